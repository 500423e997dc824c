// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What goes wrong on the host while the guest runs.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::harness::frequency::host_runs_at;
use crate::harness::frequency::let_ticks_pass;
use crate::harness::leftovers::{CGROUPS, own_cgroups};
use crate::harness::plan::{Plan, ask_for, first_cpus, last_of, set_governor};
use crate::harness::policy::Policy;
use crate::harness::stats::of as stats;
use crate::harness::sysfs;
use crate::harness::vm::{Vm, events};

/// The VMM looks at the host every second.
const A_LOOK: Duration = Duration::from_millis(1_500);
/// Governors that follow no request.
const DEAF: [&str; 2] = ["performance", "powersave"];

/// The host's governor changes, a pCPU goes offline and comes back, the cgroup goes away. The guest
/// runs on, each is reported once and counted, and later requests are in force.
pub fn host_fails(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let (vcpu, policy) = last_of(&policies)?;
    let setup = plan
        .mirroring(&first_cpus(&policies))
        .with(&["--clamp", "exact"]);
    let mut vm = plan.guest(&setup)?;
    set_governor(&mut vm, vcpu, "userspace")?;
    let mut steps = Vec::new();
    for governor in DEAF {
        steps.push(other_governor(&mut vm, vcpu, policy, governor)?);
    }
    steps.push(pcpu_offline(&mut vm, vcpu, policy)?);
    remove_cgroups(vm.pid())?;
    both_ends(&mut vm, vcpu, policy)?;
    let alive = vm.ask("read /proc/uptime")?;
    let said = vm.quit_with(1)?;
    let happened = happened()?;
    let refused = &happened["refused"];
    let (governor, pin) = (&happened["governor"], &happened["pin"]);
    let lines = lines(&said, policy, vcpu);
    let figures = json!({
        "steps": steps, "events": happened, "lines": lines, "vmm_said": said,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_rows("each step", &steps)
        .check("refusals are told", refused.as_u64() >= Some(2), refused)
        .check_eq(
            "governors are told",
            governor,
            json!(["lost", "ok", "lost", "ok"]),
        )
        .check_eq("pinnings are told", pin, json!(["lost", "ok"]))
        .check_rows("each line is printed once a change", [&lines])
        .check("the guest runs on", !alive.is_empty(), &alive))
}

/// Under another governor, whatever is asked for; then under schedutil again.
fn other_governor(vm: &mut Vm, vcpu: usize, policy: &Policy, governor: &str) -> Result<Value> {
    let file = format!("{}/scaling_governor", policy.path);
    let before = lost(vm, "governors_lost")?;
    sysfs::write(&file, governor)?;
    sleep(A_LOOK);
    let during = lost(vm, "governors_lost")?;
    let followed = both_ends(vm, vcpu, policy)?;
    sysfs::write(&file, "schedutil")?;
    sleep(A_LOOK);
    let after = lost(vm, "governors_lost")?;
    let follows_again = both_ends(vm, vcpu, policy)?;
    let counted = [during, after] == [before + 1; 2];
    Ok(json!({
        "right": counted && !followed && follows_again,
        "governor": governor, "counted": [before, during, after],
        "followed": followed, "follows_again": follows_again,
    }))
}

/// While its pCPU is offline, the vCPU is elsewhere, clamped as it asks; when
/// it is back, so is the vCPU, and the pCPU follows it.
fn pcpu_offline(vm: &mut Vm, vcpu: usize, policy: &Policy) -> Result<Value> {
    let online = format!("/sys/devices/system/cpu/cpu{}/online", policy.cpu());
    sysfs::write(&online, 0)?;
    let mut clamped = true;
    for khz in [policy.max(), policy.min()] {
        ask_for(vm, vcpu, khz)?;
        let_ticks_pass();
        clamped &= vm.clamp(vcpu)? == (policy.util(khz), policy.util(khz));
    }
    sleep(A_LOOK);
    let (during, elsewhere) = (lost(vm, "pins_lost")?, vm.pcpu(vcpu)?);
    let allowed_meanwhile = vm.allowed(vcpu)?;
    sysfs::write(&online, 1)?;
    sleep(A_LOOK);
    let follows = both_ends(vm, vcpu, policy)?;
    let (after, home) = (lost(vm, "pins_lost")?, vm.pcpu(vcpu)?);
    let allowed = vm.allowed(vcpu)?;
    let counted = (during, after) == (1, 1) && allowed == policy.cpu().to_string();
    let right = clamped && elsewhere != policy.cpu() && follows && home == policy.cpu();
    Ok(json!({
        "right": right && counted, "offline": policy.cpu(),
        "clamped_meanwhile": clamped, "pcpu_meanwhile": elsewhere, "pcpu_after": home,
        "allowed_meanwhile": allowed_meanwhile, "allowed_after": allowed,
        "follows_after": follows, "counted": [during, after],
    }))
}

fn lost(vm: &Vm, what: &str) -> Result<u64> {
    stats(vm)?[what].as_u64().context("no such count")
}

/// The events of the host in the events file.
fn happened() -> Result<Value> {
    let events = events()?;
    let of = |kind: &'static str| events.iter().filter(move |event| event["event"] == kind);
    let results = |kind| of(kind).map(|event| event["result"].clone());
    Ok(json!({
        "refused": of("refused").count(),
        "governor": results("governor").collect::<Vec<_>>(),
        "pin": results("pin").collect::<Vec<_>>(),
    }))
}

/// How often the VMM printed each line that it has to print once a change.
fn lines(said: &str, policy: &Policy, vcpu: usize) -> Value {
    let count = |text: &str| said.lines().filter(|line| line.contains(text)).count();
    let deaf = DEAF.map(|name| count(&format!("is under the governor {name}: ")));
    let heard = count("is under schedutil again");
    let cpu = policy.cpu();
    let gone = count(&format!("vCPU {vcpu} runs elsewhere than on CPUs {cpu}"));
    let back = count(&format!("vCPU {vcpu} is pinned to CPUs {cpu} again"));
    let sums = count("governors lost 2, pinnings lost 1");
    let right = deaf == [1; 2] && (heard, gone, back, sums) == (2, 1, 1, 1);
    json!({
        "right": right,
        "other_governor": deaf, "schedutil_again": heard, "unpinned": gone, "pinned_again": back,
        "in_the_sum": sums,
    })
}

/// Asks for both ends while the vCPU is busy; whether the host followed.
fn both_ends(vm: &mut Vm, vcpu: usize, policy: &Policy) -> Result<bool> {
    vm.ask(format!("start busy busy {vcpu}"))?;
    let mut right = true;
    for khz in [policy.max(), policy.min()] {
        ask_for(vm, vcpu, khz)?;
        let_ticks_pass();
        right &= host_runs_at(policy, vm, khz)? == khz;
    }
    vm.ask("stop busy")?;
    Ok(right)
}

/// As an administrator could by mistake: moves everything to the root and removes the groups.
fn remove_cgroups(vmm: u32) -> Result<()> {
    sysfs::write(format!("{CGROUPS}/cgroup.procs"), vmm)?;
    for top in own_cgroups()? {
        for entry in fs::read_dir(&top)?.flatten() {
            if entry.file_type()?.is_dir() {
                fs::remove_dir(entry.path())?;
            }
        }
        fs::remove_dir(&top)?;
    }
    Ok(())
}
