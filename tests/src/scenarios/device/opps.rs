// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Every OPP of every cluster: guest asks → clamp of the thread → host
//! frequency → guest reads.

use std::cell::RefCell;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::harness::fair_server::floor_khz;
use crate::harness::frequency::{LOOKS, look_after, stay_off};
use crate::harness::plan::{
    Plan, ask_for, cur_perf, first_cpus, last_of, let_load_decay, registers, set_governor,
};
use crate::harness::policy::Policy;
use crate::harness::trace::{Trace, now_us};
use crate::harness::vm::{Vm, events};
use crate::harness::wait::settled;

/// What was seen for one request of a busy vCPU.
#[derive(Debug, Clone, Copy)]
pub struct SweepRow {
    pub vcpu: usize,
    pub pcpu: u32,
    /// The guest asked for this.
    pub asked: u32,
    /// What the host then is to run at: that, or more where its fair servers hold the pCPU above.
    pub wanted: u32,
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

impl SweepRow {
    /// As a JSON object.
    pub fn json(&self) -> Value {
        json!({
            "vcpu": self.vcpu, "pcpu": self.pcpu, "asked_khz": self.asked,
            "wanted_khz": self.wanted,
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
    right: impl Fn(&SweepRow) -> bool,
) -> Result<Vec<SweepRow>> {
    let down = policy.opps.iter().rev().skip(1);
    let requests = policy.opps.iter().chain(down);
    let requests: Vec<_> = requests.map(|&opp| (opp, opp)).collect();
    sweep_of(vm, (vcpu, policy), &requests, right)
}

/// Asks for each of these requests in turn, and looks whether the host runs at the OPP beside it.
pub fn sweep_of(
    vm: &mut Vm,
    (vcpu, policy): (usize, &Policy),
    requests: &[(u32, u32)],
    right: impl Fn(&SweepRow) -> bool,
) -> Result<Vec<SweepRow>> {
    stay_off(policy, vm)?;
    set_governor(vm, vcpu, "userspace")?;
    let floor = floor_khz(policy)?;
    let mut rows = Vec::new();
    for &(asked, opp) in requests {
        let wanted = policy.at_least(opp.max(floor));
        let (mut row, mut disturbed) = one_opp(vm, vcpu, policy, (asked, wanted))?;
        while !right(&row) && disturbed && row.looks < LOOKS {
            // Anew, from another OPP: beside another task in the same bucket
            // a clamp takes effect only once the vCPU has slept.
            let other = if opp == policy.min() {
                policy.max()
            } else {
                policy.min()
            };
            ask_for(vm, vcpu, other)?;
            let looks = row.looks + 1;
            (row, disturbed) = one_opp(vm, vcpu, policy, (asked, wanted))?;
            row.looks = looks;
        }
        rows.push(row);
    }
    Ok(rows)
}

/// Asks, and looks; whether the look was disturbed, too.
fn one_opp(
    vm: &mut Vm,
    vcpu: usize,
    policy: &Policy,
    (asked, wanted): (u32, u32),
) -> Result<(SweepRow, bool)> {
    let base = registers(vm)?;
    // What the guest reads may be the frequency of a moment: the host's own
    // tasks move it too. It must be one that there was.
    let guest = RefCell::new(&mut *vm);
    let ask = || ask_for(&mut guest.borrow_mut(), vcpu, asked);
    let read = || cur_perf(&mut guest.borrow_mut(), base, vcpu);
    let look = look_after(policy, ask, read)?;
    let row = SweepRow {
        vcpu,
        pcpu: policy.cpu(),
        asked,
        wanted,
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

impl SweepRow {
    /// The host runs at exactly the request, or at its fair servers' floor, and the guest reads
    /// that.
    pub fn exact(&self) -> bool {
        self.host == self.wanted && self.clamp == (self.util, self.util) && self.read_true
    }
}

/// `--clamp exact`, busy vCPU: the host runs at exactly the OPP asked for. Each of many requests is in
/// force without a second one.
pub fn exact(plan: &Plan) -> Result<LabVerdict> {
    every_opp(plan, "exact", SweepRow::exact)
}

/// `--clamp ceilings`, busy vCPU of a guest that doesn't limit itself: the host never runs below the OPP
/// asked for, and at exactly it while 1.25 × the thread's utilization is under it.
pub fn floor(plan: &Plan) -> Result<LabVerdict> {
    let right = |row: &SweepRow| {
        // What it reads may be older than what the host runs at: it ramps.
        row.lowest >= row.wanted && row.clamp == (row.util, 1024) && row.read >= row.asked
    };
    Ok(every_opp(plan, "ceilings", right)?.part("ramps", ramps(plan)?))
}

fn every_opp(plan: &Plan, clamp: &str, right: impl Fn(&SweepRow) -> bool) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let setup = plan
        .mirroring(&first_cpus(&policies))
        .with(&["--clamp", clamp, "--explain"]);
    let mut vm = plan.guest(&setup)?;
    let mut rows = Vec::new();
    let mut floors = 0;
    for (vcpu, policy) in policies.iter().enumerate() {
        vm.ask(format!("start busy busy {vcpu}"))?;
        rows.extend(sweep(&mut vm, vcpu, policy, &right)?);
        vm.ask("stop busy")?;
        floors += usize::from(floor_khz(policy)? > policy.min());
    }
    let lost = lost(&mut vm, last_of(&policies)?)?;
    let said = vm.quit()?;
    let named = said.lines().filter(|line| line.contains("holds down to"));
    let named = named.count();
    let wrong: Vec<Value> = rows
        .iter()
        .filter(|row| !right(row))
        .map(SweepRow::json)
        .collect();
    let looks: u32 = rows.iter().map(|row| row.looks).sum();
    let below = rows.iter().filter(|row| row.asked < row.wanted).count();
    let figures = json!({
        "looks": looks, "floors": floors, "floors_named_by_explain": named,
        "opps_checked": rows.len(), "of_them_below_the_fair_servers": below,
        "opps_wrong": wrong.len(), "wrong": wrong, "single_requests": SINGLE, "lost": lost,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_none("no OPP is wrong", &wrong)
        .check("OPPs are checked", !rows.is_empty(), ())
        .check("explain names each floor", named == floors, (named, floors))
        .check_none("no single request is lost", &lost))
}

/// Requests that are looked at one by one: a defect that loses each 64th loses two of them.
const SINGLE: usize = 130;
/// In which one is in force by any path. The server of a shared memory finds a request without a
/// doorbell later.
const IN_FORCE: Duration = Duration::from_millis(100);

/// Requests another OPP again and again, each when the last one is in force. Those that are not in
/// force by themselves.
fn lost(vm: &mut Vm, (vcpu, policy): (usize, &Policy)) -> Result<Vec<Value>> {
    let mut lost = Vec::new();
    for (number, &khz) in policy.opps.iter().cycle().take(SINGLE).enumerate() {
        ask_for(vm, vcpu, khz)?;
        let util = policy.util(khz);
        let (min, _) = settled(IN_FORCE, || vm.clamp(vcpu), |(min, _)| *min == util)?;
        if min != util {
            lost.push(json!({ "number": number, "asked_khz": khz, "util": util, "clamp": min }));
        }
    }
    Ok(lost)
}

/// The governor reckons with the CPU's utilization, in which there is also
/// what the host's own short tasks have left there: this much at most.
const OTHERS_UTIL: u32 = 32;

/// A vCPU that was idle becomes busy: until 1.25 × the utilization that the
/// host sees of it reaches the request, the host runs at exactly the request.
fn ramps(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let setup = plan
        .mirroring(&first_cpus(&policies))
        .with(&["--clamp", "ceilings"]);
    let mut vm = plan.guest(&setup)?;
    let (mut compared, mut looks) = (0, 0);
    let (mut wrong, mut without_tick) = (Vec::new(), Vec::new());
    for (vcpu, policy) in policies.iter().enumerate() {
        stay_off(policy, &vm)?;
        set_governor(&mut vm, vcpu, "userspace")?;
        let floor = floor_khz(policy)?;
        for &asked in &policy.opps {
            let wanted = policy.at_least(asked.max(floor));
            let mut ramp = Ramp::default();
            for _ in 0..LOOKS {
                ramp = Ramp::of(&mut vm, vcpu, policy, (asked, wanted))?;
                looks += 1;
                if ramp.without_tick.is_empty() && (ramp.wrong.is_empty() || !ramp.disturbed) {
                    break;
                }
            }
            compared += ramp.compared;
            without_tick.extend(ramp.without_tick);
            wrong.extend(ramp.wrong);
        }
    }
    vm.quit()?;
    let figures = json!({
        "compared": compared, "looks": looks,
        "without_tick": without_tick, "wrong": wrong,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_none("no read is wrong", &wrong)
        .check("enough are compared", compared >= 20, compared)
        .check_none("ticks come", &without_tick))
}

/// How a vCPU's pCPU went up.
#[derive(Default)]
pub struct Ramp {
    /// Moments at which the request alone decided.
    pub compared: u32,
    /// Moments at which it wasn't right, the vCPU had run for long enough, but
    /// the pCPU hadn't ticked meanwhile: the ramp is taken anew.
    pub without_tick: Vec<Value>,
    /// Moments at which the frequency wasn't right.
    pub wrong: Vec<Value>,
    /// Another task ran beside the vCPU.
    pub disturbed: bool,
}

/// A clamp shows at the host's next tick at the latest, 4 ms; two, for the
/// first may find the governor's rate limit.
const IN_FORCE_US: u64 = 8_000;
const IN_FORCE_TICKS: usize = 2;
/// For what a tick does.
const TICK_US: u64 = 500;

/// Ticks until a busy fair thread calls schedutil: load tracking's clock, which goes as fast as the
/// pCPU works, has to reach another period of 1,024 us (docs/design.md, "What a clamp does"). One
/// more for the governor's rate limit.
fn ticks_of_period(policy: &Policy, khz: u32) -> usize {
    const HOST_TICK_US: u64 = 4_000;
    let work = HOST_TICK_US * u64::from(policy.capacity) * u64::from(khz);
    let per_tick_us = (work / 1024 / u64::from(policy.reference.max(1))).max(1);
    usize::try_from(1024_u64.div_ceil(per_tick_us)).unwrap_or(usize::MAX) + 1
}

impl Ramp {
    pub fn of(
        vm: &mut Vm,
        vcpu: usize,
        policy: &Policy,
        (asked, wanted): (u32, u32),
    ) -> Result<Self> {
        ask_for(vm, vcpu, asked)?;
        let_load_decay();
        let tid = vm.vcpu_tid(vcpu)?;
        let trace = Trace::start_with_ticks()?;
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
            let since = seen.running_since(tid, time);
            if since + IN_FORCE_US + TICK_US > time {
                continue;
            }
            let ticks = seen.ticks_on(policy.cpu(), (since, time - TICK_US));
            let khz = seen.frequency_at(policy.cpu(), time).unwrap_or(at_start);
            let under = (util + OTHERS_UTIL) * 5 / 4 < policy.util(wanted);
            let ticked = ticks >= IN_FORCE_TICKS;
            // So slow a pCPU's load tracking has not come to a period yet.
            if ticked && ticks < ticks_of_period(policy, khz) {
                continue;
            }
            ramp.compared += u32::from(under && ticked);
            if khz < wanted || (under && khz != wanted) {
                let row = json!({
                    "asked_khz": asked, "wanted_khz": wanted, "host_khz": khz, "util": util,
                    "ran_us": time - since, "ticks": ticks,
                });
                match ticked {
                    true => ramp.wrong.push(row),
                    false => ramp.without_tick.push(row),
                }
            }
        }
        Ok(ramp)
    }
}

/// The events of a fixed sequence of requests, all of it in the result: two
/// runs are compared to the byte.
pub fn repeat(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let setup = plan
        .mirroring(&first_cpus(&policies))
        .with(&["--clamp", "exact"]);
    let mut vm = plan.guest(&setup)?;
    for (vcpu, policy) in policies.iter().enumerate() {
        vm.ask(format!("start busy busy {vcpu}"))?;
        sweep(&mut vm, vcpu, policy, SweepRow::exact)?;
        vm.ask("stop busy")?;
    }
    vm.quit()?;
    let events = events()?;
    let verdict = LabVerdict::default().check("events are logged", !events.is_empty(), ());
    Ok(verdict.figure("events", events))
}
