// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest's kernel learns from its VMM: the device tree that `--dump-dtb`
//! wrote, and an access that can't be decoded; `guest-facts:stolen`: the time that others took
//! from it.

use std::process::{Child, Command};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;
use vcpufreq_load::work::pin_thread;
use vcpufreq_tests::LabVerdict;

use crate::harness::console_commands::digest;
use crate::harness::plan::{Plan, registers};
use crate::harness::policy::Policy;
use crate::harness::sysfs;
use crate::harness::vm::Vm;

const DTB: &str = "/run/guest.dtb";
/// USER_HZ, the unit of /proc/stat.
const TICK_MS: u64 = 10;
/// What stolen time may be off by, in per cent of what the other took.
const TOLERANCE: u64 = 10;
/// What a vCPU that is alone may have had stolen: the host's own short tasks.
const ALONE_MS: u64 = 10;

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let policy = policies.first().context("no policy")?;
    let setup = plan.mirroring(&[policy.cpu()]).with(&["--dump-dtb", DTB]);
    let mut vm = plan.guest(&setup)?;
    let written = digest(DTB)?;
    let in_guest = vm.ask("digest /sys/firmware/fdt")?;
    let register = registers(&mut vm)? + 0x04;
    let pair = vm.ask(format!("store-pair {register:#x}"))?;
    let said = vm.quit()?;
    // Twice: the program's own handler of SIGBUS leaves the second to the kernel.
    let aborted = pair == "signal 7" && said.contains("accesses of no device 2,");
    let figures = json!({
        "dtb": { "written": written, "in_guest": in_guest },
        "store_of_a_pair": pair, "vmm_said": said,
    });
    Ok(LabVerdict::with_figures(figures)
        .check(
            "the guest's device tree is the VMM's",
            written == in_guest,
            (&written, &in_guest),
        )
        .check("a store of a pair is aborted", aborted, (&pair, &said)))
}

/// A busy vCPU alone, and beside another process.
pub fn stolen(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let policy = policies.first().context("no policy")?;
    let mut vm = plan.guest(&plan.mirroring(&[policy.cpu()]))?;
    vm.ask("start busy busy 0")?;
    let alone = stolen_while(&mut vm, || Ok(0))?;
    let shared = stolen_while(&mut vm, || beside(policy.cpu()))?;
    vm.ask("stop busy")?;
    vm.quit()?;
    let off = shared.0.abs_diff(shared.1);
    let figures = json!({
        "stolen_ms": { "alone": alone.0, "shared": shared.0, "other_ran": shared.1 },
    });
    Ok(LabVerdict::with_figures(figures)
        .check("little is stolen alone", alone.0 <= ALONE_MS, alone)
        .check("the other one ran", shared.1 > 200, shared)
        .check(
            "as much is stolen as it ran",
            off * 100 <= shared.1 * TOLERANCE,
            shared,
        ))
}

/// The stolen time that the guest reports while `other` ran, in ms, and how long
/// `other` ran by its own count.
fn stolen_while(vm: &mut Vm, other: impl FnOnce() -> Result<u64>) -> Result<(u64, u64)> {
    // The line itself is work on the host.
    let before = steal_ms(vm)?;
    sleep(Duration::from_millis(100));
    let ran = other()?;
    sleep(Duration::from_millis(100));
    Ok((steal_ms(vm)? - before, ran))
}

/// The eighth figure of a CPU's line, proc_stat(5).
fn steal_ms(vm: &mut Vm) -> Result<u64> {
    let text = vm.ask("read /proc/stat")?;
    let line = text.split("\\n").find(|line| line.starts_with("cpu0 "));
    let ticks = line.and_then(|line| line.split_whitespace().nth(8));
    Ok(ticks.context("no steal in /proc/stat")?.parse::<u64>()? * TICK_MS)
}

/// Another process keeps the vCPU's pCPU busy for half a second; for how long
/// it ran, in ms.
fn beside(cpu: u32) -> Result<u64> {
    let mut other = Command::new("/init").arg("burn").spawn()?;
    let ran = ran_beside(&other, cpu);
    other.kill()?;
    other.wait()?;
    ran
}

fn ran_beside(other: &Child, cpu: u32) -> Result<u64> {
    pin_thread(i32::try_from(other.id())?, &[cpu])?;
    let process = format!("/proc/{}", other.id());
    let (before, _) = sysfs::ran_and_waited_ns(&process)?;
    sleep(Duration::from_millis(500));
    let (after, _) = sysfs::ran_and_waited_ns(&process)?;
    Ok((after - before) / 1_000_000)
}
