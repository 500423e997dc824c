// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The first use of uclamp on a host, and whether the kernel's count is right.
//!
//! The first use flips a static key (`sched_uclamp_enable`). It patches `enqueue_task`, which
//! counts a task in, before `dequeue_task`, which counts it out. A task that is queued and leaves
//! between the two stays counted: on that CPU nothing below its clamp takes effect any more, until
//! the next boot.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use crate::harness::fair_server::SwitchedOff;
use crate::harness::load::Load;
use crate::harness::policy::Policy;
use crate::harness::wait::{SOON, settled};
use crate::harness::{sys, sysfs};

/// Writing another value than it has is a use of uclamp.
pub const RT_DEFAULT: &str = "/proc/sys/kernel/sched_util_clamp_min_rt_default";
const GROUP: &str = "/sys/fs/cgroup/probe";
/// Above everything that could sleep meanwhile.
const TOP_PRIORITY: i32 = 99;

/// Uses uclamp for the first time (a second time does no harm), while no task can leave a CPU: no other
/// CPU is online, and this thread is above all tasks. Then leaves the clamp
/// that real-time tasks have by default at `rt_default`; at what it is with
/// `None`. Without uclamp in the kernel there is nothing to do.
pub fn first_use(rt_default: Option<u32>) -> Result<()> {
    if !Path::new(RT_DEFAULT).exists() {
        return Ok(());
    }
    let before: u32 = sysfs::number(RT_DEFAULT)?;
    let others = others_online()?;
    for file in &others {
        sysfs::write(file, 0)?;
    }
    let used = std::thread::spawn(move || {
        sys::set_fifo_priority(TOP_PRIORITY)?;
        // Only another value than before is a use.
        sysfs::write(RT_DEFAULT, before.saturating_sub(1))?;
        sysfs::write(RT_DEFAULT, rt_default.unwrap_or(before))
    });
    let used = used.join();
    for file in &others {
        sysfs::write(file, 1)?;
    }
    used.map_err(|_| anyhow!("a thread panicked"))?
}

/// The switches of all CPUs but the first that are online.
fn others_online() -> Result<Vec<String>> {
    let mut switches = Vec::new();
    for entry in fs::read_dir("/sys/devices/system/cpu")? {
        let switch = entry?.path().join("online");
        // The first CPU can't be switched off on some machines.
        let first = switch.to_string_lossy().contains("/cpu0/");
        if switch.exists() && !first && sysfs::text(&switch)? == "1" {
            switches.push(switch.display().to_string());
        }
    }
    switches.sort();
    Ok(switches)
}

/// The CPUs on which a ceiling of 0 doesn't bring a busy task's policy to its
/// minimum.
///
/// The scheduler's servers are off meanwhile: what they reserve holds a small CPU above its
/// minimum, as a clamp without effect does.
pub fn cpus_that_disobey() -> Result<Vec<u32>> {
    if !Path::new(RT_DEFAULT).exists() {
        return Ok(Vec::new());
    }
    let servers = SwitchedOff::all()?;
    let wrong = try_all_cpus();
    servers.restore()?;
    wrong
}

fn try_all_cpus() -> Result<Vec<u32>> {
    let mut wrong = Vec::new();
    for policy in Policy::all()? {
        for &cpu in &policy.cpus {
            if lowest_khz(&policy, cpu)? != policy.min() {
                wrong.push(cpu);
            }
        }
    }
    Ok(wrong)
}

/// The lowest frequency that a busy task under a ceiling of 0 brings a CPU's policy to.
pub fn lowest_khz(policy: &Policy, cpu: u32) -> Result<u32> {
    sysfs::write("/sys/fs/cgroup/cgroup.subtree_control", "+cpu")?;
    fs::create_dir(GROUP)?;
    sysfs::write(format!("{GROUP}/cgroup.type"), "threaded")?;
    sysfs::write(format!("{GROUP}/cpu.uclamp.max"), 0)?;
    let busy = Load::busy_in(cpu, &format!("{GROUP}/cgroup.threads"));
    let mut lowest = u32::MAX;
    // Another task on a CPU of the policy lifts it for as long as it runs, this
    // one too, and until its utilization has decayed.
    for _ in 0..500 {
        std::thread::sleep(Duration::from_millis(4));
        lowest = lowest.min(policy.khz()?);
        if lowest == policy.min() {
            break;
        }
    }
    busy.stop()?;
    remove_group()?;
    Ok(lowest)
}

/// A thread that has ended leaves its cgroup a moment later.
fn remove_group() -> Result<()> {
    settled(SOON, || Ok(fs::remove_dir(GROUP)), Result::is_ok)?.context(GROUP)
}
