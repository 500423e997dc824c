// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of a server about its guardian, and about waits for others.
//!
//! - A guardian that is killed gets a successor, which undoes all when the server is killed, too.
//! - What a guardian can't undo is a line, of a service in the host's log.
//! - Without one the server puts all back by itself; after it is killed, `vcpufreq cleanup` does.
//! - A VMM whose memory the kernel is still freeing is waited for: the server goes on afterwards.
//! - A server that waits for a lock says so, and goes on when it is free. It ends by a signal, also if the
//!   lock is never free; its guardian puts the rest back then.

use std::{
    fs::{self, File},
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    process::Command,
};

use nix::{
    fcntl::{Flock, FlockArg},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use vcpufreq::lifecycle::record::{VmmRecord, owner_of};
use vcpufreq::lifecycle::state::{ROOT_DIR, StateDir};
use vcpufreq_host::undo::JournalEntry;
use vcpufreq_host::{GroupRecord, HostRoot, RaisedGroups};

use super::{ERROR, PATIENCE, dir, left, server::Server, vmm::Vmm, wait_until};

/// The guardian of process `pid`.
fn guardian_of(pid: u32) -> Option<u32> {
    let line = format!("guardian\0{pid}\0");
    let all = fs::read_dir("/proc").unwrap().flatten();
    let mut numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.find(|pid: &u32| {
        let command = fs::read_to_string(format!("/proc/{pid}/cmdline"));
        command.is_ok_and(|command| command.ends_with(&line))
    })
}

fn end(pid: u32) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap());
    kill(pid, Signal::SIGKILL).unwrap();
}

#[test]
fn a_guardian_that_is_killed_gets_a_successor() {
    let Some((dir, socket)) = dir() else { return };
    let (server, mut vmm) = Server::with_vmm(&socket);
    let (prefix, mut other) = Server::before_vmm(dir.path());
    for (mut server, vmm) in [(server, &mut vmm), (prefix, &mut other)] {
        let pid = server.process.id();
        wait_until("the vCPU is pinned", || vmm.pcpus() == 1);
        end(guardian_of(pid).unwrap());
        server.hear("another is on guard");
        assert!(guardian_of(pid).is_some());
        server.signal(Signal::SIGKILL);
        server.ended();
        wait_until("the pin is put back", || vmm.pcpus() > 1);
        wait_until("no record is left", || left(pid).is_empty());
        vmm.end();
    }
}

#[test]
fn what_a_guardian_says_of_a_service_is_in_the_log() {
    let Some((run, socket)) = dir() else { return };
    let (run, log) = (run.path(), run.path().join("log"));
    let lines = UnixDatagram::bind(&log).unwrap();
    lines.set_read_timeout(Some(PATIENCE)).unwrap();
    let server = Server::start_logging(&socket, run, &log).that_says("waits at");
    let mut vmm = Vmm::served_at(&socket);
    let pid = server.process.id();
    let record = StateDir::at(run.join("vcpufreq")).record_path(pid);
    fs::write(&record, "no record").unwrap();
    let guardian = guardian_of(pid).unwrap();
    server.end(Signal::SIGKILL);
    let mut line = [0; 4096];
    let bytes = lines.recv(&mut line).unwrap();
    let line = String::from_utf8_lossy(&line[..bytes]);
    let begin = format!("<28>vcpufreq[{guardian}]: ");
    assert!(line.starts_with(&begin), "{line}");
    assert!(
        line.contains(&format!("/run/vcpufreq/{pid}.json")),
        "{line}"
    );
    vmm.end();
}

#[test]
fn without_a_guardian_the_server_puts_back_or_cleanup() {
    let Some((run, socket)) = dir() else { return };
    let run = run.path();
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let mut server = Server::start_unguarded(&socket, run).that_says("waits at");
        let mut vmm = Vmm::served_at(&socket);
        let pid = server.process.id();
        wait_until("the vCPU is pinned", || vmm.pcpus() == 1);
        assert_eq!(guardian_of(pid), None);
        let record = StateDir::at(run.join("vcpufreq")).record_path(pid);
        assert!(record.exists());
        server.signal(signal);
        server.ended();
        if signal == Signal::SIGKILL {
            assert!(record.exists());
            Server::cleanup_in(run);
        }
        assert!(vmm.pcpus() > 1, "{signal}");
        assert!(!record.exists(), "{signal}");
        vmm.end();
    }
}

