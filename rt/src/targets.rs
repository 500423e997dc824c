// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Everything that the settings may change. A record that names anything else isn't carried out,
//! and neither is a plan that does: restore would refuse its record.

use vcpufreq_host::undo::JournalScope;

/// What a record may name. A file of a folder that is made goes with the folder, so no record has
/// one.
pub(crate) const SCOPE: JournalScope = JournalScope {
    files: FILES,
    inside: &[],
    shown_in: SHOWN_IN,
    dirs: DIRS,
    threads: THREADS,
};

/// Files.
const FILES: &[&str] = &[
    "/proc/irq/default_smp_affinity",
    "/proc/irq/*/smp_affinity",
    "/proc/sys/kernel/nmi_watchdog",
    "/proc/sys/kernel/numa_balancing",
    "/proc/sys/kernel/sched_rt_runtime_us",
    "/proc/sys/kernel/sched_util_clamp_max",
    "/proc/sys/kernel/sched_util_clamp_min",
    "/proc/sys/kernel/sched_util_clamp_min_rt_default",
    "/proc/sys/kernel/timer_migration",
    "/proc/sys/kernel/watchdog_cpumask",
    "/proc/sys/vm/compaction_proactiveness",
    "/proc/sys/vm/min_free_kbytes",
    "/proc/sys/vm/stat_interval",
    "/proc/sys/vm/swappiness",
    "/proc/sys/vm/watermark_boost_factor",
    "/proc/sys/vm/watermark_scale_factor",
    "/sys/devices/system/cpu/cpu*/cpuidle/state*/disable",
    "/sys/devices/system/cpu/cpu*/power/pm_qos_resume_latency_us",
    "/sys/devices/system/cpu/cpufreq/policy*/scaling_governor",
    "/sys/devices/system/cpu/cpufreq/policy*/scaling_max_freq",
    "/sys/devices/system/cpu/cpufreq/policy*/scaling_min_freq",
    "/sys/devices/system/cpu/cpufreq/policy*/scaling_setspeed",
    // A governor's tunables: all policies', or each policy's own.
    "/sys/devices/system/cpu/cpufreq/*/*",
    "/sys/devices/system/cpu/cpufreq/policy*/*/*",
    "/sys/devices/virtual/workqueue/cpumask",
    "/sys/devices/virtual/workqueue/*/cpumask",
    "/sys/fs/cgroup/cgroup.subtree_control",
    "/sys/kernel/debug/sched/ext_server/cpu*/runtime",
    "/sys/kernel/debug/sched/fair_server/cpu*/runtime",
    "/sys/kernel/mm/ksm/run",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/kernel/rcu_expedited",
    "/sys/kernel/tracing/tracing_on",
    "/sys/module/kvm/parameters/halt_poll_ns",
];
/// Files that show what was written to another one.
const SHOWN_IN: &[&str] = &["/sys/devices/virtual/workqueue/cpumask_requested"];
/// Folders that are made.
const DIRS: &[&str] = &[
    "/sys/fs/cgroup/vcpufreq-rt.*",
    "/sys/fs/cgroup/vcpufreq-rt.*/rest",
    "/sys/fs/cgroup/vcpufreq-rt.*/rt",
];
/// Kernel threads.
const THREADS: &[&str] = &["ktimers/*", "rcub/*", "rcuc/*", "ksoftirqd/*"];

#[cfg(test)]
mod tests {
    //! Promise: no path leads out of what the settings change.
    use vcpufreq_host::undo::{Format, Target};

    use super::*;

    fn file(path: &str, shown_in: Option<&str>) -> Target {
        Target::File {
            path: path.to_owned(),
            format: Format::Text,
            shown_in: shown_in.map(str::to_owned),
        }
    }

    #[test]
    fn files() {
        for path in [
            "/proc/irq/17/smp_affinity",
            "/proc/sys/vm/swappiness",
            "/sys/devices/system/cpu/cpu12/cpuidle/state3/disable",
            "/sys/devices/system/cpu/cpufreq/policy0/schedutil/rate_limit_us",
            "/sys/devices/system/cpu/cpufreq/ondemand/up_threshold",
            "/sys/devices/virtual/workqueue/scsi_tmf_0/cpumask",
        ] {
            assert!(SCOPE.has(&file(path, None)), "{path}");
        }
        for path in [
            "/etc/shadow",
            "/proc/sys/kernel/core_pattern",
            "/proc/sys/kernel/modprobe",
            "/proc/irq/../smp_affinity",
            "/proc/irq//smp_affinity",
            "/proc/irq/17/../../../etc/smp_affinity",
            "/sys/devices/system/cpu/cpufreq/../../../../../etc/shadow",
            "/sys/devices/system/cpu/cpufreq/policy0/../..",
            "/sys/devices/system/cpu/cpu/power/pm_qos_resume_latency_us",
            "proc/sys/vm/swappiness",
            "/proc/sys/vm/swappiness/",
            "",
        ] {
            assert!(!SCOPE.has(&file(path, None)), "{path}");
        }
        let shown = |path| file("/sys/devices/virtual/workqueue/cpumask", Some(path));
        assert!(SCOPE.has(&shown(SHOWN_IN[0])) && !SCOPE.has(&shown("/etc/shadow")));
    }

    #[test]
    fn folders_and_threads() {
        let dir = |path: &str| SCOPE.has(&Target::Dir { path: path.into() });
        assert!(dir("/sys/fs/cgroup/vcpufreq-rt.plc/rt"));
        for path in [
            "/etc",
            "/sys/fs/cgroup/system.slice",
            "/sys/fs/cgroup/vcpufreq-rt./rt",
        ] {
            assert!(!dir(path), "{path}");
        }
        let thread = |name: &str| {
            let (pid, start_ticks, name) = (7, 0, name.to_owned());
            SCOPE.has(&Target::Thread {
                pid,
                name,
                start_ticks,
            })
        };
        assert!(thread("rcuc/3") && !thread("sshd") && !thread("rcuc/"));
        let (path, format, or_at) = ("/proc/sys/vm/swappiness".into(), Format::Text, None);
        assert!(!SCOPE.has(&Target::Inside {
            path,
            format,
            or_at
        }));
    }
}
