// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise: an impossible partition is refused, with the cause in one line.

use vcpufreq_rt::{
    Applied, ApplyError, CpuList, Partition, PartitionGuest, Profile, Restored, RtPlan, apply,
    check, is_ready, plan, restore,
};

use crate::fake::{CPU, FakeKernel};

pub fn guest(name: &str, cpus: &str) -> PartitionGuest {
    let (name, cpus) = (name.to_owned(), cpus.parse().unwrap());
    PartitionGuest { name, cpus }
}

/// One guest, on CPU 3.
pub fn plc(host: &FakeKernel) -> Partition {
    Partition::new(host, vec![guest("plc", "3")], None, None).unwrap()
}

/// What a profile of this text plans for it.
pub fn planned(host: &FakeKernel, text: &str) -> (RtPlan, Profile) {
    let profile = Profile::parse("test", text).unwrap();
    (plan(host, &plc(host), &profile), profile)
}

/// Applies a plan of [`planned`].
pub fn applied(host: &FakeKernel, of: &(RtPlan, Profile)) -> Result<Applied, ApplyError> {
    let (plan, profile) = of;
    apply(host, plan, ("test", profile), &mut |_, _, _| {})
}

/// Restores; what is left, with the reason, and what is gone.
pub fn restored(host: &FakeKernel) -> (Vec<(String, String)>, Vec<String>) {
    let restored = restore(host, &mut |_, _, _| {}).unwrap();
    let Restored::Done { left, gone, .. } = restored else {
        panic!("{restored:?}");
    };
    (left, gone)
}

fn refused(guests: &[(&str, &str)], housekeeping: Option<&str>) -> String {
    let host = FakeKernel::four();
    host.put(&format!("{CPU}/online"), "0-2");
    let guests = guests
        .iter()
        .map(|(name, cpus)| guest(name, cpus))
        .collect();
    let housekeeping = housekeeping.map(|text| text.parse().unwrap());
    let error = Partition::new(&host, guests, housekeeping, None).unwrap_err();
    let line = error.to_string();
    assert_eq!(line.lines().count(), 1, "{line}");
    line
}

#[test]
fn what_is_wrong_is_said() {
    for (guests, housekeeping, said) in [
        (&[("a", "0-2")][..], None, "no CPU is left for housekeeping"),
        (&[("a", "1-9")], None, "CPU 4-9 doesn't exist"),
        (&[("a", "1")], Some("0,7"), "CPU 7 doesn't exist"),
        (&[("a", "3")], None, "CPU 3 is offline"),
        (
            &[("a", "1"), ("b", "1-2")],
            None,
            "CPU 1 is wanted by b, and is a's",
        ),
        (&[("a", "1"), ("a", "2")], None, "two guests are called a"),
        (&[("a", "1")], Some("0-1"), "can't be for housekeeping too"),
        (&[("a", "")], None, "no guest has a CPU"),
        (&[], None, "no guest has a CPU"),
        (&[("../x", "1")], None, "is no name"),
    ] {
        let line = refused(guests, housekeeping);
        assert!(line.contains(said), "{said}: {line}");
    }
}

#[test]
fn throttling_off_without_housekeeping_is_said_as_such() {
    let host = FakeKernel::four();
    for (text, said) in [
        ("[settings]\nrt-runtime-us = -1", "rt-runtime-us = -1"),
        (
            "[settings]\nfair-server-runtime-ns = 0",
            "fair-server-runtime-ns = 0",
        ),
    ] {
        let profile = Profile::parse("test", text).unwrap();
        let unthrottled = profile.settings.unthrottled();
        let error = Partition::new(&host, vec![guest("a", "0-3")], None, unthrottled);
        let line = error.unwrap_err().to_string();
        assert!(
            line.contains(said) && line.contains("stop this machine"),
            "{line}"
        );
    }
}

#[test]
fn housekeeping_is_what_guests_leave() {
    let host = FakeKernel::four();
    let partition = Partition::new(&host, vec![guest("a", "3")], None, None).unwrap();
    assert_eq!(partition.housekeeping, "0-2".parse::<CpuList>().unwrap());
}

#[test]
fn a_cpu_that_an_earlier_apply_gave_away_is_refused() {
    let host = FakeKernel::four();
    let profile = Profile::shipped("kvm-rt").unwrap();
    let of = |name, cpus| {
        let partition = Partition::new(&host, vec![guest(name, cpus)], None, None).unwrap();
        let plan = plan(&host, &partition, &profile);
        apply(&host, &plan, ("kvm-rt", &profile), &mut |_, _, _| {})
    };
    of("a", "3").unwrap();
    let before = host.snapshot();
    let taken = of("b", "2-3").unwrap_err();
    assert!(
        matches!(&taken, ApplyError::Partition(why) if why.to_string().contains("is a's already")),
        "{taken}"
    );
    let in_force = of("b", "2").unwrap_err();
    assert!(in_force.to_string().contains("restore first"), "{in_force}");
    assert_eq!(host.snapshot(), before);
}

#[test]
fn the_servers_of_all_cpus_go_and_come_back_without_a_guest() {
    let host = FakeKernel::four();
    host.put("/proc/version", "Linux version 7.3.4 #1 SMP PREEMPT");
    let before = host.snapshot();
    let profile = Profile::shipped("no-fair-server").unwrap();
    let partition = Partition::without_guests(&host).unwrap();
    let planned = plan(&host, &partition, &profile);
    let names: Vec<String> = planned
        .changes()
        .map(|(_, change)| change.target.name())
        .collect();
    let files = ["fair_server", "ext_server"].map(|server| {
        (0..4).map(move |cpu| format!("/sys/kernel/debug/sched/{server}/cpu{cpu}/runtime"))
    });
    let files: Vec<String> = files.into_iter().flatten().collect();
    assert_eq!(names, files);
    let apply = |plan| apply(&host, plan, ("no-fair-server", &profile), &mut |_, _, _| {});
    assert_eq!(apply(&planned).unwrap().made, 8);
    for file in &files {
        assert_eq!(host.snapshot()[file], "0");
    }
    // Neither a PREEMPT_RT kernel nor a command line is missing: there is no real-time guest.
    let now = plan(&host, &partition, &profile);
    assert!(is_ready(&now, &check(&host, &now, &profile)));
    let again = apply(&now).unwrap_err().to_string();
    assert!(
        again.contains("no-fair-server") && again.contains("restore first"),
        "{again}"
    );
    restore(&host, &mut |_, _, _| {}).unwrap();
    let mut after = host.snapshot();
    after.retain(|path, _| before.contains_key(path));
    assert_eq!(after, before);
}
