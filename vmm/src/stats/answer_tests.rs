// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: the answer of the largest VM is taken; each rule refuses what breaks it, and nothing of
//! the answer is in the error; what is taken makes a table, a screen and metrics, whatever its
//! numbers, of printable ASCII and with the number that the VMM was asked by.

use proptest::prelude::*;
use serde_json::{Value, json};
use vcpufreq_device::PERFTBL_MAX_LEN;

use super::*;
use crate::stats::{
    DeciderStats, PolicyTimes, Times, TuningStats, openmetrics, openmetrics::tests::strictly_read,
    screen, table,
};

const PID: u32 = 42;

fn read(stats: &Stats) -> Result<Stats, BadAnswer> {
    read_answer(&serde_json::to_vec(stats).unwrap(), PID)
}

fn opps(count: u32, us: u64) -> Vec<OppTime> {
    let opps = (0..count).map(|index| OppTime {
        khz: u32::MAX - index,
        us,
    });
    opps.collect()
}

/// Two vCPUs and a policy.
fn vm() -> Stats {
    let vcpus = [0, 1].map(|vcpu| VcpuStats {
        vcpu,
        ..VcpuStats::default()
    });
    Stats {
        pid: 1,
        at_ns: 1,
        vcpus: vcpus.into(),
        accesses_outside: 0,
        governors_lost: 0,
        governors_off: 0,
        pins_lost: 0,
        tunings: vec![TuningStats::default()],
        decided_by: Some(DeciderStats::default()),
        policies: vec![PolicyTimes {
            policy: 0,
            cpus: "0,2-3".to_owned(),
            opps: opps(2, 1),
            capped_khz: None,
            boost_off_khz: None,
        }],
    }
}

/// One whose numbers are the largest.
pub(in crate::stats) fn largest() -> Stats {
    let counts = [u64::MAX; 10];
    let names = json!({"requests": counts[0], "applied": counts[1], "unchanged": counts[2],
        "superseded": counts[3], "coalesced": counts[4], "limited": counts[5],
        "refused": counts[6], "not_applicable": counts[7], "illegal": counts[8],
        "source_failures": counts[9]});
    let times = Times {
        n: u64::MAX,
        p50_below_ns: Some(u64::MAX),
        p99_below_ns: Some(u64::MAX),
        buckets: vec![u64::MAX; HISTOGRAM_BUCKETS],
    };
    let vcpus = (0..MAX_VCPUS).map(|vcpu| VcpuStats {
        vcpu: vcpu.try_into().unwrap(),
        domain: u32::MAX,
        pcpu: Some(u32::MAX),
        pcpu_khz: Some(u32::MAX),
        asks_khz: Some(u32::MAX),
        gets_khz: u32::MAX,
        uclamp: (1024, 1024),
        own_util: Some(1024),
        others_util: Some(1024),
        target_sum: Some(u32::MAX),
        target: Some(1024),
        counts: serde_json::from_value(names.clone()).unwrap(),
        clamp_after: times.clone(),
        freq_after: times.clone(),
        // And for no request.
        requested: opps(PERFTBL_MAX_LEN + 1, u64::MAX),
        ..VcpuStats::default()
    });
    let policies = (0..512).map(|policy| PolicyTimes {
        policy,
        cpus: "65535".to_owned(),
        opps: opps(32, u64::MAX),
        capped_khz: Some(u32::MAX),
        boost_off_khz: Some(u32::MAX),
    });
    Stats {
        vcpus: vcpus.collect(),
        policies: policies.collect(),
        ..vm()
    }
}

#[test]
fn the_largest_vm_is_read() {
    let largest = largest();
    assert_eq!(read(&largest).map(|stats| stats.vcpus.len()), Ok(MAX_VCPUS));
    let metrics = openmetrics(std::slice::from_ref(&largest)).len();
    assert!(size_of(&largest) >= metrics && 2 * size_of(&largest) <= MOST_OF_ALL);
    let text = serde_json::to_vec(&largest).unwrap().len();
    assert!(
        size_of(&largest) >= text * METRICS_OF_TEXT / 2
            && size_of(&largest) <= 2 * text * METRICS_OF_TEXT,
        "{text}"
    );
}

#[test]
fn the_number_is_the_one_that_was_asked() {
    assert_eq!(read(&vm()).map(|stats| stats.pid), Ok(PID));
}

/// Breaks a rule.
type Break = fn(&mut Stats);

#[test]
fn each_rule_refuses_what_breaks_it() {
    let rules: [(&str, Break); 14] = [
        ("a vCPU has too many OPPs", |vm| {
            vm.vcpus[0].requested = opps(PERFTBL_MAX_LEN + 2, 0);
        }),
        ("too many tunings", |vm| {
            let tuned = (0..).map(|handle| TuningStats {
                handle,
                ..TuningStats::default()
            });
            vm.tunings = tuned.take(TUNINGS_AT_MOST + 1).collect();
        }),
        ("policies have too many OPPs", |vm| {
            vm.policies[0].opps = opps(1 << 15, 0);
        }),
        ("policies have too many OPPs", |vm| {
            let first = vm.policies[0].clone();
            let policies = (0..).map(|policy| PolicyTimes {
                policy,
                ..first.clone()
            });
            vm.policies = policies.take(MOST_OPPS + 1).collect();
        }),
        ("number is too high", |vm| vm.vcpus[1].vcpu = 512),
        ("numbers don't rise", |vm| vm.vcpus[1].vcpu = 0),
        ("above 1024", |vm| vm.vcpus[1].uclamp.1 = 1025),
        ("above 1024", |vm| vm.vcpus[0].others_util = Some(u16::MAX)),
        ("too many buckets", |vm| {
            vm.vcpus[0].freq_after.buckets = vec![0; 41];
        }),
        ("twice", |vm| {
            vm.vcpus[0].requested = [opps(1, 0), opps(1, 1)].concat();
        }),
        ("handles don't rise", |vm| {
            vm.tunings = vec![vm.tunings[0]; 2];
        }),
        ("policies' numbers", |vm| {
            vm.policies = vec![vm.policies[0].clone(); 2];
        }),
        ("no list of numbers", |vm| {
            vm.policies[0].cpus = "0\x1b]0;title\x07".to_owned();
        }),
        ("no list of numbers", |vm| {
            vm.policies[0].cpus = "0,".repeat(2049);
        }),
    ];
    for (rule, broken) in rules {
        let mut stats = vm();
        broken(&mut stats);
        let line = read(&stats).unwrap_err().to_string();
        assert!(line.contains(rule), "{rule}: {line}");
    }
    let long = [b" ".repeat(MOST_BYTES), b"{}".to_vec()].concat();
    assert_eq!(read_answer(&long, PID), Err(BadAnswer::TooLong));
}

