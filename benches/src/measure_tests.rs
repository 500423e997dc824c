// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Figures from made-up traces: what counts as the start, as reached, as
//! kept, and what never comes about.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::load_log::Mark;
use crate::machine::{BenchMachine, Cluster, GuestFiles, SCHEDUTIL};
use crate::metric::Metric;
use crate::needed::HostKhz;
use crate::observed::Observed;
use crate::observed::Unsettled;
use crate::residency;
use crate::rest::settled;
use crate::scenario::{CpuSelection, PLAIN, Scenario, expanded};
use crate::scenarios::SCENARIOS;
use crate::trace::RepeatEvents;
use crate::tracefs::{FrequencyEvent, Mmio, Switch};

const LOAD: i32 = 99;

/// CPU 0 is little, 1 is big.
pub fn machine() -> BenchMachine {
    let cluster = |cpu, capacity, khz| Cluster {
        cpus: vec![cpu],
        capacity,
        khz,
        opps_khz: vec![khz.0, khz.1],
        made_up: false,
        power: vec![(khz.0, 100), (khz.1, 1000)],
        governor: SCHEDUTIL.to_owned(),
        cur_freq: PathBuf::new(),
    };
    let file = PathBuf::new;
    BenchMachine {
        clusters: vec![cluster(0, 329, (600, 1800)), cluster(1, 1024, (700, 2800))],
        cores: BTreeMap::new(),
        measured: false,
        kernel: String::new(),
        board: String::new(),
        guest: GuestFiles {
            kernel: file(),
            initrd: file(),
            qemu: None,
            disk: false,
        },
        speed_switch: None,
    }
}

fn mark(name: &str, us: u64, cpu: u32) -> Mark {
    let name = name.to_owned();
    Mark {
        name,
        us,
        cpu,
        told: false,
    }
}

pub fn change(time_us: u64, cpu: u32, khz: u32) -> FrequencyEvent {
    FrequencyEvent { time_us, cpu, khz }
}

pub fn switch(time_us: u64, cpu: u32, (prev, next): (i32, i32)) -> Switch {
    Switch {
        time_us,
        cpu,
        prev: (String::new(), prev),
        next: (String::new(), next),
    }
}

/// The load gets its CPU at 1000, marks its start at 1050, ends at 9000.
pub fn observed(cpu: u32, changes: &[(u64, u32)]) -> Observed {
    let mark = |name, us| mark(name, us, cpu);
    let switch = |us, prev, next| switch(us, cpu, (prev, next));
    Observed {
        seen: RepeatEvents {
            changes: changes
                .iter()
                .map(|&(us, khz)| change(us, cpu, khz))
                .collect(),
            switches: vec![switch(1000, 0, LOAD), switch(9100, LOAD, 0)],
            ..RepeatEvents::default()
        },
        marks: vec![mark("start", 1050), mark("end", 5000), mark("done", 9000)],
        frames: Vec::new(),
        figures: [("turns".to_owned(), 7), ("done".to_owned(), 2)].into(),
        threads: vec![LOAD],
        targets: None,
        khz_before: vec![600, 700],
        clock_error_us: 0,
        khz_at_rest: vec![600, 700],
        rest: Vec::new(),
        unsettled: None,
        put_away: Vec::new(),
    }
}

fn figure(metric: Metric, observed: &Observed) -> Option<u64> {
    let host = HostKhz {
        top: 1700,
        settled: 1700,
    };
    metric.measure(&machine(), observed, Some(host))
}

#[test]
fn a_ramp_counts_from_the_switch_not_from_the_mark() {
    let ramp = observed(1, &[(2000, 1700), (4000, 2800)]);
    assert_eq!(figure(Metric::ToFmax, &ramp), Some(3000));
    assert_eq!(figure(Metric::ToHostTop, &ramp), Some(1000));
    assert_eq!(figure(Metric::TopKhz, &ramp), Some(2800));
}

