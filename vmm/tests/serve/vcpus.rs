// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises about a VM's vCPUs, which come and go.
//!
//! - A vCPU that ends is served no longer: its thread's number may become another's. The VM is served
//!   on until its last vCPU ends, by a later server too. A vCPU that is there again is served.
//! - A domain's request in the page of its first vCPU counts while that vCPU isn't there.
//! - A VM with a vCPU too many is refused, by the names of its threads or by the control socket, unless
//!   it was served before.
//! - The last line of `vcpufreq qemu` before a QEMU that is refused is the reason.
//! - A VMM that doesn't read what it is sent, or may open too few files, is a line with the cure.
//! - A VM whose device has too few vectors is a line with the cure. The server rings for a vCPU without
//!   a doorbell, and a later server too.

use std::{io::Write as _, os::unix::net::UnixListener, path::Path};

use nix::sys::signal::Signal;

use super::{GONE, dir, server::Server, socket_room, vmm::Vmm, wait_until};

/// Of the second vCPU's page.
const CUR_PERF_1: u64 = 0x2000;
const SET_PERF_1: u64 = 0x2004;
const TWO_VCPUS: [&str; 5] = [
    "--cpus=2",
    "--pin=0=0",
    "--pin=1=1",
    "--table=0-1=500000,1000000",
    "--capacity=0-1=1024",
];

#[test]
fn a_vcpu_without_a_doorbell_is_rung_for() {
    let Some((_dir, socket)) = dir() else { return };
    let mut server = Server::start_for(&socket, &TWO_VCPUS).that_says("waits at");
    let mut vmm = Vmm::with_vectors(&socket, 2, 1);
    for (khz, next) in [(600_000, true), (700_000, false)] {
        let line = server.hear("has no doorbell of vCPU");
        assert!(
            line.contains("vCPU 1: give its ivshmem-doorbell vectors=2 ("),
            "{line}"
        );
        vmm.ask(&format!("store {SET_PERF_1} {khz}"));
        // The worker's own look finds the request too, and counts no ring.
        wait_until("the request, with a ring", || {
            let vcpu = &server.stats()["vcpus"][1];
            vcpu["asks_khz"] == khz && vcpu["accesses"]["writes_in_kernel"].as_u64() > Some(0)
        });
        if next {
            server.end(Signal::SIGKILL);
            server = Server::start_for(&socket, &TWO_VCPUS).that_says("takes process");
        }
    }
    server.outlive(&mut vmm);
}

#[test]
fn a_vmm_that_does_not_read_is_a_line_and_is_served_when_it_does() {
    let Some((_dir, socket)) = dir() else { return };
    let server = Server::start(&socket).that_says("waits at");
    let mut vmm = Vmm::deaf(&socket, 1);
    let line = server.hear("doesn't read what it was sent");
    assert!(line.contains("leave reconnect="), "{line}");
    assert_eq!(vmm.ask("hear 1"), "served");
    vmm.ask("request 700000");
    wait_until("the request", || server.asked() == Some(700_000));
    let totals = server.outlive(&mut vmm);
    assert!(totals.contains("requests 1,"), "{totals}");
}

#[test]
fn a_large_vmm_that_does_not_read_is_given_up_with_the_cure() {
    let Some((run, socket)) = dir() else { return };
    if socket_room() > 1 << 19 {
        println!("SKIP: a socket here has room for all that 400 vCPUs are sent");
        return;
    }
    let vm = [
        "--cpus=400",
        "--table=0-399=500000,1000000",
        "--capacity=0-399=1024",
    ];
    let server = Server::start_alone_for(&socket, run.path(), (1, &vm)).that_says("waits at");
    let mut vmm = Vmm::deaf(&socket, 400);
    let line = server.hear("doesn't take its memory");
    assert!(line.contains("; if it is QEMU, leave reconnect="), "{line}");
    let kept = format!("vcpufreq/{}.vm", vmm.pid);
    assert!(!run.path().join(kept).exists());
    vmm.end();
    server.end(Signal::SIGTERM);
}

#[test]
fn a_vmm_that_may_open_too_few_files_is_a_line() {
    let Some((_dir, socket)) = dir() else { return };
    let server = Server::start(&socket).that_says("waits at");
    for (files, lacks) in [
        (0, "has not taken its memory"),
        (1, "has no doorbell of vCPU 0"),
    ] {
        let mut vmm = Vmm::with_files(&socket, files);
        let line = server.hear(lacks);
        let cure = format!("{lacks}: raise its limit of open files (ulimit -n");
        assert!(line.contains(&cure), "{line}");
        vmm.end();
        server.hear("has ended");
    }
    server.end(Signal::SIGTERM);
}

