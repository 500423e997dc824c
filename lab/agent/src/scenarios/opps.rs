// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Every OPP of every cluster: guest asks → clamp of the thread → host
//! frequency → guest reads.

use std::cell::RefCell;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::frequency::{LOOKS, look_after, stay_off};
use super::{
    Plan, Policy, ask_for, cur_perf, first_cpus, let_load_decay, let_ticks_pass, registers,
    set_governor,
};
use crate::sys::set_fifo_priority_of;
use crate::trace::{FrequencyEvent, Trace, now_us};
use crate::vm::{Setup, Vm, events};

/// What was seen for one request of a busy vCPU.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    pub vcpu: usize,
    pub pcpu: u32,
    /// The guest asked for this.
    pub asked: u32,
    /// The clamp in force.
    pub clamp: (u32, u32),
    /// The utilization that the ask stands for, worked out here.
    pub util: u32,
    /// The pCPU ran at this, for most of 20 ms.
    pub host: u32,
    /// And at no time of them below this.
    pub lowest: u32,
    /// The guest read this,
    pub read: u32,
    /// which was the frequency at some time of its reading.
    pub read_true: bool,
    /// Looks until it was right, or was undisturbed.
    pub looks: u32,
}

impl Row {
    /// As a JSON object.
    pub fn json(&self) -> Value {
        json!({
            "vcpu": self.vcpu, "pcpu": self.pcpu, "asked_khz": self.asked,
            "util": self.util, "uclamp_min": self.clamp.0, "uclamp_max": self.clamp.1,
            "host_khz": self.host, "guest_reads_khz": self.read, "looks": self.looks,
        })
    }
}

/// Asks for every OPP of the vCPU's policy in turn, up and then down. A row
/// that isn't `right` counts when no other task ran beside the vCPU.
pub fn sweep(
    vm: &mut Vm,
    vcpu: usize,
    policy: &Policy,
    right: impl Fn(&Row) -> bool,
) -> Result<Vec<Row>> {
    stay_off(policy, vm)?;
    set_governor(vm, vcpu, "userspace")?;
    let down = policy.opps.iter().rev().skip(1);
    let mut rows = Vec::new();
    for &asked in policy.opps.iter().chain(down) {
        let (mut row, mut disturbed) = one_opp(vm, vcpu, policy, asked)?;
        while !right(&row) && disturbed && row.looks < LOOKS {
            // Anew, from another OPP: beside another task in the same bucket
            // a clamp takes effect only once the vCPU has slept.
            let other = if asked == policy.min() {
                policy.max()
            } else {
                policy.min()
            };
            ask_for(vm, vcpu, other)?;
            let looks = row.looks + 1;
            (row, disturbed) = one_opp(vm, vcpu, policy, asked)?;
            row.looks = looks;
        }
        rows.push(row);
    }
    Ok(rows)
}

/// Asks, and looks; whether the look was disturbed, too.
fn one_opp(vm: &mut Vm, vcpu: usize, policy: &Policy, asked: u32) -> Result<(Row, bool)> {
    let base = registers(vm)?;
    // What the guest reads may be the frequency of a moment: the host's own
    // tasks move it too. It must be one that there was.
    let guest = RefCell::new(&mut *vm);
    let ask = || ask_for(&mut guest.borrow_mut(), vcpu, asked);
    let read = || cur_perf(&mut guest.borrow_mut(), base, vcpu);
    let look = look_after(policy, ask, read)?;
    let row = Row {
        vcpu,
        pcpu: policy.cpu(),
        asked,
        clamp: vm.clamp(vcpu)?,
        util: policy.util(asked),
        host: look.held.most,
        lowest: look.held.lowest,
        read: look.outcome,
        read_true: look.held.since.contains(&look.outcome),
        looks: 1,
    };
    Ok((row, look.disturbed))
}

impl Row {
    /// The host runs at exactly what was asked for, and the guest knows it.
    pub fn exact(&self) -> bool {
        self.host == self.asked && self.clamp == (self.util, self.util) && self.read_true
    }
}

/// `--clamp exact`, busy vCPU: the host runs at exactly the OPP asked for.
pub fn exact(plan: &Plan) -> Result<Value> {
    every_opp(plan, "exact", Row::exact)
}

