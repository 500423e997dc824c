// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What vCPUs do at the same time in the library: its own files, compiled with loom's locks and
//! atomics, which are run in each order of their steps, with each value that a load may see.
//! `tests/orders.rs` has a test for each function.
#![forbid(unsafe_code)]

// These are a library's, of which the models use a part.
#[allow(dead_code)]
#[path = "../../../vmm-device/device/src/domain.rs"]
mod domain;
mod ioeventfd;
#[allow(dead_code)]
#[path = "../../../vmm-device/device/src/limit.rs"]
mod limit;
#[allow(dead_code)]
#[path = "../../../vmm-device/device/src/device/residency.rs"]
mod residency;
#[path = "../../../vmm-device/device/src/sample_order.rs"]
mod sample_order;
mod config {
    pub use vcpufreq_device::DeviceConfig;
}
mod policy {
    pub use vcpufreq_device::Clamp;
}
mod regs {
    pub use vcpufreq_device::{CEILING_SHIFT, MAX_VCPUS, SET_PERF_KHZ};
}
mod sync;
mod table {
    pub use vcpufreq_device::PerfTable;
}
mod units {
    pub use vcpufreq_device::{DomainId, Khz, VcpuId};
}

use std::num::NonZeroU32;
use std::sync::atomic::AtomicI32;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use loom::thread;

use domain::{Domain, Request};
use ioeventfd::WritesScene;
use limit::{Bucket, Limit, RateLimit};
use residency::Residency;
use sample_order::SampleOrder;
use units::{DomainId, VcpuId};

/// A domain, and its host.
struct DomainScene {
    domain: Domain,
    /// What was put into force last, kHz.
    in_force: AtomicU32,
    /// A thread calls the host.
    busy: AtomicBool,
    /// Requests less those that were put into force or overtaken. Not loom's: no order of its steps
    /// matters.
    unanswered: AtomicI32,
}

impl DomainScene {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            domain: Domain::new(DomainId(0)),
            in_force: AtomicU32::new(0),
            busy: AtomicBool::new(false),
            unanswered: AtomicI32::new(0),
        })
    }

    fn publish(&self, value: u32) {
        let request = Request::written(VcpuId(0), None, value);
        let published = self.domain.publish(request, 0);
        self.unanswered
            .fetch_add(i32::from(published.superseded.is_none()), Relaxed);
    }

    fn apply(&self) {
        self.apply_and(|| {});
    }

    /// With something that happens in each host call.
    fn apply_and(&self, mut meanwhile: impl FnMut()) {
        self.domain.apply_pending(|request, in_force| {
            assert!(!self.busy.swap(true, Relaxed), "two threads call the host");
            self.in_force.store(value_of(request), Relaxed);
            self.unanswered.fetch_sub(1, Relaxed);
            meanwhile();
            self.busy.store(false, Relaxed);
            in_force
        });
    }

    fn write(&self, value: u32) {
        self.publish(value);
        self.apply();
    }

    fn write_ceiling(&self, khz: u32, ms: u32) {
        self.write(khz | (ms << regs::CEILING_SHIFT));
    }

    /// Ends a ceiling, if there is one.
    fn lift(&self) {
        let Some(until) = self.domain.ceiling_until() else {
            return;
        };
        if let Ok(lifted) = self.domain.lift_ceiling(until) {
            let lifted = i32::from(lifted.is_some());
            self.unanswered.fetch_add(lifted, Relaxed);
            self.apply();
        }
    }

    fn check(&self) {
        assert_eq!(
            self.unanswered.load(Relaxed),
            0,
            "requests without an outcome"
        );
        let newest = self.domain.newest().map(value_of);
        assert_eq!(
            newest,
            Some(self.in_force.load(Relaxed)),
            "the last value is in force"
        );
    }
}

/// As it is written to set_perf.
fn value_of(request: Request) -> u32 {
    request.khz.0 | (request.ceiling_ms << regs::CEILING_SHIFT)
}

/// As loom's own, with at most so many times that a thread has to wait in the middle of a step.
fn model(preemptions: usize, run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(run);
}

/// Two vCPUs write to a domain, twice each.
pub fn the_last_of_two_writers_is_in_force() {
    model(3, || {
        let scene = DomainScene::new();
        let other = scene.clone();
        let other = thread::spawn(move || [1, 2].into_iter().for_each(|khz| other.write(khz)));
        [3, 4].into_iter().for_each(|khz| scene.write(khz));
        other.join().expect("no panic");
        scene.check();
    });
}

/// A thread makes its last round, because requests came during each host call of its own before. One
/// more comes meanwhile.
pub fn a_request_in_the_last_round_is_in_force() {
    model(3, || {
        let scene = DomainScene::new();
        let other = scene.clone();
        let other = thread::spawn(move || other.write(10));
        let mut calls = 0;
        scene.publish(1);
        scene.apply_and(|| {
            calls += 1;
            // As of a writer that has found the lock taken, and has returned.
            if calls < domain::MAX_HOST_CALLS {
                scene.publish(1 + calls);
            }
        });
        other.join().expect("no panic");
        scene.check();
    });
}

