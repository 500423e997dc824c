// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The words of the shared memory, as `abi/vcpufreq-shm.h` has them.

#![forbid(unsafe_code)]

use vcpufreq_device::{REG_WIDTH, REGION_STRIDE, VcpuId, region_size};

pub const MAGIC: usize = 0x00;
pub const VERSION: usize = 0x04;
pub const FEATURES: usize = 0x08;
pub const VCPUS: usize = 0x0c;
pub const SIZE: usize = 0x10;
pub const PEER: usize = 0x14;

pub const MAGIC_VALUE: u32 = 0x7166_7076;
pub const VERSION_VALUE: u32 = 1;
/// Where vCPU 0's page begins, bytes.
pub const PAGES: usize = 0x1000;

pub const CAPACITY: u64 = 0x104;
pub const PERFTBL: u64 = 0x200;
pub const POWER: u64 = 0x300;

/// Bytes of the doorbell's page, which follows the memory.
pub const DOORBELL_PAGE: u64 = 0x1000;
/// Of the doorbell, in its page.
pub const DOORBELL: u64 = 0x0c;

/// cur_perf of a server that has ended.
pub const GONE: u32 = u32::MAX;

/// The peer that the server is; the guest is peer 0.
pub const SERVER: u16 = 1;

/// Bytes of header and pages.
pub(super) fn used(vcpus: u16) -> u64 {
    PAGES as u64 + region_size(vcpus)
}

/// Bytes of the memory of so many vCPUs: a PCI BAR's size is a power of two.
#[must_use]
pub fn size(vcpus: u16) -> u64 {
    used(vcpus).next_power_of_two()
}

/// What the guest writes to the doorbell for a request in the page of `vcpu`.
pub(super) fn ring(vcpu: VcpuId) -> u32 {
    (u32::from(SERVER) << 16) | u32::from(vcpu.0)
}

/// The vCPU that a write of `value` to the doorbell rings for.
pub(super) fn rung(value: u32) -> Option<VcpuId> {
    let [vcpu, peer] = [value & 0xffff, value >> 16].map(|half| u16::try_from(half).ok());
    (peer? == SERVER).then_some(VcpuId(vcpu?))
}

/// The index of a word at `offset` in the page of `vcpu`, of those from vCPU 0's page on.
pub(super) fn word(vcpu: VcpuId, offset: u64) -> usize {
    let offset = u64::from(vcpu.0) * REGION_STRIDE + offset;
    usize::try_from(offset).unwrap_or(usize::MAX) / REG_WIDTH
}

#[cfg(test)]
mod tests {
    //! The header in C and this file have the same numbers.
    use std::collections::BTreeMap;

    use super::*;

    const HEADER: &str = include_str!("../../abi/vcpufreq-shm.h");

    /// Each number of the header, by its name.
    fn defined() -> BTreeMap<&'static str, u64> {
        let numbers = HEADER.lines().filter_map(|line| {
            let mut words = line.strip_prefix("#define ")?.split_whitespace();
            let (name, value) = (words.next()?, words.next()?);
            let number = match value.strip_prefix("0x") {
                Some(digits) => u64::from_str_radix(digits, 16),
                None => value.parse(),
            };
            Some((name, number.ok()?))
        });
        numbers.collect()
    }

    #[test]
    fn the_header_in_c_has_the_same_numbers() {
        let here = BTreeMap::from([
            // QEMU's, of its ivshmem-doorbell.
            ("VCPUFREQ_SHM_PCI_VENDOR", 0x1af4),
            ("VCPUFREQ_SHM_PCI_DEVICE", 0x1110),
            ("VCPUFREQ_SHM_BAR_REGS", 0),
            ("VCPUFREQ_SHM_BAR_MEMORY", 2),
            ("VCPUFREQ_SHM_DOORBELL", DOORBELL),
            ("VCPUFREQ_SHM_MAGIC", MAGIC as u64),
            ("VCPUFREQ_SHM_VERSION", VERSION as u64),
            ("VCPUFREQ_SHM_FEATURES", FEATURES as u64),
            ("VCPUFREQ_SHM_VCPUS", VCPUS as u64),
            ("VCPUFREQ_SHM_SIZE", SIZE as u64),
            ("VCPUFREQ_SHM_PEER", PEER as u64),
            ("VCPUFREQ_SHM_MAGIC_VALUE", MAGIC_VALUE.into()),
            ("VCPUFREQ_SHM_VERSION_VALUE", VERSION_VALUE.into()),
            ("VCPUFREQ_SHM_PAGES", PAGES as u64),
            ("VCPUFREQ_SHM_CAPACITY", CAPACITY),
            ("VCPUFREQ_SHM_PERFTBL", PERFTBL),
            ("VCPUFREQ_SHM_POWER", POWER),
            ("VCPUFREQ_SHM_GONE", GONE.into()),
        ]);
        assert_eq!(defined(), here);
    }

    #[test]
    fn each_ring_is_for_its_vcpu_of_this_peer_alone() {
        for vcpu in 0..=u16::MAX {
            let value = ring(VcpuId(vcpu));
            assert_eq!(rung(value), Some(VcpuId(vcpu)));
            for peer in [0, 2, u32::from(u16::MAX)] {
                assert_eq!(rung((peer << 16) | value & 0xffff), None);
            }
        }
    }

    #[test]
    fn a_bar_is_a_power_of_two_with_room_for_every_page() {
        for vcpus in [1, 2, 15, 16, 17, 512] {
            let last = word(VcpuId(vcpus - 1), REGION_STRIDE - 4);
            assert!(size(vcpus).is_power_of_two(), "{vcpus}");
            let end = PAGES as u64 + (last as u64 + 1) * 4;
            assert!(end <= used(vcpus), "{vcpus}");
            assert!(used(vcpus) <= size(vcpus), "{vcpus}");
        }
    }
}
