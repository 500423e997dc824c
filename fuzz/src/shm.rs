// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest of shared memory, and its VMM: they store anything anywhere in the memory, ring any
//! doorbell in any way, and start anew, while the worker takes its turns. Against a model: what is in
//! force is what the rung vCPU's own page requests, within its own capacity; what describes the vCPUs
//! is there again after each look.
#![expect(unsafe_code, reason = "a guest's memory is used by its address")]

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use vcpufreq_bridge::fuzzing::ShmRequests;
use vcpufreq_bridge::ioeventfd::RequestQueue as _;
use vcpufreq_bridge::shm::{AllVcpus, SharedMemory, ShmRegion};
use vcpufreq_bridge::{MmioDevice as _, Silent};
use vcpufreq_device::{Clamp, MmioRegion, VcpuId};
use vm_memory::{FileOffset, MmapRegion};
use vmm_sys_util::eventfd::EventFd;

use crate::machine::{FuzzedDevice, VCPUS, check, clamp_of, device};
use crate::operations;

/// Bytes of an access: what, whose, two of an offset, four of a value.
const ACCESS: usize = 8;
/// Bytes of the memory.
const SIZE: usize = 0x2_0000;
const SET_PERF: usize = 4;
/// Where the doorbell is, behind the memory.
const DOORBELL: u64 = SIZE as u64 + 0x0c;

/// What the guest should have brought about.
struct ShmModel {
    requested: [u32; 3],
    rung: [u64; 3],
    /// What was carried out last of each vCPU, and what the last look found.
    carried_out: [u32; 3],
    found: [Option<u32>; 3],
    clamps: [Clamp; 2],
    coalesced: [u64; 3],
}

impl ShmModel {
    fn new() -> Self {
        Self {
            requested: [0; 3],
            rung: [0; 3],
            carried_out: [0; 3],
            found: [None; 3],
            clamps: [Clamp::NONE; 2],
            coalesced: [0; 3],
        }
    }

    fn carry_out(&mut self, vcpu: usize, by_queue: bool) {
        let (domain, clamp) = clamp_of(vcpu, self.requested[vcpu]);
        self.clamps[domain] = clamp;
        if by_queue {
            (self.carried_out[vcpu], self.found[vcpu]) = (self.requested[vcpu], None);
        }
    }

    /// The worker looks at the doorbell of `vcpu`.
    fn answer(&mut self, vcpu: usize) {
        let rings = std::mem::take(&mut self.rung[vcpu]);
        if rings > 0 {
            self.coalesced[vcpu] += rings.min(u32::MAX.into()) - 1;
            self.carry_out(vcpu, true);
        }
    }

    fn look(&mut self) {
        for vcpu in 0..VCPUS.len() {
            let found = self.requested[vcpu];
            let before = self.found[vcpu].replace(found);
            if before == Some(found) && found != self.carried_out[vcpu] {
                self.carry_out(vcpu, true);
            }
        }
    }

    fn start_anew(&mut self) {
        let (clamps, coalesced) = (self.clamps, self.coalesced);
        *self = Self {
            clamps,
            coalesced,
            ..Self::new()
        };
    }

    /// A word is stored, by a plain store or one that exits.
    fn store(&mut self, offset: usize, value: u32) {
        let vcpu = (offset / 0x1000).wrapping_sub(1);
        if offset % 0x1000 == SET_PERF && vcpu < VCPUS.len() {
            self.requested[vcpu] = value;
        }
    }
}

struct FuzzServer {
    device: Arc<FuzzedDevice>,
    requests: ShmRequests,
    region: ShmRegion,
    bells: Arc<[EventFd]>,
    all: AllVcpus,
    /// What the guest's loads and stores reach.
    guest: MmapRegion,
}

impl FuzzServer {
    fn new() -> Self {
        let device = Arc::new(device());
        let memory = Arc::new(SharedMemory::create(device.config()).expect("a memory"));
        let file = memory.as_fd().try_clone_to_owned().expect("a file");
        let file = FileOffset::new(File::from(file), 0);
        let bell = || EventFd::new(nix::libc::EFD_NONBLOCK).expect("an eventfd");
        let bells: Arc<[EventFd]> = VCPUS.map(|_| bell()).into();
        let all = AllVcpus::new().expect("an eventfd");
        Self {
            requests: ShmRequests::new(
                memory.clone(),
                bells.clone(),
                all.clone(),
                Arc::new(Silent),
            ),
            region: ShmRegion::new(memory, Arc::new(MmioRegion::new(device.clone()))),
            guest: MmapRegion::from_file(file, SIZE).expect("a mapping"),
            device,
            bells,
            all,
        }
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        let words = self.guest.as_ptr().cast::<AtomicU32>();
        assert!(offset < SIZE);
        // SAFETY: in the mapping, which is as long.
        let word = unsafe { words.add(offset / 4) };
        // SAFETY: aligned, mapped as long as `self`, and used as an atomic by all.
        unsafe { &*word }
    }

