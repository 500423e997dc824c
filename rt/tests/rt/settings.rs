// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise of each setting: which files it changes to what on this host, what it says where the
//! host lacks them or hides them, and when it counts as effective.

use vcpufreq_rt::{Effect, Finding, Look, Partition, Plan, Profile, check, plan};

use crate::{
    fake::{CGROUP, CPU, FakeKernel},
    partition::guest,
};

struct Case<'a> {
    host: &'a FakeKernel,
    profile: Profile,
    partition: Partition,
}

/// One guest on CPU 3, and these settings.
fn case<'a>(host: &'a FakeKernel, settings: &str) -> Case<'a> {
    let profile = Profile::parse("test", &format!("[settings]\n{settings}")).unwrap();
    let partition = Partition::new(host, vec![guest("plc", "3")], None, None).unwrap();
    Case {
        host,
        profile,
        partition,
    }
}

impl Case<'_> {
    fn plan(&self) -> Plan {
        plan(self.host, &self.partition, &self.profile)
    }

    /// `NAME now → want` of each change.
    fn changes(&self) -> Vec<String> {
        let plan = self.plan();
        let lines = plan.changes().map(|(_, change)| {
            let now = change.now.as_deref().unwrap_or("-");
            let want = change.want.as_deref().unwrap_or("kept");
            format!("{} {now} → {want}", change.target.name())
        });
        lines.collect()
    }

    /// Puts the plan into force, then asks whether `name` is effective.
    fn effect(&self, name: &str) -> Effect {
        let checked = check(self.host, &self.plan(), &self.profile);
        let one = checked.into_iter().find(|one| one.name == name);
        let one = one.unwrap_or_else(|| panic!("no {name}"));
        assert!(one.unset.is_empty(), "{one:?}");
        one.effect
    }
}

fn is_not(effect: &Effect, said: &str) -> bool {
    matches!(effect, Effect::Not(why) if why.contains(said))
}

#[test]
fn plain_switches() {
    let host = FakeKernel::four();
    for (setting, line) in [
        (
            "timer-migration = 0",
            "/proc/sys/kernel/timer_migration 1 → 0",
        ),
        (
            "rt-runtime-us = -1",
            "/proc/sys/kernel/sched_rt_runtime_us 950000 → -1",
        ),
        (
            "util-clamp-min = 512",
            "/proc/sys/kernel/sched_util_clamp_min 1024 → 512",
        ),
        (
            "util-clamp-max = 512",
            "/proc/sys/kernel/sched_util_clamp_max 1024 → 512",
        ),
        (
            "util-clamp-min-rt-default = 128",
            "/proc/sys/kernel/sched_util_clamp_min_rt_default 1024 → 128",
        ),
        (
            "watchdog = 'housekeeping'",
            "/proc/sys/kernel/watchdog_cpumask 0-3 → 0-2",
        ),
        ("nmi-watchdog = 0", "/proc/sys/kernel/nmi_watchdog 1 → 0"),
        ("tracing = 0", "/sys/kernel/tracing/tracing_on 1 → 0"),
        ("ksm = 0", "/sys/kernel/mm/ksm/run 1 → 0"),
        (
            "transparent-hugepages = 'madvise'",
            "/sys/kernel/mm/transparent_hugepage/enabled always → madvise",
        ),
        ("swappiness = 10", "/proc/sys/vm/swappiness 60 → 10"),
        (
            "compaction-proactiveness = 0",
            "/proc/sys/vm/compaction_proactiveness 20 → 0",
        ),
        (
            "numa-balancing = 0",
            "/proc/sys/kernel/numa_balancing 1 → 0",
        ),
        ("rcu-expedited = 1", "/sys/kernel/rcu_expedited 0 → 1"),
        (
            "halt-poll-ns = 0",
            "/sys/module/kvm/parameters/halt_poll_ns 500000 → 0",
        ),
        (
            "schedutil-rate-limit-us = 1000",
            "/sys/devices/system/cpu/cpufreq/policy2/schedutil/rate_limit_us 2000 → 1000",
        ),
        (
            "resume-latency-us = '20'",
            "/sys/devices/system/cpu/cpu3/power/pm_qos_resume_latency_us 0 → 20",
        ),
        (
            "min-freq = 'max'",
            "/sys/devices/system/cpu/cpufreq/policy2/scaling_min_freq 600000 → 2800000",
        ),
        (
            "max-freq = 1000000",
            "/sys/devices/system/cpu/cpufreq/policy2/scaling_max_freq 2800000 → 1000000",
        ),
    ] {
        assert_eq!(case(&host, setting).changes(), [line]);
    }
}

