// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where registers are in a guest's RAM: in its last aligned 2 MiB, which the guest's tree reserves.

use anyhow::{Context, bail, ensure};
use vcpufreq_dt::{RESERVED, initrd, memory, registers_in_ram};

use super::{VcpuConfig, topology};

/// Bytes of the largest device tree that Linux takes on arm64, and what QEMU aligns it to.
const MOST_OF_TREE: u64 = 2 << 20;
/// How to make a tree that has them.
const ANEW: &str = "make it anew by vcpufreq dt --in-ram --merge";

/// Where the registers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamPlace {
    /// Their address in the guest.
    pub base: u64,
    /// Where they are in the file of its RAM, bytes.
    pub offset: u64,
    /// The size of that file, bytes.
    pub size: u64,
}

impl RamPlace {
    /// Where the guest of `tree` has those of `vcpus`, as `dt --in-ram` puts them there.
    ///
    /// # Errors
    /// When it has none, or others, in one line.
    pub fn of_tree(tree: &[u8], vcpus: &[VcpuConfig]) -> anyhow::Result<Self> {
        let region = registers_in_ram(tree).context("it is no device tree")?;
        let Some(region) = region else {
            bail!("it has no registers in RAM; {ANEW}")
        };
        let place = Self::of_base(tree)?;
        ensure!(
            region == topology::in_guest_ram(vcpus, place.base),
            "its registers aren't those of {} vCPUs at the end of its RAM; {ANEW}",
            vcpus.len()
        );
        Ok(place)
    }

    /// Where a guest of `base`, a tree without registers, is to have them.
    ///
    /// # Errors
    /// When it is no device tree; when its RAM is of no use.
    pub fn of_base(base: &[u8]) -> anyhow::Result<Self> {
        const UNREADABLE: &str = "can't read the device tree";
        let place = Self::last_of(&memory(base).context(UNREADABLE)?)?;
        let initrd = initrd(base).context(UNREADABLE)?;
        place.check_free_of(initrd.map_or(0, |(_, end)| end))?;
        Ok(place)
    }

    /// Checks that neither an initrd with this end nor the tree behind it, in the next aligned 2 MiB,
    /// is where the registers are. The source: QEMU's `hw/arm/boot.c`.
    fn check_free_of(&self, initrd_end: u64) -> anyhow::Result<()> {
        let behind = initrd_end.checked_next_multiple_of(MOST_OF_TREE);
        let behind = behind.and_then(|tree| tree.checked_add(MOST_OF_TREE));
        ensure!(
            behind.is_some_and(|end| end <= self.base),
            "the guest's initrd and device tree reach into the last 2 MiB of its RAM, where the \
             registers go; give QEMU more by -m"
        );
        Ok(())
    }

    /// The last 2 MiB of these ranges of RAM, which is one range.
    ///
    /// # Errors
    /// When they are of no use, in one line.
    fn last_of(ranges: &[(u64, u64)]) -> anyhow::Result<Self> {
        let [(start, size)] = *ranges else {
            bail!(
                "registers in RAM need one NUMA node, and QEMU has {}; leave -numa out",
                ranges.len()
            );
        };
        let end = start.checked_add(size);
        let last = end.and_then(|end| (end - end % RESERVED).checked_sub(RESERVED));
        // The kernel and its tree are in the first ones.
        let base = last.filter(|last| *last > start.saturating_add(size / 2));
        let base =
            base.context("registers take 2 MiB of the guest's RAM; give QEMU -m 64 or more")?;
        Ok(Self {
            base,
            offset: base - start,
            size,
        })
    }
}

#[cfg(test)]
mod tests {
    //! The registers are at the end of the RAM, which has room for all of them.
    use vcpufreq_bridge::shm::{SharedMemory, sealed_memory};
    use vcpufreq_device::{MAX_VCPUS, region_size};

    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_registers_are_in_the_last_2_mib() {
        for (size, base) in [
            (GIB, 0x7fe0_0000),
            (64 << 20, 0x43e0_0000),
            // Not a multiple of 2 MiB.
            (GIB + (1 << 20), 0x7fe0_0000),
        ] {
            let place = RamPlace::last_of(&[(GIB, size)]).unwrap();
            assert_eq!((place.base, place.offset), (base, base - GIB), "{size:#x}");
        }
        for (ranges, line) in [
            (&[(GIB, 4 << 20)][..], "give QEMU -m 64"),
            (&[(u64::MAX, GIB)], "give QEMU -m 64"),
            (&[(GIB, GIB), (2 * GIB, GIB)], "and QEMU has 2"),
            (&[], "and QEMU has 0"),
        ] {
            let error = RamPlace::last_of(ranges).unwrap_err().to_string();
            assert!(error.contains(line), "{error}");
        }
    }

    #[test]
    fn an_initrd_that_reaches_the_registers_is_refused() {
        let place = RamPlace::last_of(&[(GIB, 128 << 20)]).unwrap();
        let free = |mib: u64| place.check_free_of(GIB + (mib << 20));
        assert!(place.check_free_of(0).is_ok() && free(124).is_ok());
        // Its tree comes to lie in the registers, it does itself, and it has no end.
        for refused in [free(125), free(127), place.check_free_of(u64::MAX)] {
            assert!(refused.unwrap_err().to_string().contains("more by -m"));
        }
    }

    #[test]
    fn the_registers_of_512_vcpus_fit() {
        let most = u16::try_from(MAX_VCPUS).unwrap();
        assert!(region_size(most) <= RESERVED);
        let file = sealed_memory(64 << 20).unwrap();
        let pages =
            |offset| SharedMemory::in_guest_ram(file.try_clone().unwrap(), offset, most).map(drop);
        let place = RamPlace::last_of(&[(GIB, 64 << 20)]).unwrap();
        assert!(pages(place.offset).is_ok());
        assert!(pages(place.offset + 0x1_0000).is_err());
    }
}