/// Three vCPUs write to a domain once each.
pub fn the_last_of_three_writers_is_in_force() {
    model(2, || {
        let scene = DomainScene::new();
        let writers = [1, 2].map(|khz| {
            let scene = scene.clone();
            thread::spawn(move || scene.write(khz))
        });
        scene.write(3);
        writers
            .into_iter()
            .for_each(|writer| writer.join().expect("no panic"));
        scene.check();
    });
}

/// Two vCPUs write ceilings of a domain, while the maintenance thread ends one.
pub fn no_ceiling_is_left() {
    model(2, || {
        let scene = DomainScene::new();
        let (other, maintenance) = (scene.clone(), scene.clone());
        let other = thread::spawn(move || other.write_ceiling(1, 1));
        let maintenance = thread::spawn(move || maintenance.lift());
        scene.write_ceiling(2, 2);
        other.join().expect("no panic");
        maintenance.join().expect("no panic");
        // A first ceiling wakes it.
        scene.lift();
        scene.check();
        let left = scene.in_force.load(Relaxed) >> regs::CEILING_SHIFT;
        assert_eq!(left, 0, "ms of a ceiling that nothing ends");
    });
}

/// A write waits for a token, while another one has one and the maintenance thread looks.
pub fn a_request_that_waits_is_not_forgotten() {
    model(3, || {
        let scene = DomainScene::new();
        let (limited, maintenance) = (scene.clone(), scene.clone());
        let limited = thread::spawn(move || {
            limited.publish(1);
            limited.domain.defer();
        });
        let look = |scene: &DomainScene| {
            if scene.domain.take_deferred().is_some() {
                scene.apply();
            }
        };
        let maintenance = thread::spawn(move || look(&maintenance));
        scene.write(2);
        limited.join().expect("no panic");
        maintenance.join().expect("no panic");
        // It is called again after each request that waits.
        look(&scene);
        scene.check();
    });
}

/// Two vCPUs want the VM's only token: one gets it, and the other one has lost none of its own.
pub fn a_token_is_given_once() {
    model(3, || {
        let limit = RateLimit {
            per_second: NonZeroU32::MIN,
            burst: NonZeroU32::MIN,
        };
        let limit = Arc::new((Limit::new(limit, 1), [Bucket::default(), Bucket::default()]));
        let other = limit.clone();
        let other = thread::spawn(move || other.0.take(&other.1[1], 0).is_ok());
        let own = limit.0.take(&limit.1[0], 0).is_ok();
        let other = other.join().expect("no panic");
        assert_ne!(own, other, "one token");
        let pace = limit::Pace {
            token_ns: 1,
            slack_ns: 0,
        };
        let lost = &limit.1[usize::from(own)];
        assert_eq!(lost.take(pace, 0), Ok(()), "the VM's refusal costs nothing");
    });
}

/// Two requests of one vCPU, by two threads that write for it, when it has one token.
pub fn a_bucket_loses_no_charge() {
    model(3, || {
        let pace = limit::Pace {
            token_ns: 10,
            slack_ns: 10,
        };
        let bucket = Arc::new(Bucket::default());
        let takers = [(); 2].map(|()| {
            let bucket = bucket.clone();
            thread::spawn(move || bucket.take(pace, 0).is_ok())
        });
        let own = bucket.take(pace, 0).is_ok();
        let taken = takers.map(|taker| taker.join().expect("no panic"));
        let granted = taken.into_iter().chain([own]).filter(|took| *took).count();
        assert_eq!(granted, 2, "of three, when there are two tokens");
    });
}

/// A thread samples a vCPU's frequency while it changes, another one after it has changed.
pub fn a_page_has_the_frequency_of_the_latest_look() {
    model(3, || {
        let host = Arc::new((SampleOrder::default(), AtomicU32::new(1), AtomicU32::new(1)));
        let sample = |host: &(SampleOrder, AtomicU32, AtomicU32)| {
            let (order, khz, page) = host;
            let number = order.begin();
            let found = khz.load(Relaxed);
            order.end(number, || page.store(found, Relaxed));
        };
        let other = host.clone();
        let other = thread::spawn(move || sample(&other));
        host.1.store(2, Relaxed);
        sample(&host);
        other.join().expect("no panic");
        assert_eq!(host.2.load(Relaxed), 2, "kHz in the page");
    });
}

/// A vCPU whose write exits leaves writes of its domain unfinished, while the worker goes on with
/// what was left.
pub fn a_write_left_unfinished_is_carried_out() {
    model(3, || {
        let scene = Arc::new(WritesScene::new());
        let (worker, exits) = (scene.clone(), scene.clone());
        let worker = thread::spawn(move || worker.turn());
        let exits = thread::spawn(move || exits.exit());
        [1, 2].into_iter().for_each(|khz| scene.signal(khz));
        worker.join().expect("no panic");
        exits.join().expect("no panic");
        scene.check();
    });
}

/// Two threads put a request of another table entry into force each.
pub fn an_interval_is_closed_once() {
    model(3, || {
        let residency = Arc::new(Residency::new(2, 0));
        let other = residency.clone();
        let other = thread::spawn(move || other.change(2, 20));
        residency.change(1, 10);
        other.join().expect("no panic");
        let us = residency.at(30);
        // The first entry's before the second's, or after it.
        let right = [[10, 10, 10], [20, 10, 0]];
        assert!(right.iter().any(|right| us == right), "{us:?}");
    });
}