#[test]
fn the_fair_server_keeps_real_time_tasks_from_the_whole_cpu() {
    let host = FakeKernel::four();
    let both = case(&host, "rt-runtime-us = -1\nfair-server-runtime-ns = 0");
    assert_eq!(
        both.changes()[1..],
        [
            "/sys/kernel/debug/sched/fair_server/cpu3/runtime 50000000 → 0",
            "/sys/kernel/debug/sched/ext_server/cpu3/runtime 50000000 → 0",
        ]
    );
    host.put("/proc/sys/kernel/sched_rt_runtime_us", "-1");
    let alone = case(&host, "rt-runtime-us = -1");
    assert!(is_not(&alone.effect("rt-runtime-us"), "fair_server/cpu3"));
    host.remove("/sys/kernel/debug/sched/fair_server");
    host.remove("/sys/kernel/debug/sched/ext_server");
    assert_eq!(alone.effect("rt-runtime-us"), Effect::Effective);
    host.remove("/sys/kernel/debug/sched");
    assert!(matches!(alone.effect("rt-runtime-us"), Effect::Unseen(_)));
    assert!(
        both.plan().unseen[0].why.contains("mount"),
        "an empty debugfs isn't mounted"
    );
}

#[test]
fn workqueues_leave_the_real_time_cpus() {
    let host = FakeKernel::four();
    let case = case(&host, "workqueues = 'housekeeping'");
    let dir = "/sys/devices/virtual/workqueue";
    assert_eq!(
        case.changes(),
        [
            format!("{dir}/cpumask f → 7"),
            format!("{dir}/scsi_tmf_0/cpumask f → 7"),
            format!("{dir}/writeback/cpumask f → 7"),
        ]
    );
    for name in [
        "cpumask_requested",
        "scsi_tmf_0/cpumask",
        "writeback/cpumask",
    ] {
        host.put(&format!("{dir}/{name}"), "7");
    }
    assert!(
        is_not(&case.effect("workqueues"), "CPU 3"),
        "the common mask counts"
    );
    host.put(&format!("{dir}/cpumask"), "7");
    assert_eq!(case.effect("workqueues"), Effect::Effective);
}

#[test]
fn interrupts_that_can_be_moved_are() {
    let host = FakeKernel::four();
    let case = case(&host, "interrupts = 'housekeeping'");
    assert_eq!(
        case.changes(),
        [
            "/proc/irq/default_smp_affinity f → 7",
            "/proc/irq/15/smp_affinity f → 7",
            "/proc/irq/16/smp_affinity 2 → 2",
        ]
    );
    host.put("/proc/irq/default_smp_affinity", "7");
    host.put("/proc/irq/15/smp_affinity", "7");
    assert!(is_not(
        &case.effect("interrupts"),
        "interrupt 15 still goes to CPU 3"
    ));
    host.put("/proc/irq/15/effective_affinity", "1");
    assert_eq!(case.effect("interrupts"), Effect::Effective);
}

#[test]
fn irqbalance_has_to_be_told() {
    let host = FakeKernel::four();
    host.put("/proc/900/comm", "irqbalance");
    let said = |finding: &Finding| matches!(finding, Finding::Hand(text) if text.contains("IRQBALANCE_BANNED_CPULIST=3"));
    let has_to = |environ: &str| {
        host.put("/proc/900/environ", environ);
        let plan = case(&host, "interrupts = 'housekeeping'").plan();
        plan.findings.iter().any(said)
    };
    assert!(has_to("PATH=/bin\0"));
    assert!(has_to("PATH=/bin\0IRQBALANCE_BANNED_CPULIST=2\0"));
    assert!(!has_to("PATH=/bin\0IRQBALANCE_BANNED_CPULIST=2-3\0"));
    assert!(!has_to("IRQBALANCE_BANNED_CPUS=8\0"));
    host.put(&format!("{CPU}/isolated"), "3");
    assert!(!has_to("PATH=/bin\0"), "isolcpus is heeded");
    assert!(
        has_to("IRQBALANCE_BANNED_CPULIST=2\0"),
        "what it is told wins"
    );
}

#[test]
fn a_governor_takes_its_tunables_along() {
    let host = FakeKernel::four();
    let case = case(&host, "governor = 'performance'");
    let dir = format!("{CPU}/cpufreq/policy2");
    assert_eq!(
        case.changes(),
        [
            format!("{dir}/schedutil/rate_limit_us 2000 → kept"),
            format!("{dir}/scaling_governor schedutil → performance"),
        ]
    );
    host.put(&format!("{dir}/scaling_governor"), "performance");
    assert!(is_not(&case.effect("governor"), "600000 of 2800000"));
    host.put(&format!("{dir}/scaling_cur_freq"), "2800000");
    assert_eq!(case.effect("governor"), Effect::Effective);
}