#[test]
fn a_vm_with_a_vcpu_too_many_is_refused_unless_it_was_plugged_in_later() {
    let Some((dir, socket)) = dir() else { return };
    let path = dir.path().join("qmp");
    let listener = UnixListener::bind(&path).unwrap();
    // QEMU's side, which lists the vCPU's thread so many times.
    let list = |vmm: &Vmm, vcpus: u32| {
        let (mut qmp, _) = listener.accept().unwrap();
        let thread = vmm.vcpu();
        let cpus =
            (0..vcpus).map(|vcpu| format!("{{\"cpu-index\": {vcpu}, \"thread-id\": {thread}}}"));
        let cpus = cpus.collect::<Vec<_>>().join(",");
        writeln!(qmp, "{{\"QMP\": {{}}}}\n{{\"return\": [{cpus}]}}").unwrap();
        qmp
    };
    let server = Server::start_by(&socket, &path).that_says("waits at");
    let mut vmm = Vmm::served_at(&socket);
    let _qmp = list(&vmm, 2);
    server.hear("it has 2 vCPUs; start the server with --cpus 2");
    assert!(!vmm.is_kept());
    vmm.end();
    let mut vmm = Vmm::served_at(&socket);
    let qmp = list(&vmm, 1);
    vmm.ask("request 700000");
    wait_until("the request", || server.asked() == Some(700_000));
    server.end(Signal::SIGTERM);
    drop(qmp);
    let server = Server::start_by(&socket, &path);
    let _of_another_vm = list(&vmm, 0);
    server.hear("isn't served: ");
    assert!(vmm.is_kept());
    server.end(Signal::SIGTERM);
    let server = Server::start_by(&socket, &path).that_says("takes process");
    let _qmp = list(&vmm, 2);
    wait_until("the next server", || server.asked() == Some(700_000));
    server.outlive(&mut vmm);
}

#[test]
fn the_reason_of_a_refusal_is_the_last_line() {
    let Some((dir, _socket)) = dir() else { return };
    let (_, said) = Server::before_a_vcpu_too_many(dir.path()).output();
    let of_qemu = said
        .iter()
        .position(|line| line.contains("server sent version -1"));
    let last = said.last().unwrap();
    assert!(of_qemu.is_some_and(|at| at < said.len() - 1), "{said:?}");
    assert!(
        last.contains("the reason for QEMU's \"version -1\""),
        "{last}"
    );
    assert!(last.contains("it has 2 vCPUs"), "{last}");
}

#[test]
fn a_vm_with_a_thread_too_many_is_refused() {
    let Some((_dir, socket)) = dir() else { return };
    let server = Server::start(&socket).that_says("waits at");
    let mut vmm = Vmm::of_vcpus(&socket, 2);
    let line = server.hear(&format!("process {} isn't served: ", vmm.pid));
    let why = "it has 2 vCPUs; start the server with --cpus 2";
    assert!(line.ends_with(why), "{line}");
    assert_eq!(vmm.answer(), "refused");
    assert!(vmm.ended() && !vmm.is_kept());
    server.end(Signal::SIGTERM);
    // One that was served stays when another vCPU was plugged in.
    let (server, mut vmm) = Server::with_vmm(&socket);
    server.end(Signal::SIGTERM);
    vmm.ask("begin 1");
    let server = Server::start(&socket);
    vmm.ask("request 700000");
    wait_until("the next server", || server.asked() == Some(700_000));
    vmm.end();
    server.end(Signal::SIGTERM);
}

