// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The arithmetic between guest and host: pure functions, no I/O, no state.
//!
//! Down: kHz that a guest asks for become a utilization that the host shall clamp to.
//! Up: a pCPU's frequency becomes the performance that the vCPU gets.

#![forbid(unsafe_code)]

use crate::config::{ClampMode, Headroom, VcpuSpec};
use crate::units::{Khz, Util};

/// A pCPU at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PcpuPerf {
    /// Number of the pCPU.
    pub pcpu: u32,
    /// Its frequency.
    pub khz: Khz,
    /// The frequency that `capacity` refers to. Boost can be above it.
    pub reference: Khz,
    /// Its capacity at `reference`.
    pub capacity: Util,
}

/// A clamp on the utilization of whatever stands for a domain on the host. `min <= max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clamp {
    /// uclamp.min.
    pub min: Util,
    /// uclamp.max.
    pub max: Util,
}

/// What policy made of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// The clamp.
    pub clamp: Clamp,
    /// The performance that the clamp stands for: the request, up to the maximum; 0 when there
    /// is none.
    pub granted: Khz,
}

impl Clamp {
    /// No clamp at all, as a thread starts.
    pub const NONE: Self = Self {
        min: Util::ZERO,
        max: Util::MAX,
    };

    /// Not below `floor`.
    #[must_use]
    pub fn raised(self, floor: Util) -> Self {
        Self {
            min: self.min.max(floor),
            max: self.max.max(floor),
        }
    }

    /// Both ends moved into those of `bounds`.
    #[must_use]
    pub fn within(self, bounds: Self) -> Self {
        Self {
            min: self.min.clamp(bounds.min, bounds.max),
            max: self.max.clamp(bounds.min, bounds.max),
        }
    }

    /// As one number: the minimum in the low half, the maximum in the high one.
    #[must_use]
    pub fn bits(self) -> u32 {
        u32::from(self.min.get()) | (u32::from(self.max.get()) << 16)
    }

    /// The clamp of these [`Self::bits`]; `None` when they are of none.
    #[must_use]
    pub fn from_bits(bits: u32) -> Option<Self> {
        let [min, min_high, max, max_high] = bits.to_le_bytes();
        Some(Self {
            min: Util::new(u16::from_le_bytes([min, min_high]))?,
            max: Util::new(u16::from_le_bytes([max, max_high]))?,
        })
    }
}

/// The entry of the table of `spec` that is nearest to `khz`; of two, the higher. A table of one
/// entry has no steps, since any performance up to it may be asked for: `khz` as it is.
#[must_use]
pub fn nearest_entry(spec: &VcpuSpec, khz: Khz) -> Khz {
    if let [_] = spec.table.entries() {
        return khz;
    }
    let nearest = spec.table.entries().iter().rev();
    let nearest = nearest.min_by_key(|entry| entry.0.abs_diff(khz.0));
    nearest.copied().unwrap_or(khz)
}

/// The highest entry of the table of `spec` within `khz`; the lowest, if none is. A table of one
/// entry has no steps: `khz` as it is.
#[must_use]
pub fn entry_within(spec: &VcpuSpec, khz: Khz) -> Khz {
    match spec.table.entries() {
        [] | [_] => khz,
        entries @ [lowest, ..] => {
            let above = entries.partition_point(|entry| *entry <= khz);
            *above.checked_sub(1).map_or(lowest, |last| &entries[last])
        }
    }
}

/// The clamp of a request for `asked` by a vCPU like `spec`.
///
/// `util = floor(capacity * perf / reference)`: floor, because the host rounds the frequency up to
/// its next OPP. With capacity 1024 at 2 800 000 kHz, 1 400 000 kHz are 512; one more would take the
/// host to the OPP above. A value between two table entries is not rounded here, since the host does
/// that, by its own OPPs. A clamp ends at 1024: if boost is above that, a request for it is 1024.
///
/// In [`ClampMode::Ceilings`] that is the clamp of a request that is no ceiling. A ceiling has the clamp
/// of [`ClampMode::Exact`].
///
/// 0 is no request: in all modes the clamp is that of a thread before the first request. A guest
/// that takes its driver away or suspends leaves neither a floor nor, in [`ClampMode::Exact`], a
/// ceiling behind.
#[must_use]
pub fn clamp(spec: &VcpuSpec, asked: Khz, mode: ClampMode, headroom: Headroom) -> Decision {
    if asked == Khz(0) {
        return Decision {
            clamp: Clamp::NONE,
            granted: asked,
        };
    }
    let max = spec.table.max();
    let granted = asked.min(max);
    let (num, den) = headroom.factor();
    let scaled = u128::from(spec.capacity.get()) * u128::from(granted.0) * u128::from(num);
    let reference = u128::from(spec.table.reference().0);
    let min = Util::saturating(scaled / (reference * u128::from(den)));
    let max = match mode {
        ClampMode::Floor | ClampMode::Ceilings => Util::MAX,
        ClampMode::Exact => min,
    };
    Decision {
        clamp: Clamp { min, max },
        granted,
    }
}

/// What a vCPU like `spec` gets on a pCPU in the state `pcpu`:
/// `reference(vCPU) * capacity(pCPU) * f / (reference(pCPU) * capacity(vCPU))`.
///
/// That is `f` itself when the vCPU mirrors the pCPU. It may be above the vCPU's own maximum when
/// the pCPU is bigger, and is at least 1. `None` when the pCPU's figures can't be (a reference or
/// frequency of 0): a guest must not read a frequency of 0.
#[must_use]
pub fn performance(spec: &VcpuSpec, pcpu: &PcpuPerf) -> Option<Khz> {
    if pcpu.khz.0 == 0 {
        return None;
    }
    // Up to 2^32 * 2^10 * 2^32 = 2^74: more than 64 bits.
    let have = u128::from(spec.table.reference().0)
        * u128::from(pcpu.capacity.get())
        * u128::from(pcpu.khz.0);
    let per = u128::from(pcpu.reference.0) * u128::from(spec.capacity.get());
    let khz = have.checked_div(per)?;
    Some(Khz(u32::try_from(khz).unwrap_or(u32::MAX).max(1)))
}

/// The most that a vCPU like `spec` can get now on the pCPUs that it may be on, if a limit takes
/// something from it: `now` has each at the highest frequency that it may have now, `unlimited` at
/// the highest one that it has, with boost.
///
/// A vCPU that reaches its maximum on one of them has no cap, whatever the others are.
#[must_use]
pub fn cap(spec: &VcpuSpec, now: &[PcpuPerf], unlimited: &[PcpuPerf]) -> Option<Khz> {
    let best = |pcpus: &[PcpuPerf]| {
        pcpus
            .iter()
            .filter_map(|pcpu| performance(spec, pcpu))
            .max()
    };
    let (now, unlimited) = (best(now)?, best(unlimited)?);
    (now < unlimited.min(spec.table.max())).then_some(now)
}
