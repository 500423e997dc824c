// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The doorbells of the path `ioeventfd`: a guest writes entries of two vCPUs of a domain in any
//! order, and a third one's, while the worker takes its turns. Where the order is recorded, the last value
//! is in force; where it isn't, that or a higher one. Each write is counted once.

use std::sync::{Arc, Mutex};

use vcpufreq_bridge::ioeventfd::{
    DomainWrites, EntryBell, LastWrite, PendingWrites, RequestQueue, TraceProgress, Unknown,
    WriteOrder,
};
use vcpufreq_device::{Clamp, Util, VcpuId};
use vmm_sys_util::eventfd::EventFd;

use crate::machine::{FuzzedDevice, VCPUS, clamp_of, device};
use crate::operations;

/// Knows the last write of each domain.
#[derive(Default)]
struct Recorded(Mutex<[Option<LastWrite>; 2]>);

impl WriteOrder for Recorded {
    fn newest(&self, vcpus: &[VcpuId], _: &mut TraceProgress) -> Option<LastWrite> {
        let domain = VCPUS[vcpus.first()?.index()].0 as usize;
        self.0.lock().expect("no panic meanwhile")[domain]
    }
}

/// A write of entry `byte / 4 % 3` of vCPU `byte % 4`; of vCPU 3, which isn't there, the worker's turn.
pub fn doorbells(data: &[u8]) {
    let Some((how, writes)) = data.split_first() else {
        return;
    };
    let recorded = Arc::new(Recorded::default());
    let order: Arc<dyn WriteOrder> = match how % 2 {
        0 => recorded.clone(),
        _ => Arc::new(Unknown),
    };
    let (device, bells) = (device(), bells());
    let of = |domain| {
        let bells = bells
            .iter()
            .filter(|bell| VCPUS[bell.vcpu.index()].0 == domain);
        DomainWrites::new(bells.cloned().collect(), order.clone()).expect("an epoll set")
    };
    let pending = PendingWrites::new(vec![of(0), of(1)], vec![0, 0, 1]);
    let mut last = [Clamp::NONE.min; 2];
    let mut written = [0; 3];
    let turn = |last: [Util; 2], written: [u64; 3]| {
        for domain in 0..2 {
            pending.drain_one(domain, &device);
        }
        while RequestQueue::<FuzzedDevice>::is_unfinished(&*pending) {
            pending.finish(&device);
        }
        let in_force = device.actuator().clamps().map(|clamp| clamp.min);
        for (domain, (in_force, last)) in in_force.into_iter().zip(last).enumerate() {
            let right = match how % 2 {
                0 => in_force == last,
                _ => in_force >= last,
            };
            assert!(right, "domain {domain} has {in_force:?}, last was {last:?}");
        }
        for (vcpu, written) in (0..).map(VcpuId).zip(written) {
            let counted = device.accesses(vcpu).map(|all| all.writes_in_kernel);
            assert_eq!(counted, Some(written), "writes of vCPU {vcpu}");
        }
    };
    for (at_ns, byte) in (0..).zip(writes) {
        operations::count();
        let (vcpu, entry) = (usize::from(byte % 4), usize::from(byte / 4 % 3));
        if vcpu == VCPUS.len() {
            turn(last, written);
            continue;
        }
        let bell = &bells[vcpu * 3 + entry];
        let (domain, clamp) = clamp_of(vcpu, bell.khz);
        // KVM records a write before it signals it.
        let (vcpu_id, khz) = (bell.vcpu, bell.khz);
        recorded.0.lock().expect("no panic meanwhile")[domain] = Some(LastWrite {
            vcpu: vcpu_id,
            khz,
            at_ns,
        });
        bell.event.write(1).expect("room for a signal");
        last[domain] = clamp.min;
        written[vcpu] += 1;
    }
    turn(last, written);
}

/// Of each entry of each vCPU.
fn bells() -> Vec<EntryBell> {
    let vcpus = (0..).map(VcpuId).zip(VCPUS);
    let bells = vcpus.flat_map(|(vcpu, (_, _, table))| {
        table.iter().map(move |khz| EntryBell {
            vcpu,
            khz: *khz,
            event: Arc::new(EventFd::new(nix::libc::EFD_NONBLOCK).expect("an eventfd")),
        })
    });
    bells.collect()
}
