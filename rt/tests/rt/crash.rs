// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: restore brings back exactly the old values, wherever apply or an earlier restore was
//! killed, and whatever a file refuses. It writes nothing that the plan didn't list, and nothing at
//! all after another boot.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};

use vcpufreq_host::undo::Target;
use vcpufreq_rt::{
    Partition, Profile, RestoreError, Restored, RtPlan, apply, check, plan, restore,
};

use crate::{
    fake::{CGROUP, CPU, FakeKernel},
    partition::{guest, restored},
};

/// Everything at once, and the values are other ones than the fake host's.
const EVERYTHING: &str = "
cmdline = ['nohz_full={rt}', 'irqaffinity={housekeeping}']
[settings]
timer-migration = 0
rt-runtime-us = -1
fair-server-runtime-ns = 0
workqueues = 'housekeeping'
interrupts = 'housekeeping'
governor = 'performance'
frequency-cpus = 'all'
min-freq = 1000000
max-freq = 1000000
util-clamp-min = 512
util-clamp-max = 1000
util-clamp-min-rt-default = 0
idle-states-off = 'deep'
resume-latency-us = 'n/a'
cpuset = 'isolated'
watchdog = 'housekeeping'
nmi-watchdog = 0
tracing = 0
ksm = 0
transparent-hugepages = 'never'
swappiness = 10
compaction-proactiveness = 0
numa-balancing = 0
rcu-expedited = 1
ktimers = 'fifo:2'
rcuc = 'fifo:4'
ksoftirqd = 'rr:3'
halt-poll-ns = 0
";

fn planned(host: &FakeKernel) -> (RtPlan, Profile) {
    let profile = Profile::parse("everything", EVERYTHING).unwrap();
    let guests = vec![guest("plc", "3"), guest("hmi", "2")];
    let partition = Partition::new(host, guests, None, None).unwrap();
    (plan(host, &partition, &profile), profile)
}

/// How many changes were made; `None` when it was killed before any could be.
fn try_apply(host: &FakeKernel) -> Option<usize> {
    let (plan, profile) = planned(host);
    let applied = apply(host, &plan, ("everything", &profile), &mut |_, _, _| {});
    applied.ok().map(|applied| applied.made)
}

/// As the kernel reads them: a mask has many texts.
fn values(host: &FakeKernel) -> BTreeMap<String, String> {
    let mut all = host.snapshot();
    for (path, text) in &mut all {
        if path.ends_with("smp_affinity") {
            *text = vcpufreq_rt::CpuList::from_mask(text).unwrap().mask();
        }
        // Where the hardware sends an interrupt is the kernel's choice.
        if path.ends_with("effective_affinity") {
            text.clear();
        }
        // `always madvise [x]` for any order.
        if path.ends_with("transparent_hugepage/enabled") {
            *text = vcpufreq_host::undo::Format::Choice.value(text);
        }
    }
    all.retain(|path, _| !path.starts_with("/run"));
    all
}

#[test]
fn applied_is_effective_and_restored_is_as_before() {
    let host = FakeKernel::four();
    let before = values(&host);
    let made = try_apply(&host).unwrap();
    let (again, profile) = planned(&host);
    for checked in check(&host, &again, &profile) {
        assert!(checked.is_good(), "{checked:?}");
    }
    let (left, gone) = restored(&host);
    assert!(left.is_empty() && gone.is_empty(), "{left:?} {gone:?}");
    assert!(made > 40, "{made}");
    assert_eq!(values(&host), before);
    assert!(!host.snapshot().contains_key("/run/vcpufreq-rt"));
    assert_eq!(
        restore(&host, &mut |_, _, _| {}).unwrap(),
        Restored::Nothing
    );
}

#[test]
fn nothing_is_touched_that_the_plan_does_not_list() {
    let host = FakeKernel::four();
    let (plan, profile) = planned(&host);
    let listed: BTreeSet<String> = plan
        .changes()
        .map(|(_, change)| change.target.name())
        .collect();
    apply(&host, &plan, ("everything", &profile), &mut |_, _, _| {}).unwrap();
    restore(&host, &mut |_, _, _| {}).unwrap();
    for path in host.touched.borrow().iter() {
        let thread = path
            .strip_prefix("/proc/")
            .and_then(|rest| rest.strip_suffix("/stat"));
        let known = match thread {
            Some(pid) => listed
                .iter()
                .any(|name| name.ends_with(&format!("(thread {pid})"))),
            None => listed.contains(path),
        };
        assert!(known, "{path}");
    }
}

