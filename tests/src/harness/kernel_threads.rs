// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which threads a pCPU can't be without: those that the kernel has for each CPU.

use std::collections::{BTreeMap, BTreeSet};

use vcpufreq_bench::tracefs::Switch;
use vcpufreq_host::stat_field;

use crate::harness::sysfs;
use crate::harness::vmm::vcpu_name;

/// The names that the kernel gives them, before `/` and the CPU's number. Threads of interrupts
/// (`irq/7-eth0`) and unbound workers (`kworker/u8:1`) are none of them.
const KINDS: [&str; 11] = [
    "swapper",
    "ktimers",
    "kworker",
    "rcuc",
    "irq_work",
    "ksoftirqd",
    "migration",
    "cpuhp",
    "backlog_napi",
    "idle_inject",
    "posixcputmr",
];
/// `PF_KTHREAD` of the flags in proc_pid_stat(5).
const KERNEL_THREAD: u64 = 0x20_0000;

/// The threads that ran on a pCPU.
#[derive(Debug)]
pub struct Company {
    /// How often it was switched to each thread.
    pub counts: BTreeMap<String, u32>,
    /// Threads that are neither the vCPU's nor the pCPU's own.
    pub strangers: BTreeSet<String>,
}

impl Company {
    /// Of the vCPU `vcpu`, as [`vcpu_name`] has it, on the pCPU `cpu` that is its alone.
    pub fn of(vcpu: &str, cpu: u32, switches: &[Switch]) -> Self {
        let (mut counts, mut strangers) = (BTreeMap::new(), BTreeSet::new());
        for switch in switches.iter().filter(|switch| switch.cpu == cpu) {
            let (thread, tid) = &switch.next;
            let name = vcpu_name(thread).unwrap_or(thread.into()).into_owned();
            *counts.entry(name.clone()).or_default() += 1;
            if name != vcpu && !is_own(&name, *tid, cpu) {
                strangers.insert(name);
            }
        }
        Self { counts, strangers }
    }
}

/// Whether a thread that ran is one of `cpu`'s own. A thread that has ended is recognized by its
/// name.
fn is_own(name: &str, tid: i32, cpu: u32) -> bool {
    let stat = sysfs::text(format!("/proc/{tid}/stat"));
    has_name(name, cpu) && (tid == 0 || stat.map_or(true, |stat| is_kernels(&stat)))
}

/// `ktimers/7`, `kworker/7:1`.
fn has_name(name: &str, cpu: u32) -> bool {
    let Some((kind, rest)) = name.split_once('/') else {
        return false;
    };
    let digits = rest.find(|c: char| !c.is_ascii_digit());
    let (number, end) = rest.split_at(digits.unwrap_or(rest.len()));
    // Only workers have more than the CPU's number.
    KINDS.contains(&kind)
        && number.parse() == Ok(cpu)
        && (end.is_empty() || kind == "kworker" && end.starts_with(':'))
}

/// By field 9 of a thread's stat.
pub fn is_kernels(stat: &str) -> bool {
    let flags = stat_field(stat, 9).and_then(|flags| flags.parse::<u64>().ok());
    flags.is_some_and(|flags| flags & KERNEL_THREAD != 0)
}

#[cfg(test)]
mod tests {
    //! Promise: no other thread passes for one of the CPU's own.
    use super::*;

    #[test]
    fn names() {
        for name in [
            "swapper/7",
            "ktimers/7",
            "kworker/7:1",
            "kworker/7:1H",
            "migration/7",
        ] {
            assert!(has_name(name, 7), "{name}");
        }
        for name in [
            "irq/7-eth0",
            "kworker/u7:1",
            "kworker/70:1",
            "ktimers/6",
            "ktimers/7-x",
            "vcpu/7",
            "rcuop/7",
            "7",
        ] {
            assert!(!has_name(name, 7), "{name}");
        }
    }

    #[test]
    fn threads_of_programs_are_none() {
        let stat = |flags: u64| format!("40 (ktimers/7) x) S 2 0 0 0 -1 {flags} 0 0");
        assert!(is_kernels(&stat(69_238_848)));
        assert!(!is_kernels(&stat(4_194_304)));
    }
}
