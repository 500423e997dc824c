// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Accesses of a guest to the registers of three vCPUs, against a model: what a register reads as,
//! and the clamp that is in force.

use std::sync::Arc;

use vcpufreq_device::{Clamp, MmioRegion, VcpuId};

use crate::machine::{VCPUS, check, clamp_of, device};
use crate::operations;

/// The registers that the binding has, and those of the extensions.
const REGISTERS: [u64; 8] = [0x00, 0x04, 0x08, 0x0c, 0x10, 0x14, 0x100, 0x108];
/// Bytes of an access: what, where, of how many bytes, and its value.
const ACCESS: usize = 8;

/// What the device should be like.
struct RegisterModel {
    selected: [u32; 3],
    clamps: [Clamp; 2],
}

impl RegisterModel {
    fn new() -> Self {
        Self {
            selected: [0; 3],
            clamps: [Clamp::NONE; 2],
        }
    }

    fn write(&mut self, vcpu: usize, register: u64, value: u32) {
        match register {
            0x04 => {
                let (domain, clamp) = clamp_of(vcpu, value);
                self.clamps[domain] = clamp;
            }
            0x0c => self.selected[vcpu] = value,
            _ => (),
        }
    }

    /// What a register reads as; `None` for cur_perf, which the host decides.
    fn read(&self, vcpu: usize, register: u64) -> Option<u32> {
        let (domain, _, table) = VCPUS[vcpu];
        let selected = usize::try_from(self.selected[vcpu]).ok();
        match register {
            0x00 => None,
            0x08 => u32::try_from(table.len()).ok(),
            0x10 => Some(selected.and_then(|n| table.get(n)).copied().unwrap_or(0)),
            0x14 => Some(domain),
            0x100 => Some(7),
            0x108 => table.last().copied(),
            _ => Some(0),
        }
    }
}

/// Carries the accesses out on device and model.
pub fn registers(data: &[u8]) {
    let device = Arc::new(device());
    let region = MmioRegion::new(device.clone());
    let mut model = RegisterModel::new();
    for access in data.chunks_exact(ACCESS) {
        operations::count();
        let [what, page, register, len, value @ ..] = access else {
            continue;
        };
        let value: [u8; 4] = value.try_into().unwrap_or_default();
        let in_page = match REGISTERS.get(usize::from(register % 9)) {
            Some(known) => *known,
            None => u64::from(u32::from_le_bytes(value)),
        };
        let offset = u64::from(page % 5) * 0x1000 + in_page;
        let (vcpu, in_page) = ((offset / 0x1000) as usize, offset % 0x1000);
        // Most have the width that is legal.
        let len = if *len < 200 { 4 } else { usize::from(*len % 9) };
        let legal = vcpu < VCPUS.len() && len == 4;
        let by = Some(VcpuId(u16::from(what >> 4) % 4)).filter(|by| by.index() < VCPUS.len());
        if what & 1 == 0 {
            let bytes = [value, value, value].concat();
            region.write_by(by, offset, &bytes[..len]);
            if legal {
                model.write(vcpu, in_page, u32::from_le_bytes(value));
            }
            check(&device, model.clamps, &access);
        } else {
            let mut read = vec![0xff; len];
            region.read(offset, &mut read);
            let expected = if legal {
                model.read(vcpu, in_page)
            } else {
                Some(0)
            };
            let read = read
                .iter()
                .rev()
                .fold(0, |all, byte| (all << 8) | u64::from(*byte));
            match expected {
                Some(expected) => assert_eq!(read, u64::from(expected), "{access:?}"),
                None => assert!(read > 0, "{access:?}"),
            }
        }
    }
}
