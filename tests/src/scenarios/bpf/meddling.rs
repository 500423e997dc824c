// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Another process changes what the module sets: the clamps of a vCPU's group, or of the group above
//! it, its policy, its priority. The next request is in force again, and the module changes clamps
//! alone.

use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use anyhow::{Result, anyhow};
use serde_json::json;
use vcpufreq_host_bpf::{ActuateBy, HostModule};
use vcpufreq_tests::LabVerdict;

use super::group::{ClampGroup, write_util};
use super::vcpu::{FROM_KHZ, SET_PERF, STEP_KHZ, TinyVcpu, own_clamps, stores};
use crate::harness::sys::set_policy_of;
use crate::harness::{console_commands, load};

/// What is asked for, and then asked for again.
const ASKED_KHZ: u32 = FROM_KHZ + 100 * STEP_KHZ;

pub fn run() -> Result<LabVerdict> {
    console_commands::insmod("vcpufreq_host", "")?;
    let running = std::thread::Builder::new().spawn(|| {
        let mut vcpu = TinyVcpu::new(ActuateBy::Kfunc)?;
        let _event = vcpu.vm.swallow(SET_PERF)?;
        Ok::<_, anyhow::Error>([group(&mut vcpu)?, above(&mut vcpu)?, policy(&mut vcpu)?])
    })?;
    let rows = running.join().map_err(|_| anyhow!("the vCPU panicked"))??;
    console_commands::unload_host_module()?;
    let [group, above, policy] = rows;
    Ok(LabVerdict::default()
        .part("group", group)
        .part("group_above", above)
        .part("policy", policy))
}

/// The clamps in force after one request.
fn ask(vcpu: &mut TinyVcpu, khz: u32) -> Result<(u32, u32)> {
    vcpu.vm.run(stores(1, khz, 0), |_, _| ())?;
    own_clamps()
}

/// The group's floor and ceiling.
fn group(vcpu: &mut TinyVcpu) -> Result<LabVerdict> {
    let group = ClampGroup::with_current("meddling")?;
    let module = HostModule::open(1, 1)?;
    module.bind(0, group.min.as_fd(), group.max.as_fd())?;
    let wanted = (vcpu.policy.util(ASKED_KHZ), 1024);
    let first = ask(vcpu, ASKED_KHZ)?;
    let before = vcpu.counters()?;
    let same = ask(vcpu, ASKED_KHZ)?;
    let unchanged = vcpu.counters()?.unchanged - before.unchanged;
    write_util(&group.min, 0)?;
    let lowered = own_clamps()?;
    let again = ask(vcpu, ASKED_KHZ)?;
    write_util(&group.min, 1000)?;
    let raised = own_clamps()?;
    let down = ask(vcpu, ASKED_KHZ)?;
    write_util(&group.max, 50)?;
    let capped = own_clamps()?;
    let next = ask(vcpu, ASKED_KHZ + STEP_KHZ)?;
    let next_wanted = (vcpu.policy.util(ASKED_KHZ + STEP_KHZ), 1024);
    let (meddled, asked) = ([lowered, raised, capped], [first, same, again, down]);
    let figures = json!({
        "wanted": wanted, "first": first, "asked_again": same, "unchanged": unchanged,
        "floor_lowered": lowered, "then": again, "floor_raised": raised, "then_down": down,
        "capped": capped, "next": next, "next_wanted": next_wanted,
    });
    let meddled_as = meddled == [(0, 1024), (1000, 1024), (50, 50)];
    Ok(LabVerdict::with_figures(figures)
        .check("meddling is in force", meddled_as, meddled)
        .check_eq("the same request is unchanged", &unchanged, 1)
        .check_eq("each request is in force", &asked, [wanted; 4])
        .check_eq("and the next", &next, next_wanted))
}

