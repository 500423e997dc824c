// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! With real eventfds and a real epoll set: of all values written since the last look, the last is
//! carried out, or, if the order is unknown, one that is no lower. Each write is counted, and a
//! panic while a request is carried out doesn't lose it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use proptest::prelude::*;
use vcpufreq_device::fakes::{FixedSource, NullActuator};
use vcpufreq_device::{ActuateError, Actuator, Clamp, Device, DomainId, Event, Events, VcpuId};
use vmm_sys_util::eventfd::EventFd;

use super::super::fake_device::{FakeDevice, fake_device, requests};
use super::super::{LastWrite, TraceProgress, Unknown, WriteOrder};
use super::{DomainWrites, EntryBell, SignalledWrite};

const VCPU: VcpuId = VcpuId(0);
const ENTRIES: u32 = 4;

/// A domain with one vCPU and a table of 1 to 4 kHz.
struct TestDomain {
    writes: DomainWrites,
    events: Vec<Arc<EventFd>>,
}

impl TestDomain {
    fn new() -> Self {
        let events: Vec<_> = (0..ENTRIES)
            .map(|_| Arc::new(EventFd::new(libc::EFD_NONBLOCK).unwrap()))
            .collect();
        let bells = (1..).zip(&events);
        let bells = bells.map(|(khz, event)| EntryBell {
            vcpu: VCPU,
            khz,
            event: event.clone(),
        });
        let writes = DomainWrites::new(bells.collect(), Arc::new(Unknown)).unwrap();
        Self { writes, events }
    }

    /// As KVM does when the guest writes `khz`.
    fn write(&self, khz: u32) {
        self.events[khz as usize - 1].write(1).unwrap();
    }

    fn written(values: &[u32]) -> Self {
        let bench = Self::new();
        values.iter().for_each(|khz| bench.write(*khz));
        bench
    }
}

/// Requests that were overtaken, and writes that ended in the kernel.
fn counted(device: &FakeDevice<NullActuator>) -> (u64, u64) {
    let counters = device.counters(VCPU).unwrap();
    (
        counters.coalesced,
        device.accesses(VCPU).unwrap().writes_in_kernel,
    )
}

fn latest(khz: u32, certain: bool) -> Option<SignalledWrite> {
    Some(SignalledWrite {
        vcpu: VCPU,
        khz,
        certain,
    })
}

#[test]
fn the_last_of_several_values_is_taken() {
    let rows: [(&[u32], u32); 6] = [
        (&[3], 3),
        (&[1, 2, 3], 3),
        (&[3, 2, 1], 1),
        (&[2, 4, 1, 3], 3),
        (&[2, 2, 2], 2),
        (&[1, 3, 3, 3], 3),
    ];
    for (values, khz) in rows {
        let mut bench = TestDomain::written(values);
        assert_eq!(bench.writes.take(), latest(khz, true), "{values:?}");
        assert_eq!(bench.writes.take(), None);
    }
}

#[test]
fn a_value_that_comes_back_is_not_taken_for_an_older_one() {
    // The ready list reads 3, 1 in both.
    for values in [[3, 1, 3], [3, 3, 1]] {
        let mut bench = TestDomain::written(&values);
        assert_eq!(bench.writes.take(), latest(3, false), "{values:?}");
        // And is certain again from then on.
        bench.write(3);
        bench.write(1);
        assert_eq!(bench.writes.take(), latest(1, true));
    }
}

/// Knows what was written last.
struct Knows(u32);

impl WriteOrder for Knows {
    fn newest(&self, vcpus: &[VcpuId], _known: &mut TraceProgress) -> Option<LastWrite> {
        assert_eq!(vcpus, [VCPU]);
        Some(LastWrite {
            vcpu: VCPU,
            khz: self.0,
            at_ns: 7,
        })
    }
}

#[test]
fn who_knows_the_order_is_asked() {
    for values in [[3, 1, 3], [3, 3, 1], [1, 3, 1]] {
        let mut bench = TestDomain::written(&values);
        bench.writes.write_order = Arc::new(Knows(values[2]));
        assert_eq!(bench.writes.take(), latest(values[2], true), "{values:?}");
    }
    // A value that no eventfd stands for came by an exit, which is in force.
    let mut bench = TestDomain::written(&[3, 3, 1]);
    bench.writes.write_order = Arc::new(Knows(77));
    assert_eq!(bench.writes.take(), latest(3, false));
}

#[test]
fn a_write_whose_signal_is_still_to_come_counts_once() {
    let mut bench = TestDomain::written(&[3, 3, 1]);
    bench.writes.write_order = Arc::new(Knows(2));
    let device = fake_device(1, NullActuator);
    while !bench.writes.drain(&device) {}
    bench.write(2);
    while !bench.writes.drain(&device) {}
    assert_eq!((requests(&device), counted(&device)), (vec![3, 2], (2, 4)));
    let at_ns = 7;
    let written = Event::Written { vcpu: VCPU, at_ns };
    assert!(device.events().all().contains(&written));
}

#[test]
fn what_comes_between_two_looks_is_in_order() {
    let mut bench = TestDomain::written(&[1, 2]);
    assert_eq!(bench.writes.take(), latest(2, true));
    bench.write(1);
    assert_eq!(bench.writes.take(), latest(1, true));
    bench.write(2);
    bench.write(1);
    assert_eq!(bench.writes.take(), latest(1, true));
}

#[test]
fn what_came_before_is_counted() {
    let mut bench = TestDomain::written(&[1, 2, 2, 4]);
    let device = fake_device(1, NullActuator);
    assert!(bench.writes.drain(&device));
    assert_eq!((requests(&device), counted(&device)), (vec![4], (3, 4)));
    assert!(bench.writes.drain(&device));
    assert_eq!((requests(&device), counted(&device)), (vec![4], (3, 4)));
}