#[test]
fn a_vcpu_is_served_until_it_ends_and_when_it_is_there_again() {
    let Some((_dir, socket)) = dir() else { return };
    let (server, mut vmm) = of_one_domain(&socket);
    vmm.ask("request 500000");
    vmm.ask(&format!("store {SET_PERF_1} 1000000"));
    wait_until("the last request to count", || {
        server.asked() == Some(1_000_000)
    });
    vmm.ask("end 1");
    server.hear("has ended vCPU 1: ");
    wait_until("vCPU 0 to be served on", || server.asked() == Some(500_000));
    assert_eq!((vmm.pcpus(), vmm.is_kept()), (1, true));
    // Without a thread it has the highest OPP, and no look finds another.
    assert_eq!(vmm.ask(&format!("read {CUR_PERF_1}")), "1000000");
    let of_vcpu_1 = &server.stats()["vcpus"][1];
    assert_eq!(of_vcpu_1["counts"]["source_failures"], 0, "{of_vcpu_1}");
    server.end(Signal::SIGTERM);
    let server = server_of_one_domain(&socket).that_says("takes process");
    wait_until("the next server", || server.asked() == Some(500_000));
    vmm.ask("begin 1");
    server.hear("has vCPU 1 again: ");
    vmm.ask(&format!("store {SET_PERF_1} 1000000"));
    wait_until("vCPU 1", || server.asked() == Some(1_000_000));
    vmm.ask("end 1");
    server.hear("has ended vCPU 1: ");
    wait_until("the last but one", || server.asked() == Some(500_000));
    vmm.ask("end 0");
    server.hear("has ended vCPU 0: ");
    assert!(!vmm.is_kept());
    assert_eq!(vmm.cur_perf(), GONE);
    Vmm::with_vcpus(&socket, 2).end();
    server.end(Signal::SIGTERM);
}

#[test]
fn a_domains_request_counts_while_its_first_vcpu_is_not_there() {
    let Some((_dir, socket)) = dir() else { return };
    let (server, mut vmm) = of_one_domain(&socket);
    // As the driver of this project does for both.
    vmm.ask("request 500000");
    let asks = |server: &Server| server.stats()["vcpus"][1]["asks_khz"].as_u64();
    wait_until("the request", || asks(&server) == Some(500_000));
    vmm.ask("end 0");
    server.hear("has ended vCPU 0: ");
    wait_until("the same", || asks(&server) == Some(500_000));
    vmm.ask("request 1000000");
    wait_until("another one", || asks(&server) == Some(1_000_000));
    server.end(Signal::SIGTERM);
    let server = server_of_one_domain(&socket).that_says("takes process");
    wait_until("the next server", || asks(&server) == Some(1_000_000));
    vmm.ask("end 1");
    server.hear("has ended vCPU 1: ");
    server.end(Signal::SIGTERM);
}

#[test]
fn vcpus_may_end_while_others_have_ended() {
    let Some((_dir, socket)) = dir() else { return };
    let server = Server::start_for(
        &socket,
        &[
            "--cpus=4",
            "--table=0-3=500000,1000000",
            "--capacity=0-3=1024",
        ],
    )
    .that_says("waits at");
    let mut vmm = Vmm::with_vcpus(&socket, 4);
    vmm.ask("end 3");
    server.hear("has ended vCPU 3: ");
    // While the others' bridge begins.
    vmm.ask("end 2");
    vmm.ask("end 1");
    vmm.ask("request 500000");
    wait_until("vCPU 0 to be served on", || {
        let vcpus = &server.stats()["vcpus"];
        vcpus[0]["asks_khz"] == 500_000 && vcpus[1]["asks_khz"].is_null()
    });
    vmm.end();
    server.end(Signal::SIGTERM);
}

#[test]
fn a_prefix_serves_the_vcpus_that_are_left() {
    let Some((dir, _)) = dir() else { return };
    let (prefix, mut vmm) = Server::before_vmm_of(dir.path(), &TWO_VCPUS);
    vmm.ask("end 1");
    prefix.hear("has ended vCPU 1: ");
    vmm.ask("request 500000");
    wait_until("vCPU 0 to be served on", || prefix.asked() == Some(500_000));
    assert_eq!((vmm.pcpus(), vmm.is_kept()), (1, true));
    vmm.ask("begin 1");
    prefix.hear("has vCPU 1 again: ");
    vmm.ask(&format!("store {SET_PERF_1} 1000000"));
    wait_until("vCPU 1 to be served", || {
        let of_vcpu_1 = &prefix.stats()["vcpus"][1];
        of_vcpu_1["asks_khz"] == 1_000_000
    });
    vmm.ask("end 1");
    prefix.hear("has ended vCPU 1: ");
    wait_until("the last but one", || prefix.asked() == Some(500_000));
    vmm.ask("end 0");
    prefix.hear("has ended vCPU 0: ");
    assert_eq!((vmm.cur_perf(), vmm.is_kept()), (GONE, false));
    vmm.end();
}

/// Of two vCPUs, each of which requests for both.
fn server_of_one_domain(socket: &Path) -> Server {
    Server::start_for(socket, &[&TWO_VCPUS[..], &["--domain=0-1=0"]].concat())
}

fn of_one_domain(socket: &Path) -> (Server, Vmm) {
    let server = server_of_one_domain(socket).that_says("waits at");
    (server, Vmm::with_vcpus(socket, 2))
}
