// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The frequency below which no clamp brings a busy CPU: the kernel's arithmetic, without I/O.
//! What is reserved is read by the module above.
//!
//! schedutil never goes below the bandwidth of the deadline entities that are active on a CPU
//! (`effective_cpu_util()`: `*min = max(irq + cpu_bw_dl(rq), uclamp_rq_get(rq, UCLAMP_MIN))`), and
//! the fair server is one of them while a fair task is runnable. 50 ms of 1 s are 51 of 1024, which
//! is a third of a CPU whose capacity is 160. `irq` is left out: it is 0 in kernels without
//! `CONFIG_IRQ_TIME_ACCOUNTING`, and small in others.

/// What one server reserves of its CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// Runtime of each period.
    pub runtime_ns: u64,
    /// The period.
    pub period_ns: u64,
}

impl Reservation {
    /// Each CPU's fair server without settings (`sched_init_dl_servers()`).
    pub const DEFAULT: Self = Self {
        runtime_ns: 50_000_000,
        period_ns: 1_000_000_000,
    };

    /// `to_ratio()`: in units of 2^-20.
    fn bandwidth(self) -> u128 {
        (u128::from(self.runtime_ns) << 20)
            .checked_div(u128::from(self.period_ns))
            .unwrap_or(0)
    }
}

/// `cpu_bw_dl()`: the sum in 1024ths of the largest CPU, rounded down once.
pub fn utilization(servers: impl IntoIterator<Item = Reservation>) -> u32 {
    let sum: u128 = servers.into_iter().map(Reservation::bandwidth).sum();
    u32::try_from(sum >> 10).unwrap_or(u32::MAX)
}

/// What a policy's busy CPUs run at, at least.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Floor {
    /// What is reserved of each CPU, in 1024ths of the largest CPU.
    pub util: u32,
    /// The capacity of such a CPU, in the same unit.
    pub capacity: u16,
    /// The frequency that this is: `get_next_freq()`.
    pub khz: u32,
    /// The policy's OPPs that are below, rising: a request for one of them gets
    /// [`Self::lowest_khz`].
    pub opps_below_khz: Vec<u32>,
    /// The OPP that busy CPUs run at, at least; `None` where the OPPs aren't known.
    pub lowest_khz: Option<u32>,
}

impl Floor {
    /// Of a policy whose CPUs have this capacity at a frequency, these OPPs (rising) and this
    /// highest frequency.
    #[must_use]
    pub fn new(
        util: u32,
        (capacity, reference_khz): (u16, u32),
        opps_khz: &[u32],
        max_khz: u32,
    ) -> Self {
        let of_reference = u64::from(reference_khz) * u64::from(util);
        let khz = of_reference.checked_div(u64::from(capacity)).unwrap_or(0);
        // `cpufreq_driver_resolve_freq()` keeps to the policy's limits.
        let khz = u32::try_from(khz).unwrap_or(max_khz).min(max_khz);
        let (below, from): (Vec<u32>, Vec<u32>) = opps_khz.iter().partition(|opp| **opp < khz);
        Self {
            util,
            capacity,
            khz,
            lowest_khz: from.first().or(below.last()).copied(),
            opps_below_khz: below,
        }
    }
}

#[cfg(test)]
mod tests {
    //! Promise: the floor is what the kernel computes, and an OPP counts as below it exactly when a
    //! request for it gets another one.
    use super::*;

    const fn ms(runtime: u64, period: u64) -> Reservation {
        Reservation {
            runtime_ns: runtime * 1_000_000,
            period_ns: period * 1_000_000,
        }
    }

