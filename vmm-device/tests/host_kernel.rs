// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of the cgroup actuator on the running kernel: the groups can be made, the clamp that
//! the scheduler uses for a thread is the demand, for real-time threads too, and all of it goes
//! away. Needs root and `VCPUFREQ_TEST_HOST=1`, since it makes groups on the machine it runs on.
#![cfg(feature = "host")]

use std::fs;
use std::process::Command;
use std::thread;

use vcpufreq_device::host::*;
use vcpufreq_device::*;

const DOMAINS: [DomainId; 2] = [DomainId(3), DomainId(9)];

/// A place on this machine; says why there is none.
fn place() -> Option<Placement> {
    if std::env::var_os("VCPUFREQ_TEST_HOST").is_none() {
        println!("SKIP: VCPUFREQ_TEST_HOST=1 lets this test make cgroups on this machine");
        return None;
    }
    let place = Placement::find(&HostRoot::default());
    place.map_err(|error| println!("SKIP: {error}")).ok()
}

/// The clamp that the scheduler uses for `tid`.
fn effective_clamp(tid: Tid) -> Option<(u16, u16)> {
    let text = fs::read_to_string(format!("/proc/self/task/{tid}/sched")).ok()?;
    let value = |name| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        line.rsplit(' ').next()?.parse().ok()
    };
    Some((
        value("effective uclamp.min")?,
        value("effective uclamp.max")?,
    ))
}

/// Makes the calling thread SCHED_FIFO, if there is a program that can.
fn become_fifo(tid: Tid) -> bool {
    let tid = tid.to_string();
    let chrt = Command::new("chrt").args(["-f", "-p", "10", &tid]).status();
    chrt.is_ok_and(|status| status.success())
}

fn check_clamps(actuator: &CgroupActuator, tid: Tid, kind: &str) {
    if effective_clamp(tid).is_none() {
        return println!("SKIP: this kernel doesn't show effective clamps in /proc/<pid>/sched");
    }
    for (min, max) in [
        (512, 1024),
        (1024, 1024),
        (329, 329),
        (700, 700),
        (1, 1),
        (0, 1024),
    ] {
        let util = |value| Util::new(value).expect("on the scale");
        let (min, max) = (util(min), util(max));
        let applied = actuator.apply(DomainId(9), Demand { min, max });
        assert_eq!(applied, Ok(()), "{kind}");
        assert_eq!(effective_clamp(tid), Some((min.get(), max.get())), "{kind}");
    }
}

#[test]
fn the_schedulers_clamp_is_the_demand_and_nothing_stays() {
    let Some(place) = place() else { return };
    let made = CgroupActuator::create(&KernelTree, &place, &DOMAINS);
    let actuator = made.unwrap_or_else(|error| panic!("{error}"));
    let checked = thread::scope(|scope| {
        scope
            .spawn(|| {
                let tid = Tid::current();
                actuator.register_thread(VcpuId(1), tid).unwrap();
                check_clamps(&actuator, tid, "SCHED_OTHER");
                if become_fifo(tid) {
                    check_clamps(&actuator, tid, "SCHED_FIFO");
                } else {
                    println!("SKIP: no chrt to make a SCHED_FIFO thread with");
                }
            })
            .join()
    });
    let own = effective_clamp(Tid::current());
    let removed = remove(&KernelTree, actuator.record());
    checked.unwrap();
    removed.unwrap();
    assert!(
        own.is_none_or(|clamp| clamp == (0, 1024)),
        "threads of no vCPU: {own:?}"
    );
    assert!(!actuator.record().group.exists());
    let home = Placement::find(&HostRoot::default()).unwrap();
    assert_eq!(
        home, place,
        "the process is back, and the controller as it was"
    );
}
