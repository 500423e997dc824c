// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guests that start and end around `vcpufreq rt apply` and `restore`, and guests that would share
//! a real-time vCPU's pCPU. Each is refused with one line and changes nothing; the pCPU keeps its
//! first guest.

use std::path::Path;
use std::process::Output;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use super::inventory::{bound_file, changes, everything};
use crate::harness::rt_command::{output, succeeded};
use crate::harness::sysfs;
use crate::harness::vm::{self, BOOT, Setup, Vm};
use crate::harness::wait::wait_until;

/// A bound that both apply and the guest set, and no cpuset: its threads would keep restore off.
const PROFILE: &str = "/run/bound.toml";
/// In which a guest has its vCPUs, and its guardian has cleaned up.
const PATIENCE: Duration = Duration::from_secs(60);

/// A guest that runs before apply, real-time or not; one that runs when restore comes. They need
/// not boot for that, and end killed: what brings back their bounds is the same.
pub fn run((little, cpu): (u32, u32)) -> Result<LabVerdict> {
    std::fs::write(PROFILE, "[settings]\nresume-latency-us = 'n/a'\n")?;
    let guest = format!("plc={cpu}");
    let apply = ["apply", "--profile", PROFILE, "--guest", guest.as_str()];
    let plain = Setup {
        silent: true,
        ..Setup::mirroring(&[little, cpu])
    };
    let real_time = plain
        .clone()
        .with(&["--rt", "1=fifo:1", "--resume-latency-us", "50"]);
    let bound = || sysfs::text(bound_file(cpu));
    let first = bound()?;
    let before_apply = refused_beside(&real_time, &apply)?;
    let between = bound()?;
    let pinned = refused_beside(&plain, &apply)?;
    succeeded(&apply)?;
    let applied = bound()?;
    let before_restore = refused_beside(&real_time, &["restore"])?;
    let after_it = bound()?;
    succeeded(&["restore"])?;
    let bounds = [&first, &between, &applied, &after_it, &bound()?];
    let all = [&before_apply, &pinned, &before_restore];
    let had = all.map(|one| one.get("bound_us_meanwhile").clone());
    let right = bounds == ["0", "0", "n/a", "n/a", "0"];
    let figures = json!({ "bounds_us": bounds });
    Ok(LabVerdict::with_figures(figures)
        .check("latencies are bound in between", right, bounds)
        .check_eq("and meanwhile", &had, ["50", "0", "50"])
        .part("apply_under_it", before_apply)
        .part("apply_under_one_that_is_not_real_time", pinned)
        .part("restore_under_it", before_restore))
}

/// Whether `vcpufreq rt` refuses this because of a guest that runs, and leaves all as it is. The
/// last vCPU's pCPU is the one that counts.
fn refused_beside(setup: &Setup, line: &[&str]) -> Result<LabVerdict> {
    let cpu = setup.pins.last().context("no pin")?.parse()?;
    let vm = Vm::start(setup)?;
    let pid = vm.pid();
    let started = || Ok(vm.vcpu_tid(setup.pins.len() - 1).is_ok());
    wait_until("a guest has its vCPUs", PATIENCE, started)?;
    let refused = refused(line, pid)?;
    let bound = sysfs::text(bound_file(cpu))?;
    let refused = refused.figure("bound_us_meanwhile", bound);
    vm.kill()?;
    let record = format!("/run/vcpufreq/{pid}.json");
    wait_until("its guardian has cleaned up", PATIENCE, || {
        Ok(!Path::new(&record).exists())
    })?;
    Ok(refused)
}

/// Whether `vcpufreq rt` refuses this because of process `pid`, and leaves all as it is.
fn refused(line: &[&str], pid: u32) -> Result<LabVerdict> {
    let before = everything()?;
    let output = output(line)?;
    let changed = changes(&before, &everything()?);
    let told = told(
        &output,
        &[&format!("process {pid}"), "end that guest first"],
    );
    let figures = json!({ "changed": changed });
    Ok(LabVerdict::with_figures(figures)
        .part("told", told)
        .check_none("nothing changes", &changed))
}

/// One line that contains all of this, and exit code 2.
fn told(output: &Output, says: &[&str]) -> LabVerdict {
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    let all = says.iter().all(|text| said.contains(text));
    let code = output.status.code();
    LabVerdict::with_figures(json!({ "said": said, "code": code }))
        .check("it names the cause", all, &said)
        .check("one line", said.lines().count() == 1, &said)
        .check_eq("the exit code", &code, Some(2))
}

/// With a real-time guest on pCPUs `first` to `last`, the host's last ones, which `vcpufreq rt apply`
/// has set apart: others that are pinned there, alone or among other pCPUs. One that isn't pinned
/// boots beside it, and the cpuset keeps it off.
pub fn others((first, last): (u32, u32)) -> Result<LabVerdict> {
    let pinned = |pins: &str| Setup {
        pins: vec![pins.to_owned()],
        silent: true,
        ..Setup::default()
    };
    let mut cases = Vec::new();
    for (pins, named) in [(last.to_string(), last), (format!("0-{last}"), first)] {
        let output = vm::command(&pinned(&pins)).output()?;
        cases.push(told(
            &output,
            &[&format!("CPU {named}"), "pin it to other CPUs"],
        ));
    }
    let mut beside = Vm::start(&pinned(""))?;
    beside.expect("@ready", BOOT)?;
    // The agent that started it keeps to one CPU: let it go wherever it may.
    let mut all = CpuSet::new();
    for cpu in 0..=usize::try_from(last)? {
        all.set(cpu)?;
    }
    sched_setaffinity(Pid::from_raw(beside.vcpu_tid(0)?), &all).context("letting it go")?;
    let allowed = beside.allowed(0)?;
    beside.quit()?;
    let off = allowed == format!("0-{}", first - 1);
    Ok(LabVerdict::default()
        .check("one that isn't pinned keeps off", off, &allowed)
        .parts("pinned_there", cases)
        .figure("not_pinned_ran_on", allowed))
}
