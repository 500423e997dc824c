// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Frequencies below the smaller of two requests that follow each other, from the host's trace.

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use vcpufreq_bench::tracefs::FrequencyEvent;

use crate::harness::plan::GuestDevice;
use crate::harness::policy::Policy;
use crate::harness::vm::Vm;

/// Changes of request, up and down, that `no_dip` makes on each vCPU.
pub const CHANGES: usize = 100;

/// Until when a dip after a request is the request's: the vCPU sleeps 4 ms
/// after it, and then its clamp counts no more.
pub const LIGHT_US: u64 = 3_500;

/// How long [`CHANGES`] of these take: 108 ms each.
pub const LIGHT_CHANGES: Duration = Duration::from_millis(110 * (CHANGES as u64 + 2));

/// Has a vCPU become busy again and again, and change its request then, from the highest OPP to the
/// lowest but one, and back.
pub fn start_light(vm: &mut Vm, vcpu: usize, policy: &Policy) -> Result<()> {
    let low = policy.opps.get(1).context("a policy of one OPP")?;
    let register = GuestDevice::of(vm)?.set_perf(vcpu);
    vm.ask(format!(
        "start changes{vcpu} changes {vcpu} {register} {low} {}",
        policy.max()
    ))?;
    Ok(())
}

/// Ends that.
pub fn stop_light(vm: &mut Vm, vcpu: usize) -> Result<()> {
    vm.ask(format!("stop changes{vcpu}"))?;
    Ok(())
}

/// What the trace shows after each change of request.
pub struct Dips {
    pub changes: usize,
    /// Those at which the frequency was known, and no lower than both requests: a dip would show.
    pub from_above: usize,
    /// Changes of the pCPU's frequency after the first of them.
    pub moves: usize,
    /// How many there are to be at least.
    pub least_moves: usize,
    pub dips: Vec<Value>,
}

impl Dips {
    /// Whether there were changes of request, and the frequency moved at all. (With a SCHED_FIFO
    /// thread it doesn't move at each change: its tick doesn't call the governor, only other events
    /// on its pCPU do. 19 to 72 moves in 102 changes, by build.)
    pub fn enough(&self) -> bool {
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
