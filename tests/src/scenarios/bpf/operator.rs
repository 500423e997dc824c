// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A policy decides about each request while it is in force, and the built-in rule before and after.
//! The examples do what they say. The VMM's thread sets a clamp that is deferred. In 1,000 changes
//! beside a vCPU that requests, each request is counted and in force, and none exits. What is no policy,
//! loops, reads out of range or answers nonsense is refused in one line, and the policy before it stays;
//! what is outside of the VM's limits is bounded.

use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde_json::json;
use vcpufreq_device::Util;
use vcpufreq_host_bpf::{ActuateBy, HostModule, OperatorVm};
use vcpufreq_tests::LabVerdict;

use super::group::ClampGroup;
use super::vcpu::{FROM_KHZ, ONE, SET_PERF, STEP_KHZ, TinyVcpu, own_clamps, stores};
use crate::harness::clock::set_hour;
use crate::harness::console_commands;

const CHANGES: u32 = 1_000;
/// Requests between two looks whether the changes are done.
const AT_ONCE: u64 = 100;
const PAUSE: Duration = Duration::from_millis(2);
/// What is refused, and a word of the line.
const REFUSED: [(&str, &str); 5] = [
    ("policy_nonsense", "is no clamp: min 5000, max 3"),
    ("policy_loop", "infinite loop"),
    ("policy_range", "refused"),
    ("policy_slow", "helper 181"),
    ("allowed", "VCPUFREQ_POLICY"),
];
/// How long a boost holds.
const BOOST: Duration = Duration::from_millis(20);

pub fn run() -> Result<LabVerdict> {
    console_commands::insmod("vcpufreq_host", "")?;
    let thread = std::thread::Builder::new().name("vcpu0".into());
    let result = thread.spawn(decided)?.join();
    let result = result.map_err(|_| anyhow!("the vCPU panicked"))??;
    console_commands::unload_host_module()?;
    Ok(result)
}

fn object(name: &str) -> Result<Vec<u8>> {
    std::fs::read(format!("/lab/bpf/{name}.bpf.o")).with_context(|| name.to_owned())
}

fn decided() -> Result<LabVerdict> {
    let group = ClampGroup::with_current("operator")?;
    let mut vcpu = TinyVcpu::new(ActuateBy::Kfunc)?;
    let module = HostModule::open(1, 1)?;
    module.bind(0, group.min.as_fd(), group.max.as_fd())?;
    let _event = vcpu.vm.swallow(SET_PERF)?;
    let mut operator = OperatorVm::find(std::process::id())?;
    let examples = examples(&mut vcpu, &mut operator)?;
    let refused = refused(&vcpu, &mut operator)?;
    let bounded = bounded(&mut vcpu, &mut operator)?;
    let deferred = deferred(&mut vcpu, &mut operator, &module)?;
    let changes = changes(&mut vcpu, &mut operator)?;
    drop(operator);
    let khz = vcpu.policy.min();
    let back = clamp_of(&mut vcpu, khz)?;
    Ok(LabVerdict::default()
        .part("examples", examples)
        .part("refused", refused)
        .part("bounded", bounded)
        .part("deferred", deferred)
        .part("changes", changes)
        .check_eq(
            "the built-in rule is back",
            &back,
            (vcpu.policy.util(khz), 1024),
        )
        .check_eq("no policy has a name", &vcpu.host.policy_name(), None))
}

/// The clamp in force behind a request.
fn clamp_of(vcpu: &mut TinyVcpu, khz: u32) -> Result<(u32, u32)> {
    vcpu.vm.run(stores(1, khz, 0), |_, _| ())?;
    own_clamps()
}

fn examples(vcpu: &mut TinyVcpu, operator: &mut OperatorVm) -> Result<LabVerdict> {
    let (low, high) = (vcpu.policy.min(), vcpu.policy.max());
    let [least, most] = [low, high].map(|khz| vcpu.policy.util(khz));
    let built_in = clamp_of(vcpu, low)?;
    operator.load(&object("margin")?, "margin")?;
    let margin = [clamp_of(vcpu, low)?, clamp_of(vcpu, high)?];
    operator.load(&object("night")?, "night")?;
    let by_night = set_hour(23, || clamp_of(vcpu, high))?;
    let by_day = set_hour(12, || clamp_of(vcpu, high))?;
    operator.load(&object("boost")?, "boost")?;
    sleep(BOOST);
    let woken = clamp_of(vcpu, low)?;
    let since = Instant::now();
    while since.elapsed() < 2 * BOOST {
        std::hint::spin_loop();
    }
    let later = clamp_of(vcpu, low)?;
    let name = vcpu.host.policy_name();
    Ok(LabVerdict::default()
        .check_eq("without a policy", &built_in, (least, 1024))
        .check_eq(
            "a margin of 10 %, up to the limit",
            &margin,
            [(least + least / 10, 1024), (most, 1024)],
        )
        .check_eq("half by night", &by_night, (most / 2, most / 2))
        .check_eq("all by day", &by_day, (most, 1024))
        .check_eq("a boost behind a wake-up", &woken, (most, 1024))
        .check_eq("and none 40 ms later", &later, (least, 1024))
        .check_eq("it is named", &name.as_deref(), Some("boost")))
}