/// Panics at a request.
struct Panics;

impl Actuator for Panics {
    fn apply(&self, _domain: DomainId, _clamp: Clamp) -> Result<(), ActuateError> {
        panic!("as the test wants");
    }

    fn serves_any_vcpu(&self) -> bool {
        false
    }
}

#[test]
fn what_a_thread_had_in_hand_is_carried_out_by_the_next_one() {
    let mut bench = TestDomain::written(&[1, 3]);
    let panics = fake_device(1, Panics);
    let dies = |bench: &mut TestDomain| {
        let drain = AssertUnwindSafe(|| bench.writes.drain(&panics));
        assert!(catch_unwind(drain).is_err());
    };
    dies(&mut bench);
    bench.write(2);
    let device = fake_device(1, NullActuator);
    assert!(bench.writes.drain(&device));
    assert_eq!(requests(&device), [3, 2]);
    assert!(bench.writes.drain(&device));
    assert_eq!(requests(&device), [3, 2]);
    // Not by one thread after the other.
    bench.write(4);
    dies(&mut bench);
    dies(&mut bench);
    assert!(bench.writes.drain(&panics));
}

/// Panics at the first event of which this is true.
struct PanicsOnce(fn(&Event) -> bool, AtomicBool);

impl Events for PanicsOnce {
    fn record(&self, event: &Event) {
        assert!(
            !self.0(event) || self.1.swap(true, Relaxed),
            "as the test wants"
        );
    }
}

fn panics_once(at: fn(&Event) -> bool) -> Device<NullActuator, FixedSource, PanicsOnce> {
    let config = fake_device(1, NullActuator).config().clone();
    let events = PanicsOnce(at, AtomicBool::new(false));
    Device::new(config, NullActuator, FixedSource::default(), events).unwrap()
}

#[test]
fn what_a_thread_had_read_is_counted_by_the_next_one() {
    let mut bench = TestDomain::written(&[1, 1, 2, 2, 3]);
    let device = panics_once(|event| matches!(event, Event::Coalesced { .. }));
    let drain = AssertUnwindSafe(|| bench.writes.drain(&device));
    assert!(catch_unwind(drain).is_err());
    assert!(bench.writes.drain(&device));
    assert_eq!(device.counters(VCPU).unwrap().requests, 5);
    assert_eq!(device.accesses(VCPU).unwrap().writes_in_kernel, 5);
}

/// The guest writes on while the thread dies: what it had in hand isn't taken for the rest.
#[test]
fn each_signal_counts_once_where_more_may_come() {
    for (values, again) in [(&[1][..], 1), (&[1, 1], 1), (&[1, 1, 2], 1), (&[1, 2], 2)] {
        let mut bench = TestDomain::written(values);
        let device = panics_once(|event| matches!(event, Event::Request { .. }));
        let writes = &mut bench.writes;
        let count = writes.epoll.wait(0, &mut writes.events).unwrap();
        writes.count(count);
        let latest = SignalledWrite {
            vcpu: VCPU,
            khz: again,
            certain: false,
        };
        let dies = AssertUnwindSafe(|| writes.carry_out(latest, &device));
        assert!(catch_unwind(dies).is_err());
        assert!(writes.drain(&device));
        let all = u64::try_from(values.len()).unwrap();
        assert_eq!(device.counters(VCPU).unwrap().requests, all, "{values:?}");
        assert_eq!(device.accesses(VCPU).unwrap().writes_in_kernel, all);
    }
}

/// A guest that writes while its writes are being emptied.
#[test]
fn the_last_value_is_found_while_the_guest_writes() {
    for round in 0..200_u32 {
        let mut bench = TestDomain::new();
        let device = fake_device(1, NullActuator);
        let guest = bench.events.clone();
        let values: Vec<u32> = (0..50)
            .map(|i| (i * 7 + round * 3 + i / 5) % ENTRIES)
            .collect();
        let last = values[values.len() - 1] + 1;
        std::thread::scope(|scope| {
            let writes = scope.spawn(move || {
                for value in values {
                    guest[value as usize].write(1).unwrap();
                }
            });
            while !writes.is_finished() {
                drain_counting(&mut bench.writes, &device);
            }
        });
        while !drain_counting(&mut bench.writes, &device) {}
        let (_, signals) = counted(&device);
        assert_eq!(signals, 50, "each signal once");
        let requests = requests(&device);
        assert!(requests[requests.len() - 1] >= last, "round {round}");
    }
}

/// Drains; each signal that is reported counts once, as a request or as overtaken. A request that is
/// taken up again, when in doubt, counts once more: how often that is depends on who runs when.
fn drain_counting(writes: &mut DomainWrites, device: &FakeDevice<NullActuator>) -> bool {
    let total = || requests(device).len() as u64 + counted(device).0;
    let before = (total(), counted(device).1);
    let is_empty = writes.drain(device);
    let (counts, signals) = (total() - before.0, counted(device).1 - before.1);
    assert!(
        (signals..=signals + 1).contains(&counts),
        "{counts} of {signals}"
    );
    is_empty
}

proptest! {
    /// Against the order in which the values were really written.
    #[test]
    fn never_an_older_value_unless_higher(
        batches in prop::collection::vec(prop::collection::vec(1..=ENTRIES, 1..8), 1..8)
    ) {
        let mut bench = TestDomain::new();
        for batch in batches {
            batch.iter().for_each(|khz| bench.write(*khz));
            let taken = bench.writes.take().unwrap();
            let last = batch[batch.len() - 1];
            prop_assert!(taken.khz == last || (!taken.certain && taken.khz > last));
            prop_assert_eq!(bench.writes.take(), None);
        }
    }
}
