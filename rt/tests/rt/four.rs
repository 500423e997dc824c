// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A host with everything that the settings know, for [`FakeKernel`].

use crate::fake::{CGROUP, CPU, FakeKernel, WORKQUEUE};

impl FakeKernel {
    /// Four CPUs: policies 0-1 and 2-3, everything that the settings know.
    pub fn four() -> Self {
        let host = Self::empty();
        for (path, text) in [
            ("/proc/sys/kernel/random/boot_id", "boot-1"),
            ("/proc/sys/kernel/osrelease", "7.2.12-rt"),
            ("/proc/version", "Linux version 7.2.12 #1 SMP PREEMPT_RT"),
            ("/proc/cmdline", "console=ttyAMA0 irqaffinity=0-3"),
            ("/proc/1/comm", "systemd"),
            ("/proc/swaps", "Filename Type Size Used Priority"),
            ("/proc/sys/kernel/timer_migration", "1"),
            ("/proc/sys/kernel/sched_rt_runtime_us", "950000"),
            ("/proc/sys/kernel/sched_util_clamp_min", "1024"),
            ("/proc/sys/kernel/sched_util_clamp_max", "1024"),
            ("/proc/sys/kernel/sched_util_clamp_min_rt_default", "1024"),
            ("/proc/sys/kernel/watchdog_cpumask", "0-3"),
            ("/proc/sys/kernel/nmi_watchdog", "1"),
            ("/proc/sys/kernel/numa_balancing", "1"),
            ("/proc/sys/vm/swappiness", "60"),
            ("/proc/sys/vm/compaction_proactiveness", "20"),
            ("/proc/sys/vm/min_free_kbytes", "67584"),
            ("/proc/sys/vm/watermark_scale_factor", "10"),
            ("/proc/sys/vm/watermark_boost_factor", "15000"),
            ("/proc/sys/vm/stat_interval", "1"),
            ("/sys/kernel/tracing/tracing_on", "1"),
            ("/sys/kernel/tracing/current_tracer", "nop"),
            ("/sys/kernel/rcu_expedited", "0"),
            ("/sys/kernel/rcu_normal", "0"),
            ("/sys/kernel/mm/ksm/run", "1"),
            ("/sys/kernel/mm/ksm/pages_shared", "0"),
            (
                "/sys/kernel/mm/transparent_hugepage/enabled",
                "[always] madvise never",
            ),
            ("/sys/module/kvm/parameters/halt_poll_ns", "500000"),
            ("/proc/irq/default_smp_affinity", "f"),
        ] {
            host.put(path, text);
        }
        host.cpus();
        host.kernel_work();
        host.cgroups();
        host
    }

    fn cpus(&self) {
        for name in ["online", "present"] {
            self.put(&format!("{CPU}/{name}"), "0-3");
        }
        self.put(&format!("{CPU}/cpuidle/current_governor"), "menu");
        for cpu in 0..4 {
            for state in 0..3 {
                let dir = format!("{CPU}/cpu{cpu}/cpuidle/state{state}");
                self.put(&format!("{dir}/disable"), "0");
            }
            let power = format!("{CPU}/cpu{cpu}/power/pm_qos_resume_latency_us");
            self.put(&power, "0");
            for server in ["fair_server", "ext_server"] {
                let runtime = format!("/sys/kernel/debug/sched/{server}/cpu{cpu}/runtime");
                self.put(&runtime, "50000000");
            }
            for (n, name) in ["ktimers", "rcuc", "ksoftirqd"].into_iter().enumerate() {
                let (policy, priority) = if name == "ksoftirqd" { (0, 0) } else { (1, 1) };
                let pid = 10 + cpu * 10 + n;
                self.thread(pid, &format!("{name}/{cpu}"), policy, priority);
            }
        }
        // Their numbers are no CPUs'.
        for (pid, name) in [(90, "rcub/0"), (91, "rcub/1")] {
            self.thread(pid, name, 1, 1);
        }
        for (policy, cpus, max) in [(0, "0 1", 1_800_000), (2, "2 3", 2_800_000)] {
            let dir = format!("{CPU}/cpufreq/policy{policy}");
            for (name, text) in [
                ("affected_cpus", cpus.to_owned()),
                ("scaling_governor", "schedutil".to_owned()),
                (
                    "scaling_available_governors",
                    "performance userspace schedutil".to_owned(),
                ),
                ("cpuinfo_min_freq", "600000".to_owned()),
                ("cpuinfo_max_freq", max.to_string()),
                ("scaling_min_freq", "600000".to_owned()),
                ("scaling_max_freq", max.to_string()),
                ("scaling_cur_freq", "600000".to_owned()),
                ("scaling_setspeed", "<unsupported>".to_owned()),
                ("schedutil/rate_limit_us", "2000".to_owned()),
            ] {
                self.put(&format!("{dir}/{name}"), &text);
            }
        }
    }

    fn kernel_work(&self) {
        for (name, mask) in [("cpumask", "f"), ("cpumask_requested", "f")] {
            self.put(&format!("{WORKQUEUE}/{name}"), mask);
        }
        for name in ["writeback", "scsi_tmf_0"] {
            self.put(&format!("{WORKQUEUE}/{name}/cpumask"), "f");
        }
        // 1 is per CPU, 15 goes anywhere, 16 was put on CPU 1.
        for (irq, mask, mode) in [(1, "f", 0o444), (15, "f", 0o644), (16, "2", 0o644)] {
            let path = format!("/proc/irq/{irq}/smp_affinity");
            self.put(&path, mask);
            self.mode(&path, mode);
            let arrives = if irq == 16 { "2" } else { "8" };
            self.put(&format!("/proc/irq/{irq}/effective_affinity"), arrives);
        }
    }

    fn cgroups(&self) {
        self.put(&format!("{CGROUP}/cgroup.controllers"), "cpuset cpu memory");
        self.put(&format!("{CGROUP}/cgroup.subtree_control"), "memory");
        self.put(&format!("{CGROUP}/cpuset.cpus.isolated"), "");
    }
}