    /// What describes vCPUs is what the server knows.
    fn check_described(&self) {
        for (offset, value) in [(0x00, 0x7166_7076), (0x04, 1), (0x0c, 3), (0x14, 1)] {
            assert_eq!(self.word(offset).load(Relaxed), value, "at {offset:#x}");
        }
        for (page, (_, capacity, table)) in (1..).zip(VCPUS) {
            let word = |at| self.word(page * 0x1000 + at).load(Relaxed);
            assert_eq!(word(0x104), u32::from(capacity));
            let entries = (0..table.len()).map(|entry| word(0x200 + 4 * entry));
            assert!(entries.eq(table.iter().copied()), "table of page {page}");
        }
    }
}

/// Carries the accesses out on server and model.
pub fn shm(data: &[u8]) {
    let (server, mut model) = (FuzzServer::new(), ShmModel::new());
    for access in data.chunks_exact(ACCESS) {
        operations::count();
        let [what, whose, o0, o1, value @ ..] = access else {
            continue;
        };
        let value = u32::from_le_bytes(value.try_into().unwrap_or_default());
        let vcpu = usize::from(whose % 3);
        let offset = usize::from(u16::from_le_bytes([*o0, *o1])) * 4 % SIZE;
        // Most stores are requests.
        let offset = if *whose < 128 {
            (1 + vcpu) * 0x1000 + SET_PERF
        } else {
            offset
        };
        step(&server, &mut model, (what % 10, vcpu, offset, value));
        check(&server.device, model.clamps, &access);
        let vcpus = (0..).map(VcpuId).zip(model.coalesced);
        for (vcpu, coalesced) in vcpus {
            let counted = server
                .device
                .counters(vcpu)
                .map(|counters| counters.coalesced);
            assert_eq!(counted, Some(coalesced), "rings of vCPU {vcpu}");
        }
    }
}

fn step(
    server: &FuzzServer,
    model: &mut ShmModel,
    (what, vcpu, offset, value): (u8, usize, usize, u32),
) {
    let (requests, device, region) = (&server.requests, &*server.device, &server.region);
    match what {
        0 | 1 => {
            server.word(offset).store(value, Relaxed);
            model.store(offset, value);
        }
        2 => {
            let rings = u64::from(value >> (value % 32));
            let _ = server.bells[vcpu].write(rings);
            model.rung[vcpu] += rings;
        }
        3 => {
            requests.drain_one(vcpu, device);
            model.answer(vcpu);
        }
        4 => {
            requests.drain(device);
            (0..VCPUS.len()).for_each(|vcpu| model.answer(vcpu));
        }
        5 => {
            requests.look(device);
            model.look();
            server.check_described();
        }
        6 => {
            server.all.carry_out();
            requests.drain_one(VCPUS.len(), device);
            let asking = |vcpu: &usize| model.requested[*vcpu] != 0;
            let asking: Vec<_> = (0..VCPUS.len()).filter(asking).collect();
            asking
                .into_iter()
                .for_each(|vcpu| model.carry_out(vcpu, true));
        }
        // A ring that exits, for any peer and vCPU.
        7 => {
            region.write(DOORBELL, &value.to_le_bytes());
            let (peer, rung) = (value >> 16, (value & 0xffff) as usize);
            if peer == 1 && rung < VCPUS.len() {
                model.carry_out(rung, false);
            }
        }
        // An access that exits, of any width.
        8 => {
            let bytes = [value.to_le_bytes(); 2].concat();
            let (len, odd) = ((value % 9) as usize, u64::from((value >> 8) & 3));
            region.write(offset as u64 + odd, &bytes[..len]);
            if len == 4 && odd == 0 {
                model.store(offset, value);
            }
            let mut read = vec![0; len];
            region.read(offset as u64 + odd, &mut read);
            region.read(u64::from(value), &mut read);
        }
        _ => {
            requests.start_anew(device.config());
            model.start_anew();
            server.check_described();
        }
    }
}
