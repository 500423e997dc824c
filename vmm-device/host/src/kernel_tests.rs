// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of the cgroup actuator on the running kernel. The groups can be made and removed. The
//! scheduler uses the clamp for a thread, for real-time threads too. Needs root and
//! `VCPUFREQ_TEST_HOST=1`, since it makes groups on the machine it runs on.

#![forbid(unsafe_code)]

use std::{fs, io, thread};

use vcpufreq_device::{Actuator, Clamp, DomainId, Util, VcpuId};

use super::*;

const DOMAINS: [DomainId; 2] = [DomainId(3), DomainId(9)];

/// A place on this machine, or the reason why there is none.
fn place() -> Option<Placement> {
    if std::env::var_os("VCPUFREQ_TEST_HOST").is_none() {
        println!("SKIP: VCPUFREQ_TEST_HOST=1 lets this test make cgroups on this machine");
        return None;
    }
    let place = Placement::find(&HostRoot::default(), None);
    place.map_err(|error| println!("SKIP: {error}")).ok()
}

/// The clamp that the scheduler uses for `tid`.
fn clamp_of(tid: Tid) -> Option<(u32, u32)> {
    let text = fs::read_to_string(format!("/proc/self/task/{tid}/sched")).ok()?;
    effective_clamp(&text)
}

/// Makes `tid` SCHED_FIFO, which starts with the maximum for its minimum.
fn become_fifo(tid: Tid) -> io::Result<()> {
    let attr = SchedAttr {
        policy: SchedAttr::FIFO,
        priority: 10,
        ..SchedAttr::default()
    };
    attr.set(tid)
}

fn check_clamps(actuator: &CgroupActuator, tid: Tid, kind: &str) {
    if clamp_of(tid).is_none() {
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
        let applied = actuator.apply(DomainId(9), Clamp { min, max });
        assert_eq!(applied, Ok(()), "{kind}");
        let clamp = (min.get().into(), max.get().into());
        assert_eq!(clamp_of(tid), Some(clamp), "{kind}");
    }
}

#[test]
fn the_schedulers_clamp_is_the_demand_and_nothing_stays() {
    let Some(place) = place() else { return };
    let made = CgroupActuator::create(&KernelTree, &place, &DOMAINS);
    let actuator = made.unwrap_or_else(|error| panic!("{error}"));
    let other = on_a_thread(|tid| {
        actuator.register_thread(VcpuId(1), tid).unwrap();
        check_clamps(&actuator, tid, "SCHED_OTHER");
        become_fifo(tid).unwrap();
        check_clamps(&actuator, tid, "SCHED_OTHER that became SCHED_FIFO");
    });
    let fifo = on_a_thread(|tid| {
        become_fifo(tid).unwrap();
        actuator.register_thread(VcpuId(1), tid).unwrap();
        check_clamps(&actuator, tid, "SCHED_FIFO");
    });
    let rest = clamp_of(Tid::current());
    let removed = remove(&KernelTree, actuator.record().unwrap());

    // Only now, so that a failure leaves no groups behind.
    other.and(fifo).unwrap();
    removed.unwrap();
    assert!(rest.is_none_or(|clamp| clamp == (0, 1024)), "{rest:?}");
    assert!(!actuator.record().unwrap().group.exists());
    let home = Placement::find(&HostRoot::default(), None).unwrap();
    assert_eq!(home, place, "process and controller are as they were");
}

fn on_a_thread(test: impl FnOnce(Tid) + Send) -> thread::Result<()> {
    thread::scope(|scope| scope.spawn(|| test(Tid::current())).join())
}
