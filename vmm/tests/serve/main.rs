// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of `serve` and its end, with the real program and a process that stands for a VMM: it
//! connects, has a thread named as QEMU's, and keeps the files that it receives.
//!
//! - A server that is killed leaves no pin; the next one takes the VM over, pins its vCPUs anew, and
//!   carries out what the guest has requested meanwhile.
//! - A server that is ended tells the guest so, and the next one takes over in the same way.
//! - A `vcpufreq qemu` that is killed leaves its VM to a server for that process, and afterwards to
//!   the next one at this server's socket. Meanwhile no other server gets it.
//! - A `vcpufreq qemu` that can't put the host back warns, and has QEMU's exit code all the same.
//! - While QEMU reports by its control socket that the VM is paused, the VM's request is withdrawn. A
//!   VM that is reset has none. If the control socket is lost, the VM is served on.
//! - A control socket that reports without an end neither keeps the server busy nor lets others wait.
//! - With a service manager, it does so from the files that this one has kept.
//! - Whichever signal ends a server, no pin is left.
//! - A second server at the same socket, and one at another user's, is an error of one line that
//!   leaves all as it was. Another user's VMM is a line too.
//! - A second VMM at the same socket is refused, with one line, while the first is served. One
//!   without vCPUs delays none.
//! - A VM whose guest has registers in its RAM: `ram.rs`.
//! - vCPUs come and go: `vcpus.rs`. Guardians and locks: `guardian.rs`.
//! - A server that can't serve any longer ends, with an exit code that tells.
//! - A VM's process has no rights of the server, none of its files but those of the VM, and leaves
//!   nothing when it is killed.
//! - When the VMM ends, nothing is left.
//! - The events of all VMs of a server are in its file, which another server that is refused at the
//!   socket leaves alone.
//! - Requests of a QEMU guest with this project's driver arrive, and the guest reads the answers.

#![allow(clippy::unwrap_used)]

mod guardian;
mod guest;
mod ram;
#[path = "../scripts/mod.rs"]
mod scripts;
mod server;
mod vcpus;
mod vmm;

use std::{
    fs::{self, File, Permissions},
    io::Write as _,
    os::{
        fd::OwnedFd,
        unix::{
            fs::{MetadataExt, PermissionsExt},
            net::{UnixDatagram, UnixListener, UnixStream},
            process::ExitStatusExt,
        },
    },
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::{Pid, chown},
};
use serde_json::Value;
use server::{Server, heard};
use tempfile::TempDir;
use vmm::{Vmm, stand_for_one};

/// Ends a test that would hang. A machine may be busy with something else for long.
const PATIENCE: Duration = Duration::from_secs(600);
/// What a service manager calls the socket.
const SOCKET: &str = "vcpufreq.socket";
const GONE: u32 = u32::MAX;
/// A user that owns nothing.
const NOBODY: u32 = 65534;
/// The exit code of errors, as in --help.
const ERROR: i32 = 2;

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