/// Driver, governor, the policy's other files; what is said against it, if anything is.
type Governed = (
    &'static str,
    &'static str,
    &'static [(&'static str, &'static str)],
    Option<&'static str>,
);

const HWP: &str = "energy_performance_preference";

const GOVERNED: &[Governed] = &[
    (
        "scmi",
        "performance",
        &[("scaling_cur_freq", "2800000")],
        None,
    ),
    // Measured, on x86.
    (
        "acpi-cpufreq",
        "performance",
        &[("scaling_cur_freq", "2799124")],
        None,
    ),
    (
        "acpi-cpufreq",
        "performance",
        &[("scaling_cur_freq", "3400000")],
        None,
    ),
    (
        "amd-pstate",
        "performance",
        &[("scaling_cur_freq", "1400000")],
        Some("1400000 of 2800000"),
    ),
    (
        "scmi",
        "performance",
        &[("scaling_cur_freq", "<unknown>")],
        Some("doesn't tell"),
    ),
    // Asleep, it shows what was last.
    (
        "intel_pstate",
        "performance",
        &[(HWP, "performance"), ("scaling_cur_freq", "800000")],
        None,
    ),
    (
        "amd-pstate-epp",
        "performance",
        &[(HWP, "balance_power")],
        Some("'balance_power'"),
    ),
    // Without hardware-managed states, as in a Xeon E5 v3.
    (
        "intel_pstate",
        "performance",
        &[("scaling_cur_freq", "1200000")],
        None,
    ),
    ("scmi", "powersave", &[("scaling_cur_freq", "600000")], None),
    (
        "scmi",
        "powersave",
        &[("scaling_cur_freq", "1000000")],
        Some("1000000"),
    ),
    ("intel_pstate", "powersave", &[], Some("follows the load")),
    (
        "scmi",
        "userspace",
        &[
            ("scaling_setspeed", "1000000"),
            ("scaling_cur_freq", "1000000"),
        ],
        None,
    ),
    (
        "scmi",
        "userspace",
        &[
            ("scaling_setspeed", "1000000"),
            ("scaling_cur_freq", "2000000"),
        ],
        Some("2000000"),
    ),
    ("scmi", "schedutil", &[], None),
    ("scmi", "conservative", &[], Some("follows the load")),
    ("scmi", "ondemand", &[], Some("follows the load")),
];

#[test]
fn each_governor_is_looked_at() {
    for (driver, governor, files, said) in GOVERNED.iter().copied() {
        let host = FakeKernel::four();
        let dir = format!("{CPU}/cpufreq/policy2");
        host.put(&format!("{dir}/scaling_driver"), driver);
        host.put(&format!("{dir}/scaling_governor"), governor);
        for (name, text) in files {
            host.put(&format!("{dir}/{name}"), text);
        }
        let effect = case(&host, &format!("governor = '{governor}'")).effect("governor");
        let why = match &effect {
            Effect::Effective => "",
            Effect::Not(why) | Effect::Unseen(why) => why,
        };
        assert_eq!(why.is_empty(), said.is_none(), "{driver} {governor}: {why}");
        assert!(
            why.contains(said.unwrap_or_default()),
            "{driver} {governor}: {why}"
        );
    }
}

#[test]
fn schedutil_without_uclamp_heeds_nobody() {
    let host = FakeKernel::four();
    let case = case(&host, "governor = 'schedutil'");
    assert_eq!(case.effect("governor"), Effect::Effective);
    host.remove("/proc/sys/kernel/sched_util_clamp_min");
    assert!(is_not(&case.effect("governor"), "CONFIG_UCLAMP_TASK"));
}

#[test]
fn a_policy_that_cannot_have_the_governor_is_a_finding_only() {
    let host = FakeKernel::four();
    let dir = |policy: u32| format!("{CPU}/cpufreq/policy{policy}");
    for name in ["scaling_governor", "scaling_available_governors"] {
        host.put(&format!("{}/{name}", dir(0)), "ondemand");
    }
    host.put(&format!("{}/scaling_governor", dir(2)), "performance");
    host.put(&format!("{}/scaling_cur_freq", dir(2)), "2800000");
    let both = Case {
        partition: Partition::new(&host, vec![guest("plc", "1,3")], None, None).unwrap(),
        ..case(&host, "governor = 'performance'")
    };
    assert_eq!(both.effect("governor"), Effect::Effective);
    let of_0 =
        |finding: &Finding| matches!(finding, Finding::Hand(text) if text.contains("policy0"));
    assert!(both.plan().findings.iter().any(of_0));
}

