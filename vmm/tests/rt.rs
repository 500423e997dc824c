// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of `vcpufreq rt` on the command line: plan and check read a tree and change nothing,
//! with or without privilege. An impossible partition gives one line and exit code 2.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;
use tempfile::TempDir;

#[path = "rt/exec.rs"]
mod exec;

const PLC: &str = "--guest=plc=3";

/// A small host: four CPUs and two switches.
fn tree() -> TempDir {
    let dir = TempDir::new().expect("a temporary directory");
    for (path, text) in [
        ("sys/devices/system/cpu/online", "0-3\n"),
        ("sys/devices/system/cpu/present", "0-3\n"),
        ("proc/sys/kernel/random/boot_id", "boot-1\n"),
        ("proc/sys/kernel/timer_migration", "1\n"),
        ("proc/sys/vm/swappiness", "10\n"),
        ("proc/version", "Linux version 7.2 SMP PREEMPT_RT\n"),
        ("proc/cmdline", "quiet\n"),
        (
            "sys/kernel/debug/sched/fair_server/cpu1/runtime",
            "50000000\n",
        ),
    ] {
        write(&dir, path, text);
    }
    dir
}

fn write(dir: &TempDir, path: &str, text: &str) {
    let path = dir.path().join(path);
    fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    fs::write(path, text).expect("a file");
}

