// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! kill -9 of the VMM, alone and with its guardian.

use std::fs;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill as send};
use nix::unistd::Pid;
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::harness::leftovers::{CGROUPS, left_soon, leftovers, own_cgroups, processes};
use crate::harness::load::Load;
use crate::harness::plan::{Plan, first_cpus, registers};
use crate::harness::policy::Policy;
use crate::harness::vm::{BOOT, Setup, Vm};
use crate::harness::wait::{SOON, settled, wait_until};

/// Kills of a VMM that starts, or whose guest boots.
const EARLY: u32 = 47;
/// The moments that they come at, from the start of the VMM.
const MOMENTS: Duration = Duration::from_millis(800);
/// Kills of one whose guest makes requests.
const LOADED: u32 = 3;
/// What a VMM says whose guardian has ended.
const LOST: &str = "its guardian has ended";

/// kill -9 of the VMM at 50 times: within 1 s nothing of it is left, nor does a
/// clamp hold a frequency up. Then of VMM and guardian both: `vcpufreq cleanup` and
/// the next start remove what is left of them alone.
pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let setup = plan.mirroring(&first_cpus(&policies));
    let stranger = format!("{CGROUPS}/stranger");
    fs::create_dir(&stranger)?;
    let (mut left, with_cgroup) = early(&setup)?;
    let loaded: Vec<LabVerdict> = (0..LOADED)
        .map(|round| loaded(plan, &setup, &policies, round))
        .collect::<Result<_>>()?;
    for one in &loaded {
        left.extend(one.get("left").as_array().into_iter().flatten().cloned());
    }
    let cleanup = cleanup(&setup)?;
    let next_start = next_start(&setup)?;
    let stranger_there = fs::remove_dir(&stranger).is_ok();
    let figures = json!({
        "kills": EARLY + LOADED, "killed_with_a_cgroup": with_cgroup, "left": left,
        "stranger_untouched": stranger_there,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_none("nothing is left", &left)
        .check(
            "half have a cgroup when they are killed",
            with_cgroup > EARLY / 2,
            with_cgroup,
        )
        .parts("loaded", loaded)
        .parts("both_killed", vec![cleanup, next_start])
        .check("another's cgroup is untouched", stranger_there, ()))
}

/// From before it does anything to a booting guest: what is left of all of
/// them, and how many of them had a cgroup.
fn early(setup: &Setup) -> Result<(Vec<Value>, u32)> {
    let mut left = Vec::new();
    let mut with_cgroup = 0;
    for round in 0..EARLY {
        let vm = Vm::start(setup)?;
        // In steps that visit every part of it, not in order.
        sleep(MOMENTS / EARLY * (round * 37 % EARLY));
        with_cgroup += u32::from(!own_cgroups()?.is_empty());
        vm.kill()?;
        left.extend(left_soon()?.into_iter().map(Value::from));
    }
    Ok((left, with_cgroup))
}

/// With its driver loaded, one vCPU busy under the guest's own governor and the
/// other's register written each millisecond.
fn loaded(plan: &Plan, setup: &Setup, policies: &[Policy], round: u32) -> Result<LabVerdict> {
    let mut vm = Vm::start(setup)?;
    vm.expect("@ready", BOOT)?;
    plan.load_driver(&mut vm)?;
    let register = registers(&mut vm)? + 0x04;
    let [first, .., _] = policies else {
        bail!("needs two policies: take another topology");
    };
    vm.ask(format!("start busy busy {}", policies.len() - 1))?;
    vm.ask(format!(
        "start writes writes 0 {register:#x} 1000 {} {}",
        first.max(),
        first.min()
    ))?;
    sleep(Duration::from_millis(20 + 23 * u64::from(round)));
    let clamps: Vec<(u32, u32)> = (0..policies.len())
        .map(|vcpu| vm.clamp(vcpu))
        .collect::<Result<_>>()?;
    vm.kill()?;
    let left = left_soon()?;
    let held_up = held_up(policies)?;
    let clamped = clamps.iter().all(|(min, _)| *min > 0);
    let figures = json!({ "clamps": clamps, "left": left, "held_up_khz": held_up });
    Ok(LabVerdict::with_figures(figures)
        .check("each vCPU is clamped", clamped, &clamps)
        .check_none("nothing is left", &left)
        .check_none("no policy is held up", &held_up))
}

