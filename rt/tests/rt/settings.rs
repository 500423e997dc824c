// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise of each setting: its changes on this host, its text if the host lacks or hides the
//! files, and when it counts as effective.

use vcpufreq_rt::{Effect, Finding, Partition, Profile, RtPlan, check, plan};

use crate::{
    fake::{CGROUP, CPU, FakeKernel},
    partition::plc,
};

pub struct Case<'a> {
    pub host: &'a FakeKernel,
    pub profile: Profile,
    pub partition: Partition,
}

/// One guest on CPU 3, and these settings.
pub fn case<'a>(host: &'a FakeKernel, settings: &str) -> Case<'a> {
    let profile = Profile::parse("test", &format!("[settings]\n{settings}")).unwrap();
    Case {
        host,
        profile,
        partition: plc(host),
    }
}

impl Case<'_> {
    pub fn plan(&self) -> RtPlan {
        plan(self.host, &self.partition, &self.profile)
    }

    /// `NAME now → want` of each change.
    pub fn changes(&self) -> Vec<String> {
        let plan = self.plan();
        let lines = plan.changes().map(|(_, change)| {
            let now = change.now.as_deref().unwrap_or("-");
            let want = change.want.as_deref().unwrap_or("kept");
            format!("{} {now} → {want}", change.target.name())
        });
        lines.collect()
    }

    /// Puts the plan into force, then asks whether `name` is effective.
    pub fn effect(&self, name: &str) -> Effect {
        let checked = check(self.host, &self.plan(), &self.profile);
        let one = checked.into_iter().find(|one| one.name == name);
        let one = one.unwrap_or_else(|| panic!("no {name}"));
        assert!(one.unset.is_empty(), "{one:?}");
        one.effect
    }
}

pub fn is_not(effect: &Effect, said: &str) -> bool {
    matches!(effect, Effect::Not(why) if why.contains(said))
}

/// A setting, and the change that it makes.
const SWITCHES: &str = "\
timer-migration = 0: /proc/sys/kernel/timer_migration 1 → 0
rt-runtime-us = -1: /proc/sys/kernel/sched_rt_runtime_us 950000 → -1
util-clamp-min = 512: /proc/sys/kernel/sched_util_clamp_min 1024 → 512
util-clamp-max = 512: /proc/sys/kernel/sched_util_clamp_max 1024 → 512
util-clamp-min-rt-default = 128: /proc/sys/kernel/sched_util_clamp_min_rt_default 1024 → 128
watchdog = 'housekeeping': /proc/sys/kernel/watchdog_cpumask 0-3 → 0-2
nmi-watchdog = 0: /proc/sys/kernel/nmi_watchdog 1 → 0
tracing = 0: /sys/kernel/tracing/tracing_on 1 → 0
ksm = 0: /sys/kernel/mm/ksm/run 1 → 0
swappiness = 10: /proc/sys/vm/swappiness 60 → 10
compaction-proactiveness = 0: /proc/sys/vm/compaction_proactiveness 20 → 0
numa-balancing = 0: /proc/sys/kernel/numa_balancing 1 → 0
rcu-expedited = 1: /sys/kernel/rcu_expedited 0 → 1
min-free-kbytes = 262144: /proc/sys/vm/min_free_kbytes 67584 → 262144
watermark-scale-factor = 100: /proc/sys/vm/watermark_scale_factor 10 → 100
watermark-boost-factor = 0: /proc/sys/vm/watermark_boost_factor 15000 → 0
stat-interval = 10: /proc/sys/vm/stat_interval 1 → 10
halt-poll-ns = 0: /sys/module/kvm/parameters/halt_poll_ns 500000 → 0
schedutil-rate-limit-us = 1000: CPU/cpufreq/policy2/schedutil/rate_limit_us 2000 → 1000
resume-latency-us = '20': CPU/cpu3/power/pm_qos_resume_latency_us 0 → 20
min-freq = 'max': CPU/cpufreq/policy2/scaling_min_freq 600000 → 2800000
max-freq = 1000000: CPU/cpufreq/policy2/scaling_max_freq 2800000 → 1000000
";

