// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of `vcpufreq rt exec`: the exit code is the command's. Settings are in force while it runs,
//! and as before when all processes have ended, however they ended.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    process::{Child, ChildStderr, ChildStdout, Command, Stdio},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tempfile::TempDir;
use vcpufreq_host::undo::KernelHost;
use vcpufreq_rt::{CpuList, Restored, restore};

use crate::{tree, write};

const SWAPPINESS: &str = "proc/sys/vm/swappiness";

/// A host with a setting that is to be changed.
fn host() -> TempDir {
    let dir = tree();
    write(&dir, SWAPPINESS, "60\n");
    write(&dir, "rt.toml", "[settings]\nswappiness = 10\n");
    fs::create_dir(dir.path().join("run")).expect("a folder");
    dir
}

fn exec(root: &Path, words: &[&str]) -> Command {
    exec_with(&[], root, words)
}

fn exec_with(flags: &[&str], root: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vcpufreq"));
    command
        .args(["rt", "exec", "--guest=plc=1", "--root"])
        .arg(root)
        .arg("--profile")
        .arg(root.join("rt.toml"))
        .args(flags)
        .arg("--")
        .args(words);
    command
}

fn swappiness(dir: &TempDir) -> String {
    let text = fs::read_to_string(dir.path().join(SWAPPINESS));
    text.expect("a file").trim().to_owned()
}

fn assert_as_before(dir: &TempDir) {
    assert_eq!(swappiness(dir), "60");
    assert!(!dir.path().join("run/vcpufreq-rt").exists(), "a record");
}

/// An exec whose command has begun.
struct RunningExec {
    child: Child,
    output: BufReader<ChildStdout>,
    errors: BufReader<ChildStderr>,
}

impl RunningExec {
    fn start(dir: &TempDir, script: &str) -> Self {
        let file = dir.path().join(SWAPPINESS);
        let script = format!("echo $(cat {}); {script}", file.display());
        let mut child = exec(dir.path(), &["sh", "-c", &script])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut output = BufReader::new(child.stdout.take().expect("stdout"));
        let errors = BufReader::new(child.stderr.take().expect("stderr"));
        let mut meanwhile = String::new();
        output.read_line(&mut meanwhile).expect("a line");
        assert_eq!(meanwhile, "10\n");
        Self {
            child,
            output,
            errors,
        }
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("a process")
    }

    /// Its guardian's process.
    fn guardian(&self) -> i32 {
        let wanted = format!("rt\0guard\0--pid\0{}\0", self.child.id());
        let names = fs::read_dir("/proc").expect("/proc");
        let mut names = names.filter_map(|one| one.ok()?.file_name().into_string().ok());
        let is_it = |pid: &String| {
            let line = fs::read_to_string(format!("/proc/{pid}/cmdline"));
            line.is_ok_and(|line| line.contains(&wanted))
        };
        let found = names.find(is_it).expect("a guardian");
        found.parse().expect("a process")
    }

    /// Its next line on stderr.
    fn said(&mut self) -> String {
        let mut line = String::new();
        assert_ne!(self.errors.read_line(&mut line).expect("a line"), 0);
        line
    }

    /// The exit code, stdout and stderr, when exec, command and guardian have all ended.
    fn end(mut self) -> (Option<i32>, String, String) {
        let mut texts = [String::new(), String::new()];
        self.output.read_to_string(&mut texts[0]).expect("stdout");
        self.errors.read_to_string(&mut texts[1]).expect("stderr");
        let [output, errors] = texts;
        (self.child.wait().expect("its end").code(), output, errors)
    }
}

fn send(signal: Signal, pid: i32) {
    kill(Pid::from_raw(pid), signal).expect("it runs");
}

#[test]
fn the_exit_code_is_the_commands() {
    for (script, code) in [
        ("exit 0", 0),
        ("exit 7", 7),
        ("kill -9 $$", 137),
        ("kill -TERM $PPID; exec sleep 3600.25", 143),
    ] {
        let dir = host();
        let (ended, _, said) = RunningExec::start(&dir, script).end();
        assert_eq!(ended, Some(code), "{script}: {said}");
        assert!(said.contains("vm/swappiness: 60 → 10"), "{said}");
        assert_as_before(&dir);
    }
}

