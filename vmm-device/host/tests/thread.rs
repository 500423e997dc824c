// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of the thread actuator, on threads of this process. What needs a kernel with uclamp
//! prints SKIP on one without.
use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::process::{self, Child, Command};
use std::sync::mpsc;
use std::thread;

use vcpufreq_device::*;
use vcpufreq_host::{HostRoot, HostThread, SchedAttr, ThreadActuator, Tid, uclamp_available};

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
            let read = SchedAttr::read(tid).unwrap();
            assert_eq!(clamp_of(&read), clamp);
            assert_ne!(read.flags & SchedAttr::RESET_ON_FORK, 0, "kept by requests");
        }
        let own = SchedAttr::read(Tid::current()).unwrap();
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
        let child = thread::spawn(|| SchedAttr::read(Tid::current()).unwrap());
        (
            SchedAttr::read(Tid::current()).unwrap(),
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
                    [first, second, other].map(|tid| clamp_of(&SchedAttr::read(tid).unwrap()));
                assert_eq!(clamps, [clamp(100, 200), clamp(100, 200), Clamp::NONE]);
            });
        });
    });
}

/// A join returns a little before the kernel has let go of the thread.
fn until_gone(tid: Tid) {
    while fs::exists(format!("/proc/self/task/{tid}")).expect("procfs") {
        thread::yield_now();
    }
}

#[test]
fn a_thread_that_ended_is_refused() {
    let tid = thread::spawn(Tid::current).join().unwrap();
    until_gone(tid);
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

const NUMBER_TAKEN: &str = "another_thread_with_the_number_of_an_ended_one_is_left_alone";
/// Set in the process that runs that test with process numbers of its own.
const OWN_NUMBERS: &str = "VCPUFREQ_OWN_NUMBERS";

#[test]
fn another_thread_with_the_number_of_an_ended_one_is_left_alone() {
    if env::var_os(OWN_NUMBERS).is_some() {
        return take_the_number();
    }
    let is_root = fs::metadata("/proc/self").unwrap().uid() == 0;
    let user: &[_] = if is_root {
        &[]
    } else {
        &["--user", "--map-root-user"]
    };
    let within = || {
        let mut unshare = Command::new("unshare");
        unshare.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
        unshare.args(user);
        unshare
    };
    let next = within().args(["test", "-e", LAST_NUMBER]).status();
    if !next.is_ok_and(|status| status.success()) {
        return println!("SKIP: no namespace here in which the next process number can be chosen");
    }
    let test = within()
        .arg(env::current_exe().unwrap())
        .args(["--exact", NUMBER_TAKEN, "--nocapture"])
        .env(OWN_NUMBERS, "1")
        .output()
        .unwrap();
    let said = [test.stdout, test.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(test.status.success(), "{}", said.concat());
    assert!(said[0].contains("1 passed"), "{}", said.concat());
}

/// The number before the next that the kernel gives out.
const LAST_NUMBER: &str = "/proc/sys/kernel/ns_last_pid";

/// A process that has the number of a thread that has ended. The kernel frees the number a little after
/// the thread has gone.
fn process_with(tid: Tid) -> Child {
    for _ in 0..1000 {
        fs::write(LAST_NUMBER, (tid.get() - 1).to_string()).expect("a number of choice");
        let mut other = Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("sleep starts");
        if i32::try_from(other.id()) == Ok(tid.get()) {
            return other;
        }
        other.kill().expect("it sleeps");
        other.wait().expect("it has ended");
    }
    panic!("no process gets the number {tid}");
}

/// A thread of this process, which stands for a VMM, ends, and another process gets its number.
fn take_the_number() {
    let host = HostRoot::default();
    let actuator = ThreadActuator::new(&[DOMAIN]).for_process(&host, process::id());
    let mut registered = None;
    with_thread(|tid| {
        // Without uclamp it's refused, and registered all the same.
        let _ = actuator.register_thread(VcpuId(0), tid);
        let thread = HostThread::of_process(&host, process::id(), tid).expect("a thread");
        assert_eq!(thread.tid().expect("it has not ended"), tid);
        registered = Some((tid, thread));
    });
    let (tid, thread) = registered.expect("a thread");
    until_gone(tid);
    let mut other = process_with(tid);
    let before = SchedAttr::read(tid);
    let answers = (
        actuator.apply(DOMAIN, clamp(329, 329)),
        thread.tid().map_err(|error| error.raw_os_error()),
        actuator
            .register_thread(VcpuId(0), tid)
            .map_err(|error| error.kind()),
    );
    let after = SchedAttr::read(tid);
    other.kill().expect("it sleeps");
    other.wait().expect("it has ended");
    let (domain, call, errno) = (DOMAIN, "sched_setattr", 3);
    let refused = ActuateError::Refused {
        domain,
        call,
        errno,
    };
    let absent = io::ErrorKind::NotFound;
    assert_eq!(answers, (Err(refused), Err(Some(errno)), Err(absent)));
    let attributes = [before, after].map(|attr| attr.expect("of the process"));
    assert_eq!(attributes[0], attributes[1]);
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
