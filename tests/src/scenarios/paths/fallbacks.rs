// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the path `bpf` falls back on while the guest runs, and at start (`fallbacks:start`): each
//! time the guest's requests are carried out, and the VMM prints the reason. And what it
//! does with a request while clamps mean nothing to its vCPU.

use std::fs;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use libbpf_rs::query::MapInfoIter;
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use nix::mount::{MsFlags, mount, umount};
use serde_json::{Value, json};
use vcpufreq_host::{SchedAttr, Tid};
use vcpufreq_tests::LabVerdict;

use crate::harness::console_commands::{insmod, unload_host_module};
use crate::harness::cur_perf::asked_for;
use crate::harness::plan::{Plan, ask_for, registers, set_governor};
use crate::harness::policy::Policy;
use crate::harness::stats::{has_one_outcome_each, of as stats};
use crate::harness::sys::drop_bpf_capabilities;
use crate::harness::sysfs;
use crate::harness::vm::{Setup, Vm};

const BTF: &str = "/sys/kernel/btf";
const LOCKDOWN: &str = "/sys/kernel/security/lockdown";
/// The VMM looks ten times a second for requests that no program saw.
const LOOKS: Duration = Duration::from_secs(1);
/// The VMM looks once a second for threads that have become SCHED_DEADLINE, or are so no longer.
const MAINTENANCE: Duration = Duration::from_secs(3);
const RT_RUNTIME: &str = "/proc/sys/kernel/sched_rt_runtime_us";

/// While the guest runs.
pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let deadline = after_deadline(plan)?;
    let rows = [
        detached(plan)?,
        detached_amid_requests(plan, "on")?,
        detached_amid_requests(plan, "off")?,
    ];
    Ok(LabVerdict::default()
        .part("after_deadline", deadline)
        .parts("rows", rows.into()))
}

/// At start. The last case can't be taken back, so this is the last scenario of its boot.
pub fn at_start(plan: &Plan) -> Result<LabVerdict> {
    unload_host_module()?;
    let mut rows = vec![started(
        plan,
        "without the module",
        "bpf",
        "isn't loaded",
        |_| (),
    )?];
    insmod("vcpufreq_host", "")?;
    mount(
        None::<&str>,
        BTF,
        Some("tmpfs"),
        MsFlags::empty(),
        None::<&str>,
    )?;
    let row = started(
        plan,
        "without BTF",
        "ioeventfd",
        "CONFIG_DEBUG_INFO_BTF",
        |_| (),
    );
    umount(BTF)?;
    rows.push(row?);
    rows.push(started(
        plan,
        "without CAP_BPF",
        "ioeventfd",
        "lacks CAP_",
        |command| {
            drop_bpf_capabilities(command);
        },
    )?);
    mount(
        Some("securityfs"),
        "/sys/kernel/security",
        Some("securityfs"),
        MsFlags::empty(),
        None::<&str>,
    )?;
    fs::write(LOCKDOWN, "confidentiality").context("lockdown")?;
    rows.push(started(
        plan,
        "in lockdown",
        "ioeventfd",
        "lockdown",
        |_| (),
    )?);
    Ok(LabVerdict::default().parts("rows", rows))
}

/// A guest on the last policy, which `prepare` prepares: its path, the reason, and whether each OPP
/// is in force.
fn started(
    plan: &Plan,
    what: &str,
    path: &str,
    reason: &str,
    prepare: impl FnOnce(&mut Command),
) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let options = ["--clamp", "exact", "--explain", "--cur-perf", "request"];
    let setup = Setup::mirroring(&[policy.cpu()]).with(&options);
    let mut vm = Vm::boot_prepared(&setup, prepare)?;
    plan.load_driver(&mut vm)?;
    set_governor(&mut vm, 0, "userspace")?;
    let wrong = wrong_clamps(&mut vm, policy)?;
    // What it asked for last.
    let report = asked_for(&mut vm, 0, policy, policy.min())?;
    let taken = stats(&vm)?["vcpus"][0]["path"].clone();
    let said = vm.quit()?;
    let line = said.lines().find(|line| line.contains(reason));
    let figures = json!({ "case": what, "path": taken, "reason": line, "wrong": wrong });
    Ok(LabVerdict::with_figures(figures)
        .check_none("no clamp is wrong", &wrong)
        .check_eq("the path", &taken, path)
        .check("the reason is told", line.is_some(), &said)
        .part("report_request", report))
}

