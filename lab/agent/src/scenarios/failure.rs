// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What goes wrong on the host: while the guest runs, and when the VMM is
//! killed.

use std::fs;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill as send};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::frequency::host_runs_at;
use super::{Plan, Policy, ask_for, first_cpus, let_ticks_pass, set_governor};
use crate::sysfs;
use crate::vm::{Setup, Vm, events};

const CGROUPS: &str = "/sys/fs/cgroup";

/// The host's governor changes, a pCPU goes offline and comes back, the
/// cgroup goes away: the guest runs on, and each refusal is an event.
pub fn host_fails(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let (vcpu, policy) = policies
        .iter()
        .enumerate()
        .next_back()
        .context("no policy")?;
    let setup = plan
        .mirroring(&first_cpus(&policies))
        .with(&["--clamp", "exact"]);
    let mut vm = plan.guest(&setup)?;
    set_governor(&mut vm, vcpu, "userspace")?;
    vm.ask(format!("start busy busy {vcpu}"))?;
    let governor = format!("{}/scaling_governor", policy.path);
    sysfs::write(&governor, "performance")?;
    both_ends(&mut vm, vcpu, policy)?;
    sysfs::write(&governor, "schedutil")?;
    let after_governor = both_ends(&mut vm, vcpu, policy)?;
    let online = format!("/sys/devices/system/cpu/cpu{}/online", policy.cpu());
    sysfs::write(&online, 0)?;
    both_ends(&mut vm, vcpu, policy)?;
    sysfs::write(&online, 1)?;
    remove_cgroups(vm.pid())?;
    both_ends(&mut vm, vcpu, policy)?;
    let alive = vm.ask("read /proc/uptime")?;
    let said = vm.quit_with(1)?;
    let refused = events()?
        .iter()
        .filter(|event| event["event"] == "refused")
        .count();
    Ok(json!({
        "held": after_governor && refused >= 2 && !alive.is_empty(),
        "follows_after_governor_change": after_governor, "refused": refused, "vmm_said": said,
    }))
}

/// A vCPU pinned to a pCPU that is offline: one line, exit code 2, nothing
/// left behind; online again, the same guest starts.
pub fn pin_offline(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let setup = plan.mirroring(&[policy.cpu()]);
    let online = format!("/sys/devices/system/cpu/cpu{}/online", policy.cpu());
    sysfs::write(&online, 0)?;
    let said = Vm::start(&setup)?.finish(2);
    sysfs::write(&online, 1)?;
    let said = said?;
    let left = leftovers()?;
    Vm::boot(&setup)?.quit()?;
    let one_line = said.lines().count() == 1;
    Ok(json!({
        "held": one_line && said.contains("offline") && said.contains("bring it online") && left.is_empty(),
        "vmm_said": said, "left": left,
    }))
}

/// Asks for both ends; whether the host followed.
fn both_ends(vm: &mut Vm, vcpu: usize, policy: &Policy) -> Result<bool> {
    let mut right = true;
    for khz in [policy.max(), policy.min()] {
        ask_for(vm, vcpu, khz)?;
        let_ticks_pass();
        right &= host_runs_at(policy, vm, khz)? == khz;
    }
    Ok(right)
}

/// As an administrator would who doesn't know what they are for: moves
/// everything to the root and removes them.
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

fn own_cgroups() -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(CGROUPS)?.flatten() {
        if entry.file_name().to_string_lossy().starts_with("vcpufreq") {
            found.push(entry.path().display().to_string());
        }
    }
    Ok(found)
}

/// Kills in all.
const KILLS: u32 = 50;

/// kill -9 of the VMM at 50 times: within 1 s nothing of it is left. Then
/// of VMM and guardian both: `vcpufreq cleanup` removes what is left, and
/// nothing that isn't its own.
pub fn kill(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let setup = plan.mirroring(&first_cpus(&policies));
    let stranger = format!("{CGROUPS}/stranger");
    fs::create_dir(&stranger)?;
    let mut left = Vec::new();
    let mut with_cgroup = 0;
    for round in 0..KILLS {
        let vm = Vm::start(&setup)?;
        // From before it does anything to a booting guest: 0 to 1.25 s in
        // steps that visit every part of it, not in order.
        sleep(Duration::from_millis(25) * (round * 37 % KILLS));
        with_cgroup += u32::from(!own_cgroups()?.is_empty());
        vm.kill()?;
        sleep(Duration::from_secs(1));
        left.extend(leftovers()?);
    }
    let (after_both, cleaned) = kill_both(&setup)?;
    let stranger_there = fs::remove_dir(&stranger).is_ok();
    Ok(json!({
        "held": left.is_empty() && with_cgroup > KILLS / 2 && !after_both.is_empty()
            && cleaned && stranger_there,
        "kills": KILLS, "killed_with_a_cgroup": with_cgroup, "left": left,
        "left_after_both_were_killed": after_both, "cleanup_removed_it": cleaned,
        "stranger_untouched": stranger_there,
    }))
}

fn kill_both(setup: &Setup) -> Result<(Vec<String>, bool)> {
    let vm = Vm::boot(setup)?;
    let vmm = vm.pid();
    let guardians: Vec<u32> = processes()?.into_iter().filter(|&pid| pid != vmm).collect();
    ensure!(!guardians.is_empty(), "no guardian beside the VMM");
    for pid in guardians {
        send(Pid::from_raw(i32::try_from(pid)?), Signal::SIGKILL)?;
    }
    vm.kill()?;
    sleep(Duration::from_secs(1));
    let after = leftovers()?;
    let output = Command::new("/bin/vcpufreq").arg("cleanup").output()?;
    ensure!(
        output.status.success(),
        "cleanup: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok((after, leftovers()?.is_empty()))
}

/// Everything of vcpufreq's that is on the host now.
fn leftovers() -> Result<Vec<String>> {
    let mut found = own_cgroups()?;
    found.extend(processes()?.iter().map(|pid| format!("process {pid}")));
    if let Ok(entries) = fs::read_dir("/run/vcpufreq") {
        found.extend(
            entries
                .flatten()
                .map(|entry| entry.path().display().to_string()),
        );
    }
    #[cfg(feature = "bpf")]
    found.extend(super::bpf::left());
    Ok(found)
}

/// Processes of the program; one that has ended but isn't reaped is none.
fn processes() -> Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse() else {
            continue;
        };
        let target = fs::read_link(entry.path().join("exe"));
        if target.is_ok_and(|target| target.ends_with("vcpufreq")) {
            found.push(pid);
        }
    }
    Ok(found)
}