// serde_json's own text has the names that it doesn't know.
#[test]
fn nothing_of_an_answer_is_in_the_error() {
    let mut answer = serde_json::to_value(vm()).unwrap();
    answer["vcpus"][0]["path"] = json!("\x1b[2J");
    for text in [answer.to_string(), "\x1b[2J".to_owned()] {
        let line = read_answer(text.as_bytes(), PID).unwrap_err().to_string();
        assert!(is_plain(&line) && !line.contains("[2J"), "{line:?}");
    }
}

fn is_plain(text: &str) -> bool {
    text.chars()
        .all(|char| char == '\n' || (' '..='~').contains(&char))
}

/// Mostly small, some at the ends.
fn number(most: u64) -> impl Strategy<Value = u64> {
    prop_oneof![6 => 0..=1000.min(most), 1 => 0..=most, 2 => Just(most)]
}

fn times() -> impl Strategy<Value = Value> {
    let buckets = prop::collection::vec(number(u64::MAX), 0..42);
    let times = (number(u64::MAX), number(u64::MAX), buckets);
    times.prop_map(|(n, ns, buckets)| {
        json!({"n": n, "p50_below_ns": ns, "p99_below_ns": null, "buckets": buckets})
    })
}

fn some_opps() -> impl Strategy<Value = Value> {
    let opp = (number(u32::MAX.into()), number(u64::MAX));
    let opp = opp.prop_map(|(khz, us)| json!({"khz": khz, "us": us}));
    prop::collection::vec(opp, 0..3).prop_map(Value::from)
}

fn vcpu() -> impl Strategy<Value = Value> {
    let wide = prop::collection::vec(number(u64::MAX), 13);
    let words = prop::collection::vec(number(u32::MAX.into()), 5);
    let utils = prop::collection::vec(number(1025), 5);
    let path = prop::sample::select(vec!["exit", "shm", "ioeventfd", "bpf", "\x1b[2J"]);
    let parts = (wide, words, utils, path, times(), times(), some_opps());
    parts.prop_map(
        |(wide, words, utils, path, clamp_after, freq_after, requested)| {
            json!({
                "vcpu": 0, "domain": words[0], "path": path, "pcpu": words[1], "pcpu_khz": words[2],
                "asks_khz": words[3], "gets_khz": words[4], "uclamp": [utils[0], utils[1]],
                "own_util": utils[2], "others_util": utils[3], "target": utils[4],
                "target_sum": words[0],
                "accesses": {"reads_exited": wide[0], "writes_exited": wide[1],
                    "writes_in_kernel": wide[2]},
                "counts": {"requests": wide[3], "applied": wide[4], "unchanged": wide[5],
                    "superseded": wide[6], "coalesced": wide[7], "limited": wide[8],
                    "refused": wide[9], "not_applicable": wide[10], "illegal": wide[11],
                    "source_failures": wide[12]},
                "clamp_after": clamp_after, "freq_after": freq_after, "requested": requested,
            })
        },
    )
}

fn answer() -> impl Strategy<Value = Value> {
    let vcpus = prop::collection::vec(vcpu(), 0..4).prop_map(|mut vcpus| {
        (0..)
            .zip(&mut vcpus)
            .for_each(|(number, vcpu): (u16, _)| vcpu["vcpu"] = json!(number));
        vcpus
    });
    let policy = ("[0-9,-]{0,6}", some_opps());
    let policies = prop::collection::vec(policy, 0..3).prop_map(|policies| {
        let policies = (0..).zip(policies);
        let policies = policies.map(|(number, (cpus, opps)): (u32, _)| {
            json!({"policy": number, "cpus": cpus, "opps": opps})
        });
        policies.collect::<Vec<_>>()
    });
    let wide = prop::collection::vec(number(u64::MAX), 4);
    (vcpus, policies, wide).prop_map(|(vcpus, policies, wide)| {
        json!({"pid": 1, "at_ns": wide[0], "vcpus": vcpus, "accesses_outside": wide[1],
            "governors_lost": wide[2], "governors_off": wide[2], "pins_lost": wide[3], "policies": policies})
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_is_taken_can_be_shown(answers in prop::collection::vec(answer(), 2)) {
        let read = answers.iter().map(|one| read_answer(one.to_string().as_bytes(), PID));
        let taken: Vec<_> = read.flatten().collect();
        let mut shown = String::new();
        for before in &taken {
            shown += &table(before);
            taken.iter().for_each(|now| shown += &screen(before, now).join("\n"));
            let metrics = openmetrics(std::slice::from_ref(before));
            let names = strictly_read(&metrics);
            prop_assert!(names.is_ok(), "{names:?}");
            shown += &metrics;
        }
        prop_assert!(is_plain(&shown), "{shown:?}");
    }
}
