// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The service starts, reports its status and ends. Each obstacle is an error of one line. However
//! it ends, nothing is left.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use serde_json::json;
use vcpufreq_host_bpf::{PINS, verify};
use vcpufreq_tests::LabVerdict;

use super::super::ext_server::ExtScheduler;
use super::service::{
    PROGRAM, ServiceProcess, disabled, in_force, left, refused, said, scx, sysrq, vm_refused,
};
use crate::harness::load;
use crate::harness::machine::mount_bpffs;
use crate::harness::sys::set_deadline;

/// Of a program on sched_switch that calls the kernel.
const LOCKED: &str = "/lab/bpf/locked.bpf.o";

pub fn run() -> Result<LabVerdict> {
    let none = said(&scx(&["status"])?);
    ensure!(none == (Some(1), "not running\n".into()), "{none:?}");
    let mut refusals = vec![("without bpffs", refused()?, "mount -t bpf")];
    mount_bpffs()?;
    let ends = [by_stop()?, by_kill()?, by_sysrq()?];
    let takes_all = ExtScheduler::start("takes_all")?;
    refusals.push(("beside another", refused()?, "takes_all"));
    takes_all.end()?;
    refusals.push(("hooks", locked()?, "tp_btf/sched_switch"));
    refusals.push(("deadline", beside_deadline()?, "SCHED_DEADLINE"));
    let mixed = super::threads::mixed()?;
    let service = ServiceProcess::start()?;
    refusals.push(("twice", refused()?, "runs already"));
    refusals.push(("another layout", other_layout()?, "of another version"));
    let nobody = said(&scx(&["status"])?);
    let expected = format!("running, process {}, 0 vCPUs\n", service.pid());
    let stopped = said(&scx(&["stop"])?).0 == Some(0);
    let told = refusals.iter().all(|(_, text, word)| text.contains(word));
    let left = left()?;
    let texts: Vec<_> = refusals
        .iter()
        .map(|(what, text, _)| json!({ *what: text }))
        .collect();
    let figures = json!({ "refusals": texts, "status": nobody.1, "left": left });
    Ok(LabVerdict::with_figures(figures)
        .parts("ends", ends.into())
        .check("no vCPU is left", nobody == (Some(0), expected), &nobody.1)
        .check("it is stopped", stopped, ())
        .check("each refusal names its cause", told, &texts)
        .part("two_services", mixed)
        .check("nothing is left", left.is_empty(), &left))
}

/// A kernel without sched_ext: the service and a VM that asks for it are refused in a line.
pub fn none() -> Result<LabVerdict> {
    let service = refused()?;
    // Debian's kernel without it has no uclamp either, which the VM misses first.
    let vm = vm_refused()?;
    let status = said(&scx(&["status"])?);
    let figures = json!({ "service": service, "vm": vm, "status": status.1 });
    Ok(LabVerdict::with_figures(figures)
        .check(
            "it names the kernel",
            service.contains("no sched_ext"),
            &service,
        )
        .check_eq("none runs", &status.0, Some(1)))
}

/// A VM beside a service whose maps are laid out in another way.
fn other_layout() -> Result<String> {
    let control = MapHandle::from_pinned_path(format!("{PINS}/scx_control"))?;
    let key = 0_u32.to_ne_bytes();
    let own = control.lookup(&key, MapFlags::ANY)?.context("no entry")?;
    let mut other = own.clone();
    let layout = other.first_chunk_mut().context("a short entry")?;
    *layout = 99_u32.to_ne_bytes();
    control.update(&key, &other, MapFlags::ANY)?;
    let refused = vm_refused();
    control.update(&key, &own, MapFlags::ANY)?;
    refused
}