/// `--clamp floor`, busy vCPU: the host never runs below the OPP asked for,
/// and at exactly it while 1.25 × the thread's utilization is under it.
pub fn floor(plan: &Plan) -> Result<Value> {
    let right = |row: &Row| {
        // What it reads may be older than what the host runs at: it ramps.
        row.lowest >= row.asked && row.clamp == (row.util, 1024) && row.read >= row.asked
    };
    let mut result = every_opp(plan, "floor", right)?;
    let ramps = ramps(plan)?;
    result["held"] = (result["held"] == true && ramps["held"] == true).into();
    result["ramps"] = ramps;
    Ok(result)
}

fn every_opp(plan: &Plan, clamp: &str, right: impl Fn(&Row) -> bool) -> Result<Value> {
    let policies = Policy::all()?;
    let setup = plan
        .mirroring(&first_cpus(&policies))
        .with(&["--clamp", clamp]);
    let mut vm = plan.guest(&setup)?;
    let mut rows = Vec::new();
    for (vcpu, policy) in policies.iter().enumerate() {
        vm.ask(format!("start busy busy {vcpu}"))?;
        rows.extend(sweep(&mut vm, vcpu, policy, &right)?);
        vm.ask("stop busy")?;
    }
    vm.quit()?;
    let wrong: Vec<Value> = rows
        .iter()
        .filter(|row| !right(row))
        .map(Row::json)
        .collect();
    let looks: u32 = rows.iter().map(|row| row.looks).sum();
    Ok(json!({
        "held": wrong.is_empty() && !rows.is_empty(), "looks": looks,
        "opps_checked": rows.len(), "opps_wrong": wrong.len(), "wrong": wrong,
    }))
}

/// The governor reckons with the CPU's utilization, in which there is also
/// what the host's own short tasks have left there: this much at most.
const OTHERS_UTIL: u32 = 32;

/// A vCPU that was idle becomes busy: until 1.25 × the utilization that the
/// host sees of it reaches the request, the host runs at exactly the request.
fn ramps(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let setup = plan
        .mirroring(&first_cpus(&policies))
        .with(&["--clamp", "floor"]);
    let mut vm = plan.guest(&setup)?;
    let (mut compared, mut looks) = (0, 0);
    let mut wrong = Vec::new();
    for (vcpu, policy) in policies.iter().enumerate() {
        stay_off(policy, &vm)?;
        set_governor(&mut vm, vcpu, "userspace")?;
        for &asked in &policy.opps {
            let mut ramp = Ramp::default();
            for _ in 0..LOOKS {
                ramp = Ramp::of(&mut vm, vcpu, policy, asked)?;
                looks += 1;
                if ramp.wrong.is_empty() || !ramp.disturbed {
                    break;
                }
            }
            compared += ramp.compared;
            wrong.extend(ramp.wrong);
        }
    }
    vm.quit()?;
    Ok(json!({
        "held": wrong.is_empty() && compared >= 20, "compared": compared, "looks": looks,
        "wrong": wrong,
    }))
}

/// How a vCPU's pCPU went up.
#[derive(Default)]
struct Ramp {
    /// Moments at which the request alone decided.
    compared: u32,
    /// Moments at which the frequency wasn't right.
    wrong: Vec<Value>,
    /// Another task ran beside the vCPU.
    disturbed: bool,
}

/// A clamp shows at the host's next tick at the latest, 4 ms; two, for the
/// first may find the governor's rate limit.
const IN_FORCE_US: u64 = 8_000;

impl Ramp {
    fn of(vm: &mut Vm, vcpu: usize, policy: &Policy, asked: u32) -> Result<Self> {
        ask_for(vm, vcpu, asked)?;
        let_load_decay();
        let tid = vm.vcpu_tid(vcpu)?;
        let trace = Trace::start()?;
        let at_start = policy.khz()?;
        let started = now_us();
        vm.ask(format!("start busy busy {vcpu}"))?;
        let mut samples = Vec::new();
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(2));
            // Utilization rises: the later look is the higher one.
            samples.push((now_us(), vm.util(vcpu)?));
        }
        let ended = now_us();
        let seen = trace.stop()?;
        vm.ask("stop busy")?;
        let mut ramp = Self {
            disturbed: seen.others_ran(&[policy.cpu()], (started, ended)) > 0,
            ..Self::default()
        };
        for (time, util) in samples {
            if seen.running_since(tid, time) + IN_FORCE_US > time {
                continue;
            }
            let khz = seen.frequency_at(policy.cpu(), time).unwrap_or(at_start);
            let under = (util + OTHERS_UTIL) * 5 / 4 < policy.util(asked);
            ramp.compared += u32::from(under);
            if khz < asked || (under && khz != asked) {
                let row = json!({ "asked_khz": asked, "host_khz": khz, "util": util });
                ramp.wrong.push(row);
            }
        }
        Ok(ramp)
    }
}