/// Frequencies above the minimum at which policies stay under a load of 1 %, on the CPUs that vCPUs
/// were on: only a clamp causes that.
fn held_up(policies: &[Policy]) -> Result<Vec<u32>> {
    let mut held_up = Vec::new();
    for policy in policies {
        let [period, busy] = [20_000, 200].map(Duration::from_micros);
        let light = Load::periodic(policy.cpu(), period, busy);
        let khz = settled(SOON, || policy.khz(), |khz| *khz == policy.min())?;
        light.stop()?;
        held_up.extend((khz > policy.min()).then_some(khz));
    }
    Ok(held_up)
}

/// `vcpufreq cleanup` after both were killed.
fn cleanup(setup: &Setup) -> Result<LabVerdict> {
    let vm = Vm::boot(setup)?;
    kill_guardian(&vm)?;
    let said_of_it = settled(SOON, || Ok(vm.errors()), |said| said.contains(LOST))?;
    let (_, before) = kill_alone(vm)?;
    let output = Command::new("/bin/vcpufreq").arg("cleanup").output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let after = leftovers()?;
    let figures = json!({
        "then": "cleanup", "left": before, "left_after_it": after, "said": said,
    });
    Ok(LabVerdict::with_figures(figures)
        .check(
            "the VMM reports the end of its guardian",
            said_of_it.contains(LOST),
            &said_of_it,
        )
        .check("cleanup succeeds", output.status.success(), &said)
        .check("something is left before it", !before.is_empty(), &before)
        .check_none("nothing after it", &after))
}

/// The next start after both were killed: when it has its own cgroup, nothing
/// of the one before is left.
fn next_start(setup: &Setup) -> Result<LabVerdict> {
    let vm = Vm::start(setup)?;
    wait_for_cgroup(vm.pid())?;
    kill_guardian(&vm)?;
    let (pid, before) = kill_alone(vm)?;
    let of_it = |found: &[String]| -> Vec<String> {
        let number = pid.to_string();
        let its = |text: &&String| {
            text.split(|c: char| !c.is_ascii_digit())
                .any(|n| n == number)
        };
        found.iter().filter(its).cloned().collect()
    };
    let next = Vm::start(setup)?;
    wait_for_cgroup(next.pid())?;
    let after = leftovers()?;
    next.kill()?;
    let end = left_soon()?;
    let figures = json!({
        "then": "next start", "left": of_it(&before), "left_after_it": of_it(&after),
        "of_the_next": after, "left_in_the_end": end,
    });
    Ok(LabVerdict::with_figures(figures)
        .check(
            "something is left before it",
            of_it(&before).len() >= 2,
            &before,
        )
        .check_none("nothing of it after it", &of_it(&after))
        .check("the next one has its own", !after.is_empty(), &after)
        .check_none("nothing is left in the end", &end))
}

fn wait_for_cgroup(vmm: u32) -> Result<()> {
    let own = format!("vcpufreq.{vmm}");
    wait_until(&own, 5 * SOON, || {
        Ok(own_cgroups()?.iter().any(|path| path.ends_with(&own)))
    })
}

fn kill_guardian(vm: &Vm) -> Result<()> {
    let vmm = vm.pid();
    let guardians: Vec<u32> = processes()?.into_iter().filter(|&pid| pid != vmm).collect();
    ensure!(!guardians.is_empty(), "no guardian beside the VMM");
    for pid in guardians {
        let pid = Pid::from_raw(i32::try_from(pid)?);
        send(pid, Signal::SIGKILL).context("killing the guardian")?;
    }
    Ok(())
}

/// Kills a VMM without a guardian; its number, and what is left.
fn kill_alone(vm: Vm) -> Result<(u32, Vec<String>)> {
    let vmm = vm.pid();
    vm.kill()?;
    sleep(SOON);
    Ok((vmm, leftovers()?))
}