#[test]
fn times_at_frequencies_add_up_to_the_load() {
    let request = |time_us, vcpu: u64, value| Mmio {
        time_us,
        cpu: 1,
        len: 4,
        address: 0xa004 + 0x1000 * vcpu,
        value,
    };
    let mut load = observed(1, &[(2000, 1700), (4000, 2800), (9500, 700)]);
    load.seen.base = 0xa000;
    load.seen.requests = vec![
        request(500, 1, 700),
        // Of the other domain.
        request(600, 0, 600),
        request(3000, 1, 2800),
        request(9500, 1, 700),
    ];
    let times = residency::json(&machine(), &[load]).unwrap();
    // From 1000 to 9000.
    let ran = serde_json::json!([[700, 1000], [1700, 2000], [2800, 5000]]);
    assert_eq!(times["ran_us"], ran);
    let requested = serde_json::json!([[700, 2000], [2800, 6000]]);
    assert_eq!(times["requested_us"], requested);
    let without = residency::json(&machine(), &[observed(1, &[])]).unwrap();
    assert_eq!(without["requested_us"], serde_json::json!([]));
}

#[test]
fn other_threads_of_the_pcpu_are_told_from_the_load() {
    let mut load = observed(1, &[(2000, 1700)]);
    // Another thread runs from 3000 to 4000 and from 6000 to 6500; then the pCPU is idle to 7000.
    let others = [
        (3000, LOAD, 5),
        (4000, 5, LOAD),
        (6000, LOAD, 5),
        (6500, 5, 0),
    ];
    let more = others.map(|(us, prev, next)| switch(us, 1, (prev, next)));
    load.seen.switches.splice(1..1, more);
    load.seen.switches.insert(5, switch(7000, 1, (0, LOAD)));
    // What runs on another pCPU does not count.
    load.seen.switches.insert(1, switch(2500, 0, (0, 6)));
    let times = residency::json(&machine(), &[load]).unwrap();
    assert_eq!(times["own_us"], 2000 + 2000 + 2000);
    assert_eq!(times["others_us"], 1000 + 500);
}

#[test]
fn a_load_needs_what_the_host_settles_at() {
    let changes = [
        (1500, 1700),
        (2000, 2800),
        (2500, 1700),
        (4000, 700),
        (4500, 1700),
    ];
    let load = observed(1, &changes);
    let host = HostKhz {
        top: 2800,
        settled: 1700,
    };
    let found = HostKhz::needed(&machine(), &PLAIN, &[observed(1, &changes)]);
    assert_eq!(found, Some(host));
    assert_eq!(figure(Metric::ToNeeded, &load), Some(500));
    assert_eq!(figure(Metric::Below, &load), Some(500));
    assert_eq!(figure(Metric::Above, &load), Some(500), "1700 is the top");
    let higher = observed(1, &[(1500, 2800)]);
    assert_eq!(figure(Metric::ToNeeded, &higher), Some(500));
    assert_eq!(figure(Metric::ToNeeded, &observed(1, &[])), None);
}

#[test]
fn a_frequency_that_never_comes_gives_no_figure() {
    assert_eq!(figure(Metric::ToFmax, &observed(1, &[(2000, 1700)])), None);
}

#[test]
fn a_switch_after_the_mark_counts_within_the_clocks_error() {
    let mut late = observed(1, &[(4000, 2800)]);
    late.marks[0].us = 900;
    assert_eq!(figure(Metric::ToFmax, &late), Some(3100));
    late.clock_error_us = 100;
    assert_eq!(figure(Metric::ToFmax, &late), Some(3000));
}

#[test]
fn a_dip_to_the_minimum_is_not_the_step_down() {
    let down = observed(1, &[(2000, 2800), (5500, 700), (6000, 1700), (7000, 700)]);
    assert_eq!(figure(Metric::FirstFmin, &down), Some(500));
    assert_eq!(figure(Metric::ToFmin, &down), Some(2000));
    let up = observed(1, &[(5500, 700), (6000, 1700)]);
    assert_eq!(figure(Metric::ToFmin, &up), None);
}

#[test]
fn migration_counts_from_the_switch_on_the_big_cpu() {
    let mut moved = observed(0, &[]);
    moved.marks.insert(1, mark("on", 4010, 1));
    moved.marks[2].cpu = 1;
    moved.marks[3].cpu = 1;
    moved.seen.switches.insert(1, switch(4000, 1, (0, LOAD)));
    moved.seen.changes.push(change(6000, 1, 2800));
    assert_eq!(figure(Metric::Migrate, &moved), Some(3000));
    assert_eq!(figure(Metric::ToBig, &moved), Some(3000));
    assert_eq!(figure(Metric::ToBigFmax, &moved), Some(5000));
    assert_eq!(figure(Metric::EndsOnBig, &moved), Some(1));
    assert_eq!(figure(Metric::EndsOnBig, &observed(0, &[])), Some(0));
}

