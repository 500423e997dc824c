// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Topologies that are drawn from a seed: hosts that no other test has in mind.
//! The same seed gives the same topology.

use std::ops::RangeInclusive;

use crate::topology::{Topology, TopologyPolicy};

/// As many as runs take little time with.
const MOST_CPUS: u32 = 8;
const CLUSTERS: RangeInclusive<u32> = 2..=4;
/// Of the clusters below the largest, which has 1024.
const CAPACITIES: RangeInclusive<u32> = 60..=960;
const OPPS: RangeInclusive<u32> = 3..=17;
/// Two OPPs are at least 2 % of the highest frequency apart then, which uclamp
/// can tell apart on a CPU of capacity 60 (1.7 %).
const LOWEST_MHZ: RangeInclusive<u32> = 300..=600;
const HIGHEST_MHZ: RangeInclusive<u32> = 1500..=3000;
const GAPS: RangeInclusive<u32> = 100..=200;
const LOWEST_UV: RangeInclusive<u32> = 550_000..=650_000;
const HIGHEST_UV: RangeInclusive<u32> = 900_000..=1_100_000;

impl Topology {
    /// The topology of a seed.
    pub fn drawn(seed: u64) -> Self {
        let mut dice = Dice(seed);
        let capacities = dice.capacities();
        let clusters = capacities.iter().zip(dice.cpus(capacities.len()));
        let clusters: Vec<TopologyPolicy> = clusters
            .enumerate()
            .map(|(number, (&capacity, cpus))| dice.cluster(number, cpus, capacity))
            .collect();
        let shown = clusters.iter().zip(&capacities).map(|(cluster, capacity)| {
            let opps = cluster.khz.len();
            format!("{} of {capacity} with {opps} OPPs", cluster.cpus)
        });
        let shown: Vec<String> = shown.collect();
        Self {
            description: format!("drawn from {seed}: CPUs {}", shown.join(", ")),
            clusters: None,
            policies: on_one_scale(clusters, &capacities),
        }
    }
}

/// SplitMix64: small, and the same everywhere.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn of(&mut self, range: &RangeInclusive<u32>) -> u32 {
        let width = u64::from(range.end() - range.start()) + 1;
        // Below the width, which is a u32's.
        range.start() + u32::try_from(self.next() % width).unwrap_or_default()
    }

    /// Rising, each another one.
    fn capacities(&mut self) -> Vec<u32> {
        let count = usize::try_from(self.of(&CLUSTERS)).unwrap_or_default();
        let mut capacities = vec![1024_u32];
        while capacities.len() < count {
            let capacity = self.of(&CAPACITIES);
            // Closer ones are the same to the scheduler.
            if capacities.iter().all(|one| one.abs_diff(capacity) >= 32) {
                capacities.push(capacity);
            }
        }
        capacities.sort_unstable();
        capacities
    }

    /// Of each cluster, so that all have one and the board has room for them.
    fn cpus(&mut self, clusters: usize) -> Vec<u32> {
        let mut left = MOST_CPUS;
        (0..clusters)
            .rev()
            .map(|after| {
                let after = u32::try_from(after).unwrap_or_default();
                let cpus = self.of(&(1..=(left - after).min(4)));
                left -= cpus;
                cpus
            })
            .collect()
    }

    /// Its `dmips_mhz` is its capacity, to be brought to one scale.
    fn cluster(&mut self, number: usize, cpus: u32, capacity: u32) -> TopologyPolicy {
        let count = self.of(&OPPS);
        let gaps: Vec<u32> = (1..count).map(|_| self.of(&GAPS)).collect();
        let all: u32 = gaps.iter().sum();
        // Odd: no multiple of what a clock's parent has.
        let odd = |dice: &mut Self, mhz| dice.of(mhz) * 1000 + 2 * dice.of(&(0..=499)) + 1;
        let (low, high) = (odd(self, &LOWEST_MHZ), odd(self, &HIGHEST_MHZ));
        let uv = (self.of(&LOWEST_UV), self.of(&HIGHEST_UV));
        let mut gone = 0;
        let points = std::iter::once(0).chain(gaps).map(|gap| {
            gone += gap;
            let share = |(from, to): (u32, u32)| from + scaled(to - from, gone, all);
            (share((low, high)) | 1, share(uv))
        });
        let (khz, uv): (Vec<u32>, Vec<u32>) = points.unzip();
        let uw = khz.iter().zip(&uv);
        let uw = uw.map(|(khz, uv)| power_uw(*khz, *uv, capacity, high));
        TopologyPolicy {
            name: format!("drawn{number}"),
            cpus,
            times: 1,
            dmips_mhz: Some(capacity),
            cppc: None,
            uw: Some(uw.collect()),
            khz,
            boost: 0,
            uv,
            power_coefficient: None,
        }
    }
}

