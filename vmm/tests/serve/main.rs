// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of `serve` and its end, with the real program and a process that stands for a VMM: it
//! connects, has a thread named as QEMU's, and keeps the files that it receives.
//!
//! - A server that is killed leaves no pin; the next one takes the VM over, pins its vCPUs anew, and
//!   carries out what the guest has requested meanwhile.
//! - A server that is ended tells the guest so, and the next one takes over in the same way.
//! - A `vcpufreq qemu` that is killed leaves its VM to a server for that process, and afterwards to
//!   the next one at this server's socket. Meanwhile no other server gets it.
//! - While QEMU reports by its control socket that the VM is paused, the VM's request is withdrawn. A
//!   VM that is reset has none. If the control socket is lost, the VM is served on.
//! - With a service manager, it does so from the files that this one has kept.
//! - A second VMM at the same socket is refused, with one line, while the first is served. One
//!   without vCPUs delays none.
//! - A vCPU that ends is served no longer: its thread's number may become another's.
//! - A server that can't serve any longer ends, with an exit code that tells.
//! - When the VMM ends, nothing is left.

#![allow(clippy::unwrap_used)]

mod server;
mod vmm;

use std::{
    fs::File,
    io::Write as _,
    os::{
        fd::OwnedFd,
        unix::net::{UnixDatagram, UnixListener, UnixStream},
    },
    path::PathBuf,
    thread,
    time::Duration,
};

use nix::sys::signal::Signal;
use server::{Server, heard};
use tempfile::TempDir;
use vmm::{Vmm, stand_for_one};

/// A machine may be busy with something else.
const PATIENCE: Duration = Duration::from_secs(20);
/// What a service manager calls the socket.
const SOCKET: &str = "vcpufreq.socket";
const GONE: u32 = u32::MAX;

/// Not a test of its own: the process that stands for a VMM.
#[test]
fn vmm_process() {
    stand_for_one();
}

fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    for _ in 0..PATIENCE.as_millis() / 10 {
        if is() {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("{what}");
}

fn socket() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vm");
    (dir, path)
}

/// Pins show only where there are more pCPUs than one; records of another user need a directory.
fn skipped() -> bool {
    let pcpus = thread::available_parallelism().unwrap().get();
    let skipped = pcpus < 2 || !nix::unistd::geteuid().is_root();
    if skipped {
        println!("SKIP: takes root and two pCPUs");
    }
    skipped
}

#[test]
fn the_next_server_takes_over_from_one_that_was_killed() {
    if skipped() {
        return;
    }
    let (_dir, socket) = socket();
    let (server, mut vmm) = Server::with_vmm(&socket);
    assert!(vmm.pcpus() == 1 && vmm.is_kept());
    server.end(Signal::SIGKILL);
    wait_until("the pin is put back", || vmm.pcpus() > 1);
    // The doorbell is not heard meanwhile.
    vmm.ask("request 700000");

    let server = Server::start(&socket);
    server.hear("over");
    wait_until("the vCPU is pinned again", || vmm.pcpus() == 1);
    let (status, said) = server.end(Signal::SIGTERM);
    let totals = said.iter().find(|line| line.contains("goes on")).unwrap();
    assert!(
        status.success() && totals.contains("requests 1,"),
        "{said:?}"
    );
    assert_eq!((vmm.cur_perf(), vmm.is_kept()), (GONE, true));
    assert!(vmm.pcpus() > 1);

    let server = Server::start(&socket);
    server.hear("over");
    wait_until("the vCPU is pinned again", || vmm.pcpus() == 1);
    let file = PathBuf::from(format!("/run/vcpufreq/{}.vm", vmm.pid));
    vmm.end();
    server.hear("has ended");
    assert!(!file.exists());
    // Another VM comes to it.
    Vmm::served_at(&socket).end();
    server.hear("has ended");
    server.end(Signal::SIGTERM);
}

#[test]
fn a_vm_of_a_killed_qemu_command_is_taken_over_by_its_pid() {
    if skipped() {
        return;
    }
    let (dir, socket) = socket();
    let (mut prefix, mut vmm) = Server::before_vmm(dir.path());
    wait_until("the vCPU is pinned", || vmm.pcpus() == 1);
    let early = Server::start_for(&socket, vmm.pid);
    early.hear(&format!("process {} serves it", prefix.process.id()));
    early.end(Signal::SIGTERM);
    assert!(vmm.pcpus() == 1 && vmm.is_kept());
    prefix.process.kill().unwrap();
    prefix.ended();
    wait_until("the pin is put back", || vmm.pcpus() > 1);
    vmm.ask("request 700000");

    let mut first = Server::start_for(&socket, vmm.pid);
    first.hear("over");
    wait_until("the vCPU is pinned again", || vmm.pcpus() == 1);
    first.process.kill().unwrap();
    first.ended();
    wait_until("the pin is put back", || vmm.pcpus() > 1);
    let server = Server::start(&socket);
    server.hear("over");
    wait_until("the vCPU is pinned again", || vmm.pcpus() == 1);
    vmm.end();
    let totals = server.hear("has ended");
    assert!(totals.contains("requests 1,") && !vmm.is_kept(), "{totals}");
    server.end(Signal::SIGTERM);
}

