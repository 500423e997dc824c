// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: apply changes nothing under a running guest. The changes of a guest and of apply are
//! each restored to the value before, whatever their order. A record that another process holds or
//! makes is left alone.

use std::fs::File;

use nix::fcntl::{Flock, FlockArg};
use vcpufreq_host::undo::ReadHost;
use vcpufreq_rt::{
    Applied, ApplyError, InForce, InForceError, Profile, RestoreError, Restored, RtPlan, restore,
};

use crate::{
    fake::{CGROUP, CPU, FakeKernel},
    partition::{applied, planned},
};

const VMM: u32 = 900;

fn bound_file() -> String {
    format!("{CPU}/cpu3/power/pm_qos_resume_latency_us")
}

/// A profile that changes what a real-time guest changes too, and makes no cpuset.
fn planned_bound(host: &FakeKernel) -> (RtPlan, Profile) {
    planned(host, "settings.resume-latency-us = 'n/a'")
}

fn try_apply(host: &FakeKernel) -> Result<Applied, ApplyError> {
    applied(host, &planned_bound(host))
}

fn try_restore(host: &FakeKernel) -> Result<Restored, RestoreError> {
    restore(host, &mut |_, _, _| {})
}

fn record(real_time: &str, pinned: &str) -> String {
    format!(
        r#"{{"owner":{{"pid":{VMM},"start_ticks":0,"boot_id":"boot-1","pid_namespace":""}},
        "real_time":[{real_time}],"pinned":[{pinned}],"entries":[]}}"#
    )
}

/// What a VMM does: its record, then its bound on CPU 3's latency. The bound that was.
fn start_guest(host: &FakeKernel) -> String {
    host.thread(VMM as usize, "vcpufreq", 0, 20);
    host.put(&format!("/run/vcpufreq/{VMM}.json"), &record("3", "3,0"));
    let old = host.read(&bound_file()).unwrap();
    host.put(&bound_file(), "50");
    old
}

fn kill_guest(host: &FakeKernel) {
    host.remove(&format!("/proc/{VMM}"));
}

/// The guest's end, or the cleaning up after it.
fn end_guest(host: &FakeKernel, old: &str) {
    host.put(&bound_file(), old);
    host.remove(&format!("/run/vcpufreq/{VMM}.json"));
    if host.list(&format!("/proc/{VMM}")).is_ok() {
        kill_guest(host);
    }
}

fn line(error: impl std::fmt::Display) -> String {
    let line = error.to_string();
    assert_eq!(line.lines().count(), 1, "{line}");
    line
}

#[test]
fn a_guest_that_starts_before_apply_and_ends_after_it() {
    let host = FakeKernel::four();
    let old = start_guest(&host);
    let before = host.snapshot();
    let refused = line(try_apply(&host).unwrap_err());
    assert!(
        refused.contains("CPU 3") && refused.contains("process 900"),
        "{refused}"
    );
    assert_eq!(host.snapshot(), before);
    end_guest(&host, &old);
    try_apply(&host).unwrap();
    assert_eq!(host.read(&bound_file()).unwrap(), "n/a");
    try_restore(&host).unwrap();
    assert_eq!(host.read(&bound_file()).unwrap(), "0");
}

#[test]
fn a_guest_that_starts_after_apply_and_ends_after_restore() {
    let host = FakeKernel::four();
    let values = |host: &FakeKernel| host.read(&bound_file()).unwrap();
    try_apply(&host).unwrap();
    let old = start_guest(&host);
    let before = host.snapshot();
    let refused = line(try_restore(&host).unwrap_err());
    assert!(
        refused.contains("CPU 3") && refused.contains("process 900"),
        "{refused}"
    );
    assert_eq!(host.snapshot(), before);
    // Killed with its guardian: cleaning up would bring back what it found.
    kill_guest(&host);
    let refused = line(try_restore(&host).unwrap_err());
    assert!(refused.contains("vcpufreq cleanup"), "{refused}");
    assert_eq!(values(&host), "50");
    end_guest(&host, &old);
    try_restore(&host).unwrap();
    assert_eq!(values(&host), "0");
}