/// A cgroup of the server, in which a process can neither be moved nor ends with the VMM: so is a VMM
/// whose memory the kernel frees.
fn group_in_use(server: u32) -> Option<(PathBuf, std::process::Child)> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "))?;
    let mount = Path::new(mount.split(' ').nth(4)?);
    let group = mount.join(format!("vcpufreq.{server}"));
    let inner = group.join("domain0/inner");
    fs::create_dir_all(&inner).ok()?;
    let process = Command::new("sleep").arg("3600").spawn().unwrap();
    fs::write(inner.join("cgroup.procs"), process.id().to_string()).unwrap();
    let dir = StateDir::at(ROOT_DIR);
    let record = fs::read_to_string(dir.record_path(server)).unwrap();
    let record: VmmRecord = serde_json::from_str(&record).unwrap();
    let groups = JournalEntry::Groups(GroupRecord {
        group,
        origin: mount.to_owned(),
        enabled_cpu: false,
        raised_min: false,
    });
    let entries = vec![groups];
    dir.write(&VmmRecord { entries, ..record }).unwrap();
    Some((inner, process))
}

#[test]
fn a_vmm_whose_memory_is_being_freed_is_waited_for() {
    let Some((_dir, socket)) = dir() else { return };
    let (server, mut vmm) = Server::with_vmm(&socket);
    let pid = server.process.id();
    let Some((inner, mut process)) = group_in_use(pid) else {
        println!("SKIP: no cgroup v2 in which groups can be made");
        return;
    };
    vmm.ask("end 0");
    server.hear(&format!("waits for process {} to end", vmm.pid));
    process.kill().unwrap();
    process.wait().unwrap();
    fs::remove_dir(&inner).unwrap();
    vmm.end();
    server.hear("has ended");
    assert!(!inner.parent().unwrap().exists());
    assert_eq!(left(pid), [""; 0]);
    Vmm::served_at(&socket).end();
    let (status, said) = server.end(Signal::SIGTERM);
    assert!(status.success(), "{said:?}");
}

/// Groups that a VM has raised: to put them back takes the lock of the records. None is there.
fn raised() -> Vec<JournalEntry> {
    let group = Path::new(ROOT_DIR).join("no-group");
    vec![JournalEntry::Raised(RaisedGroups::one(group, "0.00"))]
}

/// Puts the record of a VMM that has raised groups, and was killed, into `dir`.
fn plant(dir: &StateDir) {
    let mut process = Command::new("sleep").arg("3600").spawn().unwrap();
    let owner = owner_of(&HostRoot::default(), process.id()).unwrap();
    process.kill().unwrap();
    process.wait().unwrap();
    let mut record = VmmRecord::new(owner);
    record.entries = raised();
    dir.write(&record).unwrap();
}

pub fn hold(run: &Path) -> Flock<File> {
    let dir = File::open(run.join("vcpufreq")).unwrap();
    Flock::lock(dir, FlockArg::LockExclusive).unwrap()
}

/// What a server says that has given the lock up.
const GIVEN_UP: &str = "see which one hangs";

#[test]
fn a_wait_for_the_lock_is_a_line_and_ends_with_it_or_by_a_signal() {
    let Some((run, socket)) = dir() else { return };
    let run = run.path();
    let dir = StateDir::at(run.join("vcpufreq"));
    plant(&dir);
    let held = hold(run);
    let server = Server::start_alone(&socket, run, 600).that_says("waits at");
    let mut vmm = Vmm::connect(&socket);
    let line = server.hear("waits for another vcpufreq");
    assert!(line.ends_with("locked, at most 600 s"), "{line}");
    drop(held);
    assert_eq!(vmm.answer(), "served");
    vmm.end();
    server.hear("has ended");

    plant(&dir);
    let held = hold(run);
    let mut vmm = Vmm::connect(&socket);
    server.hear("waits for another vcpufreq");
    let (status, said) = server.end(Signal::SIGTERM);
    assert!(status.success(), "{said:?}");
    assert!(!said.iter().any(|line| line.contains(GIVEN_UP)), "{said:?}");
    drop(held);
    vmm.end();
}

#[test]
fn a_lock_that_is_never_let_go_of_keeps_no_server_from_its_end() {
    let Some((run, socket)) = dir() else { return };
    let run = run.path();
    let server = Server::start_alone(&socket, run, 1).that_says("waits at");
    let mut vmm = Vmm::served_at(&socket);
    let dir = StateDir::at(run.join("vcpufreq"));
    let path = dir.record_path(server.process.id());
    let record = fs::read_to_string(&path).unwrap();
    let mut record: VmmRecord = serde_json::from_str(&record).unwrap();
    record.entries.extend(raised());
    dir.write(&record).unwrap();
    let held = hold(run);
    let (status, said) = server.end(Signal::SIGTERM);
    assert_eq!(status.code(), Some(ERROR), "{said:?}");
    assert!(said.iter().any(|line| line.contains(GIVEN_UP)), "{said:?}");
    drop(held);
    wait_until("the guardian puts it back", || !path.exists());
    assert!(vmm.pcpus() > 1);
    vmm.end();
}