#[test]
fn a_command_that_cannot_be_started() {
    let dir = host();
    write(&dir, "text", "no program\n");
    let text = dir.path().join("text");
    fs::set_permissions(&text, fs::Permissions::from_mode(0o644)).expect("a mode");
    for (program, code) in [
        ("/nowhere/a-program", 127),
        (text.to_str().expect("UTF-8"), 126),
    ] {
        let output = exec(dir.path(), &[program]).output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(said.contains("can't be started"), "{said}");
        assert_as_before(&dir);
    }
}

/// What is said where a command can't enter a partition, and isn't started.
fn not_entered(dir: &TempDir, flags: &[&str]) -> String {
    let started = dir.path().join("started");
    let words = ["touch", started.to_str().expect("UTF-8")];
    let output = exec_with(flags, dir.path(), &words).output();
    let output = output.expect("it starts");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(!started.exists(), "{said}");
    assert_as_before(dir);
    said
}

#[test]
fn without_a_partition_nothing_is_entered_or_changed() {
    let dir = host();
    let said = not_entered(&dir, &["--enter"]);
    assert!(said.contains("cpuset is none"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    write(&dir, "rt.toml", "[settings]\ncpuset = 'isolated'\n");
    let said = not_entered(&dir, &["--enter", "--guest=hmi=2"]);
    assert!(said.contains("2 are named"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn a_partition_that_cannot_be_entered_is_removed() {
    let dir = host();
    write(
        &dir,
        "rt.toml",
        "[settings]\nswappiness = 10\ncpuset = 'isolated'\n",
    );
    // Folders that are made here have no cgroup.procs.
    for (name, text) in [
        ("cgroup.controllers", "cpuset\n"),
        ("cgroup.subtree_control", "cpuset\n"),
        ("cpuset.cpus.isolated", "\n"),
    ] {
        write(&dir, &format!("sys/fs/cgroup/{name}"), text);
    }
    let said = not_entered(&dir, &["--enter"]);
    let group = "sys/fs/cgroup/vcpufreq-rt.plc";
    let line = said.lines().last().expect("a line");
    assert!(line.contains(group), "{said}");
    assert!(line.contains("can't be entered (No such file"), "{said}");
    assert!(!dir.path().join(group).exists(), "{said}");
}

#[test]
fn a_finding_is_printed_and_the_command_runs() {
    let dir = host();
    write(
        &dir,
        "rt.toml",
        "cmdline = ['nohz_full={rt}']\n[settings]\nswappiness = 10\n",
    );
    let (code, _, said) = RunningExec::start(&dir, "exit 3").end();
    assert_eq!(code, Some(3), "{said}");
    assert!(said.contains("reboot: "), "{said}");
    assert_as_before(&dir);
}

#[test]
fn it_is_refused_while_settings_are_in_force() {
    let dir = host();
    let first = RunningExec::start(&dir, "exec sleep 3600.25");
    let second = exec(dir.path(), &["touch", "started"])
        .current_dir(&dir)
        .output();
    let second = second.expect("it starts");
    let said = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(2), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(!dir.path().join("started").exists());
    assert_eq!(swappiness(&dir), "10");
    send(Signal::SIGTERM, first.pid());
    assert_eq!(first.end().0, Some(143));
    assert_as_before(&dir);
}

#[test]
fn the_command_may_take_its_time_to_end() {
    let dir = host();
    // A shell's child that has not begun its program may lose any other signal.
    let trap = "trap 'kill -KILL $!; echo asked; exit 5' TERM; sleep 3600.25 & echo; wait";
    let mut running = RunningExec::start(&dir, trap);
    running
        .output
        .read_line(&mut String::new())
        .expect("the trap");
    send(Signal::SIGTERM, running.pid());
    let (code, output, said) = running.end();
    assert_eq!((code, &*output), (Some(5), "asked\n"), "{said}");
    assert_as_before(&dir);
}

#[test]
fn the_guardian_restores_after_exec_and_ends_the_command() {
    let dir = host();
    let mut running = RunningExec::start(&dir, "exec sleep 3600.25");
    // Only SIGKILL ends it.
    send(Signal::SIGTERM, running.guardian());
    running.child.kill().expect("kill");
    let (code, _, said) = running.end();
    assert_eq!(code, None, "{said}");
    assert_as_before(&dir);
}

#[test]
fn another_guardian_replaces_one_that_is_killed() {
    let dir = host();
    let mut running = RunningExec::start(&dir, "exec sleep 3600.25");
    for _ in 0..2 {
        send(Signal::SIGKILL, running.guardian());
        let mut lines = running.errors.by_ref().lines().map_while(Result::ok);
        let said = lines.find(|line| line.contains("guardian"));
        let said = said.expect("a line");
        assert!(said.ends_with("another is on guard"), "{said}");
    }
    assert_eq!(swappiness(&dir), "10");
    running.child.kill().expect("kill");
    running.end();
    assert_as_before(&dir);
}

#[test]
fn exec_restores_without_its_guardian() {
    let dir = host();
    let mut running = RunningExec::start(&dir, "echo $$; exec sleep 3600.25");
    let mut command = String::new();
    running.output.read_line(&mut command).expect("a line");
    // Both have ended when exec looks again.
    send(Signal::SIGSTOP, running.pid());
    let guardian = running.guardian();
    send(Signal::SIGKILL, guardian);
    let command = command.trim().parse().expect("a process");
    send(Signal::SIGTERM, command);
    for ended in [guardian, command] {
        let stat = || fs::read_to_string(format!("/proc/{ended}/stat")).expect("stat");
        while !stat().contains(") Z ") {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    send(Signal::SIGCONT, running.pid());
    assert_eq!(running.end().0, Some(143));
    assert_as_before(&dir);
}

#[test]
fn a_signal_ends_the_wait_for_a_guardian_that_is_stopped() {
    let dir = host();
    let mut running = RunningExec::start(&dir, "exec sleep 3600.25");
    let guardian = running.guardian();
    send(Signal::SIGSTOP, guardian);
    send(Signal::SIGTERM, running.pid());
    while !running.said().contains("waits for the guardian to restore") {}
    send(Signal::SIGTERM, running.pid());
    let line = running.said();
    let goes_on = format!("process {guardian}, goes on to restore");
    assert!(line.contains(&goes_on), "{line}");
    assert_eq!(running.child.wait().expect("its end").code(), Some(143));
    assert_eq!(swappiness(&dir), "10");
    send(Signal::SIGCONT, guardian);
    running.end();
    assert_as_before(&dir);
}

#[test]
fn after_both_are_killed_the_record_is_there_to_restore() {
    let dir = host();
    let mut running = RunningExec::start(&dir, "exec sleep 3600.25");
    // It starts no other one.
    send(Signal::SIGSTOP, running.pid());
    send(Signal::SIGKILL, running.guardian());
    running.child.kill().expect("kill");
    running.end();
    assert_eq!(swappiness(&dir), "10");
    let restored = restore(&KernelHost::at(dir.path()), &mut |_, _, _| {});
    let restored = restored.expect("restore");
    assert!(
        matches!(
            restored,
            Restored::Done {
                brought_back: 1,
                ..
            }
        ),
        "{restored:?}"
    );
    assert_as_before(&dir);
}

#[test]
fn the_guardian_takes_no_path() {
    let dir = host();
    let running = RunningExec::start(&dir, "exec sleep 3600.25");
    let mut guard = Command::new(env!("CARGO_BIN_EXE_vcpufreq"));
    let pid = running.pid().to_string();
    guard.args(["rt", "guard", "--start-ticks=1", "--pid", &pid]);
    let output = guard.arg("--root").arg(dir.path()).output();
    let output = output.expect("it starts");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert_eq!(swappiness(&dir), "10");
    send(Signal::SIGTERM, running.pid());
    running.end();
    assert_as_before(&dir);
}

#[test]
fn the_guardian_is_in_a_session_of_its_own_and_off_the_real_time_cpus() {
    let dir = host();
    let running = RunningExec::start(&dir, "exec sleep 3600.25");
    let pid = running.guardian();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("its status");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let cpus: CpuList = line.expect("its CPUs").trim().parse().expect("a list");
    assert!(cpus.iter().all(|cpu| cpu != 1), "{cpus}");
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("its state");
    let behind = stat.rsplit_once(')').expect("a name").1;
    // Fields 5 and 6: group and session.
    let numbers = behind.split_whitespace().skip(2).take(2);
    let own: Vec<i32> = numbers.map(|one| one.parse().expect("a number")).collect();
    assert_eq!(own, [pid, pid]);
    send(Signal::SIGTERM, running.pid());
    running.end();
    assert_as_before(&dir);
}
