// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether the host's frequency dips when a guest's request changes.

use anyhow::Result;
use vcpufreq_tests::LabVerdict;

use crate::harness::dips::CHANGES;
use crate::harness::dips::Dips;
use crate::harness::dips::LIGHT_CHANGES;
use crate::harness::dips::LIGHT_US;
use crate::harness::dips::dips;
use crate::harness::dips::start_light;
use crate::harness::dips::stop_light;
use crate::harness::fair_server::floor_khz;
use crate::harness::frequency::let_ticks_pass;
use crate::harness::frequency::stay_off;
use crate::harness::plan::{Plan, ask_for, first_cpus, last_of, set_governor};
use crate::harness::policy::Policy;
use crate::harness::sys::set_fifo_priority_of;
use crate::harness::trace::Trace;
use crate::harness::vm::{Setup, Vm, requests_of};

/// Across 100 changes of request on a busy vCPU, the host's trace shows
/// nothing below the smaller of the old and the new request.
pub fn no_dip(plan: &Plan) -> Result<LabVerdict> {
    let seen = changes_while_busy(plan, &Policy::all()?, false)?;
    Ok(LabVerdict::default()
        .check("no change dips", seen.none(), seen.json())
        .figure("seen", seen.json()))
}

/// The same of a SCHED_FIFO vCPU. Its tick doesn't call the governor: how often the frequency moves
/// depends on what else happens on its pCPU.
pub fn no_dip_on_fifo(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let mut seen = changes_while_busy(plan, &policies, true)?;
    // Nor does a server's start call the governor then.
    if floor_khz(last_of(&policies)?.1)? == 0 {
        seen.least_moves = 1;
    }
    Ok(LabVerdict::default()
        .check("no change dips", seen.none(), seen.json())
        .figure("seen", seen.json()))
}

/// The changes of a busy vCPU of the last policy, whose thread may be
/// SCHED_FIFO.
fn changes_while_busy(plan: &Plan, policies: &[Policy], fifo: bool) -> Result<Dips> {
    let (vcpu, policy) = last_of(policies)?;
    let setup = plan
        .mirroring(&first_cpus(policies))
        .with(&["--clamp", "exact"]);
    let mut vm = plan.guest(&setup)?;
    stay_off(policy, &vm)?;
    if fifo {
        set_fifo_priority_of(vm.vcpu_tid(vcpu)?, 1)?;
    }
    set_governor(&mut vm, vcpu, "userspace")?;
    vm.ask(format!("start busy busy {vcpu}"))?;
    ask_for(&mut vm, vcpu, policy.max())?;
    let_ticks_pass();
    let trace = Trace::start()?;
    for change in 0..CHANGES {
        ask_for(&mut vm, vcpu, nth_request(policy, change))?;
        let_ticks_pass();
    }
    let seen = trace.stop()?.frequencies;
    vm.quit()?;
    Ok(dips(policy, &requests_of(vcpu)?, &seen, u64::MAX))
}

/// The same on a vCPU that has just become busy, so that the request alone holds the frequency: no
/// dips by a cgroup, some by sched_setattr on the vCPU's thread. That is why a cgroup is preferred.
pub fn dip_by_actuator(_plan: &Plan) -> Result<LabVerdict> {
    let cgroup = changes_while_light("cgroup")?;
    let thread = changes_while_light("thread")?;
    Ok(LabVerdict::default()
        .check("none by a cgroup dips", cgroup.none(), cgroup.json())
        .check("enough by a thread", thread.enough(), thread.json())
        .check(
            "some by a thread dip",
            !thread.dips.is_empty(),
            thread.json(),
        )
        .figure("cgroup", cgroup.json())
        .figure("thread", thread.json()))
}

fn changes_while_light(actuator: &str) -> Result<Dips> {
    let policies = Policy::all()?;
    let (vcpu, policy) = last_of(&policies)?;
    // By `exit`, where a request's time is that of the guest's write: by
    // `ioeventfd` it is the worker's.
    let setup = Setup::mirroring(&first_cpus(&policies));
    let setup = setup.with(&["--actuator", actuator, "--path", "exit"]);
    let mut vm = Vm::boot(&setup)?;
    stay_off(policy, &vm)?;
    let trace = Trace::start()?;
    start_light(&mut vm, vcpu, policy)?;
    std::thread::sleep(LIGHT_CHANGES);
    stop_light(&mut vm, vcpu)?;
    let seen = trace.stop()?.frequencies;
    vm.quit()?;
    Ok(dips(policy, &requests_of(vcpu)?, &seen, LIGHT_US))
}

/// A walk through the OPPs that goes up and down by varying steps, never
/// asking for the same twice in a row.
fn nth_request(policy: &Policy, n: usize) -> u32 {
    let count = policy.opps.len();
    // 0, 2, 1, 3, 2, ... modulo the count: neighbours differ.
    let index = if n % 2 == 0 { n / 2 } else { n / 2 + 2 };
    policy.opps.get(index % count).copied().unwrap_or_default()
}
