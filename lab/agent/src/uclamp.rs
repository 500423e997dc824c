// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The first use of uclamp on a host, and whether the kernel's count is right.
//!
//! The first use flips a static key (`sched_uclamp_enable`), which patches the
//! code that counts a task in, in `enqueue_task`, before the code that counts
//! it out, in `dequeue_task`. A task that is queued and leaves between the two
//! stays counted: on that CPU nothing below its clamp takes effect any more,
//! until the next boot.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use crate::load::{self, Load};
use crate::scenarios::Policy;
use crate::{sys, sysfs};

/// Writing another value than it has is a use of uclamp.
const RT_DEFAULT: &str = "/proc/sys/kernel/sched_util_clamp_min_rt_default";
const GROUP: &str = "/sys/fs/cgroup/probe";
/// Above everything that could sleep meanwhile.
const TOP_PRIORITY: i32 = 99;

/// Makes the first use of uclamp on this host, and says on which CPUs the
/// kernel lost count by it. Each `boot` does it at another moment.
pub fn first_use(boot: u64) -> Result<Vec<u32>> {
    if !Path::new(RT_DEFAULT).exists() {
        // A kernel without uclamp.
        return Ok(Vec::new());
    }
    std::thread::sleep(Duration::from_micros(3_700 * boot));
    first_use_undisturbed()?;
    cpus_that_disobey()
}

/// Makes the first use of uclamp while no task can leave a CPU: all others
/// spin above all tasks.
fn first_use_undisturbed() -> Result<()> {
    let cpus = online()?;
    let (own, others) = cpus.split_first().context("no CPU online")?;
    let (stop, spinning) = (&AtomicBool::new(false), &AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let spin = |cpu: u32| {
            let ready = above_all(cpu);
            spinning.fetch_add(1, Ordering::SeqCst);
            while ready.is_ok() && !stop.load(Ordering::SeqCst) {
                std::hint::spin_loop();
            }
            ready
        };
        let use_it = || {
            above_all(*own)?;
            while spinning.load(Ordering::SeqCst) < others.len() {
                std::thread::sleep(Duration::from_micros(100));
            }
            use_uclamp()
        };
        let spinners: Vec<_> = others
            .iter()
            .map(|&cpu| scope.spawn(move || spin(cpu)))
            .collect();
        let used = scope.spawn(use_it).join();
        stop.store(true, Ordering::SeqCst);
        let spun = spinners.into_iter().map(|thread| thread.join());
        for result in spun.chain([used]) {
            result.map_err(|_| anyhow!("a thread panicked"))??;
        }
        Ok(())
    })
}

fn above_all(cpu: u32) -> Result<()> {
    load::pin(cpu)?;
    sys::set_fifo_priority(TOP_PRIORITY)
}

/// Uses uclamp, and leaves all settings as they were.
fn use_uclamp() -> Result<()> {
    let before: u32 = sysfs::number(RT_DEFAULT)?;
    let other = if before == 0 { 1 } else { before - 1 };
    sysfs::write(RT_DEFAULT, other)?;
    sysfs::write(RT_DEFAULT, before)
}

/// The CPUs on which a ceiling of 0 doesn't bring a busy task's policy to its
/// minimum.
pub fn cpus_that_disobey() -> Result<Vec<u32>> {
    sysfs::write("/sys/fs/cgroup/cgroup.subtree_control", "+cpu")?;
    std::fs::create_dir(GROUP)?;
    sysfs::write(format!("{GROUP}/cgroup.type"), "threaded")?;
    sysfs::write(format!("{GROUP}/cpu.uclamp.max"), 0)?;
    let mut wrong = Vec::new();
    for policy in Policy::all()? {
        for &cpu in &policy.cpus {
            let busy = Load::busy_in(cpu, &format!("{GROUP}/cgroup.threads"));
            // Another task on a CPU of the policy lifts it for as long as it
            // runs, this one too, and until its utilization has decayed.
            let mut obeys = false;
            for _ in 0..250 {
                std::thread::sleep(Duration::from_millis(4));
                obeys |= policy.khz()? == policy.min();
                if obeys {
                    break;
                }
            }
            if !obeys {
                wrong.push(cpu);
            }
            busy.stop()?;
        }
    }
    std::fs::remove_dir(GROUP)?;
    Ok(wrong)
}

fn online() -> Result<Vec<u32>> {
    let policies = Policy::all()?;
    Ok(policies
        .into_iter()
        .flat_map(|policy| policy.cpus)
        .collect())
}