#[test]
fn planning_and_checking_touch_nothing() {
    let host = FakeKernel::four();
    let before = host.snapshot();
    let (plan, profile) = planned(&host);
    assert!(!check(&host, &plan, &profile).is_empty());
    assert_eq!(host.snapshot(), before);
    assert!(host.touched.borrow().is_empty());
}

/// Kills `act` at each of its steps, before and after the step, and then restores; and counts.
fn killed_everywhere(prepare: fn(&FakeKernel), act: fn(&FakeKernel)) -> usize {
    let mut kills = 0;
    for happens in [false, true] {
        for step in 0.. {
            let host = FakeKernel::four();
            let before = values(&host);
            prepare(&host);
            host.die_at(step, happens);
            let lived = catch_unwind(AssertUnwindSafe(|| act(&host))).is_ok();
            let all_done = host.steps.get() <= step;
            assert_eq!(lived, all_done, "step {step}");
            host.revive();
            let restored = restore(&host, &mut |_, _, _| {}).unwrap();
            assert!(
                !matches!(&restored, Restored::Done { left, .. } if !left.is_empty()),
                "step {step}: {restored:?}"
            );
            assert_eq!(values(&host), before, "killed at step {step}, {happens}");
            assert!(!host.snapshot().contains_key("/run/vcpufreq-rt/rt.json"));
            if all_done {
                break;
            }
            kills += 1;
        }
    }
    kills
}

#[test]
fn apply_killed_at_each_step() {
    let kills = killed_everywhere(
        |_| {},
        |host| {
            try_apply(host);
        },
    );
    assert!(kills > 100, "{kills}");
}

#[test]
fn restore_killed_at_each_step() {
    let kills = killed_everywhere(
        |host| {
            try_apply(host);
        },
        |host| drop(restore(host, &mut |_, _, _| {})),
    );
    assert!(kills > 80, "{kills}");
}

#[test]
fn files_that_refuse_in_apply() {
    for part in [
        "irq/15",
        "workqueue/cpumask",
        "vcpufreq-rt.plc/rt",
        "/proc/31/",
        "governor",
    ] {
        let host = FakeKernel::four();
        let before = values(&host);
        host.refuse(part);
        let (plan, profile) = planned(&host);
        let applied = apply(&host, &plan, ("everything", &profile), &mut |_, _, _| {}).unwrap();
        assert!(!applied.refused.is_empty(), "{part}");
        host.relent();
        restore(&host, &mut |_, _, _| {}).unwrap();
        assert_eq!(values(&host), before, "{part}");
    }
}

/// What a refusal of this target is a refusal of, on the fake host.
fn refusable(target: &Target) -> String {
    match target {
        Target::File { path, .. } | Target::Inside { path, .. } | Target::Dir { path } => {
            path.clone()
        }
        Target::Thread { pid, .. } => format!("/proc/{pid}/"),
    }
}

#[test]
fn each_target_may_refuse_and_all_is_as_before() {
    let (plan, profile) = planned(&FakeKernel::four());
    // What only comes back with another change isn't written by itself.
    let written = plan.changes().filter(|(_, change)| !change.is_set());
    let targets: Vec<Target> = written.map(|(_, change)| change.target.clone()).collect();
    assert!(targets.len() > 40, "{}", targets.len());
    for target in targets {
        let part = refusable(&target);
        let host = FakeKernel::four();
        let before = values(&host);
        host.refuse(&part);
        let applied = apply(&host, &plan, ("everything", &profile), &mut |_, _, _| {}).unwrap();
        assert!(!applied.refused.is_empty(), "{part}");
        host.relent();
        restore(&host, &mut |_, _, _| {}).unwrap();
        assert_eq!(values(&host), before, "{part} in apply");

        try_apply(&host).unwrap();
        host.refuse(&part);
        let (left, _) = restored(&host);
        // What is in a folder of ours goes with it.
        let goes = matches!(target, Target::Inside { .. });
        assert!(goes || !left.is_empty(), "{part}");
        host.relent();
        restore(&host, &mut |_, _, _| {}).unwrap();
        assert_eq!(values(&host), before, "{part} in restore");
    }
}