/// An administrator takes the program away from the running guest: the path
/// `ioeventfd` takes over, no request is lost, and no program stays.
fn detached(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let setup = Setup {
        silent: true,
        ..Setup::mirroring(&[policy.cpu()]).with(&["--clamp", "exact"])
    };
    let mut vm = plan.guest(&setup)?;
    set_governor(&mut vm, 0, "userspace")?;
    let mut wrong = wrong_clamps(&mut vm, policy)?;
    let before = stats(&vm)?["vcpus"][0].clone();
    take_program_away()?;
    // The request that shows it, twice: until the VMM has seen one, a guest without an answer gets
    // the highest frequency.
    let mut meanwhile = Vec::new();
    let second = policy.opps.get(1).copied().context("a policy of one OPP")?;
    for khz in [policy.max(), second, policy.max()] {
        ask_for(&mut vm, 0, khz)?;
        sleep(LOOKS / 4);
        meanwhile.push((khz, vm.clamp(0)?.0));
    }
    sleep(LOOKS);
    wrong.extend(wrong_clamps(&mut vm, policy)?);
    let after = stats(&vm)?["vcpus"][0].clone();
    // Of the selection, when the driver was loaded.
    let exited = |stats: &Value| stats["accesses"]["writes_exited"].clone();
    let said = vm.quit()?;
    let line = said
        .lines()
        .find(|line| line.contains("the path bpf is lost"));
    let counts = [&before, &after].map(|stats| stats["counts"].clone());
    let figures = json!({
        "case": "program taken away", "counts": counts,
        "path": after["path"], "reason": line,
        "vmm_said": said, "wrong": wrong, "asked_and_clamp": meanwhile, "writes_exited": [exited(&before), exited(&after)],
    });
    let none_below = meanwhile
        .iter()
        .all(|&(khz, clamp)| clamp >= policy.util(khz));
    let one_each = [&before, &after].into_iter().all(has_one_outcome_each);
    Ok(LabVerdict::with_figures(figures)
        .check_none("no clamp is wrong", &wrong)
        .check_eq("by bpf before", &before["path"], "bpf")
        .check_eq("by ioeventfd after", &after["path"], "ioeventfd")
        .check(
            "no write exits",
            exited(&before) == exited(&after),
            exited(&after),
        )
        .check("each request has an outcome", one_each, &counts)
        .check(
            "never below what was asked for by then",
            none_below,
            &meanwhile,
        )
        .check("the loss is told", line.is_some(), &said))
}

/// A guest that is reset after it has lost the path: its last request is taken
/// back, and what it asks for then is in force.
pub fn reset(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let setup = Setup::mirroring(&[policy.cpu()]).with(&["--clamp", "exact"]);
    let mut vm = plan.guest(&setup)?;
    set_governor(&mut vm, 0, "userspace")?;
    take_program_away()?;
    // The highest is in force for the last one, which no program saw, until the next.
    for khz in [policy.max(), policy.min(), policy.max()] {
        ask_for(&mut vm, 0, khz)?;
        sleep(LOOKS / 4);
    }
    sleep(LOOKS);
    let mut wrong = wrong_clamps(&mut vm, policy)?;
    vm.tell("restart")?;
    vm.expect("@ready", Duration::from_secs(120))?;
    let clamp = vm.clamp(0)?;
    plan.load_driver(&mut vm)?;
    set_governor(&mut vm, 0, "userspace")?;
    wrong.extend(wrong_clamps(&mut vm, policy)?);
    let path = stats(&vm)?["vcpus"][0]["path"].clone();
    let said = vm.quit()?;
    let figures = json!({
        "wrong": wrong, "clamp_after_reset": clamp, "path": path, "vmm_said": said,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_none("no clamp is wrong", &wrong)
        .check_eq("no clamp after the reset", &clamp, (0, 1024))
        .check_eq("the path", &path, "ioeventfd"))
}

/// The same while the guest makes a request each millisecond, during the switch of paths, too: no
/// clamp is below the lower of its two values, and the last one is in force in the end. In a
/// sandbox the next path has no record of the order: of requests that come together, the higher one
/// is in force until the next.
fn detached_amid_requests(plan: &Plan, sandbox: &str) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    // The highest stands for a request that no program saw.
    let [_, low, high, _, ..] = policy.opps[..] else {
        bail!("a policy of under four OPPs");
    };
    let setup = Setup {
        silent: true,
        ..Setup::mirroring(&[policy.cpu()]).with(&["--clamp", "exact", "--sandbox", sandbox])
    };
    let mut vm = plan.guest(&setup)?;
    set_governor(&mut vm, 0, "userspace")?;
    let register = registers(&mut vm)? + 0x04;
    let idle = stats(&vm)?["vcpus"][0].clone();
    vm.ask(format!(
        "start load writes 0 {register:#x} 1000 {low} {high}"
    ))?;
    sleep(LOOKS / 4);
    let before = stats(&vm)?["vcpus"][0].clone();
    take_program_away()?;
    let mut lowest = u32::MAX;
    for _ in 0..100 {
        sleep(LOOKS / 100);
        lowest = lowest.min(vm.clamp(0)?.0);
    }
    let turns = vm.number("stop load")?;
    let last = if turns % 2 == 1 { high } else { low };
    sleep(LOOKS);
    let clamp = vm.clamp(0)?;
    let after = stats(&vm)?["vcpus"][0].clone();
    let wrong = wrong_clamps(&mut vm, policy)?;
    let said = vm.quit()?;
    let line = said
        .lines()
        .find(|line| line.contains("the path bpf is lost"));
    let util = policy.util(last);
    let mut in_force = vec![(util, util)];
    if sandbox == "on" {
        in_force.push((policy.util(high), policy.util(high)));
    }
    let new = requests(&after).zip(requests(&idle));
    // The last one by `bpf` is the next path's first one, too, unless that has had one.
    let each_counted = new.is_some_and(|(all, idle)| [turns, turns + 1].contains(&(all - idle)));
    let figures = json!({
        "case": "program taken away amid requests", "sandbox": sandbox,
        "path": after["path"], "wrong": wrong,
        "reason": line, "vmm_said": said, "requests": turns, "asked_last": last, "util": util,
        "counts": [&idle["counts"], &after["counts"]],
        "clamp": clamp, "lowest_clamp": lowest, "util_of_lower": policy.util(low),
        "writes_exited": after["accesses"]["writes_exited"],
    });
    let counts = &after["counts"];
    Ok(LabVerdict::with_figures(figures)
        .check_eq("by bpf before", &before["path"], "bpf")
        .check_eq("by ioeventfd after", &after["path"], "ioeventfd")
        .check("turns of the load", turns > 500, turns)
        .check("each request is counted", each_counted, (turns, counts))
        .check(
            "each request has an outcome",
            has_one_outcome_each(&after),
            counts,
        )
        .check(
            "no clamp is below the lower OPP",
            lowest >= policy.util(low),
            lowest,
        )
        .check(
            "the last request is in force",
            in_force.contains(&clamp),
            clamp,
        )
        .check_none("no clamp is wrong", &wrong)
        .check("the loss is told", line.is_some(), &said))
}

