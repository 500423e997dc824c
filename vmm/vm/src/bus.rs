// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The MMIO bus: which device answers at which guest-physical address.
//!
//! Built before the first vCPU runs and constant from then on, so a look-up
//! takes no lock. An access that no device claims, or that runs over the end
//! of one, reads as 0 or is dropped, and is counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, bail};

pub use vcpufreq_bridge::{MmioDevice, accesses_are_of};

struct Range {
    base: u64,
    last: u64,
    device: Arc<dyn MmioDevice>,
}

/// Devices by address.
#[derive(Default)]
pub struct Bus {
    ranges: Vec<Range>,
    unclaimed: AtomicU64,
}

impl Bus {
    /// A bus without devices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts `device` at `base`, for `size` bytes.
    ///
    /// # Errors
    /// When the range is empty, runs over the end of the address space, or shares addresses with
    /// one that is there already.
    pub fn insert(
        &mut self,
        base: u64,
        size: u64,
        device: Arc<dyn MmioDevice>,
    ) -> anyhow::Result<()> {
        let range = format!("bus range at {base:#x} with {size:#x} bytes");
        let last = size.checked_sub(1).and_then(|rest| base.checked_add(rest));
        let last = last.with_context(|| format!("{range} is empty or wraps around"))?;
        let mut others = self.ranges.iter();
        if let Some(other) = others.find(|r| r.base <= last && base <= r.last) {
            bail!("{range} overlaps the one at {:#x}", other.base);
        }
        let at = self.ranges.partition_point(|r| r.base < base);
        self.ranges.insert(at, Range { base, last, device });
        Ok(())
    }

    /// A guest's read: fills all of `data`.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        match self.find(address, data.len()) {
            Some((device, offset)) => device.read(offset, data),
            None => {
                data.fill(0);
                self.count_unclaimed();
            }
        }
    }

    /// A guest's write.
    pub fn write(&self, address: u64, data: &[u8]) {
        match self.find(address, data.len()) {
            Some((device, offset)) => device.write(offset, data),
            None => self.count_unclaimed(),
        }
    }

    /// Counts an access that went nowhere.
    pub fn count_unclaimed(&self) {
        self.unclaimed.fetch_add(1, Ordering::Relaxed);
    }

    /// Accesses so far that no device claimed.
    pub fn unclaimed(&self) -> u64 {
        self.unclaimed.load(Ordering::Relaxed)
    }

    fn find(&self, address: u64, len: usize) -> Option<(&dyn MmioDevice, u64)> {
        let rest = u64::try_from(len).ok()?.checked_sub(1)?;
        let last = address.checked_add(rest)?;
        let after = self.ranges.partition_point(|r| r.base <= address);
        let range = self.ranges.get(after.checked_sub(1)?)?;
        (last <= range.last).then(|| (&*range.device, address - range.base))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Answers with its own number and keeps what was asked of it.
    #[derive(Default)]
    struct Recorder {
        answer: u8,
        writes: Mutex<Vec<(u64, Vec<u8>)>>,
    }

    impl MmioDevice for Recorder {
        fn read(&self, _offset: u64, data: &mut [u8]) {
            data.fill(self.answer);
        }

        fn write(&self, offset: u64, data: &[u8]) {
            self.writes.lock().unwrap().push((offset, data.to_vec()));
        }
    }

    fn recorder(answer: u8) -> Arc<Recorder> {
        Arc::new(Recorder {
            answer,
            ..Recorder::default()
        })
    }

    #[test]
    fn an_access_reaches_the_device_at_its_address() {
        let (low, high) = (recorder(1), recorder(2));
        let mut bus = Bus::new();
        bus.insert(0x2000, 0x1000, high.clone()).unwrap();
        bus.insert(0x1000, 0x1000, low.clone()).unwrap();
        let mut data = [0; 4];
        bus.read(0x1ffc, &mut data);
        assert_eq!(data, [1; 4]);
        bus.read(0x2000, &mut data);
        assert_eq!(data, [2; 4]);
        bus.write(0x2ffe, &[7, 8]);
        assert_eq!(*high.writes.lock().unwrap(), [(0xffe, vec![7, 8])]);
        assert_eq!(bus.unclaimed(), 0);
    }

    #[test]
    fn an_unclaimed_access_reads_zero_and_is_counted() {
        let mut bus = Bus::new();
        bus.insert(0x1000, 0x1000, recorder(1)).unwrap();
        for address in [0, 0xfff, 0x1ffd, 0x2000, u64::MAX] {
            let mut data = [0xaa; 4];
            bus.read(address, &mut data);
            assert_eq!(data, [0; 4], "at {address:#x}");
            bus.write(address, &data);
        }
        bus.read(0x1000, &mut []);
        assert_eq!(bus.unclaimed(), 11);
    }

    #[test]
    fn overlapping_and_impossible_ranges_are_refused() {
        let mut bus = Bus::new();
        bus.insert(0x1000, 0x1000, recorder(0)).unwrap();
        let rows = [
            ("the same", 0x1000, 0x1000, true),
            ("over the start", 0x800, 0x801, true),
            ("over the end", 0x1fff, 1, true),
            ("around it", 0, 0x4000, true),
            ("empty", 0x8000, 0, false),
            ("wrapping", u64::MAX, 2, false),
        ];
        for (name, base, size, overlap) in rows {
            let error = bus.insert(base, size, recorder(0)).unwrap_err();
            assert_eq!(error.to_string().contains("overlaps"), overlap, "{name}");
        }
        bus.insert(0x800, 0x800, recorder(0)).unwrap();
        bus.insert(0x2000, 1, recorder(0)).unwrap();
        bus.insert(u64::MAX, 1, recorder(0)).unwrap();
    }
}