#[test]
fn who_is_in_applys_way() {
    let rows: [(&str, String, bool); 6] = [
        ("real-time vCPUs elsewhere", record("2", "2"), true),
        ("a vCPU pinned there", record("", "2,3"), false),
        (
            "another boot",
            record("3", "3").replace("boot-1", "boot-0"),
            true,
        ),
        (
            "another PID namespace",
            record("3", "3").replace("\"\"", "\"pid:[1]\""),
            false,
        ),
        ("no record of a running process", "{}".to_owned(), false),
        (
            "a VMM that knows nothing of pins",
            record("", "").replace(r#","pinned":[]"#, ""),
            true,
        ),
    ];
    for (name, record, free) in rows {
        let host = FakeKernel::four();
        host.thread(VMM as usize, "vcpufreq", 0, 20);
        host.put(&format!("/run/vcpufreq/{VMM}.json"), &record);
        let before = host.snapshot();
        let tried = try_apply(&host);
        assert_eq!(tried.is_ok(), free, "{name}: {tried:?}");
        if let Err(error) = tried {
            line(error);
            assert_eq!(host.snapshot(), before, "{name}");
        }
    }
}

#[test]
fn a_vcpu_that_is_only_pinned_was_changed_by_nobody() {
    let host = FakeKernel::four();
    try_apply(&host).unwrap();
    host.thread(VMM as usize, "vcpufreq", 0, 20);
    host.put(&format!("/run/vcpufreq/{VMM}.json"), &record("", "3"));
    try_restore(&host).unwrap();
    assert_eq!(host.read(&bound_file()).unwrap(), "0");
}

#[test]
fn what_a_guest_brought_back_after_the_plan_is_what_was() {
    let host = FakeKernel::four();
    let old = start_guest(&host);
    let plan = planned_bound(&host);
    end_guest(&host, &old);
    let before = host.snapshot();
    let error = applied(&host, &plan).unwrap_err();
    assert!(matches!(&error, ApplyError::Moved { .. }), "{error}");
    let said = line(error);
    assert!(said.contains("was 50") && said.contains("is 0"), "{said}");
    let mut after = host.snapshot();
    after.remove("/run/vcpufreq");
    let mut before = before;
    before.remove("/run/vcpufreq");
    assert_eq!(after, before);
}

#[test]
fn a_folder_that_is_there_already_is_not_taken() {
    let host = FakeKernel::four();
    let dir = format!("{CGROUP}/vcpufreq-rt.plc");
    host.put(&format!("{dir}/cpuset.cpus.exclusive"), "");
    host.put(&format!("{dir}/cgroup.subtree_control"), "");
    let before = host.snapshot();
    let tried = applied(&host, &planned(&host, "settings.cpuset = 'isolated'"));
    let said = line(tried.unwrap_err());
    assert!(said.contains(&dir) && said.contains("rmdir"), "{said}");
    assert_eq!(host.snapshot(), before);
}

#[test]
fn a_record_that_somebody_makes_is_left_alone() {
    let host = FakeKernel::four();
    let unfinished = "/run/vcpufreq-rt/rt.json.new";
    host.put(unfinished, "{");
    let maker = File::open(host.real(unfinished)).unwrap();
    let maker = Flock::lock(maker, FlockArg::LockExclusive).unwrap();
    let tried = try_restore(&host);
    assert!(matches!(tried, Err(RestoreError::Busy)), "{tried:?}");
    assert!(host.snapshot().contains_key(unfinished));
    drop(maker);
    assert_eq!(try_restore(&host).unwrap(), Restored::Nothing);
    assert!(!host.snapshot().contains_key("/run/vcpufreq-rt"));
}

#[test]
fn an_earlier_boots_record_is_closed_by_one() {
    let host = FakeKernel::four();
    try_apply(&host).unwrap();
    host.put("/proc/sys/kernel/random/boot_id", "boot-2");
    let held = host.hold_record();
    let tried = try_apply(&host);
    assert!(matches!(tried, Err(ApplyError::Busy)), "{tried:?}");
    drop(held);
    // It shows the earlier boot's values here, which a reboot would have reset.
    host.put(&bound_file(), "0");
    assert!(try_apply(&host).unwrap().closed_earlier_boot);
    try_restore(&host).unwrap();
    assert_eq!(host.read(&bound_file()).unwrap(), "0");
}

#[test]
fn a_starting_guest_and_apply_see_one_another() {
    let host = FakeKernel::four();
    let nothing = InForce::look(&host).unwrap();
    assert!(nothing.record().is_none());
    nothing.check_still(&host).unwrap();
    try_apply(&host).unwrap();
    let begun = nothing.check_still(&host);
    assert!(matches!(begun, Err(InForceError::Begun)), "{begun:?}");

    let in_force = InForce::look(&host).unwrap();
    assert_eq!(in_force.record().unwrap().partition.guests.len(), 1);
    let second = InForce::look(&host).unwrap();
    in_force.check_still(&host).unwrap();
    let tried = try_restore(&host);
    assert!(matches!(tried, Err(RestoreError::Busy)), "{tried:?}");
    drop((in_force, second));

    let at_work = host.hold_record();
    let refused = InForce::look(&host);
    assert!(matches!(refused, Err(InForceError::Busy)), "{refused:?}");
    drop(at_work);
    host.put("/proc/sys/kernel/random/boot_id", "boot-2");
    assert!(InForce::look(&host).unwrap().record().is_none());
}
