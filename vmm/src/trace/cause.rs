// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the clamp of a vCPU is by, from the VMM's stats of one moment.

use std::collections::BTreeSet;

use vcpufreq_host::CpuList;

use crate::stats::{Stats, TuningStats, VcpuStats};

/// A program's tuning of its domain where that changes what the guest requests, an operator's policy,
/// its guest's request above a cap of the host's policy, or its guest's request alone.
pub fn cause(stats: &Stats, of: &VcpuStats) -> &'static str {
    if is_tuned(stats, of) {
        "tune"
    } else if stats.decided_by.is_some() {
        "policy"
    } else if is_capped(stats, of) {
        "guest, capped"
    } else if of.asks_khz.is_some() {
        "guest"
    } else {
        "none"
    }
}

/// Whether the highest floor or the lowest ceiling of its domain, which wins, changes its request.
fn is_tuned(stats: &Stats, of: &VcpuStats) -> bool {
    let vcpus = stats.vcpus.iter();
    let members: BTreeSet<u16> = vcpus
        .filter(|other| other.domain == of.domain && !stats.tunings.is_empty())
        .map(|other| other.vcpu)
        .collect();
    let is_member = |tuning: &&TuningStats| members.contains(&tuning.vcpu);
    let tunings = stats.tunings.iter().filter(is_member);
    let floor = tunings.clone().filter_map(|tuning| tuning.floor_khz).max();
    let ceiling = tunings.filter_map(|tuning| tuning.ceiling_khz).min();
    // Without a request its clamp is as wide as can be: each bound narrows it.
    of.asks_khz.map_or(floor.or(ceiling).is_some(), |asks_khz| {
        let raised = asks_khz.max(floor.unwrap_or(0));
        raised.min(ceiling.unwrap_or(u32::MAX)) != asks_khz
    })
}

/// Whether its pCPU may not have what it requests.
fn is_capped(stats: &Stats, of: &VcpuStats) -> bool {
    let (Some(pcpu), Some(asks_khz)) = (of.pcpu, of.asks_khz) else {
        return false;
    };
    stats.policies.iter().any(|policy| {
        let cpus = policy.cpus.parse::<CpuList>();
        policy.capped_khz.is_some_and(|cap| asks_khz > cap)
            && cpus.is_ok_and(|cpus| cpus.contains(pcpu))
    })
}

#[cfg(test)]
mod tests {
    //! Promise: a tuning or a cap is the cause only where it changes what the guest requests.

    use super::*;
    use crate::stats::PolicyTimes;

    /// vCPUs 0 and 1 are a domain, which requests `asks`, on pCPU 2 under a cap.
    fn stats(asks: Option<u32>, capped_khz: Option<u32>) -> Stats {
        let vcpu = |vcpu, domain| VcpuStats {
            vcpu,
            domain,
            pcpu: Some(2),
            asks_khz: asks,
            ..VcpuStats::default()
        };
        Stats {
            vcpus: vec![vcpu(0, 0), vcpu(1, 0), vcpu(2, 2)],
            policies: vec![PolicyTimes {
                policy: 2,
                cpus: "2-3".to_owned(),
                opps: Vec::new(),
                capped_khz,
                boost_off_khz: None,
            }],
            ..Stats::default()
        }
    }

    #[test]
    fn a_tuning_is_the_cause_where_it_changes_the_request() {
        let rows = [
            (Some(600), (Some(800), None), "tune"),
            (Some(800), (Some(800), None), "guest"),
            (Some(1000), (Some(800), None), "guest"),
            (Some(1000), (None, Some(800)), "tune"),
            (Some(800), (None, Some(800)), "guest"),
            // The ceiling wins.
            (Some(800), (Some(900), Some(800)), "guest"),
            (Some(700), (Some(900), Some(800)), "tune"),
            (None, (Some(800), None), "tune"),
            (None, (None, Some(800)), "tune"),
            (None, (None, None), "none"),
        ];
        for (asks, (floor_khz, ceiling_khz), expected) in rows {
            let mut stats = stats(asks, None);
            // Of vCPU 1: both are of its domain, and vCPU 2 is not.
            stats.tunings = vec![TuningStats {
                vcpu: 1,
                floor_khz,
                ceiling_khz,
                ..TuningStats::default()
            }];
            let [first, second, other] = [0, 1, 2].map(|of| cause(&stats, &stats.vcpus[of]));
            let row = (asks, floor_khz, ceiling_khz);
            assert_eq!([first, second], [expected; 2], "{row:?}");
            let own = asks.map_or("none", |_| "guest");
            assert_eq!(other, own, "{row:?}");
        }
    }

    #[test]
    fn a_low_floor_beside_a_higher_one_changes_nothing() {
        let mut stats = stats(Some(800), None);
        let floor = |handle, khz| TuningStats {
            handle,
            floor_khz: Some(khz),
            ..TuningStats::default()
        };
        stats.tunings = vec![floor(1, 600), floor(2, 700)];
        assert_eq!(cause(&stats, &stats.vcpus[0]), "guest");
        stats.tunings.push(floor(3, 900));
        assert_eq!(cause(&stats, &stats.vcpus[0]), "tune");
    }

    #[test]
    fn a_cap_is_the_cause_of_a_request_above_it() {
        for (asks, cap, expected) in [
            (Some(900), Some(800), "guest, capped"),
            (Some(800), Some(800), "guest"),
            (Some(600), Some(800), "guest"),
            (Some(900), None, "guest"),
            (None, Some(800), "none"),
        ] {
            let mut stats = stats(asks, cap);
            assert_eq!(cause(&stats, &stats.vcpus[0]), expected, "{asks:?} {cap:?}");
            stats.policies[0].cpus = "0-1".to_owned();
            assert_ne!(cause(&stats, &stats.vcpus[0]), "guest, capped");
        }
    }
}