    #[test]
    fn servers_are_summed_and_rounded_once() {
        for (servers, util) in [
            (&[][..], 0),
            (&[Reservation::DEFAULT], 51),
            (&[ms(0, 1000)], 0),
            (&[ms(1, 0)], 0),
            (&[ms(1000, 1000)], 1024),
            (&[ms(25, 1000)], 25),
            // 51.2 and 51.2; each 0.6 alone would be nothing.
            (&[ms(50, 1000), ms(50, 1000)], 102),
            (&[ms(6, 10_000), ms(6, 10_000)], 1),
            (&[ms(50, 1000), ms(0, 1000)], 51),
        ] {
            assert_eq!(utilization(servers.iter().copied()), util, "{servers:?}");
        }
    }

    const LITTLE: [u32; 4] = [300_000, 574_000, 738_000, 1_803_000];

    #[test]
    fn an_opp_is_below_when_a_request_for_it_gets_another_one() {
        // util, capacity, OPPs; kHz of the floor, OPPs below, lowest one to be had
        type Row<'a> = (u32, u16, &'a [u32], u32, usize, Option<u32>);
        let rows: [Row; 9] = [
            // 574,706 kHz: an OPP that is 706 kHz less is out of reach.
            (51, 160, &LITTLE, 574_706, 2, Some(738_000)),
            (51, 161, &LITTLE, 571_136, 1, Some(574_000)),
            (51, 1024, &LITTLE, 89_797, 0, Some(300_000)),
            (0, 160, &LITTLE, 0, 0, Some(300_000)),
            // An OPP at the floor is reached.
            (51, 51, &[900, 1000], 1000, 1, Some(1000)),
            (51, 102, &[499, 500, 1000], 500, 1, Some(500)),
            // 500.5 kHz are 500 to the kernel.
            (51, 102, &[499, 500, 1001], 500, 1, Some(500)),
            // More than there is.
            (102, 57, &[900, 1000], 1000, 1, Some(1000)),
            (51, 160, &[], 318, 0, None),
        ];
        for (util, capacity, opps, khz, below, lowest) in rows {
            let max_khz = opps.last().copied().unwrap_or(1000);
            let floor = Floor::new(util, (capacity, max_khz), opps, max_khz);
            assert_eq!((floor.khz, floor.lowest_khz), (khz, lowest), "{floor:?}");
            assert_eq!(floor.opps_below_khz, opps[..below], "{floor:?}");
        }
    }

    /// 51 of a capacity of 160 at 1,803 MHz stay 574.7 MHz where boost goes to 2.4 GHz.
    #[test]
    fn a_floor_is_of_the_frequency_that_the_capacity_refers_to() {
        let opps = [&LITTLE[..], &[2_400_000]].concat();
        let floor = Floor::new(51, (160, 1_803_000), &opps, 2_400_000);
        assert_eq!((floor.khz, floor.opps_below_khz.len()), (574_706, 2));
    }

    /// What `get_next_freq()` and the frequency table make of a request, written anew.
    fn kernel(request_khz: u32, floor_util: u64, capacity: u64, opps: &[u32]) -> u32 {
        let max = u64::from(*opps.last().unwrap());
        let clamp = capacity * u64::from(request_khz) / max;
        let next = max * clamp.max(floor_util) / capacity;
        let at_least = opps.iter().find(|opp| u64::from(**opp) >= next);
        *at_least.or(opps.last()).unwrap()
    }

    #[test]
    fn over_all_capacities_the_opps_below_are_those_that_the_kernel_does_not_give() {
        let opps: Vec<u32> = (1..=17).map(|n| n * 103_007).collect();
        let mut below = 0;
        for capacity in 60..=1024_u16 {
            for util in [0, 25, 51, 102] {
                let floor = Floor::new(util, (capacity, opps[16]), &opps, opps[16]);
                for &opp in &opps {
                    let gets = kernel(opp, util.into(), capacity.into(), &opps);
                    let reached = !floor.opps_below_khz.contains(&opp);
                    let expected = if reached { Some(opp) } else { floor.lowest_khz };
                    assert_eq!(Some(gets), expected, "{opp} on {floor:?}");
                    below += u32::from(!reached);
                }
            }
        }
        assert!(below > 1000, "{below}");
    }
}
