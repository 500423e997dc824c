// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Capacities with the frequency that they refer to.
//!
//! Linux compares CPUs by their capacity at one frequency, and boost can take a CPU above that.
//! A vCPU's guest knows one highest frequency, so it learns the capacity there.

#![forbid(unsafe_code)]

use crate::units::{Khz, Util};

/// A capacity at one frequency, and the highest frequency beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RatedCapacity {
    /// The capacity at `reference`.
    pub capacity: Util,
    /// The frequency that it refers to, not 0.
    pub reference: Khz,
    /// The highest one.
    pub top: Khz,
}

impl RatedCapacity {
    const FRACTION_BITS: u32 = 32;

    /// The capacity at the highest frequency. Boost takes it above 1024.
    #[must_use]
    pub fn at_top(self) -> u64 {
        u64::try_from(self.fixed_point() >> Self::FRACTION_BITS).unwrap_or(u64::MAX)
    }

    /// The same with a fraction: below 2^74.
    fn fixed_point(self) -> u128 {
        let product = u128::from(self.capacity.get()) * u128::from(self.top.0);
        (product << Self::FRACTION_BITS) / u128::from(self.reference.0.max(1))
    }
}

/// The capacities that the guest of these vCPUs learns: each one's at its highest frequency. If one
/// is above 1024, where a guest's scale ends, all shrink in proportion. Each is at least 1.
#[must_use]
pub fn guest_capacities(vcpus: &[RatedCapacity]) -> Vec<Util> {
    let tops = vcpus.iter().map(|vcpu| vcpu.fixed_point());
    let full = u128::from(Util::MAX.get());
    let end = full << RatedCapacity::FRACTION_BITS;
    let end = tops.clone().max().unwrap_or(end).max(end);
    tops.map(|top| Util::saturating((top * full / end).max(1)))
        .collect()
}

#[cfg(test)]
mod tests {
    //! Promise: a guest's capacities are in the proportion of those at the highest frequencies, and
    //! none is above 1024.
    use super::*;

    fn rated(rows: &[(u16, u32, u32)]) -> Vec<RatedCapacity> {
        let rows = rows
            .iter()
            .map(|&(capacity, reference, top)| RatedCapacity {
                capacity: Util::new(capacity).unwrap(),
                reference: Khz(reference),
                top: Khz(top),
            });
        rows.collect()
    }

    fn told(rows: &[(u16, u32, u32)]) -> Vec<u16> {
        let capacities = guest_capacities(&rated(rows)).into_iter();
        capacities.map(Util::get).collect()
    }

    #[test]
    fn boost_below_the_end_of_the_scale_raises_a_capacity_and_above_it_lowers_the_others() {
        let big = (1024, 2_800_000, 2_800_000);
        assert_eq!(told(&[(329, 1_800_000, 1_800_000), big]), [329, 1024]);
        assert_eq!(told(&[(329, 1_800_000, 2_000_000), big]), [365, 1024]);
        assert_eq!(told(&[(329, 1_800_000, 900_000), big]), [164, 1024]);
        // R-Car H3 with boost: 401 * 1600 / 1700.
        let boosted = [(1024, 1_600_000, 1_700_000), (401, 1_200_000, 1_200_000)];
        assert_eq!(told(&boosted), [1024, 377]);
        assert_eq!(rated(&boosted)[0].at_top(), 1088);
        assert_eq!(told(&[(1024, 1, u32::MAX), (1, 1, 1)]), [1024, 1]);
        assert_eq!(told(&[]), [0_u16; 0]);
    }
}