#[test]
fn plain_switches() {
    let host = FakeKernel::four();
    for line in SWITCHES.lines() {
        let (setting, change) = line.split_once(": ").unwrap();
        assert_eq!(case(&host, setting).changes(), [change.replace("CPU", CPU)]);
    }
    assert_eq!(
        case(&host, "transparent-hugepages = 'madvise'").changes(),
        [
            "/proc/sys/vm/min_free_kbytes 67584 → kept",
            "/sys/kernel/mm/transparent_hugepage/enabled always → madvise",
        ]
    );
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
    host.thread(900, "irqbalance", 0, 0);
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
    assert!(has_to("IRQBALANCE_BANNED_CPULIST=2\0"), "its own list wins");
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
    assert!(is_not(&case.effect("resume-latency-us"), "nothing obeys"));
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
    let all = "ktimers = 'fifo:2'\nrcuc = 'fifo:4'\nksoftirqd = 'fifo:2'\nrcub = 'fifo:4'";
    assert_eq!(
        case(&host, all).changes(),
        [
            "ktimers/3 (thread 40) fifo:1 → fifo:2",
            "rcuc/3 (thread 41) fifo:1 → fifo:4",
            "rcub/0 (thread 90) fifo:1 → fifo:4",
            "rcub/1 (thread 91) fifo:1 → fifo:4",
            "ksoftirqd/3 (thread 42) other:0 → fifo:2",
        ]
    );
    host.remove("/proc/41");
    host.remove("/proc/90");
    host.remove("/proc/91");
    let absent: Vec<String> = (case(&host, all).plan().absent.into_iter())
        .map(|one| one.path)
        .collect();
    assert_eq!(absent, ["rcuc/3", "rcub"]);
    // Names that any process can have, and that no kernel thread has.
    for (pid, name) in [(95, "rcub/\u{1b}[2J"), (96, "rcub/1\nfine"), (97, "rcub/")] {
        host.impostor(pid, name);
    }
    let plan = case(&host, all).plan();
    assert!(plan.findings.is_empty(), "{:?}", plan.findings);
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
    assert_eq!(unseen, ["interrupts", "rcuc"]);
    // One thread alone, by its name or by what it does.
    for file in ["comm", "stat"] {
        let host = FakeKernel::four();
        host.deny(&format!("/proc/41/{file}"));
        let plan = case(&host, "rcuc = 'fifo:4'").plan();
        assert!(plan.absent.is_empty(), "{:?}", plan.absent);
        assert!(plan.unseen[0].why.contains("run as root"), "{file}");
    }
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
fn each_policy_can_have_a_frequency_of_its_own() {
    let host = FakeKernel::four();
    let both = case(
        &host,
        "min-freq = { policy0 = 'max', policy2 = 1000000 }\nmax-freq = { policy2 = 1000000 }",
    );
    let dir = |policy: u32| format!("{CPU}/cpufreq/policy{policy}");
    assert_eq!(
        both.changes(),
        [
            format!("{}/scaling_min_freq 600000 → 1800000", dir(0)),
            format!("{}/scaling_min_freq 600000 → 1000000", dir(2)),
            format!("{}/scaling_max_freq 2800000 → 1000000", dir(2)),
        ]
    );
    // The limit of a policy is the highest that its governor has to reach.
    let held = case(
        &host,
        "governor = 'performance'\nmax-freq = { policy2 = 1000000 }",
    );
    for (name, text) in [
        ("scaling_governor", "performance"),
        ("scaling_max_freq", "1000000"),
        ("scaling_cur_freq", "1000000"),
    ] {
        host.put(&format!("{}/{name}", dir(2)), text);
    }
    assert_eq!(held.effect("governor"), Effect::Effective);
    let one = "min-freq = { policy7 = 'max' }";
    let plan = case(&host, one).plan();
    assert_eq!(plan.changes().count(), 0);
    let said = "min-freq names policy7, which this host doesn't have; it has policy0, policy2";
    assert!(
        plan.findings.contains(&Finding::Hand(said.to_owned())),
        "{:?}",
        plan.findings
    );
    host.remove(&format!("{CPU}/cpufreq"));
    let plan = case(&host, one).plan();
    assert!(plan.findings.is_empty(), "{:?}", plan.findings);
    assert_eq!(plan.absent[0].path, format!("{CPU}/cpufreq"));
}

#[test]
fn a_modules_parameter_is_set_when_it_is_loaded() {
    let said = |host: &FakeKernel| {
        let text = "module-options = ['kvm.kvmclock_periodic_sync=N', 'kvm_intel.ple_gap=0']";
        let profile = Profile::parse("test", text).unwrap();
        let findings = plan(host, &plc(host), &profile).findings;
        let by_hand = findings.into_iter().filter_map(|finding| match finding {
            Finding::Hand(text) => Some(text),
            _ => None,
        });
        by_hand.collect::<Vec<_>>()
    };
    let host = FakeKernel::four();
    assert!(
        said(&host).is_empty(),
        "a module that isn't there has no parameter"
    );
    let path = "/sys/module/kvm/parameters/kvmclock_periodic_sync";
    host.put(path, "N");
    assert!(said(&host).is_empty());
    host.put(path, "Y");
    let line = format!(
        "{path} is Y: load kvm with kvmclock_periodic_sync=N, or boot with \
         kvm.kvmclock_periodic_sync=N"
    );
    assert_eq!(said(&host), [line]);
}

#[test]
fn what_cannot_be_seen_is_said() {
    let host = FakeKernel::empty();
    host.put(&format!("{CPU}/online"), "0-3");
    let plan = case(&host, "swappiness = 10\nksm = 0").plan();
    let absent: Vec<&str> = plan.absent.iter().map(|absent| absent.setting).collect();
    assert_eq!(absent, ["ksm", "swappiness", "host"]);
}
