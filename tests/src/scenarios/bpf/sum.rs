// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Other load of a vCPU's pCPU is added to the vCPU's request, and what other vCPUs ask for there
//! ([`waiting`]). The sum follows changes and never exceeds the vCPU's own maximum. In mode `exact`
//! nothing is added. On a host without uclamp the sums are what the worker is given.

use std::os::fd::AsFd as _;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::json;
use vcpufreq_device::{ClampMode, Util};
use vcpufreq_host::{SCHED_DEBUG, proc_field};
use vcpufreq_host_bpf::{ActuateBy, BpfEvent, HostModule, VcpuPolicy};
use vcpufreq_tests::LabVerdict;

use super::group::{ClampGroup, has_uclamp};
use super::vcpu::{ONE, SET_PERF, TinyVcpu, own_clamps, refresh, stores};
use super::waiting;
use crate::harness::console_commands;
use crate::harness::load::Load;
use crate::harness::policy::Policy;
use crate::harness::sys::set_fifo_priority;
use crate::harness::sysfs;
use crate::harness::vm::field;

const PERIOD: Duration = Duration::from_millis(10);
/// Load tracking forgets half of what was in 32 ms.
const SETTLED: Duration = Duration::from_millis(400);
/// How far two looks at a utilization within a period differ, with the quarter that is added. At one
/// frequency: otherwise that differs too.
const WITHIN: u32 = 150;

pub fn run() -> Result<LabVerdict> {
    let uclamp = has_uclamp();
    if uclamp {
        console_commands::insmod("vcpufreq_host", "")?;
    }
    set_governors("performance")?;
    let running = std::thread::Builder::new();
    let running = running.spawn(if uclamp { clamped } else { given_to_worker })?;
    let result = running.join().map_err(|_| anyhow!("the vCPU panicked"))??;
    set_governors("schedutil")?;
    if uclamp {
        console_commands::unload_host_module()?;
    }
    Ok(result)
}

/// Has all policies run by it.
pub fn set_governors(governor: &str) -> Result<()> {
    for policy in Policy::all()? {
        sysfs::write(format!("{}/scaling_governor", policy.path), governor)?;
    }
    Ok(())
}

/// Without uclamp nothing can be in force.
fn given_to_worker() -> Result<LabVerdict> {
    let mut vcpu = TinyVcpu::new(ActuateBy::Worker)?;
    let _event = vcpu.vm.swallow(SET_PERF)?;
    vcpu.how.sum = true;
    let how = vcpu.how.clone();
    let rows = rows(&mut vcpu, &how)?;
    let exact = VcpuPolicy {
        clamp: ClampMode::Exact,
        ..how.clone()
    };
    let exact = beside(&mut vcpu, &exact, 50, quarter(&how))?;
    let figures = json!({ "uclamp": false, "exact": exact });
    Ok(LabVerdict::with_figures(figures)
        .parts("rows", rows)
        .check_eq("nothing is added in mode exact", &exact, (ASKED, ASKED)))
}

/// A quarter of a big pCPU's capacity.
const ASKED: u32 = 1024 / 4;

fn quarter(how: &VcpuPolicy) -> u32 {
    how.spec.table.max().0 / 4
}

/// Beside more and more load.
fn rows(vcpu: &mut TinyVcpu, how: &VcpuPolicy) -> Result<Vec<LabVerdict>> {
    let mut rows = Vec::new();
    for percent in [0, 25, 50] {
        let ((min, max), util) = seen_beside(vcpu, how, percent, quarter(how))?;
        let expected = ASKED + util * 5 / 4;
        let added = min.saturating_sub(ASKED);
        let figures = json!({
            "percent": percent, "min": min, "utilization": util, "expected": expected,
        });
        let row = LabVerdict::with_figures(figures)
            .check(
                "near the sum",
                min.abs_diff(expected) <= WITHIN,
                (min, expected),
            )
            .check_eq("no ceiling", &max, 1024)
            .check("the load is added", added >= 10 * percent, added)
            .check("nothing without load", percent > 0 || added == 0, added);
        rows.push(row);
    }
    Ok(rows)
}

