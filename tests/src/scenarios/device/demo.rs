// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What `make demo` shows: the whole loop on every OPP, and the same guest
//! with and without the bridge under a light periodic load.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use super::opps::{SweepRow, sweep};
use crate::harness::host::begins;
use crate::harness::plan::{Plan, first_cpus, let_load_decay, set_governor};
use crate::harness::policy::Policy;
use crate::harness::sysfs;
use crate::harness::trace::{Trace, TraceEvents};
use crate::harness::vm::{Vm, events};

/// 20 % duty: 4 ms of 20.
const LOAD: &str = "20000 4000";

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let setup = plan
        .mirroring(&first_cpus(&policies))
        .with(&["--clamp", "exact"]);
    let mut vm = plan.guest(&setup)?;
    let guest_kernel = vm.ask("read /proc/sys/kernel/osrelease")?;
    let mut rows = Vec::new();
    let parts = u32::try_from(policies.len())? + 2;
    for ((vcpu, policy), part) in policies.iter().enumerate().zip(0..) {
        begins(part, parts, &format!("every OPP of CPU {}", policy.cpu()));
        vm.ask(format!("start busy busy {vcpu}"))?;
        rows.extend(sweep(&mut vm, vcpu, policy, SweepRow::exact)?);
        vm.ask("stop busy")?;
    }
    begins(parts - 2, parts, "a light load with the bridge");
    let with = periodic(&mut vm, &policies, true)?;
    vm.quit()?;
    let wrong = rows.iter().filter(|row| !row.exact()).count();
    let counted = |kind: &str| {
        Ok::<_, anyhow::Error>(
            events()?
                .iter()
                .filter(|event| event["event"] == kind)
                .count(),
        )
    };
    let (requests, applied, refused) = (
        counted("request")?,
        counted("applied")?,
        counted("refused")?,
    );
    begins(parts - 1, parts, "a light load without it");
    // There is no device for the driver to bind to.
    let setup = plan
        .mirroring(&first_cpus(&policies))
        .with(&["--no-bridge"]);
    let mut vm = Vm::boot(&setup)?;
    let without = periodic(&mut vm, &policies, false)?;
    vm.quit()?;
    let at = |end: &'static str| move |row: &Value| row["busy_khz_median"] == row[end];
    let figures = json!({
        "host_kernel": sysfs::text("/proc/sys/kernel/osrelease")?,
        "guest_kernel": guest_kernel,
        "opps_checked": rows.len(), "opps_wrong": wrong,
        "requests": requests, "applied": applied, "refused": refused,
        "rows": rows.iter().map(SweepRow::json).collect::<Vec<_>>(),
        "bridge": with, "no_bridge": without,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("no OPP is wrong", &wrong, 0)
        .check(
            "a light load runs at the maximum with the bridge",
            with.iter().all(at("max_khz")),
            &with,
        )
        .check(
            "and at the minimum without it",
            without.iter().all(at("min_khz")),
            &without,
        ))
}

/// The frequencies of the pCPUs, each under a guest load of 20 % duty and, with the bridge, the
/// guest's performance governor.
fn periodic(vm: &mut Vm, policies: &[Policy], bridge: bool) -> Result<Vec<Value>> {
    let mut rows = Vec::new();
    for (vcpu, policy) in policies.iter().enumerate() {
        if bridge {
            set_governor(vm, vcpu, "performance")?;
        }
        vm.ask(format!("start light periodic {vcpu} {LOAD}"))?;
        let_load_decay();
        let trace = Trace::start()?;
        let at_start = policy.khz()?;
        std::thread::sleep(Duration::from_millis(400));
        let seen = trace.stop()?;
        vm.ask("stop light")?;
        rows.push(json!({
            "vcpu": vcpu, "pcpu": policy.cpu(),
            "busy_khz_median": median_while_running(policy, &seen, (vm.vcpu_tid(vcpu)?, at_start)),
            "min_khz": policy.min(), "max_khz": policy.max(),
        }));
    }
    Ok(rows)
}

/// The frequency that the pCPU was at or below for half of the time that the vCPU's thread ran. An
/// idle pCPU's frequency doesn't count.
fn median_while_running(policy: &Policy, seen: &TraceEvents, (tid, at_start): (i32, u32)) -> u32 {
    let mut time_at = BTreeMap::new();
    for (from, to) in seen.runs_of(tid) {
        let (mut khz, mut since) = (at_start, from);
        for event in seen
            .frequencies
            .iter()
            .filter(|event| event.cpu == policy.cpu() && event.time_us < to)
        {
            let until = event.time_us.max(from);
            *time_at.entry(khz).or_insert(0) += until - since;
            (khz, since) = (event.khz, until);
        }
        *time_at.entry(khz).or_insert(0) += to - since;
    }
    let half = time_at.values().sum::<u64>() / 2;
    let mut passed = 0;
    for (khz, time) in time_at {
        passed += time;
        if passed > half {
            return khz;
        }
    }
    0
}
