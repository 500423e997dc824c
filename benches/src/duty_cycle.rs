// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How much of its period `periodic` works: chosen so that a little more or less work leads to the
//! same OPP. At an OPP's edge a per cent of work decides between two frequencies, and the edge
//! would be measured.

use crate::machine::Cluster;

/// Duties in per cent; each is run as the nearest one that is off the edges.
pub const DUTIES: [u32; 5] = [10, 20, 40, 60, 80];

/// rt-app's period in µs.
const PERIOD_US: u32 = 20_000;
/// Between two duties that are tried, in µs of work: 0.1 %.
const STEP_US: u32 = 20;
/// Work more or less that has to make no difference: three times what a turn takes longer in a
/// guest (3 to 5 %).
const MARGIN: f64 = 0.12;
/// What load tracking halves in, in µs: 32 periods of 1024.
const HALF_LIFE_US: f64 = 32_768.0;
/// schedutil's, on utilization.
const HEADROOM: f64 = 1.25;

/// The duty's work in µs at full speed, as it is.
pub fn plain_us(duty: u32) -> u32 {
    duty * PERIOD_US / 100
}

/// The nearest to it that is off the edges of this cluster's OPPs; as it is,
/// if there is none.
pub fn run_us(duty: u32, cluster: &Cluster) -> u32 {
    let plain = plain_us(duty);
    (0..plain / STEP_US)
        .flat_map(|step| [plain - step * STEP_US, plain + step * STEP_US])
        .find(|us| *us <= PERIOD_US && off_edges(f64::from(*us), cluster))
        .unwrap_or(plain)
}

fn off_edges(us: f64, cluster: &Cluster) -> bool {
    let opp = |us: f64| {
        let khz = needed_khz(us, f64::from(cluster.khz.1));
        let enough = cluster.opps_khz.iter().filter(|of| f64::from(**of) >= khz);
        enough.min()
    };
    opp(us * (1.0 - MARGIN)) == opp(us * (1.0 + MARGIN))
}

/// What schedutil asks for at the wake-up: the utilization that the work left
/// behind (util_est), which periods before it have summed up to, and headroom.
fn needed_khz(us: f64, khz_max: f64) -> f64 {
    let gained = |us: f64| 1.0 - (-us / HALF_LIFE_US).exp2();
    let utilization = gained(us) / gained(f64::from(PERIOD_US));
    (HEADROOM * utilization * khz_max).min(khz_max)
}

#[cfg(test)]
mod tests {
    //! Duties move away from an edge, by no more than needed, and only then.

    use std::path::PathBuf;

    use super::*;
    use crate::machine::SCHEDUTIL;

    fn cluster(opps_khz: &[u32]) -> Cluster {
        Cluster {
            cpus: vec![0],
            capacity: 1024,
            khz: (opps_khz[0], opps_khz[opps_khz.len() - 1]),
            opps_khz: opps_khz.to_vec(),
            made_up: false,
            power: Vec::new(),
            governor: SCHEDUTIL.to_owned(),
            cur_freq: PathBuf::new(),
        }
    }

    #[test]
    fn duties_keep_off_the_edges_of_the_labs_topologies() {
        let qcs6490 = cluster(&[806_400, 1_324_800, 1_766_400, 2_208_000, 2_707_200]);
        let two_plus_two = cluster(&[700_000, 1_200_000, 1_700_000, 2_200_000, 2_800_000]);
        // 20 % needs 796 MHz of 806, and 60 % 2199 of 2208.
        for (cluster, expected) in [
            (qcs6490, [2000, 3620, 8000, 10760, 16000]),
            (two_plus_two, [2000, 4000, 7740, 13140, 16000]),
        ] {
            assert_eq!(DUTIES.map(|duty| run_us(duty, &cluster)), expected);
        }
    }

    #[test]
    fn where_every_duty_is_at_an_edge_it_stays() {
        let many: Vec<u32> = (1..=2000).map(|step| step * 1_400).collect();
        assert_eq!(run_us(20, &cluster(&many)), plain_us(20));
    }

    #[test]
    fn what_is_needed_is_pelts_sum_and_a_quarter() {
        for (us, khz) in [(4000.0, 795_900.0), (20_000.0, 2_707_200.0)] {
            assert!((needed_khz(us, 2_707_200.0) - khz).abs() < 500.0, "{us}");
        }
    }
}