fn clamped() -> Result<LabVerdict> {
    let group = ClampGroup::with_current("sum")?;
    let mut vcpu = TinyVcpu::new(ActuateBy::Kfunc)?;
    let module = HostModule::open(1, 1)?;
    module.bind(0, group.min.as_fd(), group.max.as_fd())?;
    let _event = vcpu.vm.swallow(SET_PERF)?;
    vcpu.how.sum = true;
    let how = vcpu.how.clone();
    let khz = quarter(&how);
    let rows = rows(&mut vcpu, &how)?;
    let small = VcpuPolicy {
        spec: vcpufreq_device::VcpuSpec {
            capacity: Util::saturating(400),
            ..how.spec.clone()
        },
        ..how.clone()
    };
    let limited = beside(&mut vcpu, &small, 50, how.spec.table.max().0)?;
    let half_limited = beside(&mut vcpu, &small, 50, khz * 2)?;
    let exact = VcpuPolicy {
        clamp: ClampMode::Exact,
        ..how.clone()
    };
    let exact = beside(&mut vcpu, &exact, 50, khz)?;
    let maximum = VcpuPolicy {
        sum: false,
        ..how.clone()
    };
    let maximum = beside(&mut vcpu, &maximum, 50, khz)?;
    let followed = follows(&mut vcpu, &how, &module, khz)?;
    let none = beside(&mut vcpu, &how, 50, 0)?;
    sysfs::write("/proc/sys/kernel/sched_util_clamp_min_rt_default", 0)?;
    let fifo = fifo(&mut vcpu, &how, &module, khz)?;
    let other_vm = waiting::run(&mut vcpu, &how, &module, khz)?;
    let figures = json!({
        "emulated": true, "limited": limited, "half_limited": half_limited, "exact": exact,
        "maximum": maximum, "asks_for_nothing": none,
    });
    Ok(LabVerdict::with_figures(figures)
        .parts("rows", rows)
        .check_eq("limited to the capacity", &limited, (400, 1024))
        .check_eq("half of it is limited too", &half_limited, (400, 1024))
        .check_eq("nothing is added in mode exact", &exact, (ASKED, ASKED))
        .check_eq("nor without sum", &maximum, (ASKED, 1024))
        .check_eq("nothing asked for is nothing", &none, (0, 1024))
        .part("followed", followed)
        .part("fifo", fifo)
        .part("other_vm", other_vm))
}

/// The clamps in force after a request beside a host's task that is busy for so many percent.
fn beside(vcpu: &mut TinyVcpu, how: &VcpuPolicy, percent: u32, khz: u32) -> Result<(u32, u32)> {
    Ok(seen_beside(vcpu, how, percent, khz)?.0)
}

/// These and the pCPU's utilization by others at that time.
fn seen_beside(
    vcpu: &mut TinyVcpu,
    how: &VcpuPolicy,
    percent: u32,
    khz: u32,
) -> Result<((u32, u32), u32)> {
    vcpu.host.set_policy(ONE, how.clone())?;
    let load = neighbour(vcpu, percent);
    sleep(SETTLED);
    let outcome = vcpu.vm.run(stores(1, khz, 0), |_, _| ())?;
    ensure!(outcome.exits == 0, "the request left the kernel");
    let own = field(&sysfs::text("/proc/thread-self/sched")?, "se.avg.util_avg")?;
    let all = utilization(vcpu.policy.cpu())?;
    let clamps = match how.actuate {
        ActuateBy::Worker => given(vcpu)?,
        _ => own_clamps()?,
    };
    drop(load);
    Ok((clamps, all.saturating_sub(own)))
}

