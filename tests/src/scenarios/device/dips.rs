// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether the host's frequency dips when a guest's request changes.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::harness::fair_server::floor_khz;
use crate::harness::frequency::stay_off;
use crate::harness::sys::set_fifo_priority_of;
use crate::harness::trace::{FrequencyEvent, Trace};
use crate::harness::vm::{Setup, Vm, events};
use crate::scenarios::{
    Plan, Policy, ask_for, first_cpus, last_of, let_ticks_pass, registers, set_governor,
};

/// Changes of request, up and down, that `no_dip` makes on each vCPU.
pub const CHANGES: usize = 100;

/// Across 100 changes of request on a busy vCPU, the host's trace shows
/// nothing below the smaller of the old and the new request.
pub fn no_dip(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let fair = changes_while_busy(plan, &policies, false)?;
    let mut fifo = changes_while_busy(plan, &policies, true)?;
    // Nor does a server's start call the governor then.
    if floor_khz(last_of(&policies)?.1)? == 0 {
        fifo.least_moves = 1;
    }
    Ok(json!({
        "held": fair.none() && fifo.none(), "seen": fair.json(), "seen_on_fifo": fifo.json(),
    }))
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

/// The same on a vCPU that has just become busy, so that the request alone
/// holds the frequency: none by a cgroup, some by sched_setattr on the
/// vCPU's thread, which is why a cgroup is taken where there is one.
pub fn dip_by_actuator(_plan: &Plan) -> Result<Value> {
    let cgroup = changes_while_light("cgroup")?;
    let thread = changes_while_light("thread")?;
    Ok(json!({
        "held": cgroup.none() && thread.enough() && !thread.dips.is_empty(),
        "cgroup": cgroup.json(), "thread": thread.json(),
    }))
}

/// Until when a dip after a request is the request's: the vCPU sleeps 4 ms
/// after it, and then its clamp counts no more.
pub const LIGHT_US: u64 = 3_500;

/// How long [`CHANGES`] of these take: 108 ms each.
pub const LIGHT_CHANGES: Duration = Duration::from_millis(110 * (CHANGES as u64 + 2));

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

/// Has a vCPU become busy again and again, and change its request then, from the highest OPP to the
/// lowest but one, and back.
pub fn start_light(vm: &mut Vm, vcpu: usize, policy: &Policy) -> Result<()> {
    let low = policy.opps.get(1).context("a policy of one OPP")?;
    let register = registers(vm)? + u64::try_from(vcpu)? * 0x1000 + 0x04;
    vm.ask(format!(
        "start changes{vcpu} changes {vcpu} {register:#x} {low} {}",
        policy.max()
    ))?;
    Ok(())
}

/// Ends that.
pub fn stop_light(vm: &mut Vm, vcpu: usize) -> Result<()> {
    vm.ask(format!("stop changes{vcpu}"))?;
    Ok(())
}

/// A walk through the OPPs that goes up and down by varying steps, never
/// asking for the same twice in a row.
fn nth_request(policy: &Policy, n: usize) -> u32 {
    let count = policy.opps.len();
    // 0, 2, 1, 3, 2, ... modulo the count: neighbours differ.
    let index = if n.is_multiple_of(2) {
        n / 2
    } else {
        n / 2 + 2
    };
    policy.opps.get(index % count).copied().unwrap_or_default()
}

/// The requests of a vCPU in order: time in µs and kHz.
fn requests_of(vcpu: usize) -> Result<Vec<(u64, u32)>> {
    let mut requests = Vec::new();
    for event in events()? {
        if event["event"] == "request" && event["vcpu"] == vcpu {
            let time = event["t_ns"].as_u64().context("a request without t_ns")? / 1000;
            let khz = event["khz"].as_u64().context("a request without khz")?;
            requests.push((time, u32::try_from(khz)?));
        }
    }
    Ok(requests)
}

/// What the trace shows after each change of request.
pub struct Dips {
    pub changes: usize,
    /// Those at which the frequency was known, and no lower than both requests: a dip would show.
    pub from_above: usize,
    /// Changes of the pCPU's frequency after the first of them.
    pub moves: usize,
    /// How many there are to be at least.
    least_moves: usize,
    pub dips: Vec<Value>,
}

impl Dips {
    /// Whether there were changes of request, and the frequency moved at all:
    /// where it doesn't move there is nothing to see. (A SCHED_FIFO thread's
    /// doesn't with each change, for its tick doesn't call the governor: what else
    /// happens on its pCPU does. 19 to 72 moves in 102 changes, by build.)
    fn enough(&self) -> bool {
        self.changes >= CHANGES && self.moves >= self.least_moves
    }

    pub fn none(&self) -> bool {
        self.enough() && self.dips.is_empty()
    }

    pub fn json(&self) -> Value {
        let first: Vec<&Value> = self.dips.iter().take(5).collect();
        json!({ "changes": self.changes, "from_above": self.from_above, "moves": self.moves, "dips": self.dips.len(), "first_dips": first })
    }
}

/// Frequencies below the smaller of the old and the new request, between the
/// new request and the one after it, or for `within_us`.
pub fn dips(
    policy: &Policy,
    requests: &[(u64, u32)],
    seen: &[FrequencyEvent],
    within_us: u64,
) -> Dips {
    let (mut dips, mut from_above) = (Vec::new(), 0);
    let own = || seen.iter().filter(|event| event.cpu == policy.cpu());
    let first = requests.first().map_or(u64::MAX, |&(time, _)| time);
    for (n, pair) in requests.windows(2).enumerate() {
        let [(_, old), (from, new)] = *pair else {
            continue;
        };
        let next = requests.get(n + 2).map_or(u64::MAX, |&(time, _)| time);
        let span = from..next.min(from.saturating_add(within_us));
        let lowest = old.min(new);
        let before = own().take_while(|event| event.time_us <= from).last();
        from_above += usize::from(before.is_some_and(|event| event.khz >= lowest));
        for event in own() {
            if span.contains(&event.time_us) && event.khz < lowest {
                dips.push(json!({
                    "old_khz": old, "new_khz": new, "host_khz": event.khz,
                    "after_us": event.time_us - from,
                }));
            }
        }
    }
    Dips {
        changes: requests.len().saturating_sub(1),
        from_above,
        moves: own().filter(|event| event.time_us >= first).count(),
        least_moves: CHANGES / 10,
        dips,
    }
}
