// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! To bring a machine's governors down: a CPU that idles keeps the frequency
//! that it had, because a governor decides at scheduler events alone. So each
//! CPU wakes briefly a number of times, which is also what makes utilization
//! that a thread's sleep preserves (util_est) decay.

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use serde::{Deserialize, Serialize};
use vcpufreq_host::{CpuList, HostCpus, HostRoot, PolicyFloor, Reserved, floors};

use crate::work::pin_to;

const CPU: &str = "/sys/devices/system/cpu";

/// Each online CPU wakes `wakes` times, `gap` apart, one after the other.
pub fn wake_all(wakes: u32, gap: Duration) -> Result<()> {
    let online =
        fs::read_to_string(format!("{CPU}/online")).context("reading which CPUs are online")?;
    let cpus: CpuList = online.parse()?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = cpus
            .iter()
            .map(|cpu| {
                scope.spawn(move || {
                    pin_to(&[cpu])?;
                    (0..wakes).for_each(|_| sleep(gap));
                    Ok::<_, anyhow::Error>(())
                })
            })
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?)
    })
}

/// A policy above its minimum.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AboveMinimum {
    /// `policy0`.
    pub policy: String,
    /// What it runs at, in kHz.
    pub khz: u64,
    /// Its minimum.
    pub min_khz: u64,
    /// Of 1024, what a server reserves, and the CPUs' capacity: nothing lower can be had.
    pub server: Option<(u64, u64)>,
}

/// The policies that aren't at their minimum, by name.
pub fn above_minimum() -> Result<Vec<AboveMinimum>> {
    above_in(Path::new("/"))
}

fn above_in(root: &Path) -> Result<Vec<AboveMinimum>> {
    let cpu = root.join(CPU.trim_start_matches('/'));
    let Ok(entries) = fs::read_dir(cpu.join("cpufreq")) else {
        return Ok(Vec::new());
    };
    let mut above = Vec::new();
    for entry in entries {
        let path = entry?.path();
        // A policy without a CPU online tells nothing.
        let [now, min] =
            ["scaling_cur_freq", "scaling_min_freq"].map(|file| number(&path.join(file)));
        let (Some(now), Some(min)) = (now, min) else {
            continue;
        };
        if now > min {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            above.push(AboveMinimum {
                khz: now,
                min_khz: min,
                server: None,
                policy: name.into_owned(),
            });
        }
    }
    if !above.is_empty() {
        // It reads many files, which keep a CPU busy: after the frequencies.
        let host = HostRoot::at(root);
        let floors = floors(&host, &HostCpus::read(&host));
        for one in &mut above {
            one.server = held_by_server(&floors, &one.policy, one.khz);
        }
    }
    above.sort_by(|one, other| one.policy.cmp(&other.policy));
    Ok(above)
}

/// What servers reserve of a policy's CPUs, and their capacity, where the policy is at the frequency
/// that this asks for, or below.
fn held_by_server(floors: &[PolicyFloor], name: &str, now_khz: u64) -> Option<(u64, u64)> {
    let number = name.strip_prefix("policy")?.parse::<u32>().ok()?;
    let of = floors.iter().find(|one| one.policy == number)?;
    let lowest = of.floor.lowest_khz?;
    let held = matches!(of.reserved, Reserved::Known(1..)) && now_khz <= lowest.into();
    held.then_some((of.floor.util.into(), of.floor.capacity.into()))
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    //! A policy above its minimum is found, and whether a server holds it there.

    use super::*;

    /// A policy of the emulated Pixel 6's little CPUs, at a frequency.
    fn host(khz: u32, runtime_ns: Option<u64>) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let policy = "sys/devices/system/cpu/cpufreq/policy4";
        write(&format!("{policy}/scaling_cur_freq"), &khz.to_string());
        write(&format!("{policy}/scaling_min_freq"), "300000");
        write(&format!("{policy}/cpuinfo_max_freq"), "1803000");
        write(&format!("{policy}/related_cpus"), "4 5");
        write("sys/devices/system/cpu/online", "4-5");
        write("sys/devices/system/cpu/cpu5/cpu_capacity", "161");
        let opps = "300000 574000 738000 930000 1803000 ";
        write(&format!("{policy}/scaling_available_frequencies"), opps);
        write("sys/devices/system/cpu/cpu4/cpu_capacity", "161");
        if let Some(ns) = runtime_ns {
            for (cpu, ns) in [(4, 0), (5, ns)] {
                let server = format!("sys/kernel/debug/sched/fair_server/cpu{cpu}");
                write(&format!("{server}/runtime"), &ns.to_string());
                write(&format!("{server}/period"), "1000000000");
            }
        }
        dir
    }

    fn above(khz: u64, server: Option<(u64, u64)>) -> AboveMinimum {
        AboveMinimum {
            policy: "policy4".to_owned(),
            khz,
            min_khz: 300_000,
            server,
        }
    }

    #[test]
    fn an_ext_server_counts_where_sched_ext_runs() {
        for (state, told) in [("disabled", None), ("enabled", Some((51, 161)))] {
            let host = host(574_000, Some(0));
            let server = host.path().join("sys/kernel/debug/sched/ext_server/cpu4");
            let ext = host.path().join("sys/kernel/sched_ext");
            fs::create_dir_all(&server).unwrap();
            fs::create_dir_all(&ext).unwrap();
            fs::write(server.join("runtime"), "50000000").unwrap();
            fs::write(server.join("period"), "1000000000").unwrap();
            fs::write(ext.join("state"), state).unwrap();
            assert_eq!(
                above_in(host.path()).unwrap(),
                [above(574_000, told)],
                "{state}"
            );
        }
    }

    #[test]
    fn what_a_server_holds_is_told_from_what_stays_up() {
        for (khz, runtime_ns, told) in [
            (300_000, Some(50_000_000), vec![]),
            // 51 of 161 is 571 MHz: the OPP above.
            (
                574_000,
                Some(50_000_000),
                vec![above(574_000, Some((51, 161)))],
            ),
            (738_000, Some(50_000_000), vec![above(738_000, None)]),
            (574_000, Some(0), vec![above(574_000, None)]),
            (574_000, None, vec![above(574_000, None)]),
            // More than the CPU has: its highest OPP.
            (
                1_803_000,
                Some(500_000_000),
                vec![above(1_803_000, Some((512, 161)))],
            ),
        ] {
            let host = host(khz, runtime_ns);
            assert_eq!(above_in(host.path()).unwrap(), told, "{khz} {runtime_ns:?}");
        }
    }
}