/// A group above has a lower limit: a repeated request writes nothing, and a limit that is taken
/// away is noticed.
fn above(vcpu: &mut TinyVcpu) -> Result<LabVerdict> {
    let above = ClampGroup::with_current("above")?;
    let below = above.child("meddling")?;
    let module = HostModule::open(1, 1)?;
    module.bind(0, below.min.as_fd(), below.max.as_fd())?;
    vcpu.host.forget(0);
    let util = vcpu.policy.util(ASKED_KHZ);
    write_util(&above.min, util / 2)?;
    let limited = ask(vcpu, ASKED_KHZ)?;
    let (before, written) = (vcpu.counters()?, module.applied(0)?.applied);
    for _ in 0..10 {
        ask(vcpu, ASKED_KHZ)?;
    }
    let unchanged = vcpu.counters()?.unchanged - before.unchanged;
    let written = module.applied(0)?.applied - written;
    write_util(&above.min, 1024)?;
    let free = ask(vcpu, ASKED_KHZ)?;
    let clamps = (limited, free);
    let counts = (unchanged, written);
    let figures = json!({
        "limited": limited, "asked_again": 10, "unchanged": unchanged, "written": written,
        "free": free, "wanted": util,
    });
    let as_limited = clamps == ((util / 2, 1024), (util, 1024));
    Ok(LabVerdict::with_figures(figures)
        .check("clamps are limited, then free", as_limited, clamps)
        .check_eq("no request is written again", &counts, (10, 0)))
}

/// Policy, priority and nice value, one after the other.
const POLICIES: [(i32, i32, i32); 5] = [
    (libc::SCHED_OTHER, 0, 3),
    (libc::SCHED_BATCH, 0, 7),
    (libc::SCHED_FIFO, 1, 7),
    (libc::SCHED_RR, 2, 5),
    (libc::SCHED_OTHER, 0, 5),
];
const CHANGES: usize = 5_000;
/// And clamps meanwhile, at least.
const CLAMPS: u64 = 1_000;

/// chrt and renice, while the vCPU's group is clamped as fast as it can: no clamp is refused. Each
/// goes on until both have been at work.
fn policy(vcpu: &mut TinyVcpu) -> Result<LabVerdict> {
    let group = ClampGroup::with_current("policy")?;
    let module = HostModule::open(1, 1)?;
    module.bind(0, group.min.as_fd(), group.max.as_fd())?;
    let tid = nix::unistd::gettid().as_raw();
    let (changes, done) = (AtomicUsize::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let changing = scope.spawn(|| change(tid, &changes, &done));
        let clamped = clamp_until(vcpu, || {
            let clamps = module.applied(0)?.applied;
            Ok(changing.is_finished() || (changes.load(SeqCst) >= CHANGES && clamps >= CLAMPS))
        });
        done.store(true, SeqCst);
        let changed = changing.join().map_err(|_| anyhow!("chrt panicked"))?;
        clamped.and(changed)
    })?;
    set_policy_of(tid, (libc::SCHED_OTHER, 0, 0))?;
    let applied = module.applied(0)?;
    let figures = json!({
        "changes": changes.into_inner(),
        "clamps": applied.applied, "refused": applied.refused, "errno": applied.last_errno,
    });
    let errno = applied.last_errno;
    Ok(LabVerdict::with_figures(figures).check("no clamp is refused", applied.refused == 0, errno))
}

fn clamp_until(vcpu: &mut TinyVcpu, enough: impl Fn() -> Result<bool>) -> Result<()> {
    while !enough()? {
        vcpu.vm.run(stores(100, FROM_KHZ, STEP_KHZ), |_, _| ())?;
    }
    Ok(())
}

fn change(tid: i32, changes: &AtomicUsize, done: &AtomicBool) -> Result<()> {
    load::pin(1)?;
    for wanted in POLICIES.into_iter().cycle() {
        if done.load(SeqCst) {
            break;
        }
        set_policy_of(tid, wanted)?;
        changes.fetch_add(1, SeqCst);
    }
    Ok(())
}