/// Changes of request, up and down, that `no_dip` makes on each vCPU.
const CHANGES: usize = 100;

/// Across 100 changes of request on a busy vCPU, the host's trace shows
/// nothing below the smaller of the old and the new request.
pub fn no_dip(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let fair = changes_while_busy(plan, &policies, false)?;
    let fifo = changes_while_busy(plan, &policies, true)?;
    let none = |seen: &Dips| seen.dips.is_empty() && seen.changes >= CHANGES;
    Ok(json!({
        "held": none(&fair) && none(&fifo), "seen": fair.json(), "seen_on_fifo": fifo.json(),
    }))
}

/// The changes of a busy vCPU of the last policy, whose thread may be
/// SCHED_FIFO.
fn changes_while_busy(plan: &Plan, policies: &[Policy], fifo: bool) -> Result<Dips> {
    let (vcpu, policy) = policies
        .iter()
        .enumerate()
        .next_back()
        .context("no policy")?;
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
    let enough = cgroup.changes.min(thread.changes) >= CHANGES;
    Ok(json!({
        "held": enough && cgroup.dips.is_empty() && !thread.dips.is_empty(),
        "cgroup": cgroup.json(), "thread": thread.json(),
    }))
}

/// Until when a dip after a request is the request's: the vCPU sleeps 4 ms
/// after it, and then its clamp counts no more.
pub const LIGHT_US: u64 = 3_500;

fn changes_while_light(actuator: &str) -> Result<Dips> {
    let policies = Policy::all()?;
    let (vcpu, policy) = policies
        .iter()
        .enumerate()
        .next_back()
        .context("no policy")?;
    let low = policy.opps.get(1).copied().context("a policy of one OPP")?;
    // By `exit`, where a request's time is that of the guest's write: by
    // `kernel` it is the worker's.
    let setup = Setup::mirroring(&first_cpus(&policies));
    let setup = setup.with(&["--actuator", actuator, "--path", "exit"]);
    let mut vm = Vm::boot(&setup)?;
    stay_off(policy, &vm)?;
    let register = registers(&mut vm)? + u64::try_from(vcpu)? * 0x1000 + 0x04;
    let trace = Trace::start()?;
    vm.ask(format!(
        "start changes changes {vcpu} {register:#x} {low} {}",
        policy.max()
    ))?;
    // 108 ms each.
    std::thread::sleep(Duration::from_millis(110) * u32::try_from(CHANGES + 2)?);
    vm.ask("stop changes")?;
    let seen = trace.stop()?.frequencies;
    vm.quit()?;
    Ok(dips(policy, &requests_of(vcpu)?, &seen, LIGHT_US))
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
    pub dips: Vec<Value>,
}

impl Dips {
    fn json(&self) -> Value {
        let first: Vec<&Value> = self.dips.iter().take(5).collect();
        json!({ "changes": self.changes, "dips": self.dips.len(), "first_dips": first })
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
    let mut dips = Vec::new();
    for (n, pair) in requests.windows(2).enumerate() {
        let [(_, old), (from, new)] = *pair else {
            continue;
        };
        let next = requests.get(n + 2).map_or(u64::MAX, |&(time, _)| time);
        let span = from..next.min(from.saturating_add(within_us));
        let lowest = old.min(new);
        for event in seen.iter().filter(|event| event.cpu == policy.cpu()) {
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
        dips,
    }
}

/// The events of a fixed sequence of requests, all of it in the result: two
/// runs are compared to the byte.
pub fn repeat(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let setup = plan
        .mirroring(&first_cpus(&policies))
        .with(&["--clamp", "exact"]);
    let mut vm = plan.guest(&setup)?;
    for (vcpu, policy) in policies.iter().enumerate() {
        vm.ask(format!("start busy busy {vcpu}"))?;
        sweep(&mut vm, vcpu, policy, Row::exact)?;
        vm.ask("stop busy")?;
    }
    vm.quit()?;
    let events = events()?;
    Ok(json!({ "held": !events.is_empty(), "events": events }))
}