/// Clamps mean nothing to a SCHED_DEADLINE thread: what it asks for meanwhile is in force when it
/// is one no longer.
fn after_deadline(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let setup = Setup::mirroring(&[policy.cpu()]).with(&["--clamp", "exact"]);
    let mut vm = plan.guest(&setup)?;
    set_governor(&mut vm, 0, "userspace")?;
    ask_for(&mut vm, 0, policy.min())?;
    let thread = Tid::new(vm.vcpu_tid(0)?).context("no thread")?;
    // Without admission control the thread may be pinned.
    let admission = sysfs::text(RT_RUNTIME)?;
    sysfs::write(RT_RUNTIME, -1)?;
    SchedAttr::deadline(5_000_000, 10_000_000).set(thread)?;
    sleep(MAINTENANCE);
    ask_for(&mut vm, 0, policy.max())?;
    let meanwhile = stats(&vm)?["vcpus"][0].clone();
    SchedAttr::default().set(thread)?;
    sysfs::write(RT_RUNTIME, admission)?;
    sleep(MAINTENANCE);
    let clamp = vm.clamp(0)?;
    let after = stats(&vm)?["vcpus"][0].clone();
    vm.quit()?;
    let util = policy.util(policy.max());
    let not_applicable = meanwhile["counts"]["not_applicable"].as_u64();
    let counted = not_applicable.is_some_and(|count| count > 0);
    let counts = json!([&meanwhile["counts"], &after["counts"]]);
    let figures = json!({ "util": util, "clamp": clamp, "counts": counts });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("by bpf", &meanwhile["path"], "bpf")
        .check("a request isn't applicable", counted, &counts)
        .check_eq("the last request is in force", &clamp, (util, util))
        .check(
            "each request has an outcome",
            has_one_outcome_each(&after),
            &counts,
        ))
}

/// Requests of a vCPU, by its stats.
fn requests(stats: &Value) -> Option<u64> {
    stats["counts"]["requests"].as_u64()
}

/// Asks for every OPP; those whose clamp isn't in force.
fn wrong_clamps(vm: &mut Vm, policy: &Policy) -> Result<Vec<Value>> {
    let mut wrong = Vec::new();
    for &khz in policy.opps.iter().chain(policy.opps.first()) {
        ask_for(vm, 0, khz)?;
        let util = policy.util(khz);
        let clamp = vm.settled_clamp(0, (util, util))?;
        if clamp != (util, util) {
            wrong.push(json!({ "khz": khz, "util": util, "clamp": clamp }));
        }
    }
    Ok(wrong)
}

/// Has the VMM's programs take its threads for those of another VM: they see none of its guest's
/// writes.
pub fn take_program_away() -> Result<()> {
    const SLOT: std::ops::Range<usize> = 12..16;
    // The newest: the kernel may still list that of a VMM that has ended.
    let all = MapInfoIter::default().filter(|map| map.name == "vm");
    let newest = all.max_by_key(|map| map.id);
    let newest = newest.ok_or_else(|| anyhow!("no VMM has programs"))?;
    let (map, key) = (MapHandle::from_map_id(newest.id)?, 0_u32.to_ne_bytes());
    let mut vm = map.lookup(&key, MapFlags::ANY)?.context("no VM")?;
    vm.get_mut(SLOT).context("another layout")?.fill(0xff);
    Ok(map.update(&key, &vm, MapFlags::ANY)?)
}
