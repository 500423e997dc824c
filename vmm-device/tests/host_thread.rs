// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of the thread actuator, on threads of this process. What needs a kernel with uclamp
//! prints SKIP on one without.
#![cfg(feature = "host")]

use std::fs;
use std::sync::mpsc;
use std::thread;

use vcpufreq_device::host::{SchedAttr, ThreadActuator, Tid, uclamp_available};
use vcpufreq_device::*;

const DOMAIN: DomainId = DomainId(5);

fn clamp(min: u16, max: u16) -> Clamp {
    let util = |value| Util::new(value).expect("on the scale");
    Clamp {
        min: util(min),
        max: util(max),
    }
}

/// Runs `test` while a thread that isn't the caller waits.
fn with_thread(test: impl FnOnce(Tid)) {
    let (tell, told) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let thread = thread::spawn(move || {
        tell.send(Tid::current()).expect("the test waits");
        // Ends with an error when the test has dropped its end.
        let _ = ended.recv();
    });
    test(told.recv().expect("the thread tells"));
    drop(end);
    thread.join().expect("the thread ends");
}

fn clamp_of(attr: &SchedAttr) -> Clamp {
    let util = |value: u32| Util::saturating(value.into());
    Clamp {
        min: util(attr.util_min),
        max: util(attr.util_max),
    }
}

/// Whether the kernel clamps; prints SKIP if it doesn't.
fn has_uclamp() -> bool {
    match uclamp_available() {
        Ok(()) => true,
        Err(error) => {
            println!("SKIP: this kernel has no uclamp: {error}");
            false
        }
    }
}

#[test]
fn the_clamp_that_the_kernel_reports_is_the_demand() {
    if !has_uclamp() {
        return;
    }
    with_thread(|tid| {
        let actuator = ThreadActuator::new(&[DOMAIN]);
        actuator.register_thread(VcpuId(0), tid).unwrap();
        for clamp in [
            clamp(0, 0),
            clamp(329, 329),
            clamp(512, 1024),
            clamp(1024, 1024),
        ] {
            actuator.apply(DOMAIN, clamp).unwrap();
            let read = SchedAttr::of(tid).unwrap();
            assert_eq!(clamp_of(&read), clamp);
            assert_ne!(read.flags & SchedAttr::RESET_ON_FORK, 0, "kept by requests");
        }
        let own = SchedAttr::of(Tid::current()).unwrap();
        assert_eq!(clamp_of(&own), Clamp::NONE, "not the caller's");
    });
}

#[test]
fn children_do_not_inherit_a_clamp() {
    if !has_uclamp() {
        return;
    }
    let actuator = ThreadActuator::new(&[DOMAIN]);
    let parent = thread::spawn(move || {
        actuator.register_thread(VcpuId(0), Tid::current()).unwrap();
        actuator.apply(DOMAIN, clamp(700, 800)).unwrap();
        let child = thread::spawn(|| SchedAttr::of(Tid::current()).unwrap());
        (
            SchedAttr::of(Tid::current()).unwrap(),
            child.join().unwrap(),
        )
    });
    let (own, child) = parent.join().unwrap();
    assert_eq!(clamp_of(&own), clamp(700, 800));
    assert_eq!(clamp_of(&child), Clamp::NONE);
}

#[test]
fn all_threads_of_a_domain_and_no_others_are_clamped() {
    if !has_uclamp() {
        return;
    }
    with_thread(|first| {
        with_thread(|second| {
            with_thread(|other| {
                let actuator = ThreadActuator::new(&[DOMAIN, DomainId(6), DOMAIN]);
                for (vcpu, tid) in [(0, first), (1, other), (2, second)] {
                    actuator.register_thread(VcpuId(vcpu), tid).unwrap();
                }
                actuator.apply(DOMAIN, clamp(100, 200)).unwrap();
                let clamps =
                    [first, second, other].map(|tid| clamp_of(&SchedAttr::of(tid).unwrap()));
                assert_eq!(clamps, [clamp(100, 200), clamp(100, 200), Clamp::NONE]);
            });
        });
    });
}

#[test]
fn a_thread_that_ended_is_refused() {
    let tid = thread::spawn(Tid::current).join().unwrap();
    // A join returns a little before the kernel has let go of the thread.
    while fs::exists(format!("/proc/self/task/{tid}")).unwrap() {
        thread::yield_now();
    }
    let actuator = ThreadActuator::new(&[DOMAIN]);
    assert!(actuator.register_thread(VcpuId(0), tid).is_err());
    let refused = actuator.apply(DOMAIN, clamp(1, 2));
    let (domain, call, errno) = (DOMAIN, "sched_setattr", 3);
    assert_eq!(
        refused,
        Err(ActuateError::Refused {
            domain,
            call,
            errno
        })
    );
}

#[test]
fn a_kernel_without_uclamp_refuses_and_says_so() {
    if uclamp_available().is_ok() {
        return println!("SKIP: this kernel has uclamp");
    }
    let actuator = ThreadActuator::new(&[DOMAIN]);
    assert!(actuator.register_thread(VcpuId(0), Tid::current()).is_err());
    let refused = actuator.apply(DOMAIN, clamp(1, 2));
    assert!(
        matches!(refused, Err(ActuateError::Refused { .. })),
        "{refused:?}"
    );
}

#[test]
fn without_a_thread_there_is_nothing_to_clamp() {
    let actuator = ThreadActuator::new(&[DOMAIN]);
    for domain in [DOMAIN, DomainId(1)] {
        let answer = actuator.apply(domain, clamp(1, 2));
        assert_eq!(answer, Err(ActuateError::NoThread { domain }));
    }
    let missing = actuator.register_thread(VcpuId(1), Tid::current());
    assert_eq!(missing.unwrap_err().kind(), std::io::ErrorKind::NotFound);
}
