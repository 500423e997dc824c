// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises when vCPUs write at the same time: the last value written is the last one put into
//! force; the host is called by one thread at a time for a domain; a writer doesn't wait for
//! another one's host call; and a flood by one vCPU doesn't keep another one.

use std::collections::HashMap;
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
        vcpus: vec![spec; vcpus],
        mode: ClampMode::Exact,
        headroom: Headroom::None,
    };
    Device::new(config, actuator, FixedSource::default(), NoEvents).expect("a sound device")
}

/// Remembers the last demand, who applied how many, and whether calls ever overlapped.
#[derive(Default)]
struct Host {
    last: AtomicU32,
    busy: AtomicBool,
    overlapped: AtomicBool,
    repeated: AtomicBool,
    calls: Mutex<HashMap<ThreadId, u32>>,
    takes: Duration,
}

impl Actuator for Host {
    fn apply(&self, _domain: DomainId, demand: Demand) -> Result<(), ActuateError> {
        if self.busy.swap(true, SeqCst) {
            self.overlapped.store(true, SeqCst);
        }
        if !self.takes.is_zero() {
            thread::sleep(self.takes);
        }
        *self
            .calls
            .lock()
            .expect("no test panics")
            .entry(thread::current().id())
            .or_default() += 1;
        let value = u32::from(demand.min.get());
        if self.last.swap(value, SeqCst) == value {
            self.repeated.store(true, SeqCst);
        }
        self.busy.store(false, SeqCst);
        Ok(())
    }
}

#[test]
fn the_last_value_written_is_in_force_in_the_end() {
    const ROUNDS: u32 = 20_000;
    const MEMBERS: u16 = 3;
    let host = Arc::new(Host::default());
    let device = device(MEMBERS.into(), Arc::clone(&host));
    let barrier = Barrier::new(MEMBERS.into());
    thread::scope(|scope| {
        for vcpu in 0..MEMBERS {
            let (device, barrier, host) = (&device, &barrier, &host);
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    barrier.wait();
                    let value = 1 + (round * u32::from(MEMBERS) + u32::from(vcpu)) % 1023;
                    device.write(VcpuId(vcpu), WriteReg::SetPerf, value);
                    // Everybody has returned: whatever was last must be in force now.
                    barrier.wait();
                    if vcpu == 0 {
                        let newest = device.save().requests[0].khz;
                        assert_eq!(host.last.load(SeqCst), newest, "round {round}");
                    }
                }
            });
        }
    });
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

/// Says when a call begins, and ends it when told.
struct Gate {
    begun: mpsc::SyncSender<u16>,
    go_on: Mutex<mpsc::Receiver<()>>,
}

impl Actuator for Gate {
    fn apply(&self, _domain: DomainId, demand: Demand) -> Result<(), ActuateError> {
        let told = self.begun.send(demand.min.get());
        told.expect("the test waits");
        let go_on = self.go_on.lock().expect("no test panics");
        go_on.recv().expect("the test tells");
        Ok(())
    }
}

#[test]
fn a_writer_does_not_wait_for_anothers_host_call() {
    let (begun_tx, begun) = mpsc::sync_channel(0);
    let (go_on, go_on_rx) = mpsc::channel();
    let gate = Gate {
        begun: begun_tx,
        go_on: Mutex::new(go_on_rx),
    };
    let device = device(2, gate);
    thread::scope(|scope| {
        scope.spawn(|| device.write(VcpuId(0), WriteReg::SetPerf, 100));
        assert_eq!(begun.recv().unwrap(), 100);
        // vCPU 0 is in its host call. These return, or the test hangs.
        device.write(VcpuId(1), WriteReg::SetPerf, 200);
        device.write(VcpuId(1), WriteReg::SetPerf, 300);
        go_on.send(()).unwrap();
        assert_eq!(begun.recv().unwrap(), 300, "vCPU 0 takes the newest along");
        go_on.send(()).unwrap();
    });
    let counters = device.counters(VcpuId(1)).unwrap();
    assert_eq!((counters.applied, counters.superseded), (1, 1));
}

#[test]
fn a_flood_does_not_keep_another_vcpu() {
    const WRITES: u32 = 100;
    let host = Arc::new(Host {
        takes: Duration::from_micros(20),
        ..Host::default()
    });
    let device = device(2, Arc::clone(&host));
    let stop = AtomicBool::new(false);
    let most = thread::scope(|scope| {
        scope.spawn(|| {
            let mut value = 0;
            while !stop.load(SeqCst) {
                value = value % 1023 + 1;
                device.write(VcpuId(1), WriteReg::SetPerf, value);
            }
        });
        let me = thread::current().id();
        let calls = || host.calls.lock().unwrap().get(&me).copied().unwrap_or(0);
        let per_write = (0..WRITES).map(|i| {
            let before = calls();
            device.write(VcpuId(0), WriteReg::SetPerf, 1 + i);
            calls() - before
        });
        let most = per_write.max();
        stop.store(true, SeqCst);
        most
    });
    assert!(most <= Some(4), "one write made {most:?} host calls");
    assert_eq!(host.last.load(SeqCst), device.save().requests[0].khz);
}