#[test]
fn files_that_refuse_in_restore_stay_on_the_record() {
    let host = FakeKernel::four();
    let before = values(&host);
    try_apply(&host).unwrap();
    host.refuse("swappiness");
    host.refuse("subtree_control");
    let (left, _) = restored(&host);
    assert_eq!(left.len(), 3, "{left:?}");
    host.relent();
    restore(&host, &mut |_, _, _| {}).unwrap();
    assert_eq!(values(&host), before);
}

#[test]
fn after_a_reboot_nothing_is_written_and_the_record_is_closed() {
    let host = FakeKernel::four();
    try_apply(&host).unwrap();
    host.put("/proc/sys/kernel/random/boot_id", "boot-2");
    let before = values(&host);
    host.touched.borrow_mut().clear();
    assert_eq!(
        restore(&host, &mut |_, _, _| {}).unwrap(),
        Restored::EarlierBoot
    );
    assert_eq!(values(&host), before);
    assert!(host.touched.borrow().is_empty());
    assert!(!host.snapshot().contains_key("/run/vcpufreq-rt"));
    assert_eq!(
        restore(&host, &mut |_, _, _| {}).unwrap(),
        Restored::Nothing
    );
}

#[test]
fn a_running_guest_is_not_pulled_from_under() {
    let host = FakeKernel::four();
    try_apply(&host).unwrap();
    let before = host.snapshot();
    host.put(
        &format!("{CGROUP}/vcpufreq-rt.plc/rt/cgroup.events"),
        "populated 1\nfrozen 0",
    );
    let error = restore(&host, &mut |_, _, _| {}).unwrap_err();
    assert!(
        matches!(&error, RestoreError::Occupied(group) if group.ends_with("plc/rt")),
        "{error}"
    );
    host.remove(&format!("{CGROUP}/vcpufreq-rt.plc/rt/cgroup.events"));
    assert_eq!(host.snapshot(), before);
}

#[test]
fn a_value_that_was_there_before_is_neither_written_nor_recorded() {
    let host = FakeKernel::four();
    host.put("/proc/sys/vm/swappiness", "10");
    try_apply(&host).unwrap();
    assert!(
        !host
            .touched
            .borrow()
            .iter()
            .any(|path| path.contains("swappiness"))
    );
}

#[test]
fn tunables_come_back_with_their_governor() {
    let host = FakeKernel::four();
    try_apply(&host).unwrap();
    let rate = format!("{CPU}/cpufreq/policy2/schedutil/rate_limit_us");
    assert!(!host.snapshot().contains_key(&rate));
    restore(&host, &mut |_, _, _| {}).unwrap();
    assert_eq!(host.snapshot()[&rate], "2000");
}

#[test]
fn two_at_a_time_are_refused() {
    let host = FakeKernel::four();
    try_apply(&host).unwrap();
    let _held = host.hold_record();
    let error = restore(&host, &mut |_, _, _| {}).unwrap_err();
    assert!(matches!(error, RestoreError::Busy), "{error}");
}

#[test]
fn what_is_not_mounted_stays_on_the_record() {
    for (mount, lost) in [("/sys/kernel/debug", 4), ("/sys/kernel/tracing", 1)] {
        let host = FakeKernel::four();
        let before = values(&host);
        try_apply(&host).unwrap();
        let away = host.take_away(mount);
        let (left, _) = restored(&host);
        assert_eq!(left.len(), lost, "{mount}: {left:?}");
        let told = |why: &str| why.contains("mount -t ") && why.contains(mount);
        assert!(left.iter().all(|(_, why)| told(why)), "{left:?}");
        host.bring_back(mount, away);
        assert_eq!(restored(&host).0, []);
        assert_eq!(values(&host), before, "{mount}");
    }
}

#[test]
fn groups_that_a_killed_guest_left_are_told() {
    let host = FakeKernel::four();
    try_apply(&host).unwrap();
    let group = format!("{CGROUP}/vcpufreq-rt.plc/rt/vcpufreq-900");
    host.put(&format!("{group}/cgroup.procs"), "");
    let (left, _) = restored(&host);
    assert!(left[0].1.contains("vcpufreq cleanup"), "{left:?}");
    host.remove(&group);
    restore(&host, &mut |_, _, _| {}).unwrap();
    assert!(!host.snapshot().contains_key("/run/vcpufreq-rt"));
}