#[test]
fn a_vm_that_qemu_pauses_or_resets_has_no_request() {
    if skipped() {
        return;
    }
    let (dir, socket) = socket();
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let server = Server::start_by(&socket, &path);
    server.hear("waits at");
    let mut vmm = Vmm::served_at(&socket);
    let (mut qmp, _) = listener.accept().unwrap();
    let thread = vmm.vcpu();
    let mut report = |line: &str| writeln!(qmp, "{line}").unwrap();
    report("{\"QMP\": {}}\n{\"return\": {}}");
    report(&format!(
        "{{\"return\": [{{\"cpu-index\": 0, \"thread-id\": {thread}}}]}}"
    ));
    report("{\"return\": {\"running\": true}}");
    wait_until("the vCPU is pinned", || vmm.pcpus() == 1);
    let asks = |khz| wait_until("it is the request", || server.asked() == khz);
    vmm.ask("request 700000");
    asks(Some(700_000));
    report("{\"event\": \"STOP\"}");
    asks(None);
    // As by a snapshot that is loaded.
    vmm.ask("request 800000");
    report("{\"event\": \"RESUME\"}");
    asks(Some(800_000));
    report("{\"event\": \"RESET\"}");
    asks(None);
    assert_eq!(vmm.set_perf(), 0);
    vmm.ask("request 500000");
    asks(Some(500_000));
    report("{\"event\": \"STOP\"}");
    asks(None);
    drop(qmp);
    server.hear("control socket is lost");
    asks(Some(500_000));
    vmm.end();
    server.hear("has ended");
    server.end(Signal::SIGTERM);
}

#[test]
fn a_second_vmm_is_refused_while_the_first_is_served() {
    if skipped() {
        return;
    }
    let (_dir, socket) = socket();
    let (server, mut first) = Server::with_vmm(&socket);
    let mut second = Vmm::connect(&socket);
    assert_eq!(second.answer(), "refused");
    let line = server.hear("isn't served");
    let [first_pid, second_pid] = [&first, &second].map(|vmm| format!("process {}", vmm.pid));
    assert!(
        line.contains(&first_pid) && line.contains(&second_pid),
        "{line}"
    );
    assert_eq!((first.pcpus(), second.ended()), (1, true));
    first.end();
    server.hear("has ended");
    server.end(Signal::SIGTERM);
}

#[test]
fn a_vmm_without_vcpus_is_not_waited_for() {
    if skipped() {
        return;
    }
    let (_dir, socket) = socket();
    let server = Server::start(&socket);
    server.hear("waits at");
    let _stray = UnixStream::connect(&socket).unwrap();
    let mut vmm = Vmm::served_at(&socket);
    let line = server.hear("isn't served");
    assert!(line.contains("at the same socket"), "{line}");
    vmm.end();
    server.end(Signal::SIGTERM);
}

#[test]
fn a_vcpu_that_ends_is_served_no_longer() {
    if skipped() {
        return;
    }
    let (_dir, socket) = socket();
    let (server, mut vmm) = Server::with_vmm(&socket);
    vmm.ask("end vcpu");
    server.hear("has ended a vCPU");
    assert!(!vmm.is_kept());
    assert_eq!(vmm.cur_perf(), GONE);
    Vmm::served_at(&socket).end();
    server.end(Signal::SIGTERM);
}

#[test]
fn a_server_whose_worker_dies_ends() {
    if skipped() {
        return;
    }
    let (_dir, socket) = socket();
    let (mut server, mut vmm) = Server::with_vmm(&socket);
    server.kill_worker();
    assert_eq!(server.ended().code(), Some(2));
    server.hear("start the server again");
    assert_eq!((vmm.cur_perf(), vmm.is_kept()), (GONE, true));
    vmm.end();
}

#[test]
fn a_service_manager_keeps_the_files() {
    if skipped() {
        return;
    }
    let (dir, socket) = socket();
    let notified = dir.path().join("notify");
    let manager = UnixDatagram::bind(&notified).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let listener: OwnedFd = UnixListener::bind(&socket).unwrap().into();
    let server = Server::start_with(&socket, &notified, &[listener.try_clone().unwrap()], SOCKET);
    assert_eq!(heard(&manager).0, "READY=1");
    let mut vmm = Vmm::connect(&socket);
    let (message, mut files) = heard(&manager);
    let stored = format!("vm-{}", vmm.pid);
    let name = format!("FDNAME={stored}");
    assert_eq!((message, files.len()), (format!("FDSTORE=1\n{name}"), 3));
    assert_eq!(vmm.answer(), "served");
    server.end(Signal::SIGKILL);
    // Else the pin that is waited for below may be this server's.
    wait_until("the pin is put back", || vmm.pcpus() > 1);
    vmm.ask("request 700000");
    assert!(socket.exists());

    // The service manager's are taken, not the VMM's: its connection is there too.
    files.push(listener.try_clone().unwrap());
    let names = format!("{stored}:{stored}:{stored}:{SOCKET}");
    let server = Server::start_with(&socket, &notified, &files, &names);
    drop(files);
    server.hear("over");
    assert_eq!(heard(&manager).0, "READY=1");
    wait_until("the vCPU is pinned again", || vmm.pcpus() == 1);
    vmm.end();
    let totals = server.hear("has ended");
    assert!(totals.contains("requests 1,"), "{totals}");
    assert_eq!(heard(&manager).0, format!("FDSTOREREMOVE=1\n{name}"));
    server.end(Signal::SIGTERM);

    // And a VM that ends while no server runs.
    let files = [listener, File::open("/dev/null").unwrap().into()];
    let server = Server::start_with(&socket, &notified, &files, &format!("{SOCKET}:{stored}"));
    assert_eq!(heard(&manager).0, format!("FDSTOREREMOVE=1\n{name}"));
    assert_eq!(heard(&manager).0, "READY=1");
    server.end(Signal::SIGTERM);
}