#[test]
fn of_three_clusters_either_larger_one_is_a_migration() {
    let mut three = machine();
    let mut middle = three.clusters[1].clone();
    middle.cpus = vec![2];
    middle.capacity = 800;
    three.clusters.insert(1, middle);
    let mut moved = observed(0, &[]);
    moved.khz_before = vec![600, 700, 700];
    for (at, us, cpu) in [(1, 2010, 2), (2, 4010, 1)] {
        moved.marks.insert(at, mark("on", us, cpu));
        let arrives = switch(us - 10, cpu, (0, LOAD));
        moved.seen.switches.insert(at, arrives);
    }
    let figure = |metric: Metric| metric.measure(&three, &moved, None);
    assert_eq!(figure(Metric::Migrate), Some(1000));
    assert_eq!(figure(Metric::ToBig), Some(3000));
}

#[test]
fn a_start_that_another_process_tells_is_that_moment() {
    let ramp = SCENARIOS.iter().find(|one| one.starts_low()).unwrap();
    let mut load = observed(1, &[]);
    load.khz_before[1] = 1700;
    assert_eq!(load.start().map(|mark| mark.us), Some(1000));
    assert!(load.not_settled(&machine(), ramp).is_some());
    load.marks[0].told = true;
    assert_eq!(load.start().map(|mark| mark.us), Some(1050));
    assert_eq!(load.not_settled(&machine(), ramp), None);
}

#[test]
fn a_start_above_the_minimum_is_told() {
    let ramp = SCENARIOS.iter().find(|one| one.starts_low()).unwrap();
    let settled = observed(1, &[(1000, 1700)]);
    assert_eq!(settled.not_settled(&machine(), ramp), None);
    let mut high = observed(1, &[]);
    high.khz_before[1] = 1700;
    let why = high.not_settled(&machine(), ramp).unwrap();
    assert!(why.why.contains("pCPU 1 at 1700 kHz"), "{why:?}");
    assert!(!why.lasting);
    high.khz_at_rest[1] = 1700;
    assert_eq!(
        high.not_settled(&machine(), ramp),
        None,
        "it can't be lower"
    );
    let beside = SCENARIOS.iter().find(|one| one.beside.is_some()).unwrap();
    assert_eq!(high.not_settled(&machine(), beside), None);
}

/// Takes repeats that didn't start settled for these reasons: a capital if it stays so.
fn retaken(whys: &[Option<&str>]) -> (Observed, usize) {
    let mut taken = 0;
    let kept = settled(|| {
        let mut one = observed(1, &[]);
        one.unsettled = whys[taken].map(|why| Unsettled {
            why: why.to_owned(),
            lasting: why.starts_with(char::is_uppercase),
        });
        taken += 1;
        Ok(one)
    });
    (kept.unwrap(), taken)
}

#[test]
fn a_repeat_that_did_not_start_settled_is_taken_anew() {
    let (kept, taken) = retaken(&[None]);
    assert_eq!((kept.unsettled, kept.put_away, taken), (None, vec![], 1));
    let (kept, taken) = retaken(&[Some("a"), Some("b"), None]);
    assert_eq!(
        (kept.unsettled, kept.put_away),
        (None, vec!["a".into(), "b".into()])
    );
    assert_eq!(taken, 3);
    let (kept, taken) = retaken(&[Some("a"), Some("b"), Some("c"), Some("d"), None]);
    let why = kept.unsettled.map(|one| one.why);
    assert_eq!(
        (why.as_deref(), kept.put_away.len(), taken),
        (Some("d"), 3, 4)
    );
}