/// A folder, and a socket in it; none where a test is skipped. Pins show only where there are more pCPUs
/// than one; records of another user need a directory.
fn dir() -> Option<(TempDir, PathBuf)> {
    let pcpus = thread::available_parallelism().unwrap().get();
    if pcpus < 2 || !nix::unistd::geteuid().is_root() {
        println!("SKIP: takes root and two pCPUs");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("vm");
    Some((dir, path))
}

/// What process `pid` has left among the records.
fn left(pid: u32) -> Vec<String> {
    let names = fs::read_dir("/run/vcpufreq").into_iter().flatten();
    let names = names.map(|file| file.unwrap().file_name().into_string().unwrap());
    names
        .filter(|name| name.starts_with(&format!("{pid}.")))
        .collect()
}

/// Starts a server that can't have `socket`; the only line that it says. The socket stays.
fn refusal_at(socket: &Path) -> String {
    let before = fs::metadata(socket).unwrap();
    let server = Server::start(socket);
    let pid = server.process.id();
    let (status, said) = server.output();
    assert_eq!((status.code(), said.len()), (Some(ERROR), 1), "{said:?}");
    assert_eq!(left(pid), [""; 0]);
    let after = fs::metadata(socket).unwrap();
    assert_eq!((after.ino(), after.uid()), (before.ino(), before.uid()));
    said.concat()
}

#[test]
fn whichever_signal_ends_it_no_pin_is_left() {
    let Some((_dir, socket)) = dir() else { return };
    let (server, mut vmm) = Server::with_vmm(&socket);
    server.end(Signal::SIGTERM);
    for (signal, code) in [
        (Signal::SIGHUP, Some(0)),
        (Signal::SIGINT, Some(0)),
        (Signal::SIGTERM, Some(0)),
        (Signal::SIGQUIT, None),
        (Signal::SIGUSR1, None),
        (Signal::SIGSEGV, None),
        (Signal::SIGKILL, None),
    ] {
        let server = Server::start(&socket).that_says("over");
        wait_until("the vCPU is pinned again", || vmm.pcpus() == 1);
        let pid = server.process.id();
        if signal == Signal::SIGSEGV {
            // Rust's own handler takes one that is no fault, and leaves the next to the kernel.
            server.signal(signal);
            wait_until("the handler has gone", || !server.catches(signal));
        }
        let (status, said) = server.end(signal);
        assert_eq!(status.code(), code, "{signal}: {said:?}");
        let by = code.is_none().then_some(signal as i32);
        assert_eq!(status.signal(), by, "{signal}");
        wait_until("the pin is put back", || vmm.pcpus() > 1);
        wait_until("no record is left", || left(pid).is_empty());
    }
    let server = Server::start(&socket).that_says("over");
    wait_until("the vCPU is pinned again", || vmm.pcpus() == 1);
    server.outlive(&mut vmm);
}

#[test]
fn a_second_server_at_the_socket_leaves_the_first_alone() {
    let Some((_dir, socket)) = dir() else { return };
    let (server, mut vmm) = Server::with_vmm(&socket);
    let line = refusal_at(&socket);
    let refused = format!(
        "vcpufreq: another server answers at {}; end it, or name another --socket",
        socket.display()
    );
    assert_eq!(line, refused);
    assert!(vmm.pcpus() == 1 && vmm.is_kept());
    server.outlive(&mut vmm);
}

#[test]
fn the_events_of_each_vm_are_in_the_file() {
    let Some((dir, socket)) = dir() else { return };
    let file = dir.path().join("events");
    fs::write(&file, "of a server before it\n").unwrap();
    let server = Server::start_writing(&socket, &file).that_says("waits at");
    for khz in [700_000, 800_000] {
        let mut vmm = Vmm::served_at(&socket);
        vmm.ask(&format!("request {khz}"));
        wait_until("the request", || server.asked() == Some(khz));
        let (status, _) = Server::start_writing(&socket, &file).output();
        assert_eq!(status.code(), Some(ERROR));
        vmm.end();
        server.hear("has ended");
    }
    server.end(Signal::SIGTERM);
    let text = fs::read_to_string(&file).unwrap();
    let events = text.lines().map(serde_json::from_str::<Value>);
    let events: Vec<_> = events.collect::<Result<_, _>>().unwrap();
    let requests = events.iter().filter(|event| event["event"] == "request");
    let asked: Vec<_> = requests.map(|request| &request["khz"]).collect();
    assert_eq!(asked, [700_000, 800_000], "{text}");
}

#[test]
fn another_users_socket_stays_that_users() {
    let Some((_dir, socket)) = dir() else { return };
    // No server answers there: were it this user's, it would give way.
    drop(UnixListener::bind(&socket).unwrap());
    chown(&socket, Some(NOBODY.into()), None).unwrap();
    let line = refusal_at(&socket);
    let stays = format!(
        "'s socket is at {}; name another --socket",
        socket.display()
    );
    assert!(line.ends_with(&stays), "{line}");
}

#[test]
fn another_users_vmm_is_a_line() {
    let Some((dir, socket)) = dir() else { return };
    let server = Server::start(&socket).that_says("waits at");
    for path in [dir.path(), &socket] {
        fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
    }
    let mut vmm = Vmm::connect_as(&socket, NOBODY);
    assert_eq!(vmm.answer(), "refused");
    assert!(vmm.ended() && socket.exists());
    let [pid, own] = [vmm.pid, server.process.id()];
    let (status, said) = server.end(Signal::SIGTERM);
    assert!(status.success() && said.len() == 1, "{said:?}");
    let refused = format!("vcpufreq: a VMM isn't served: process {pid} is user ");
    let next = "; to serve it, start serve with --user ";
    assert!(
        said[0].starts_with(&refused) && said[0].contains(next),
        "{said:?}"
    );
    assert_eq!([left(pid), left(own)].concat(), [""; 0]);
}

#[test]
fn the_next_server_takes_over_from_one_that_was_killed() {
    let Some((_dir, socket)) = dir() else { return };
    let (server, mut vmm) = Server::with_vmm(&socket);
    assert!(vmm.pcpus() == 1 && vmm.is_kept());
    server.end(Signal::SIGKILL);
    wait_until("the pin is put back", || vmm.pcpus() > 1);
    // The doorbell is not heard meanwhile.
    vmm.ask("request 700000");

    let server = Server::start(&socket).that_says("over");
    wait_until("the vCPU is pinned again", || vmm.pcpus() == 1);
    let (status, said) = server.end(Signal::SIGTERM);
    let totals = said.iter().find(|line| line.contains("goes on")).unwrap();
    assert!(
        status.success() && totals.contains("requests 1,"),
        "{said:?}"
    );
    assert_eq!((vmm.cur_perf(), vmm.is_kept()), (GONE, true));
    assert!(vmm.pcpus() > 1);

    let server = Server::start(&socket).that_says("over");
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
    let Some((dir, socket)) = dir() else { return };
    let (mut prefix, mut vmm) = Server::before_vmm(dir.path());
    wait_until("the vCPU is pinned", || vmm.pcpus() == 1);
    let early = Server::start_for_process(&socket, vmm.pid);
    early.hear(&format!("process {} serves it", prefix.process.id()));
    early.end(Signal::SIGTERM);
    assert!(vmm.pcpus() == 1 && vmm.is_kept());
    prefix.process.kill().unwrap();
    prefix.ended();
    wait_until("the pin is put back", || vmm.pcpus() > 1);
    vmm.ask("request 700000");

    let mut first = Server::start_for_process(&socket, vmm.pid).that_says("over");
    wait_until("the vCPU is pinned again", || vmm.pcpus() == 1);
    first.process.kill().unwrap();
    first.ended();
    wait_until("the pin is put back", || vmm.pcpus() > 1);
    let server = Server::start(&socket).that_says("over");
    wait_until("the vCPU is pinned again", || vmm.pcpus() == 1);
    vmm.end();
    let totals = server.hear("has ended");
    assert!(totals.contains("requests 1,") && !vmm.is_kept(), "{totals}");
    server.end(Signal::SIGTERM);
}

#[test]
fn a_qemu_command_has_qemus_exit_code_whatever_is_left() {
    let Some((dir, _)) = dir() else { return };
    let (mut prefix, mut vmm) = Server::before_vmm(dir.path());
    wait_until("the vCPU is pinned", || vmm.pcpus() == 1);
    // Without it nothing is known to be put back.
    let record = format!("/run/vcpufreq/{}.json", prefix.process.id());
    fs::remove_file(record).unwrap();
    vmm.end();
    let by_signal = 128 + Signal::SIGKILL as i32;
    assert_eq!(prefix.ended().code(), Some(by_signal));
    prefix.hear("not all is as it was");
}

/// A server, a VMM that it serves, and the VMM's control socket, which has told that the VM runs.
fn served_by_qmp(dir: &TempDir, socket: &Path) -> (Server, Vmm, UnixStream) {
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    let server = Server::start_by(socket, &path).that_says("waits at");
    let vmm = Vmm::served_at(socket);
    let (mut qmp, _) = listener.accept().unwrap();
    let thread = vmm.vcpu();
    for line in [
        "{\"QMP\": {}}",
        "{\"return\": {}}",
        &format!("{{\"return\": [{{\"cpu-index\": 0, \"thread-id\": {thread}}}]}}"),
        "{\"return\": {\"running\": true}}",
    ] {
        writeln!(qmp, "{line}").unwrap();
    }
    wait_until("the vCPU is pinned", || vmm.pcpus() == 1);
    (server, vmm, qmp)
}

/// How many bytes a socket keeps for its reader, by the kernel's default.
fn socket_room() -> usize {
    let room = fs::read_to_string("/proc/sys/net/core/wmem_default").unwrap();
    room.trim().parse().unwrap()
}

#[test]
fn a_vm_that_qemu_pauses_or_resets_has_no_request() {
    let Some((dir, socket)) = dir() else { return };
    let (server, mut vmm, mut qmp) = served_by_qmp(&dir, &socket);
    let mut report = |line: &str| writeln!(qmp, "{line}").unwrap();
    let asks = |khz: Option<u64>| {
        wait_until("it is the request", || {
            let vcpu = &server.stats()["vcpus"][0];
            vcpu.is_object() && vcpu["asks_khz"].as_u64() == khz
        });
    };
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
    server.outlive(&mut vmm);
}

#[test]
fn events_without_an_end_keep_no_server_busy() {
    let Some((dir, socket)) = dir() else { return };
    let (server, mut vmm, mut qmp) = served_by_qmp(&dir, &socket);
    let begun = Instant::now();
    let events = thread::spawn(move || {
        let part = "{\"event\": \"STOP\"}\n{\"event\": \"RESUME\"}\n".repeat(100);
        let mut written = 0;
        while begun.elapsed() < Duration::from_secs(3) {
            qmp.write_all(part.as_bytes()).unwrap();
            written += part.len();
        }
        written
    });
    let mut second = Vmm::connect(&socket);
    assert_eq!(second.answer(), "refused");
    let written = events.join().unwrap();
    // At each hearing it reads a page, and the kernel keeps some for it. However slow the machine is, it
    // isn't more.
    let hearings = usize::try_from(begun.elapsed().as_millis() / 10).unwrap() + 1;
    assert!(
        written <= 4096 * hearings + 4 * socket_room(),
        "{written} bytes in {hearings} hearings"
    );
    second.end();
    server.outlive(&mut vmm);
}

#[test]
fn a_second_vmm_is_refused_while_the_first_is_served() {
    let Some((_dir, socket)) = dir() else { return };
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
    server.outlive(&mut first);
}

#[test]
fn a_vmm_without_vcpus_is_not_waited_for() {
    let Some((_dir, socket)) = dir() else { return };
    let server = Server::start(&socket).that_says("waits at");
    let _stray = UnixStream::connect(&socket).unwrap();
    let mut vmm = Vmm::served_at(&socket);
    let line = server.hear("isn't served");
    assert!(line.contains("at the same socket"), "{line}");
    vmm.end();
    server.end(Signal::SIGTERM);
}

#[test]
fn a_server_whose_worker_dies_ends() {
    let Some((_dir, socket)) = dir() else { return };
    let (mut server, mut vmm) = Server::with_vmm(&socket);
    server.kill_worker();
    assert_eq!(server.ended().code(), Some(ERROR));
    server.hear("start the server again");
    assert_eq!((vmm.cur_perf(), vmm.is_kept()), (GONE, true));
    vmm.end();
}

#[test]
fn a_vms_process_that_is_killed_leaves_nothing() {
    let Some((_dir, socket)) = dir() else { return };
    let (mut server, mut vmm) = Server::with_vmm(&socket);
    assert_eq!(vmm.pcpus(), 1);
    let process = server.vm_process().try_into().unwrap();
    kill(Pid::from_raw(process), Signal::SIGKILL).unwrap();
    assert_eq!(server.ended().code(), Some(2));
    server.hear("start the server again");
    assert!(vmm.pcpus() > 1);
    assert_eq!((vmm.cur_perf(), vmm.is_kept()), (GONE, true));
    vmm.end();
}

#[test]
fn what_reads_a_guests_requests_has_no_rights() {
    let Some((_dir, socket)) = dir() else { return };
    let (server, mut vmm) = Server::with_vmm(&socket);
    let process = format!("/proc/{}", server.vm_process());
    let tasks = fs::read_dir(format!("{process}/task")).unwrap().flatten();
    let mut names = Vec::new();
    for task in tasks {
        let status = fs::read_to_string(task.path().join("status")).unwrap();
        let value = |key: &str| {
            let mut lines = status.lines();
            let line = lines.find_map(|line| line.strip_prefix(key)).unwrap();
            line.split_whitespace().next().unwrap().to_owned()
        };
        names.push(value("Name:"));
        assert_ne!(value("Uid:"), "0");
        assert_eq!(value("CapPrm:"), "0000000000000000");
        assert_eq!(
            (value("NoNewPrivs:"), value("Seccomp:")),
            ("1".into(), "2".into())
        );
    }
    names.sort();
    assert_eq!(
        names,
        ["maintenance", "requests", "stats", "tune", "vcpufreq"]
    );
    // The server, and clients of `vcpufreq stats` and `tune`: not the VMM.
    let open = fs::read_dir(format!("{process}/fd")).unwrap().flatten();
    let open = open.filter_map(|file| fs::read_link(file.path()).ok());
    let named = |kind: &str, name: &PathBuf| name.to_string_lossy().contains(kind);
    let open: Vec<_> = open.collect();
    let count = |kind| open.iter().filter(|name| named(kind, name)).count();
    assert_eq!(["socket:", "pidfd", "signalfd"].map(count), [3, 0, 0]);
    server.outlive(&mut vmm);
}

#[test]
fn a_service_manager_keeps_the_files() {
    let Some((dir, socket)) = dir() else { return };
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