#[test]
fn a_governor_that_is_not_there_is_said() {
    let host = FakeKernel::four();
    let plan = case(&host, "governor = 'conservative'").plan();
    assert_eq!(plan.changes().count(), 0);
    let said = |finding: &Finding| matches!(finding, Finding::Hand(text) if text.contains("cpufreq_conservative"));
    assert!(plan.findings.iter().any(said));
}

#[test]
fn turbo_by_either_switch() {
    let host = FakeKernel::four();
    let case = case(&host, "turbo = false");
    assert_eq!(case.plan().absent.len(), 1);
    host.put(&format!("{CPU}/cpufreq/boost"), "1");
    let dir = format!("{CPU}/cpufreq");
    assert_eq!(
        case.changes(),
        [
            format!("{dir}/policy0/scaling_max_freq 1800000 → kept"),
            format!("{dir}/policy2/scaling_max_freq 2800000 → kept"),
            format!("{dir}/boost 1 → 0"),
        ]
    );
    host.put(&format!("{CPU}/intel_pstate/no_turbo"), "0");
    assert_eq!(
        case.changes(),
        [format!("{CPU}/intel_pstate/no_turbo 0 → 1")]
    );
}

#[test]
fn idle_states() {
    let host = FakeKernel::four();
    let states = |settings: &str| case(&host, settings).changes().len();
    assert_eq!(states("idle-states-off = 'all'"), 3);
    assert_eq!(states("idle-states-off = 'deep'"), 2);
    assert_eq!(states("idle-states-off = [2]\nidle-cpus = 'all'"), 4);
    host.put(&format!("{CPU}/cpu3/power/pm_qos_resume_latency_us"), "20");
    let case = case(&host, "resume-latency-us = '20'");
    assert_eq!(case.effect("resume-latency-us"), Effect::Effective);
    host.put(&format!("{CPU}/cpuidle/current_governor"), "haltpoll");
    assert!(is_not(&case.effect("resume-latency-us"), "haltpoll"));
    host.remove(&format!("{CPU}/cpu3/cpuidle"));
    assert!(is_not(
        &case.effect("resume-latency-us"),
        "nobody who heeds"
    ));
}

#[test]
fn a_cpuset_is_effective_when_the_kernel_says_so() {
    let host = FakeKernel::four();
    let case = case(&host, "cpuset = 'isolated'");
    let top = format!("{CGROUP}/vcpufreq-rt.plc");
    assert_eq!(
        case.changes(),
        [
            format!("{CGROUP}/cgroup.subtree_control -cpuset → +cpuset"),
            format!("{CGROUP}/cgroup.subtree_control -cpu → +cpu"),
            format!("{top} absent → there"),
            format!("{top}/cgroup.subtree_control - → +cpuset"),
            format!("{top}/cgroup.subtree_control - → +cpu"),
            format!("{top}/cpu.uclamp.min - → max"),
            format!("{top}/cpuset.cpus.exclusive - → 3"),
            format!("{top}/rest absent → there"),
            format!("{top}/rest/cgroup.type - → threaded"),
            format!("{top}/rest/cgroup.subtree_control - → +cpu"),
            format!("{top}/rest/cpu.uclamp.min - → max"),
            format!("{top}/rt absent → there"),
            format!("{top}/rt/cgroup.type - → threaded"),
            format!("{top}/rt/cgroup.subtree_control - → +cpu"),
            format!("{top}/rt/cpu.uclamp.min - → max"),
            format!("{top}/rt/cpuset.cpus - → 3"),
            format!("{top}/rt/cpuset.cpus.exclusive - → 3"),
            format!("{top}/rt/cpuset.cpus.partition - → isolated"),
        ]
    );
    let profile = &case.profile;
    vcpufreq_rt::apply(&host, &case.plan(), ("x", profile), &mut |_, _, _| {}).unwrap();
    assert_eq!(case.effect("cpuset"), Effect::Effective);
    host.put(&format!("{CGROUP}/cpuset.cpus.isolated"), "");
    assert!(is_not(&case.effect("cpuset"), "CPU 3 is not isolated"));
    let partition = format!("{top}/rt/cpuset.cpus.partition");
    host.put(&partition, "isolated invalid (Cpu list not exclusive)");
    let checked = check(&host, &case.plan(), profile);
    assert_eq!(checked[0].unset.len(), 1, "{checked:?}");
}

#[test]
fn before_remote_partitions_it_takes_a_reboot() {
    let host = FakeKernel::four();
    host.remove(&format!("{CGROUP}/cpuset.cpus.isolated"));
    let plan = case(&host, "cpuset = 'isolated'").plan();
    assert_eq!(plan.changes().count(), 0);
    let said = |finding: &Finding| matches!(finding, Finding::Reboot(text) if text.contains("6.7") && text.contains("isolcpus=3"));
    assert!(plan.findings.iter().any(said), "{:?}", plan.findings);
}