fn rt(root: &Path, line: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vcpufreq"))
        .arg("rt")
        .args(line)
        .arg("--root")
        .arg(root)
        .output()
        .expect("the program starts")
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn refused(line: &[&str]) -> String {
    let dir = tree();
    let output = rt(dir.path(), line);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(output.stdout.is_empty());
    said
}

#[test]
fn refusals_are_one_line_each() {
    let dir = tree();
    write(&dir, "rt.toml", "profil = 'kvm-rt'");
    let file = dir.path().join("rt.toml").display().to_string();
    for (line, said) in [
        (
            &["plan", "--guest=plc=0-3"][..],
            "no CPU is left for housekeeping",
        ),
        (&["plan", "--guest=plc=9"], "CPU 9 doesn't exist"),
        (&["plan", "--guest=a=3", "--guest=b=2-3"], "is wanted by b"),
        (&["plan"], "no guest has a CPU"),
        (
            &["plan", "--profile=no-fair-server", "--housekeeping=0"],
            "no guest has a CPU",
        ),
        (&["plan", "--guest=3"], "NAME=CPUS"),
        (&["plan", PLC, "--profile=nope"], "there are kvm-rt"),
        (&["plan", PLC, "--profile=./nope"], "check the path"),
        (&["plan", "--config", &file], "profil"),
        (&["check"], "nothing is applied here"),
        (&["check", "--profile=kvm-rt"], "leave them out"),
        (
            &["plan", PLC, "--housekeeping="],
            "housekeeping has no CPU; name at least one",
        ),
        (&["apply", PLC], "running host only"),
    ] {
        let line = refused(line);
        assert!(line.contains(said), "{said}: {line}");
    }
}

/// `run`, which has a file of its own syntax, `rt` and `rt report` take the same lists.
#[test]
fn every_command_refuses_the_same_garbage_as_a_list_of_cpus() {
    for list in [
        "a", "3-1", "+1", "0x1", "65536", "0,,1", "0,", "0, 1", "1-2-3",
    ] {
        let dir = tree();
        write(&dir, "rt.toml", &format!("[guest]\nplc = '{list}'"));
        write(&dir, "vm.toml", &format!("[vcpu.0]\npin = '{list}'"));
        let [rt_file, vm_file] = ["rt.toml", "vm.toml"].map(|name| dir.path().join(name));
        let (rt_file, vm_file) = (rt_file.display(), vm_file.display());
        for line in [
            format!("rt|plan|--guest=plc={list}"),
            format!("rt|plan|{PLC}|--housekeeping={list}"),
            format!("rt|plan|--config={rt_file}"),
            format!("rt|report|--cpus={list}"),
            format!("run|--kernel=none|--pin=0={list}"),
            format!("run|--kernel=none|--config={vm_file}"),
        ] {
            let output = Command::new(env!("CARGO_BIN_EXE_vcpufreq"))
                .args(line.split('|'))
                .output()
                .expect("the program starts");
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{line}: {said}");
            let why = format!("'{list}' is no list of CPUs; write one as 0,2-3");
            assert!(said.contains(&why), "{line}: {said}");
            assert_eq!(said.lines().count(), 1, "{line}: {said}");
        }
    }
}

#[test]
fn one_cpu_in_a_file_may_be_a_number() {
    let dir = tree();
    write(&dir, "rt.toml", "housekeeping = '0-2'\n[guest]\nplc = 3");
    let file = dir.path().join("rt.toml").display().to_string();
    let text = stdout(&rt(dir.path(), &["plan", "--config", &file]));
    assert!(text.contains("for plc on CPU 3"), "{text}");
}

#[test]
fn a_plan_says_old_and_new_and_the_command_line() {
    let dir = tree();
    let text = stdout(&rt(dir.path(), &["plan", PLC]));
    for line in [
        "for plc on CPU 3; housekeeping on 0-2; profile kvm-rt",
        "  /proc/sys/kernel/timer_migration: 1 → 0",
        "  /proc/sys/vm/swappiness: 10 already",
        "reboot: add to the kernel's command line: isolcpus=managed_irq,3 nohz_full=3",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let json = rt(dir.path(), &["plan", PLC, "--json"]);
    let json: Value = serde_json::from_slice(&json.stdout).expect("JSON");
    assert_eq!(json["plan"]["settings"][0]["name"], "timer-migration");
    assert_eq!(json["plan"]["settings"][0]["changes"][0]["want"], "0");
}

#[test]
fn the_servers_of_all_cpus_need_no_guest() {
    let dir = tree();
    let text = stdout(&rt(dir.path(), &["plan", "--profile=no-fair-server"]));
    for line in [
        "for CPU 0-3; profile no-fair-server",
        "  /sys/kernel/debug/sched/fair_server/cpu1/runtime: 50000000 → 0",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(!text.contains("reboot"), "{text}");
}

#[test]
fn a_file_says_the_same() {
    let dir = tree();
    let toml = "profile = 'kvm-rt'\nhousekeeping = '0-1'\n[guest]\nplc = '3'\n[settings]\nswappiness = 0\n";
    write(&dir, "rt.toml", toml);
    let file = dir.path().join("rt.toml").display().to_string();
    let text = stdout(&rt(dir.path(), &["plan", "--config", &file]));
    assert!(text.contains("housekeeping on 0-1"), "{text}");
    assert!(text.contains("swappiness: 10 → 0"), "{text}");
    let text = stdout(&rt(
        dir.path(),
        &["plan", "--config", &file, "--guest=other=2"],
    ));
    assert!(text.contains("for other on CPU 2;"), "{text}");
}

#[test]
fn check_counts_what_is_not_set() {
    let dir = tree();
    let output = rt(dir.path(), &["check", PLC]);
    assert_eq!(output.status.code(), Some(1));
    let text = stdout(&output);
    assert!(text.contains("NOT SET    timer-migration"), "{text}");
    assert!(text.contains("effective  swappiness"), "{text}");
}

#[test]
fn all_good_is_exit_code_0() {
    let dir = tree();
    write(&dir, "rt.toml", "[settings]\nswappiness = 10\n");
    let file = dir.path().join("rt.toml").display().to_string();
    let output = rt(dir.path(), &["check", PLC, "--profile", &file]);
    assert_eq!(output.status.code(), Some(0), "{}", stdout(&output));
}

#[test]
fn shipped_profiles_are_printed() {
    let program = |line: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_vcpufreq"))
            .args(line)
            .output();
        output.expect("the program starts")
    };
    let names = stdout(&program(&["rt", "profiles"]));
    assert_eq!(names.lines().count(), 7, "{names}");
    let one = program(&["rt", "profiles", "iq-8275"]);
    assert!(stdout(&one).contains("rt-runtime-us = -1"));
    assert_eq!(program(&["rt", "profiles", "nope"]).status.code(), Some(2));
}

#[test]
fn a_bench_looks_for_the_profiles_record() {
    assert_eq!(format!("/{}", vcpufreq_bench::RT_RECORD), vcpufreq_rt::PATH);
}