fn refused(vcpu: &TinyVcpu, operator: &mut OperatorVm) -> Result<LabVerdict> {
    let mut verdict = LabVerdict::default();
    for (name, word) in REFUSED {
        let said = operator.load(&object(name)?, name);
        let line = said.map_or_else(|error| error.to_string(), |()| "loaded".to_owned());
        let right = line.contains(word) && !line.contains('\n') && line.contains("refused");
        verdict = verdict.check(name, right, line);
    }
    let tried = operator.judge(&object("night")?);
    let tried = tried.map_err(|error| error.to_string());
    let name = vcpu.host.policy_name();
    Ok(verdict
        .check("a trial that is passed", tried.is_ok(), &tried)
        .check_eq("the one before stays", &name.as_deref(), Some("boost")))
}

/// A VM's lower limit, beneath which the policy stays.
fn bounded(vcpu: &mut TinyVcpu, operator: &mut OperatorVm) -> Result<LabVerdict> {
    const FLOOR: u32 = 100;
    let set_floor = |vcpu: &mut TinyVcpu, floor: u32| {
        vcpu.how.floor = Util::saturating(floor.into());
        vcpu.host.set_policy(ONE, vcpu.how.clone())
    };
    set_floor(vcpu, FLOOR)?;
    operator.load(&object("policy_limits")?, "limits")?;
    let low = vcpu.policy.min();
    let clamp = clamp_of(vcpu, low)?;
    let [asked, bounded, silent] = operator.counts();
    set_floor(vcpu, 0)?;
    Ok(LabVerdict::default()
        .check_eq("it gets its floor", &clamp, (FLOOR, FLOOR))
        .check_eq("what is outside is counted", &bounded, asked)
        .check_eq("each is answered", &silent, 0)
        .check("it was asked", asked > 0, asked))
}

/// The guest goes on with the clamp of before, until the VMM's thread sets the new one.
fn deferred(
    vcpu: &mut TinyVcpu,
    operator: &mut OperatorVm,
    module: &HostModule,
) -> Result<LabVerdict> {
    let (low, high) = (vcpu.policy.min(), vcpu.policy.max());
    operator.load(&object("margin")?, "margin")?;
    let before = clamp_of(vcpu, low)?;
    operator.load(&object("policy_defer")?, "defer")?;
    let behind = clamp_of(vcpu, high)?;
    let apply = |domain, clamp| module.apply(domain, clamp);
    let outcome = vcpu.host.apply_pending(0, apply);
    let later = own_clamps()?;
    operator.load(&object("margin")?, "margin")?;
    let most = vcpu.policy.util(high);
    Ok(LabVerdict::default()
        .check_eq("it goes on with the one before", &behind, before)
        .check_eq("then the new one is in force", &later, (most, 1024))
        .figure("outcome", format!("{outcome:?}")))
}

fn change(operator: &mut OperatorVm, policies: &[Vec<u8>; 2]) -> Result<()> {
    for number in 0..CHANGES {
        let object = &policies[usize::from(number % 2 == 1)];
        operator.load(object, "changed")?;
    }
    Ok(())
}

fn changes(vcpu: &mut TinyVcpu, operator: &mut OperatorVm) -> Result<LabVerdict> {
    // The last of an even number of changes is to the second one, whose answer depends on no time.
    let policies = [object("boost")?, object("margin")?];
    let before = vcpu.counters()?;
    let (mut written, mut exits) = (0, 0);
    let done = AtomicBool::new(false);
    let begun = Instant::now();
    let changed = std::thread::scope(|scope| {
        let changer = scope.spawn(|| {
            let changed = change(operator, &policies);
            done.store(true, SeqCst);
            changed
        });
        while !done.load(SeqCst) {
            let outcome = vcpu
                .vm
                .run(stores(AT_ONCE, FROM_KHZ, STEP_KHZ), |_, _| ())?;
            written += AT_ONCE;
            exits += outcome.exits;
            // Emulated CPUs share one's time.
            sleep(PAUSE);
        }
        changer
            .join()
            .map_err(|_| anyhow!("the changer panicked"))?
    });
    changed?;
    let after = vcpu.counters()?;
    let requests = after.requests - before.requests;
    let set = after.in_kernel + after.unchanged - before.in_kernel - before.unchanged;
    let silent = after.silent - before.silent;
    let low = vcpu.policy.min();
    let least = vcpu.policy.util(low);
    let last = clamp_of(vcpu, low)?;
    let decided = (least + least / 10, 1024);
    let figures = json!({
        "changes": CHANGES, "requests": requests, "asked": after.asked - before.asked,
        "virtual_ms": begun.elapsed().as_millis(), "missed": vcpu.host.missed(),
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("each request is counted", &requests, written)
        .check_eq("each is set before the guest goes on", &set, written)
        .check_eq("none exits", &exits, 0)
        .check_eq("each question is answered", &silent, 0)
        .check_eq("the last one counts", &last, decided))
}
