// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM whose guest has registers in its RAM: the server looks for its process, serves it, and ends with
//! it. The next server takes it over from one that was killed, and none from one that lives. A guest that
//! scribbles over its RAM makes the server no larger, and has its next request. What can't be served is
//! one line and the exit code for that.

use std::{fs, os::unix::fs::DirBuilderExt, path::PathBuf, process::Command};

use nix::sys::signal::Signal;
use tempfile::TempDir;
use vcpufreq_vm::fakes::qemu_tree;

use super::{
    guardian::hold,
    left,
    server::{ONE_VCPU, PROGRAM, Server},
    vmm::Vmm,
    wait_until,
};

const SIZE: usize = 64 << 20;
/// The exit code of a server whose only VM is refused.
const REFUSED: i32 = 3;

/// The guest's tree, in a folder of its own; none where a test is skipped.
fn tree() -> Option<(TempDir, PathBuf)> {
    let (dir, _) = super::dir()?;
    if fs::File::open("/dev/kvm").is_err() {
        println!("SKIP: takes KVM, which tells whether guests can share their RAM");
        return None;
    }
    let (base, dtb) = (dir.path().join("base.dtb"), dir.path().join("guest.dtb"));
    fs::write(&base, qemu_tree(1, SIZE as u64).unwrap()).unwrap();
    let mut dt = Command::new(PROGRAM);
    dt.arg("dt").args(ONE_VCPU).args(["--in-ram", "--merge"]);
    let made = dt.arg(base).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    fs::write(&dtb, made.stdout).unwrap();
    Some((dir, dtb))
}

/// A VMM that boots this tree.
fn vmm_of(dtb: &str) -> Vmm {
    Vmm::with_ram(SIZE, true, &["-kernel", "Image", "-dtb", dtb])
}

/// Requests again until that is read, as a governor does: a request after which the vCPU sleeps within
/// 250 us is read only when that next runs.
fn asks_until(vmm: &mut Vmm, khz: &str, mut is_read: impl FnMut() -> bool) {
    wait_until("the request", || {
        vmm.ask(&format!("request {khz}"));
        is_read()
    });
}

#[test]
fn it_is_found_served_and_taken_over() {
    let Some((dir, dtb)) = tree() else { return };
    let file = dir.path().join("vm.pid");
    let options = format!("--pid-file={}", file.display());
    let server = Server::start_by_ram(&dtb, &[&options]).that_says("to name a VMM with 1 vCPU");
    let mut vmm = vmm_of(dtb.to_str().unwrap());
    fs::write(&file, vmm.pid.to_string()).unwrap();
    wait_until("the vCPU is pinned", || vmm.pcpus() == 1);
    asks_until(&mut vmm, "700000", || server.asked() == Some(700_000));
    // The host's CPU 0 is a little one, and the table a big one's.
    wait_until("its frequency", || vmm.ask("read cur_perf") == "321289");

    let (status, said) = Server::start_by_ram(&dtb, &[&options]).output();
    assert_eq!(status.code(), Some(REFUSED), "{said:?}");
    let line = format!("process {} serves it; end that first", server.process.id());
    assert!(said.concat().contains(&line), "{said:?}");
    assert_eq!(vmm.pcpus(), 1);

    server.end(Signal::SIGKILL);
    wait_until("the pin is put back", || vmm.pcpus() > 1);
    let pid = format!("--pid={}", vmm.pid);
    let server = Server::start_by_ram(&dtb, &[&pid]).that_says("takes process");
    wait_until("the vCPU is pinned again", || vmm.pcpus() == 1);
    wait_until("the same request", || server.asked() == Some(700_000));
    let own = server.process.id();
    vmm.end();
    let (status, said) = server.output();
    assert_eq!(status.code(), Some(0), "{said:?}");
    assert!(left(own).is_empty() && left(vmm.pid).is_empty());
}

#[test]
fn a_guest_that_scribbles_over_its_ram_harms_no_server() {
    let Some((_dir, dtb)) = tree() else { return };
    let mut vmm = vmm_of(dtb.to_str().unwrap());
    let pid = format!("--pid={}", vmm.pid);
    let server = Server::start_by_ram(&dtb, &[&pid]);
    wait_until("the vCPU is pinned", || vmm.pcpus() == 1);
    asks_until(&mut vmm, "700000", || server.asked() == Some(700_000));
    let processes = [server.process.id(), server.vm_process()];
    let before = processes.map(used_kib);
    vmm.ask("scribble 20");
    wait_until("another request", || server.asked() != Some(700_000));
    for (before, after) in before.into_iter().zip(processes.map(used_kib)) {
        assert!(after < before + 1024, "{before} KiB, {after} KiB");
    }
    asks_until(&mut vmm, "600000", || server.asked() == Some(600_000));
    wait_until("its frequency", || vmm.ask("read cur_perf") == "321289");
    assert_eq!(vmm.pcpus(), 1);
    vmm.end();
    assert_eq!(server.output().0.code(), Some(0));
}

