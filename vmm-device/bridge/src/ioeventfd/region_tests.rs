// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A request that exits comes after older ones, and waits for the thread that carries them out. No
//! other access waits.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use vcpufreq_device::VcpuId;
use vcpufreq_device::fakes::NullActuator;
use vmm_sys_util::eventfd::EventFd;

use super::super::fake_device::{FakeDevice, fake_device, requests};
use super::super::{DomainWrites, EntryBell, PendingWrites, Unknown};
use super::IoeventfdRegion;
use crate::mmio_device::MmioDevice;

/// Ends a test that would hang.
const PATIENCE: Duration = Duration::from_secs(600);
const KHZ: u32 = 1_800_000;

/// Offset and width of a write, and what had been asked for by then.
type Said = (u64, usize, Vec<u32>);

/// Reports the accesses that arrive.
struct Says(Arc<FakeDevice<NullActuator>>, Sender<Said>);

impl MmioDevice for Says {
    fn read(&self, _offset: u64, _data: &mut [u8]) {}

    fn write(&self, offset: u64, data: &[u8]) {
        let said = (offset, data.len(), requests(&self.0));
        self.1.send(said).unwrap();
    }
}

/// Two vCPUs in a domain each, the first one with a table.
struct TestRegion {
    region: Arc<dyn MmioDevice>,
    pending: Arc<PendingWrites>,
    bell: Arc<EventFd>,
    said: Receiver<Said>,
}

fn bench() -> TestRegion {
    let bell = Arc::new(EventFd::new(libc::EFD_NONBLOCK).unwrap());
    let of_entry = EntryBell {
        vcpu: VcpuId(0),
        khz: KHZ,
        event: bell.clone(),
    };
    let pending = [vec![of_entry], vec![]];
    let pending = pending.map(|bells| DomainWrites::new(bells, Arc::new(Unknown)).unwrap());
    let pending = PendingWrites::new(pending.into(), vec![0, 1]);
    let (says, said) = channel();
    let device = fake_device(2, NullActuator);
    let says = Arc::new(Says(device.clone(), says));
    let region = IoeventfdRegion::new(says, device, pending.clone());
    TestRegion {
        region: Arc::new(region),
        pending,
        bell,
        said,
    }
}

#[test]
fn a_request_that_exits_comes_after_the_older_ones() {
    let bench = bench();
    bench.bell.write(1).unwrap();
    bench.region.write(0x04, &[0; 4]);
    let said: Vec<_> = bench.said.try_iter().collect();
    assert_eq!(said, [(0x04, 4, vec![KHZ])]);
}

#[test]
fn no_other_access_waits_for_who_carries_requests_out() {
    let bench = bench();
    let busy = [0, 1].map(|index| bench.pending.locked(index).unwrap());
    let rows = [
        ("a selection", 0x0c, 4),
        ("an illegal write", 0x04, 1),
        ("a request without a table", 0x1004, 4),
        ("the padding", 0x2004, 4),
    ];
    for (name, offset, len) in rows {
        let region = bench.region.clone();
        std::thread::spawn(move || region.write(offset, &[0; 4][..len]));
        let said = bench.said.recv_timeout(PATIENCE);
        assert_eq!(said, Ok((offset, len, vec![])), "{name}");
    }
    drop(busy);
}
