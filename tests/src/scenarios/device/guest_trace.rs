// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq trace --guest-trace`: a guest's own ftrace is on the host's time axis. The guest's requests
//! tell its clock, though its trace began later than the host's. Each thread that the guest has running
//! on a vCPU runs while the host has that vCPU running, within 100 us of virtual time.

use std::collections::BTreeMap;
use std::fs;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use super::trace;
use crate::harness::guest_shell::ask;
use crate::harness::plan::{Plan, ask_for, first_cpus, last_of, set_governor};
use crate::harness::policy::Policy;

const GUEST_TEXT: &str = "/tmp/guest-trace";
/// Longer than all requests take.
const LASTS: &str = "8s";
const REQUESTS: u64 = 24;
const WITHIN_US: u64 = 100;
const BEGIN: &str = "
busybox mount -t tracefs none /sys/kernel/tracing 2>/dev/null || :
cd /sys/kernel/tracing
echo mono >trace_clock
echo 1 >events/sched/sched_switch/enable
echo 1 >events/power/cpu_frequency/enable";
const END: &str = "
cd /sys/kernel/tracing
echo 0 >tracing_on
busybox cat trace";

/// From when to when something ran, us.
type RanUs = (u64, u64);

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let (vcpu, policy) = last_of(&policies)?;
    let mut vm = plan.guest(&plan.mirroring(&first_cpus(&policies)))?;
    set_governor(&mut vm, vcpu, "userspace")?;
    ask(&mut vm, BEGIN)?;
    let mut tracer = trace::start(&vm, LASTS, &["--guest-trace", GUEST_TEXT])?;
    // Values and times that fit in one way.
    for turn in 0..REQUESTS {
        let opp = usize::try_from(turn * turn * 31 % 7)?;
        let khz = policy.opps[opp % policy.opps.len()];
        ask_for(&mut vm, vcpu, khz)?;
        sleep(Duration::from_millis(20 + turn * turn * 7919 % 90));
    }
    fs::write(GUEST_TEXT, ask(&mut vm, END)?)?;
    let code = tracer.wait()?.code();
    let trace: Value = serde_json::from_slice(&fs::read(trace::OUT)?)?;
    vm.quit()?;
    let clock = &trace["otherData"]["guest_clock"];
    let within = clock["within_us"].as_u64();
    let host = ran(&trace, "vCPUs: threads and requests", "on pCPU ")?;
    let guest = ran(&trace, "guest", "")?;
    let of_host = host.get(&vcpu).context("the vCPU never runs")?;
    let of_guest = guest.get(&vcpu).context("nothing runs on the vCPU")?;
    let apart: Vec<_> = of_guest
        .iter()
        .filter(|ran| !runs(of_host, ran.0) || !runs(of_host, ran.1))
        .collect();
    let figures = json!({
        "code": code, "guest_clock": clock, "slices_of_guest": of_guest.len(),
        "slices_of_host": of_host.len(), "apart": apart,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("no event is lost", &code, Some(0))
        .check(
            "the guest's clock is known",
            within.is_some_and(|us| us <= WITHIN_US),
            clock,
        )
        .check(
            "the guest has threads",
            of_guest.len() >= 20,
            of_guest.len(),
        )
        .check_none("both agree what runs", &apart))
}

/// Whether the vCPU runs at this moment, or within what both may differ by.
fn runs(host: &[RanUs], us: u64) -> bool {
    host.iter()
        .any(|ran| ran.0 <= us + WITHIN_US && us <= ran.1 + WITHIN_US)
}

/// The slices of a group of tracks whose names begin so, by vCPU.
fn ran(trace: &Value, group: &str, named: &str) -> Result<BTreeMap<usize, Vec<RanUs>>> {
    let events = trace["traceEvents"].as_array().context("no events")?;
    let is_group = |one: &&Value| one["name"] == "process_name" && one["args"]["name"] == group;
    let pid = &events.iter().find(is_group).context("no such group")?["pid"];
    let mut found = BTreeMap::<_, Vec<_>>::new();
    for one in events {
        let is_named = one["name"]
            .as_str()
            .is_some_and(|name| name.starts_with(named));
        if one["ph"] != "X" || one["pid"] != *pid || !is_named {
            continue;
        }
        let number = |key: &str| {
            one[key]
                .as_u64()
                .with_context(|| format!("no {key}: {one}"))
        };
        let (since, track) = (number("ts")?, number("tid")?);
        // Tracks count from 1 on.
        let vcpu = usize::try_from(track.saturating_sub(1))?;
        found
            .entry(vcpu)
            .or_default()
            .push((since, since + number("dur")?));
    }
    Ok(found)
}