#[test]
fn what_stays_up_is_waited_for_once_more() {
    let (kept, taken) = retaken(&[Some("A"), Some("B"), None]);
    let why = kept.unsettled.map(|one| one.why);
    assert_eq!(
        (why.as_deref(), kept.put_away, taken),
        (Some("B"), vec!["A".into()], 2)
    );
    let (kept, taken) = retaken(&[Some("A"), None]);
    assert_eq!(
        (kept.unsettled, taken),
        (None, 2),
        "it may have been chance"
    );
}

#[test]
fn all_else_is_kept_off_the_cpu_that_the_load_starts_on() {
    let aside = |place, machine: &BenchMachine| Scenario { place, ..PLAIN }.aside(machine);
    let lone = machine();
    assert_eq!(aside(CpuSelection::Little, &lone), 1);
    assert_eq!(aside(CpuSelection::Big, &lone), 0);
    assert_eq!(aside(CpuSelection::LittleToAll, &lone), 1);
    let mut two = machine();
    two.clusters[0].cpus = vec![0, 2];
    assert_eq!(aside(CpuSelection::LittleToAll, &two), 2);
    two.clusters.pop();
    two.clusters[0].cpus.pop();
    assert_eq!(
        aside(CpuSelection::LittleToAll, &two),
        0,
        "there is one CPU"
    );
}

#[test]
fn the_share_on_big_is_of_the_loads_own_time() {
    assert_eq!(figure(Metric::OnBig, &observed(1, &[])), Some(1000));
    assert_eq!(figure(Metric::OnBig, &observed(0, &[])), Some(0));
}

#[test]
fn the_busiest_cpu_has_its_share_of_the_loads_time() {
    let mut load = observed(1, &[]);
    assert_eq!(figure(Metric::Busiest, &load), Some(1000));
    // Another of its threads, on the other CPU until 3000: 2 of 10 ms.
    load.threads.push(98);
    load.seen.switches.insert(1, switch(1000, 0, (0, 98)));
    load.seen.switches.insert(2, switch(3000, 0, (98, 7)));
    assert_eq!(figure(Metric::Busiest, &load), Some(800));
}

#[test]
fn time_at_the_highest_frequency_ends_with_the_load() {
    let load = observed(1, &[(2000, 2800), (3500, 1700), (4000, 2800)]);
    assert_eq!(figure(Metric::AtFmax, &load), Some(2500));
}

#[test]
fn energy_is_busy_time_times_power() {
    // 1000 to 5000: 1 ms at the lowest OPP (100 µW), 3 ms at the highest (1 mW).
    let load = observed(1, &[(2000, 2800)]);
    assert_eq!(load.energy_uj(&machine(), 1000, 5000), Some(3));
    assert_eq!(load.energy_uj(&machine(), 1000, 2_000_000), Some(7));
    // Its power at a frequency that the energy model has not is not known.
    let odd = observed(1, &[(2000, 1700)]);
    assert_eq!(odd.energy_uj(&machine(), 1000, 5000), None);
}

#[test]
fn a_score_is_jobs_in_a_thousand_seconds() {
    let load = observed(1, &[(2000, 2800)]);
    assert_eq!(figure(Metric::Score, &load), Some(500_000));
}

#[test]
fn words_of_steps_become_this_machines() {
    let of = |steps: &str| expanded(steps, &machine(), ("1", "0,1"), 6);
    assert_eq!(of("sleep={phase}"), "sleep=2000");
    assert_eq!(of("uclamp={above_little}/1024"), "uclamp=345/1024");
    let calm = "calm=20/10000/40";
    assert_eq!(
        of("weights=1 {start} busy=2"),
        format!("weights=1 pin=1 {calm} sleep=500000 mark=start busy=2")
    );
    assert_eq!(
        of("{start_unpinned}"),
        format!("pin=1 {calm} sleep=400000 pin=0,1 sleep=100000 mark=start")
    );
    assert_eq!(
        of("{edges/5}"),
        format!(
            "pin=1 {calm} sleep=300000 mark=start rt-app=4000/20000/5 \
             {calm} sleep=300000 rt-app=12000/20000/5 mark=end"
        )
    );
    assert_eq!(of("{duties/5}").matches("rt-app=").count(), 5);
    for scenario in SCENARIOS {
        let all = scenario.steps.iter().map(|steps| of(steps));
        assert!(
            all.clone().all(|steps| !steps.contains('{')),
            "{}",
            scenario.title()
        );
    }
}
