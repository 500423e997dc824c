// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises when vCPUs write at the same time. The last value written is the last one put into
//! force. For a domain, one thread at a time calls the host. A writer doesn't wait for another
//! one's host call. A flood by one vCPU doesn't hold up another one.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Barrier, Mutex, mpsc};
use std::thread::{self, ThreadId};
use std::time::Duration;

use vcpufreq_device::fakes::FixedSource;
use vcpufreq_device::*;

fn device<A: Actuator>(vcpus: usize, actuator: A) -> Device<A, FixedSource, NoEvents> {
    let spec = VcpuSpec {
        table: PerfTable::try_from(vec![Khz(1024)]).expect("a sound table"),
        capacity: Util::MAX,
        domain: DomainId(0),
    };
    let config = DeviceConfig {
        mode: ClampMode::Exact,
        ..DeviceConfig::new(vec![spec; vcpus])
    };
    Device::new(config, actuator, FixedSource::default(), NoEvents).expect("a sound device")
}

/// Remembers the last clamp, and whether calls ever overlapped or repeated one.
#[derive(Default)]
struct Host {
    last: AtomicU32,
    busy: AtomicBool,
    overlapped: AtomicBool,
    repeated: AtomicBool,
}

impl Actuator for Host {
    fn apply(&self, _domain: DomainId, clamp: Clamp) -> Result<(), ActuateError> {
        if self.busy.swap(true, SeqCst) {
            self.overlapped.store(true, SeqCst);
        }
        let value = u32::from(clamp.min.get());
        if self.last.swap(value, SeqCst) == value {
            self.repeated.store(true, SeqCst);
        }
        self.busy.store(false, SeqCst);
        Ok(())
    }

    fn serves_any_vcpu(&self) -> bool {
        false
    }
}

#[test]
fn the_last_value_written_is_in_force_in_the_end() {
    const ROUNDS: u32 = 20_000;
    const MEMBERS: u16 = 3;
    let host = Arc::new(Host::default());
    let device = device(MEMBERS.into(), Arc::clone(&host));
    let barrier = Barrier::new(MEMBERS.into());
    let lost = AtomicU32::new(0);
    thread::scope(|scope| {
        for vcpu in 0..MEMBERS {
            let (device, barrier, host, lost) = (&device, &barrier, &host, &lost);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    barrier.wait();
                    let value = 1 + (round * u32::from(MEMBERS) + u32::from(vcpu)) % 1023;
                    device.write(VcpuId(vcpu), WriteReg::SetPerf, value);
                    // Everybody has returned: whatever was last must be in force now.
                    barrier.wait();
                    let newest = device.save().requests[0].khz;
                    if vcpu == 0 && host.last.load(SeqCst) != newest {
                        // Not a panic: the others wait for this thread.
                        lost.fetch_add(1, SeqCst);
                    }
                }
            });
        }
    });
    assert_eq!(
        lost.into_inner(),
        0,
        "rounds that ended with an older value"
    );
    assert!(!host.overlapped.load(SeqCst), "one host call at a time");
    assert!(
        !host.repeated.load(SeqCst),
        "never what is in force already"
    );
    let counted = |vcpu| {
        let c = device.counters(VcpuId(vcpu)).unwrap();
        assert_eq!(c.requests, c.applied + c.unchanged + c.superseded);
        c.requests
    };
    let requests: u64 = (0..MEMBERS).map(counted).sum();
    assert_eq!(requests, u64::from(ROUNDS) * u64::from(MEMBERS));
}

#[test]
fn floods_from_all_members_end_with_the_newest_value() {
    for run in 0..200u32 {
        let host = Arc::new(Host::default());
        let device = device(2, Arc::clone(&host));
        thread::scope(|scope| {
            for vcpu in [0, 1] {
                let device = &device;
                scope.spawn(move || {
                    for i in 0..200 + run {
                        let value = 1 + (i * 2 + u32::from(vcpu)) % 1023;
                        device.write(VcpuId(vcpu), WriteReg::SetPerf, value);
                    }
                });
            }
        });
        assert_eq!(
            host.last.load(SeqCst),
            device.save().requests[0].khz,
            "run {run}"
        );
        assert!(!host.overlapped.load(SeqCst));
    }
}