/// The clamps of the request that waits.
fn given(vcpu: &TinyVcpu) -> Result<(u32, u32)> {
    let mut given = None;
    let worker = vcpu.host.worker()?;
    for event in worker.wait(Duration::from_millis(100))? {
        if let BpfEvent::Waiting(request) = event {
            vcpu.host.apply_waiting(&request, |_, clamp| {
                given = Some((clamp.min.get().into(), clamp.max.get().into()));
                anyhow::Ok(())
            });
        }
    }
    given.context("no request waits")
}

/// What the kernel's own report has of a CPU's run queue.
pub fn utilization(cpu: u32) -> Result<u32> {
    let text = sysfs::text(format!("{SCHED_DEBUG}/debug"))?;
    let root = format!("cfs_rq[{cpu}]:/");
    let mut queues = text.split("\n\n");
    let queue = queues.find(|queue| queue.lines().any(|line| line.trim() == root));
    let util = queue.and_then(|queue| proc_field(queue, ".util_avg")?.parse().ok());
    util.with_context(|| format!("no utilization of CPU {cpu}"))
}

fn neighbour(vcpu: &TinyVcpu, percent: u32) -> Option<Load> {
    let cpu = vcpu.policy.cpu();
    (percent > 0).then(|| Load::periodic(cpu, PERIOD, PERIOD * percent / 100))
}

/// Without a request: the clamp when a neighbour has come, and when it has gone.
fn follows(
    vcpu: &mut TinyVcpu,
    how: &VcpuPolicy,
    module: &HostModule,
    khz: u32,
) -> Result<LabVerdict> {
    let alone = beside(vcpu, how, 0, khz)?.0;
    let worker = vcpu.host.worker()?;
    let serve = |time: Duration| -> Result<(u32, u32)> {
        let mut refreshed = 0;
        let until = std::time::Instant::now() + time;
        while std::time::Instant::now() < until {
            refreshed += refresh(vcpu, &worker, module, Duration::from_millis(4))?;
        }
        Ok((own_clamps()?.0, refreshed))
    };
    let load = neighbour(vcpu, 50);
    let (with, raised) = serve(SETTLED)?;
    drop(load);
    let (without, lowered) = serve(SETTLED)?;
    let figures = json!({
        "alone": alone, "with": with, "without": without, "refreshed": [raised, lowered],
    });
    Ok(LabVerdict::with_figures(figures)
        .check(
            "it rises with the load",
            with >= alone + 3 * 50,
            (alone, with),
        )
        .check("it falls without", without == alone, (alone, without))
        .check("the worker raises it", raised > 0, raised)
        .check("and lowers it", lowered > 0, lowered))
}

/// A real-time vCPU, beside a neighbour that has come and gone: what was added goes with the next
/// request, also with one for what was asked for before. The module has counted the requests alone.
fn fifo(
    vcpu: &mut TinyVcpu,
    how: &VcpuPolicy,
    module: &HostModule,
    khz: u32,
) -> Result<LabVerdict> {
    let before = module.applied(0)?;
    set_fifo_priority(10)?;
    let alone = beside(vcpu, how, 0, khz)?.0;
    let worker = vcpu.host.worker()?;
    // A thread has the policy of the one that starts it.
    set_fifo_priority(0)?;
    let load = neighbour(vcpu, 50);
    set_fifo_priority(10)?;
    let mut with = 0;
    for _ in 0..SETTLED.as_millis() / 4 {
        sleep(Duration::from_millis(4));
        refresh(vcpu, &worker, module, Duration::ZERO)?;
        with = own_clamps()?.0.max(with);
    }
    drop(load);
    // Nothing serves the events: it is the request that sees that the neighbour has gone.
    let again = beside(vcpu, how, 0, khz)?.0;
    set_fifo_priority(0)?;
    let counted = module.applied(0)?.applied - before.applied;
    let figures = json!({
        "alone": alone, "with": with, "asked_again": again, "counted": counted,
    });
    Ok(LabVerdict::with_figures(figures)
        .check(
            "it rises with the load",
            with >= alone + 3 * 50,
            (alone, with),
        )
        .check(
            "a request shows that it is gone",
            again == alone,
            (alone, again),
        )
        .check_eq("two clamps", &counted, 2))
}
