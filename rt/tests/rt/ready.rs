// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise: check succeeds only when nothing is left for a reboot or for people. Features that the
//! kernel or the machine lacks don't matter.

use vcpufreq_rt::{check, is_ready};

use crate::{
    fake::{CGROUP, CPU, FakeKernel},
    partition::planned,
};

/// With nothing set: one guest on CPU 3.
fn ready(host: &FakeKernel, profile: &str) -> bool {
    let (plan, profile) = planned(host, profile);
    is_ready(&plan, &check(host, &plan, &profile))
}

/// Scene, profile, name.
type Row = (&'static str, fn(&FakeKernel), &'static str);

#[test]
fn what_is_left_to_do_counts() {
    let rows: [Row; 8] = [
        (
            "a kernel that isn't PREEMPT_RT",
            |host| host.put("/proc/version", "Linux version 7.2 SMP PREEMPT"),
            "",
        ),
        (
            "a missing option of the kernel's configuration",
            |host| host.put("/boot/config-7.2.12-rt", "CONFIG_CPUSETS=y"),
            "kernel-config = ['CPUSETS', 'NO_HZ_FULL']",
        ),
        (
            "a missing word of the command line",
            |_| {},
            "cmdline = ['nohz_full={rt}']",
        ),
        (
            "a governor that isn't there",
            |_| {},
            "settings.governor = 'conservative'",
        ),
        (
            "a cpuset that can't be cut off",
            |host| host.remove(&format!("{CGROUP}/cpuset.cpus.isolated")),
            "settings.cpuset = 'isolated'",
        ),
        (
            "no cpusets at all",
            |host| host.put(&format!("{CGROUP}/cgroup.controllers"), "cpu memory"),
            "settings.cpuset = 'isolated'",
        ),
        (
            "irqbalance without a ban",
            |host| {
                host.thread(900, "irqbalance", 0, 0);
                host.put("/proc/900/environ", "PATH=/bin\0");
                host.put("/proc/irq/15/effective_affinity", "1");
                host.put("/proc/irq/15/smp_affinity", "7");
                host.put("/proc/irq/default_smp_affinity", "7");
            },
            "settings.interrupts = 'housekeeping'",
        ),
        (
            "swap",
            |host| host.put("/proc/swaps", "Filename\n/dev/sda2 partition 1 0 -2"),
            "",
        ),
    ];
    for (name, scene, profile) in rows {
        let host = FakeKernel::four();
        assert!(ready(&host, ""), "without {name}");
        scene(&host);
        assert!(!ready(&host, profile), "{name}");
    }
}

#[test]
fn what_is_not_here_does_not() {
    let rows: [Row; 3] = [
        (
            "no cpufreq",
            |host| host.remove(&format!("{CPU}/cpufreq")),
            "settings.governor = 'performance'",
        ),
        (
            "no rcuc thread",
            |host| host.remove("/proc/41"),
            "settings.rcuc = 'fifo:4'",
        ),
        (
            "a cpuset that isolcpus makes up for",
            |host| {
                host.remove(&format!("{CGROUP}/cpuset.cpus.isolated"));
                host.put(&format!("{CPU}/isolated"), "3");
            },
            "settings.cpuset = 'isolated'",
        ),
    ];
    for (name, scene, profile) in rows {
        let host = FakeKernel::four();
        scene(&host);
        assert!(ready(&host, profile), "{name}");
    }
}