#[test]
fn kernel_threads_of_the_real_time_cpus() {
    let host = FakeKernel::four();
    let all = "ktimers = 'fifo:2'\nrcuc = 'fifo:4'\nksoftirqd = 'fifo:2'";
    assert_eq!(
        case(&host, all).changes(),
        [
            "ktimers/3 (thread 40) fifo:1 → fifo:2",
            "rcuc/3 (thread 41) fifo:1 → fifo:4",
            "ksoftirqd/3 (thread 42) other:0 → fifo:2",
        ]
    );
    host.remove("/proc/41");
    assert_eq!(case(&host, all).plan().absent[0].path, "rcuc/3");
}

#[test]
fn hidden_threads_are_not_seen_rather_than_absent() {
    let host = FakeKernel::four();
    for pid in ["1", "40", "41", "42"] {
        host.remove(&format!("/proc/{pid}"));
    }
    let plan = case(&host, "rcuc = 'fifo:4'\ninterrupts = 'housekeeping'").plan();
    assert!(plan.absent.is_empty(), "{:?}", plan.absent);
    let unseen: Vec<&str> = plan.unseen.iter().map(|one| one.setting).collect();
    assert_eq!(unseen, ["irqbalance", "rcuc"]);
}

#[test]
fn rcu_expedited_loses_against_rcu_normal() {
    let host = FakeKernel::four();
    host.put("/sys/kernel/rcu_expedited", "1");
    let case = case(&host, "rcu-expedited = 1");
    assert_eq!(case.effect("rcu-expedited"), Effect::Effective);
    host.put("/sys/kernel/rcu_normal", "1");
    let plan = case.plan();
    assert_eq!(
        (plan.changes().count(), plan.absent.len()),
        (0, 1),
        "PREEMPT_RT's own choice"
    );
    host.put(
        "/proc/version",
        "Linux version 7.2.12 #1 SMP PREEMPT_DYNAMIC",
    );
    assert!(is_not(&case.effect("rcu-expedited"), "write 0"));
}

#[test]
fn merged_pages_and_tracers_that_stay() {
    let host = FakeKernel::four();
    host.put("/sys/kernel/mm/ksm/run", "0");
    host.put("/sys/kernel/mm/ksm/pages_shared", "12");
    host.put("/sys/kernel/tracing/tracing_on", "0");
    host.put("/sys/kernel/tracing/current_tracer", "function");
    let case = case(&host, "ksm = 0\ntracing = 0");
    assert!(is_not(&case.effect("ksm"), "12 pages"));
    assert!(is_not(&case.effect("tracing"), "function"));
    host.put("/sys/kernel/tracing/current_tracer", "nop");
    let instance = "/sys/kernel/tracing/instances/vcpufreq-rt-9";
    host.put(&format!("{instance}/tracing_on"), "1");
    host.put(&format!("{instance}/set_event"), "");
    host.put(&format!("{instance}/current_tracer"), "nop");
    assert_eq!(
        case.effect("tracing"),
        Effect::Effective,
        "it has no events"
    );
    host.put(&format!("{instance}/set_event"), "sched:sched_switch");
    assert!(is_not(&case.effect("tracing"), "vcpufreq-rt-9 traces"));
}

#[test]
fn thermal_zones_that_slow_a_real_time_cpu() {
    let host = FakeKernel::four();
    let case = case(&host, "thermal-throttling = false");
    assert_eq!(case.plan().absent.len(), 1);
    let dir = "/sys/class/thermal";
    for (n, cpu) in [(0, 0), (1, 3)] {
        host.put(
            &format!("{dir}/cooling_device{n}/type"),
            &format!("cpufreq-cpu{cpu}"),
        );
        host.put(&format!("{dir}/cooling_device{n}/cur_state"), "0");
        host.put(&format!("{dir}/thermal_zone{n}/mode"), "enabled");
        host.link(
            &format!("{dir}/thermal_zone{n}/cdev0"),
            &format!("../cooling_device{n}"),
        );
    }
    assert_eq!(
        case.changes(),
        [format!("{dir}/thermal_zone1/mode enabled → disabled")]
    );
    let plan = case.plan();
    let warned = |one: &Finding| matches!(one, Finding::Note(text) if text.contains("thermal_zone1") && text.contains("critical"));
    assert!(plan.findings.iter().any(warned), "{:?}", plan.findings);
    assert!(!plan.settings[0].reason.contains("stays"));
    host.put(&format!("{dir}/thermal_zone1/mode"), "disabled");
    assert_eq!(case.effect("thermal-throttling"), Effect::Effective);
    host.put(&format!("{dir}/cooling_device1/cur_state"), "3");
    assert!(is_not(
        &case.effect("thermal-throttling"),
        "slowed down now"
    ));
}