/// Memory of a process' own.
fn used_kib(process: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    line.unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse()
        .unwrap()
}

#[test]
fn of_two_servers_that_wait_one_serves() {
    let Some((dir, dtb)) = tree() else { return };
    let file = dir.path().join("vm.pid");
    // A zombie, which its parent has not seen end.
    let mut ended = vmm_of(dtb.to_str().unwrap());
    fs::write(&file, ended.pid.to_string()).unwrap();
    ended.kill();
    let options = format!("--pid-file={}", file.display());
    let mut servers = [(); 2]
        .map(|()| Server::start_by_ram(&dtb, &[&options]).that_says("to name a VMM with 1 vCPU"));
    let mut vmm = vmm_of(dtb.to_str().unwrap());
    fs::write(&file, vmm.pid.to_string()).unwrap();
    wait_until("one is refused", || {
        let mut all = servers.iter_mut();
        all.any(|server| server.process.try_wait().unwrap().is_some())
    });
    wait_until("the other one serves it", || vmm.pcpus() == 1);
    vmm.end();
    ended.end();
    let mut codes = servers.map(|server| server.output().0.code());
    codes.sort_unstable();
    assert_eq!(codes, [Some(0), Some(REFUSED)]);
}

#[test]
fn a_signal_ends_a_server_that_waits() {
    let Some((dir, dtb)) = tree() else { return };
    let file = dir.path().join("vm.pid");
    // Of a process that has ended.
    fs::write(&file, u32::MAX.to_string()).unwrap();
    let options = format!("--pid-file={}", file.display());
    let server = Server::start_by_ram(&dtb, &[&options]).that_says("waits for");
    assert_eq!(server.end(Signal::SIGTERM).0.code(), Some(0));
    // QEMU makes its control socket later than its RAM.
    let mut vmm = vmm_of(dtb.to_str().unwrap());
    let qmp = format!("--qmp={}", dir.path().join("qmp").display());
    let pid = format!("--pid={}", vmm.pid);
    let server = Server::start_by_ram(&dtb, &[&pid, &qmp]);
    wait_until("it is on record", || vmm.is_kept());
    assert_eq!(server.end(Signal::SIGTERM).0.code(), Some(0));
    // It was served by none.
    assert!(!vmm.is_kept());
    vmm.end();
}

#[test]
fn a_signal_ends_a_wait_for_the_records() {
    let Some((dir, dtb)) = tree() else { return };
    let run = dir.path().join("run");
    fs::DirBuilder::new()
        .mode(0o700)
        .recursive(true)
        .create(run.join("vcpufreq"))
        .unwrap();
    let held = hold(&run);
    let mut vmm = vmm_of(dtb.to_str().unwrap());
    let server = Server::start_alone_by_ram(&dtb, &run, &format!("--pid={}", vmm.pid));
    server.hear("waits for another vcpufreq");
    assert_eq!(server.end(Signal::SIGTERM).0.code(), Some(0));
    drop(held);
    vmm.end();
}

#[test]
fn what_is_no_such_vm_is_refused() {
    let Some((dir, dtb)) = tree() else { return };
    let (own, other) = (dtb.to_str().unwrap(), dir.path().join("base.dtb"));
    let other = other.to_str().unwrap();
    let rows: [(bool, &[&str], &str); 5] = [
        (
            false,
            &["-kernel", "Image", "-dtb", own],
            "shares no RAM of 64 MiB",
        ),
        (true, &["-kernel", "Image", "-dtb", other], "give QEMU -dtb"),
        (true, &["-kernel", "Image"], "give QEMU -dtb"),
        (true, &["-dtb", own], "give QEMU -kernel"),
        (
            true,
            &["-kernel", "Image", "-bios", "EFI", "-dtb", own],
            "give QEMU -kernel",
        ),
    ];
    for (shares, words, line) in rows {
        let mut vmm = Vmm::with_ram(SIZE, shares, words);
        let pid = format!("--pid={}", vmm.pid);
        let (status, said) = Server::start_by_ram(&dtb, &[&pid]).output();
        assert_eq!(status.code(), Some(REFUSED), "{said:?}");
        let last = said.last().unwrap();
        assert!(
            last.starts_with(&format!("vcpufreq: process {} isn't served: ", vmm.pid)),
            "{said:?}"
        );
        assert!(last.contains(line), "{said:?}");
        assert!(!vmm.is_kept() && vmm.pcpus() > 1);
        // Nothing was written to it.
        assert_eq!(vmm.ask("read cur_perf"), "0");
        vmm.end();
    }
}
