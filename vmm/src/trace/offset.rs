// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How far a guest's clock is ahead of the host's, from what both have seen: a vCPU's requests. The
//! host sees the write of set_perf, and the guest its cpu_frequency event right behind it.
//!
//! Of one vCPU the values of both are laid over each other in each way in which they are the same in
//! the same order. Where it is right, all events come by the same time behind their writes, but for the
//! time that a vCPU needs to go on; else their distances differ as the times between requests do.

use std::collections::BTreeMap;

/// A frequency at one moment.
pub type KhzAt = (u64, u32);

/// A guest's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockOffset {
    /// How far it is ahead of the host's.
    pub us: i64,
    /// Three of four events come within this of their writes by that clock: so wrong it may be.
    pub within_us: u64,
    /// Requests that both have seen.
    pub pairs: usize,
}

/// Fewer pairs may fit by chance.
const PAIRS: usize = 5;
/// Events that come later than this behind their writes are those of others.
const LATEST_US: u64 = 10_000;
/// The second-best way has to spread by more than twice the best one's spread and this: else the clock
/// is ambiguous.
const CLOSE_US: u64 = 100;
/// Offsets from different vCPUs may differ by this, beyond what each may be wrong by.
const APART_US: u64 = 1_000;
/// Of a vCPU; a guest may write any text.
const MOST: [usize; 2] = [1 << 12, 1 << 16];
/// Values that fit in more ways than these repeat.
const MOST_WAYS: usize = 64;

impl ClockOffset {
    /// From the requests of each vCPU, as the host and as the guest have seen them; `None` if they don't
    /// fit in one way alone.
    pub fn find(
        host: &BTreeMap<u16, Vec<KhzAt>>,
        guest: &BTreeMap<u16, Vec<KhzAt>>,
    ) -> Option<Self> {
        let both = host.iter().filter_map(|(vcpu, host)| {
            let guest = changes(guest.get(vcpu)?, MOST[1]);
            only_fit(&changes(host, MOST[0]), &guest)
        });
        let fits: Vec<Self> = both.collect();
        let best = *fits.iter().max_by_key(|fit| fit.pairs)?;
        fits.iter().all(|fit| fit.agrees(best)).then_some(best)
    }

    fn agrees(self, other: Self) -> bool {
        let most = self.within_us.max(other.within_us) + APART_US;
        self.us.abs_diff(other.us) <= most
    }

    /// Where these are the same requests.
    fn of_pairs(pairs: &[(KhzAt, KhzAt)]) -> Option<Self> {
        let apart = pairs.iter().map(|(host, guest)| {
            let [host, guest] = [host, guest].map(|at| i64::try_from(at.0).ok());
            Some(guest? - host?)
        });
        let mut apart = apart.collect::<Option<Vec<i64>>>()?;
        apart.sort_unstable();
        // No event comes before its write; the last quarter may have waited for a pCPU.
        let us = *apart.first()?;
        let within_us = apart[(apart.len() - 1) * 3 / 4].abs_diff(us);
        Some(Self {
            us,
            within_us,
            pairs: pairs.len(),
        })
    }
}

/// Without those that renew the one before them, and without the first one, which may do so.
fn changes(all: &[KhzAt], most: usize) -> Vec<KhzAt> {
    let pairs = all.windows(2).filter(|pair| pair[0].1 != pair[1].1);
    pairs.map(|pair| pair[1]).take(most).collect()
}

/// The best of all ways, unless another one is about as good.
fn only_fit(host: &[KhzAt], guest: &[KhzAt]) -> Option<ClockOffset> {
    let least = PAIRS.max(host.len().min(guest.len()).div_ceil(2));
    let later_starts = (0..guest.len()).map(|from| (0, from));
    let starts = later_starts.chain((1..host.len()).map(|from| (from, 0)));
    let ways = starts.filter_map(|(host_from, guest_from)| {
        let pairs = host[host_from..].iter().zip(&guest[guest_from..]);
        if pairs.len() < least || pairs.clone().any(|(host, guest)| host.1 != guest.1) {
            return None;
        }
        let pairs: Vec<_> = pairs.map(|(host, guest)| (*host, *guest)).collect();
        ClockOffset::of_pairs(&pairs)
    });
    let mut ways: Vec<ClockOffset> = ways.take(MOST_WAYS + 1).collect();
    if ways.len() > MOST_WAYS {
        return None;
    }
    ways.sort_by_key(|way| way.within_us);
    let best = *ways.first()?;
    let next = ways.get(1).map_or(u64::MAX, |way| way.within_us);
    (best.within_us <= LATEST_US && next > 2 * best.within_us + CLOSE_US).then_some(best)
}