#[test]
fn cache_ways_are_divided() {
    let host = FakeKernel::four();
    let of = |ways: u32| case(&host, &format!("cache-ways = {ways}"));
    assert!(of(4).plan().absent[0].why.contains("can't divide"));
    host.put("/proc/filesystems", "nodev\tresctrl");
    assert!(of(4).plan().unseen[0].why.contains("mount"));
    host.put("/sys/fs/resctrl/info/L3/cbm_mask", "fffff");
    host.put(
        "/sys/fs/resctrl/schemata",
        "    MB:0=100\n    L3:0=fffff;1=fffff",
    );
    assert_eq!(
        of(4).changes(),
        [
            "/sys/fs/resctrl/schemata L3:0=fffff;1=fffff → L3:0=ffff0;1=ffff0",
            "/sys/fs/resctrl/vcpufreq-rt absent → there",
            "/sys/fs/resctrl/vcpufreq-rt/schemata - → L3:0=f;1=f",
            "/sys/fs/resctrl/vcpufreq-rt/cpus_list - → 3",
        ]
    );
    assert!(of(20).changes().is_empty(), "something is left for others");
}

#[test]
fn words_that_the_kernel_ignored_are_told() {
    let words = "cmdline = ['nohz_full={rt}', 'isolcpus=managed_irq,domain,{rt}']";
    let profile = Profile::parse("test", words).unwrap();
    let ignored = |isolated: &str, nohz_full: &str| {
        let host = FakeKernel::four();
        host.put("/proc/cmdline", "nohz_full=3 isolcpus=managed_irq,domain,3");
        host.put("/sys/devices/system/cpu/isolated", isolated);
        host.put("/sys/devices/system/cpu/nohz_full", nohz_full);
        let partition = Partition::new(&host, vec![guest("plc", "3")], None, None).unwrap();
        let plan = plan(&host, &partition, &profile);
        assert_eq!(plan.cmdline, None);
        let told = |finding: &&Finding| matches!(finding, Finding::Reboot(text) if text.contains("not in force"));
        plan.findings.iter().filter(told).count()
    };
    assert_eq!(ignored("3", "3"), 0);
    assert_eq!(ignored("2-3", "0-3"), 0);
    assert_eq!(ignored("", "(null)"), 2);
    assert_eq!(ignored("3", "(null)"), 1);
    assert_eq!(ignored("2", "3"), 1);
}

/// The plan of a host with this command line, of which a profile asks.
fn booted_with(host: &FakeKernel, running: &str, cmdline: &[&str]) -> Plan {
    host.put("/proc/cmdline", running);
    let profile = Profile::parse("test", &format!("cmdline = {cmdline:?}")).unwrap();
    let partition = Partition::new(host, vec![guest("plc", "3")], None, None).unwrap();
    plan(host, &partition, &profile)
}

fn reboots(plan: &Plan, part: &str) -> usize {
    let told = |one: &&Finding| matches!(one, Finding::Reboot(text) if text.contains(part));
    plan.findings.iter().filter(told).count()
}

#[test]
fn callbacks_are_offloaded_where_their_threads_run() {
    let threads = |threads: &[(&str, &str)]| {
        let host = FakeKernel::four();
        for (pid, (name, state)) in (900..).zip(threads) {
            host.thread(pid, name, 0, 20);
            let stat = host.read(&format!("/proc/{pid}/stat")).unwrap();
            let stat = stat.replace(") S ", &format!(") {state} "));
            host.put(&format!("/proc/{pid}/stat"), &stat);
        }
        let plan = booted_with(&host, "rcu_nocbs=3", &["rcu_nocbs={rt}"]);
        assert_eq!(plan.cmdline, None);
        assert!(plan.unseen.is_empty(), "{:?}", plan.unseen);
        reboots(&plan, "not in force")
    };
    assert_eq!(threads(&[]), 1, "a kernel without the option");
    assert_eq!(threads(&[("rcuog/2", "S"), ("rcuop/3", "S")]), 0);
    assert_eq!(
        threads(&[("rcuos/3", "I")]),
        0,
        "a kernel that isn't preemptible"
    );
    assert_eq!(threads(&[("rcuop/2", "S")]), 1);
    // They are made for all CPUs as soon as one is offloaded.
    assert_eq!(threads(&[("rcuop/2", "S"), ("rcuop/3", "P")]), 1);
    let hidden = FakeKernel::four();
    hidden.remove("/proc/1/comm");
    let plan = booted_with(&hidden, "rcu_nocbs=3", &["rcu_nocbs={rt}"]);
    assert_eq!(reboots(&plan, "not in force"), 0);
    assert!(plan.unseen.iter().any(|one| one.path.contains("rcuo")));
}