fn by_stop() -> Result<LabVerdict> {
    let service = ServiceProcess::start()?;
    let before = in_force();
    let stopped = said(&scx(&["stop"])?);
    let ms = disabled()?;
    let ended = service.ended()?;
    let left = left()?;
    let figures = json!({ "by": "stop", "after_ms": ms, "said": ended.1, "left": left });
    Ok(LabVerdict::with_figures(figures)
        .check("in force before", before, ())
        .check("stop succeeds", stopped.0 == Some(0), &stopped.1)
        .check("the service ends", ended.0 == Some(0), &ended.1)
        .check("nothing is left", left.is_empty(), &left))
}

/// Pins and lock stay until `cleanup`, which leaves a service that runs its own, and are in
/// nothing's way.
fn by_kill() -> Result<LabVerdict> {
    let service = ServiceProcess::start()?;
    let before = in_force();
    let alive = cleaned()?;
    service.kill()?;
    let ms = disabled()?;
    let status = said(&scx(&["status"])?).0;
    // It has left both.
    let removed = cleaned()?;
    let clean = left()?;
    drop(ServiceProcess::start()?);
    let again = disabled().is_ok();
    let service = ServiceProcess::start()?;
    said(&scx(&["stop"])?);
    drop(service);
    let left = left()?;
    let told = [
        "removed /sys/fs/bpf/vcpufreq-scx",
        "removed /run/vcpufreq-scx",
    ];
    let figures = json!({
        "by": "kill -9", "after_ms": ms, "cleaned": removed, "left": [clean, left],
    });
    Ok(LabVerdict::with_figures(figures)
        .check("in force before", before, ())
        .check(
            "nothing is cleaned while it lives",
            alive.is_empty(),
            &alive,
        )
        .check_eq("what it left is removed", &removed, told)
        .check("nothing is left then", clean.is_empty(), &clean)
        .check("the scheduler ends soon", ms < 1000, ms)
        .check_eq("none runs", &status, Some(1))
        .check("the next one is ended too", again, ())
        .check("nothing is left", left.is_empty(), &left))
}

/// The output of `vcpufreq cleanup`, line by line.
fn cleaned() -> Result<Vec<String>> {
    let (code, text) = said(&Command::new(PROGRAM).arg("cleanup").output()?);
    ensure!(code == Some(0), "cleanup: exit code {code:?}, {text}");
    Ok(text.lines().map(str::to_owned).collect())
}

fn by_sysrq() -> Result<LabVerdict> {
    let service = ServiceProcess::start()?;
    let before = in_force();
    sysrq()?;
    let ms = disabled()?;
    let ended = service.ended()?;
    let left = left()?;
    let told = ended.1.lines().count() == 1 && ended.1.contains("ended the scheduler");
    let figures = json!({ "by": "SysRq-S", "after_ms": ms, "said": ended.1, "left": left });
    Ok(LabVerdict::with_figures(figures)
        .check("in force before", before, ())
        .check("the scheduler ends soon", ms < 1000, ms)
        .check_eq("the exit code", &ended.0, Some(3))
        .check("one line tells", told, &ended.1)
        .check("nothing is left", left.is_empty(), &left))
}

/// The message of the loader for programs that the verifier lets pass.
fn locked() -> Result<String> {
    let object = std::fs::read(LOCKED)?;
    verify(&object).map_or_else(|error| Ok(error.to_string()), |()| bail!("{LOCKED} loads"))
}

/// Beside threads that leave no 5 % of the host's DEADLINE bandwidth.
fn beside_deadline() -> Result<String> {
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let run = || {
            load::unpin()?;
            // More than the bandwidth takes is refused.
            let _ = set_deadline(Duration::from_millis(45), Duration::from_millis(100));
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(5));
            }
            anyhow::Ok(())
        };
        let threads: Vec<_> = (0..32).map(|_| scope.spawn(run)).collect();
        std::thread::sleep(Duration::from_millis(200));
        let said = refused();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        for thread in threads {
            thread.join().map_err(|_| anyhow!("a thread panicked"))??;
        }
        disabled()?;
        said
    })
}