/// Reports when a call begins and on which thread, and ends it on a signal.
struct Gate {
    begun: mpsc::SyncSender<(u16, ThreadId)>,
    go_on: Mutex<mpsc::Receiver<()>>,
}

impl Gate {
    fn new() -> (Self, mpsc::Receiver<(u16, ThreadId)>, mpsc::Sender<()>) {
        let (begun, calls) = mpsc::sync_channel(0);
        let (go, go_on) = mpsc::channel();
        let go_on = Mutex::new(go_on);
        (Self { begun, go_on }, calls, go)
    }
}

impl Actuator for Gate {
    fn apply(&self, _domain: DomainId, clamp: Clamp) -> Result<(), ActuateError> {
        let told = self.begun.send((clamp.min.get(), thread::current().id()));
        told.expect("the test waits");
        let go_on = self.go_on.lock().expect("no test panics");
        go_on.recv().expect("the test tells");
        Ok(())
    }

    fn serves_any_vcpu(&self) -> bool {
        false
    }
}

#[test]
fn a_writer_does_not_wait_for_anothers_host_call() {
    let (gate, calls, go) = Gate::new();
    let device = device(2, gate);
    thread::scope(|scope| {
        scope.spawn(|| device.write(VcpuId(0), WriteReg::SetPerf, 100));
        assert_eq!(calls.recv().unwrap().0, 100);
        // vCPU 0 is in its host call. These return, or the test hangs.
        device.write(VcpuId(1), WriteReg::SetPerf, 200);
        device.write(VcpuId(1), WriteReg::SetPerf, 300);
        go.send(()).unwrap();
        assert_eq!(
            calls.recv().unwrap().0,
            300,
            "vCPU 0 takes the newest along"
        );
        go.send(()).unwrap();
    });
    let counters = device.counters(VcpuId(1)).unwrap();
    assert_eq!((counters.applied, counters.superseded), (1, 1));
}

#[test]
fn a_flood_does_not_keep_another_vcpu_and_loses_nothing() {
    let (gate, calls, go) = Gate::new();
    let device = device(2, gate);
    let (ids, seen) = thread::scope(|scope| {
        let victim = scope.spawn(|| device.write(VcpuId(0), WriteReg::SetPerf, 100));
        let mut seen = vec![calls.recv().unwrap()];
        for value in [200, 300, 400] {
            device.write(VcpuId(1), WriteReg::SetPerf, value);
            go.send(()).unwrap();
            seen.push(calls.recv().unwrap());
        }
        // The fourth call is the last that vCPU 0 makes: this write has to make its own.
        let (tell, stat) = mpsc::channel();
        let device = &device;
        let flood = scope.spawn(move || {
            let own = fs::read_link("/proc/thread-self").unwrap();
            tell.send(Path::new("/proc").join(own).join("stat"))
                .unwrap();
            device.write(VcpuId(1), WriteReg::SetPerf, 500);
        });
        let stat = stat.recv().unwrap();
        // It has published its request, and waits for the call to end; or it has returned, wrongly.
        let sleeps = || fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") S "));
        while device.save().requests[0].khz != 500 || !sleeps() && !flood.is_finished() {
            thread::yield_now();
        }
        go.send(()).unwrap();
        // A hang, if there is none.
        let fifth = calls.recv_timeout(Duration::from_secs(600));
        go.send(()).unwrap();
        let ids = (victim.thread().id(), flood.thread().id());
        (ids, (seen, fifth))
    });
    let ((victim, flood), (seen, fifth)) = (ids, seen);
    assert_eq!(seen, [100, 200, 300, 400].map(|value| (value, victim)));
    assert_eq!(fifth, Ok((500, flood)));
}