#[test]
fn words_need_options_of_the_kernel() {
    let words = [
        "isolcpus=managed_irq,{rt}",
        "nohz_full={rt}",
        "rcu_nocbs={rt}",
        "rcu_nocb_poll",
    ];
    let with = |config: &str| {
        let host = FakeKernel::four();
        host.put("/boot/config-7.2.12-rt", config);
        let plan = booted_with(&host, "", &words);
        ["CPU_ISOLATION", "NO_HZ_FULL", "RCU_NOCB_CPU"]
            .map(|option| reboots(&plan, &format!("lacks CONFIG_{option}, without which")))
    };
    assert_eq!(with("# CONFIG_RCU_NOCB_CPU is not set"), [1, 1, 1]);
    assert_eq!(
        with("CONFIG_CPU_ISOLATION=y\nCONFIG_NO_HZ_FULL=y"),
        [0, 0, 1]
    );
    assert_eq!(
        with("CONFIG_CPU_ISOLATION=y\nCONFIG_NO_HZ_FULL=y\nCONFIG_RCU_NOCB_CPU=y"),
        [0, 0, 0]
    );
    let host = FakeKernel::four();
    let plan = booted_with(&host, "", &words);
    assert!(plan.unseen.is_empty(), "the profile asks for no option");
}

#[test]
fn the_command_line_is_said_exactly() {
    let host = FakeKernel::four();
    let text = "cmdline = ['nohz_full={rt}', 'irqaffinity={housekeeping}', 'console=ttyAMA0']";
    let profile = Profile::parse("test", text).unwrap();
    let partition = Partition::new(&host, vec![guest("plc", "3")], None, None).unwrap();
    let plan = plan(&host, &partition, &profile);
    assert_eq!(plan.cmdline.as_deref(), Some("nohz_full=3 irqaffinity=0-2"));
    let replaced = Finding::Reboot(
        "the command line has irqaffinity=0-3; replace it by irqaffinity=0-2".into(),
    );
    assert!(plan.findings.contains(&replaced), "{:?}", plan.findings);
}

#[test]
fn the_host_is_looked_at() {
    let host = FakeKernel::four();
    for (path, text) in [
        ("/proc/version", "Linux version 7.2 SMP PREEMPT"),
        ("/proc/swaps", "Filename\n/dev/sda2 partition 1 0 -2"),
        ("/proc/cpuinfo", "vendor_id : GenuineIntel"),
        (
            "/sys/devices/system/cpu/cpu3/topology/thread_siblings_list",
            "1,3",
        ),
        (
            "/sys/module/pcie_aspm/parameters/policy",
            "[default] performance",
        ),
        ("/sys/kernel/security/lsm", "capability,apparmor,bpf"),
        ("/sys/devices/system/node/node0/cpulist", "0-1"),
        ("/sys/devices/system/node/node1/cpulist", "2-3"),
        ("/sys/kernel/iommu_groups/0/type", "DMA-FQ"),
        ("/sys/module/kvm/parameters/nx_huge_pages", "Y"),
        ("/boot/config-7.2.12-rt", "CONFIG_NO_HZ_FULL=y"),
    ] {
        host.put(path, text);
    }
    host.smis(3, 0xffff_0000_0000_0007);
    let text = "module-options = ['kvm.nx_huge_pages=N']\nkernel-config = ['PREEMPT_RT', 'NO_HZ_FULL']\nfirmware = ['turbo off']";
    let profile = Profile::parse("test", text).unwrap();
    let partition = Partition::new(&host, vec![guest("plc", "3")], None, None).unwrap();
    let said = format!("{:?}", plan(&host, &partition, &profile).findings);
    for part in [
        "not PREEMPT_RT",
        "swapoff",
        "7 on CPU 3 since",
        "CPU 1 is a hyperthread of real-time CPU 3",
        "PCIe links",
        "apparmor",
        "CPUs are of node1",
        "iommu.passthrough",
        "options kvm nx_huge_pages=N",
        "lacks CONFIG_PREEMPT_RT",
        "turbo off",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("lacks CONFIG_NO_HZ_FULL"));
}

#[test]
fn two_real_time_cpus_of_one_core_are_told() {
    let host = FakeKernel::four();
    for cpu in [2, 3] {
        let siblings = format!("{CPU}/cpu{cpu}/topology/thread_siblings_list");
        host.put(&siblings, "2-3");
    }
    let told = |guests| {
        let partition = Partition::new(&host, guests, None, None).unwrap();
        let plan = plan(&host, &partition, &Profile::default());
        let lines: Vec<String> = plan.findings.iter().map(|one| format!("{one:?}")).collect();
        lines.join(" ")
    };
    let both = told(vec![guest("plc", "3"), guest("hmi", "2")]);
    assert_eq!(both.matches("hyperthread of").count(), 1, "{both}");
    assert!(both.contains("CPU 3 is a hyperthread of real-time CPU 2's core, real-time as well"));
    assert!(told(vec![guest("plc", "3")]).contains("CPU 2 is a hyperthread of real-time CPU 3"));
}