/// `value * part / whole`.
fn scaled(value: u32, part: u32, whole: u32) -> u32 {
    let scaled = u64::from(value) * u64::from(part) / u64::from(whole.max(1));
    u32::try_from(scaled).unwrap_or(u32::MAX)
}

/// C × f × V²: of the largest CPU 1.7 W at 2.8 GHz and 1 V; a smaller one needs
/// less for the same work, down to two thirds.
fn power_uw(khz: u32, uv: u32, capacity: u32, highest_khz: u32) -> u32 {
    let volts_squared = u64::from(uv) * u64::from(uv) / 1_000_000;
    let size = u64::from(capacity) * (2048 + u64::from(capacity)) / 3072;
    let full = 1_700_000 * size / 1024 * u64::from(khz) / u64::from(highest_khz);
    u32::try_from(full * volts_squared / 1_000_000).unwrap_or(u32::MAX)
}

/// `capacity-dmips-mhz`, which the kernel multiplies by the highest frequency.
fn on_one_scale(mut clusters: Vec<TopologyPolicy>, capacities: &[u32]) -> Vec<TopologyPolicy> {
    let highest = |cluster: &TopologyPolicy| cluster.khz.last().copied().unwrap_or(1);
    let largest = clusters.last().map_or(1, highest);
    for (cluster, &capacity) in clusters.iter_mut().zip(capacities) {
        cluster.dmips_mhz = Some(scaled(capacity, largest, highest(cluster)));
    }
    clusters
}

#[cfg(test)]
mod tests {
    //! What is drawn is within its ranges, whatever the seed, and the same again.

    use super::*;

    fn drawn() -> impl Iterator<Item = Topology> {
        (0..1_000).map(Topology::drawn)
    }

    #[test]
    fn a_seed_is_a_topology() {
        for seed in [0, 1, u64::MAX] {
            assert_eq!(Topology::drawn(seed).dts(), Topology::drawn(seed).dts());
        }
        let mut all: Vec<String> = drawn().map(|one| one.dts()).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 1_000);
    }

    #[test]
    fn clusters_and_cpus_are_within_their_ranges() {
        let mut seen = std::collections::BTreeSet::new();
        for topology in drawn() {
            topology.check().unwrap();
            assert!((2..=MOST_CPUS).contains(&topology.cpus()));
            let count = u32::try_from(topology.policies.len()).unwrap();
            assert!(CLUSTERS.contains(&count));
            seen.insert(count);
        }
        assert_eq!(seen.len(), 3, "each number of clusters is drawn");
    }

    /// As the kernel has them.
    fn capacities(topology: &Topology) -> Vec<u32> {
        let raw = |one: &TopologyPolicy| {
            u64::from(one.dmips_mhz.unwrap()) * u64::from(*one.khz.last().unwrap())
        };
        let most = topology.policies.iter().map(raw).max().unwrap();
        let each = topology.policies.iter();
        each.map(|one| u32::try_from(raw(one) * 1024 / most).unwrap())
            .collect()
    }

    #[test]
    fn capacities_rise_to_1024() {
        for topology in drawn() {
            let capacities = capacities(&topology);
            assert!(capacities[0] >= 59, "{capacities:?}");
            assert!(capacities.is_sorted_by(|a, b| a < b), "{capacities:?}");
            assert_eq!(capacities.last(), Some(&1024));
        }
    }

    #[test]
    fn opps_are_odd_and_uclamp_can_tell_them_apart() {
        let mut seen = std::collections::BTreeSet::new();
        for topology in drawn() {
            for (cluster, capacity) in topology.policies.iter().zip(capacities(&topology)) {
                seen.insert(cluster.khz.len());
                let highest = *cluster.khz.last().unwrap();
                for pair in cluster.khz.windows(2) {
                    assert_eq!((pair[0] % 2, pair[1] % 2), (1, 1));
                    assert!((pair[1] - pair[0]) * capacity > highest, "{cluster:?}");
                }
            }
        }
        assert!(seen.into_iter().eq(3..=17));
    }

    #[test]
    fn voltage_and_power_for_a_mhz_rise_with_frequency() {
        for topology in drawn() {
            // That power for a MHz rises is checked of each topology.
            let uv = |policy: &TopologyPolicy| policy.uv.is_sorted_by(|a, b| a < b);
            assert!(topology.policies.iter().all(uv), "{topology:?}");
            topology.check().unwrap();
        }
    }
}