#[cfg(test)]
mod tests {
    //! Promises: a guest's clock is found whether it is ahead or behind, from texts that overlap in part,
    //! with renewals and late events; where it can't be told it isn't.

    use super::*;

    /// Requests as a load makes them: values and times between them that don't repeat.
    fn requests(count: u32) -> Vec<KhzAt> {
        let mut us = 50_000_000;
        let all = (0..count).map(|at| {
            us += 3_000 + u64::from(at * at * 7919 % 40_000);
            (us, 600_000 + at * at * 31 % 7 * 200_000)
        });
        all.collect()
    }

    /// As the guest sees them by a clock that is that far ahead, each some µs after its write.
    fn seen(host: &[KhzAt], ahead_us: i64) -> Vec<KhzAt> {
        let late = [5, 12, 9, 30, 5, 4_000, 8];
        let at = |(us, khz): &KhzAt, late: u64| ((us + late).checked_add_signed(ahead_us), *khz);
        let seen = host.iter().zip(late.into_iter().cycle());
        let seen = seen.map(|(host, late)| at(host, late));
        seen.map(|(us, khz)| (us.unwrap(), khz)).collect()
    }

    fn found(host: &[KhzAt], guest: &[KhzAt]) -> Option<ClockOffset> {
        ClockOffset::find(
            &BTreeMap::from([(1, host.to_vec())]),
            &BTreeMap::from([(1, guest.to_vec())]),
        )
    }

    #[test]
    fn a_clock_is_found_ahead_and_behind() {
        let host = requests(40);
        for ahead_us in [0, 7_000_000_000, -49_000_000] {
            let guest = seen(&host, ahead_us);
            let parts = [
                (&host[..], &guest[..]),
                // The guest's text is longer, shorter, earlier, later.
                (&host[8..30], &guest[..]),
                (&host[..], &guest[8..30]),
                (&host[8..], &guest[..34]),
                (&host[..34], &guest[8..]),
            ];
            for (host, guest) in parts {
                let found = found(host, guest).expect("a clock");
                assert_eq!(found.us, ahead_us + 5, "{found:?}");
                assert!(found.within_us <= 25 && found.pairs >= 12, "{found:?}");
            }
        }
    }

    #[test]
    fn renewals_are_no_requests() {
        let host = requests(40);
        let guest = seen(&host, -1_000);
        let renewed = host.iter().flat_map(|at| [*at, (at.0 + 900, at.1)]);
        let renewed: Vec<_> = renewed.collect();
        assert_eq!(found(&renewed, &guest).map(|of| of.us), Some(-995));
        assert_eq!(found(&renewed[1..], &guest).map(|of| of.us), Some(-995));
    }

    #[test]
    fn what_fits_in_more_than_one_way_or_in_none_tells_nothing() {
        let periodic: Vec<_> = (0..40_u32)
            .map(|at| (u64::from(at) * 4_000, 600_000 + at % 2))
            .collect();
        assert_eq!(found(&periodic, &seen(&periodic, 77)), None);
        // Any text of a guest's, in little time.
        let alternating = |count: u32| (0..count).map(|at| (u64::from(at) * u64::from(at), at % 2));
        let (host, guest) = (alternating(1 << 12), alternating(1 << 16));
        assert_eq!(
            found(&host.collect::<Vec<_>>(), &guest.collect::<Vec<_>>()),
            None
        );
        let host = requests(40);
        let mut others = seen(&host, 77);
        // Another value in the middle; other times; too few; none.
        others[20].1 += 1;
        assert_eq!(found(&host, &others), None);
        let stretched: Vec<_> = host.iter().map(|at| (at.0 * 2, at.1)).collect();
        assert_eq!(found(&host, &stretched), None);
        assert_eq!(found(&host[..5], &seen(&host[..5], 77)), None);
        assert_eq!(found(&host, &[]), None);
        assert_eq!(found(&[], &host), None);
    }

    #[test]
    fn vcpus_that_disagree_tell_nothing() {
        let host = requests(40);
        let both = BTreeMap::from([(0, host.clone()), (1, host.clone())]);
        let guest =
            |apart: i64| BTreeMap::from([(0, seen(&host, 500)), (1, seen(&host, 500 + apart))]);
        let found = |apart| ClockOffset::find(&both, &guest(apart)).map(|of| of.us);
        assert_eq!(found(0), Some(505));
        assert_eq!(found(50_000), None);
    }
}