#[test]
fn interrupts_that_cannot_be_counted_are_unseen() {
    let host = FakeKernel::four();
    let cpus = "3".parse().unwrap();
    assert_eq!(vcpufreq_rt::smis(&host, &cpus), None, "not an Intel");
    assert!(case(&host, "").plan().unseen.is_empty());
    host.put("/proc/cpuinfo", "vendor_id : GenuineIntel");
    assert!(
        case(&host, "").plan().unseen[0]
            .why
            .contains("modprobe msr")
    );
    assert_eq!(vcpufreq_rt::smis(&host, &cpus), None);
    host.smis(3, 9);
    assert!(case(&host, "").plan().unseen.is_empty());
    assert_eq!(vcpufreq_rt::smis(&host, &cpus), Some([(3, 9)].into()));
}

#[test]
fn the_kernels_configuration_may_be_its_own() {
    let host = FakeKernel::four();
    let profile = Profile::parse("test", "kernel-config = ['CPUSETS', 'PREEMPT_RT']").unwrap();
    let partition = Partition::new(&host, vec![guest("plc", "3")], None, None).unwrap();
    let planned = || plan(&host, &partition, &profile);
    assert!(planned().unseen[0].why.contains("config.gz"));
    // CONFIG_CPUSETS=y, CONFIG_NO_HZ_FULL=y, CONFIG_CPUSETS_V1=y.
    let gz = [
        0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0x03, 0x73, 0xf6, 0xf7, 0x73, 0xf3,
        0x74, 0x8f, 0x77, 0x0e, 0x08, 0x0d, 0x76, 0x0d, 0x09, 0xb6, 0xad, 0xe4, 0x72, 0x86, 0x08,
        0xf8, 0xf9, 0xc7, 0x7b, 0x44, 0xc5, 0xbb, 0x85, 0xfa, 0xf8, 0x20, 0xc4, 0xa0, 0x8a, 0xe2,
        0xc3, 0x0c, 0x81, 0x62, 0x00, 0x22, 0xec, 0x4c, 0x4d, 0x39, 0x00, 0x00, 0x00,
    ];
    host.put_bytes("/proc/config.gz", &gz);
    let plan = planned();
    assert!(plan.unseen.is_empty(), "{:?}", plan.unseen);
    let lacks =
        |option: &str| format!("{:?}", plan.findings).contains(&format!("lacks CONFIG_{option}"));
    assert!(lacks("PREEMPT_RT") && !lacks("CPUSETS"));
}

#[test]
fn memory_and_cpus_of_other_nodes_are_told() {
    let host = FakeKernel::four();
    for (node, cpus) in [(0, "0-1"), (1, "2-3")] {
        let list = format!("/sys/devices/system/node/node{node}/cpulist");
        host.put(&list, cpus);
    }
    let found = |cpus: &str| {
        let partition = Partition::new(&host, vec![guest("plc", cpus)], None, None).unwrap();
        plan(&host, &partition, &Profile::default()).findings
    };
    assert!(
        matches!(&found("3")[..], [Finding::Note(_)]),
        "nothing runs"
    );
    let both = &found("1,3")[0];
    assert!(matches!(both, Finding::Hand(text) if text.contains("node0 and node1")));
    host.put(&format!("{CGROUP}/vcpufreq-rt.plc/cgroup.procs"), "700");
    let maps = |nodes: &str| {
        let small = "55e0 default file=/bin/x mapped=9 N0=9 kernelpagesize_kB=4";
        let text = format!("{small}\n7f00 default anon=65536 {nodes} kernelpagesize_kB=4");
        host.put("/proc/700/numa_maps", &text);
        found("3")
    };
    assert!(maps("N1=65536").is_empty());
    let far = &maps("N0=32768 N1=32768")[..];
    assert!(
        matches!(far, [Finding::Hand(text)] if text.contains("128 MiB of plc's memory are on node0")),
        "{far:?}"
    );
}

#[test]
fn what_cannot_be_seen_is_said() {
    let host = FakeKernel::empty();
    host.put(&format!("{CPU}/online"), "0-3");
    let plan = case(&host, "swappiness = 10\nksm = 0").plan();
    let absent: Vec<&str> = plan.absent.iter().map(|absent| absent.setting).collect();
    assert_eq!(absent, ["ksm", "swappiness", "host"]);
}
