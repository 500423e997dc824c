// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: a vCPU's thread runs, waits and leaves its guest for as long as the kernel's events
//! have it, also from the start; other threads, other VMs' requests and other pCPUs aren't there;
//! requests are counted by vCPU as the stats count them, or not at all; a clamp has its cause; what
//! is lost is named. A guest's own trace is there if its clock can be told, whichever is ahead.

use super::*;
use crate::stats::{DeciderStats, TuningStats, VcpuStats};

const TEXT: &str = "# tracer: nop\n\
    \x20 x-7 [002] d..2. 1.000000: sched_switch: prev_comm=x prev_pid=7 prev_prio=120 prev_state=S ==> next_comm=vcpu1 next_pid=99 next_prio=120\n\
    \x20 vcpu1-99 [002] d.... 1.000100: kvm_exit: TRAP: HSR_EC: 0x0024 (DABT_LOW), PC: 0x8\n\
    \x20 vcpu1-99 [002] ..... 1.000110: kvm_mmio: mmio write len 4 gpa 0xa001004 val 0x1b7740\n\
    \x20 vcpu1-99 [002] d.... 1.000150: kvm_entry: PC: 0x8\n\
    \x20 y-8 [001] ..... 1.000160: kvm_mmio: mmio write len 4 gpa 0xa001004 val 0x1b7740\n\
    \x20 x-7 [002] d..2. 1.000200: cpu_frequency: state=1800000 cpu_id=2\n\
    \x20 vcpu1-99 [002] d..2. 1.000300: sched_switch: prev_comm=vcpu1 prev_pid=99 prev_prio=120 prev_state=R+ ==> next_comm=x next_pid=7 next_prio=120\n\
    \x20 x-7 [002] d..2. 1.000500: sched_switch: prev_comm=x prev_pid=7 prev_prio=120 prev_state=S ==> next_comm=vcpu1 next_pid=99 next_prio=120\n\
    \x20 vcpu1-99 [002] d..2. 1.000600: sched_switch: prev_comm=vcpu1 prev_pid=99 prev_prio=120 prev_state=S ==> next_comm=x next_pid=7 next_prio=120\n\
    \x20 x-7 [002] d..2. 1.000900: sched_wakeup: comm=a pid=x pid=99 prio=120 target_cpu=002\n\
    \x20 x-7 [002] d..2. 1.001000: cpu_frequency: state=600000 cpu_id=2\n";

const WHOLE: Recording = Recording {
    since_us: 999_000,
    lost: 0,
    accesses: true,
};

fn stats() -> Stats {
    let vcpu = |vcpu| VcpuStats {
        vcpu,
        domain: vcpu.into(),
        tid: Some(98 + i32::from(vcpu)),
        asks_khz: Some(1_800_000),
        ..VcpuStats::default()
    };
    Stats {
        pid: 42,
        at_ns: 1_000_400_000,
        vcpus: vec![vcpu(0), vcpu(1)],
        ..Stats::default()
    }
}

/// Name, start and length of each slice of a group.
fn slices(trace: &Value, group: u32) -> Vec<(&str, u64, u64)> {
    let events = trace["traceEvents"].as_array().unwrap().iter();
    let slices = events.filter(|one| one["ph"] == "X" && one["pid"] == group);
    slices
        .map(|one| {
            let number = |name: &str| one[name].as_u64().unwrap();
            (one["name"].as_str().unwrap(), number("ts"), number("dur"))
        })
        .collect()
}

/// Track and name of each mark.
fn marks(trace: &Value) -> Vec<(u64, &str)> {
    let events = trace["traceEvents"].as_array().unwrap().iter();
    let marks = events.filter(|one| one["ph"] == "i");
    let mark = |one: &'_ Value| one["tid"].as_u64().unwrap();
    marks
        .map(|one| (mark(one), one["name"].as_str().unwrap()))
        .collect()
}

#[test]
fn a_thread_runs_waits_and_leaves_its_guest() {
    let mut timeline = Timeline::new(&stats(), WHOLE);
    timeline.read(TEXT).unwrap();
    let trace = timeline.finish();
    let threads = [
        ("on pCPU 2", 1_000_000, 300),
        ("waiting", 1_000_300, 200),
        ("on pCPU 2", 1_000_500, 100),
        ("waiting", 1_000_900, 100),
    ];
    assert_eq!(slices(&trace, THREADS), threads);
    assert_eq!(slices(&trace, EXITS), [("DABT_LOW", 1_000_100, 50)]);
    let other = &trace["otherData"];
    assert_eq!(other["requests_by_vcpu"], json!({ "0": 0, "1": 1 }));
    assert_eq!(other["lost_events"], 0);
    assert_eq!(marks(&trace), [(2, "requests 1800 MHz")]);
    let text = trace.to_string();
    assert_eq!(text.matches("\"name\":\"pCPU 2\"").count(), 2, "{text}");
}

#[test]
fn what_stats_count_as_no_request_is_none() {
    let write = |offset: &str, len| {
        format!(
            " vcpu1-99 [002] ..... 1.000110: kvm_mmio: mmio write len {len} gpa 0xa00{offset} val 0x1b7740\n"
        )
    };
    // Too narrow and too wide; another register; behind the last vCPU's page.
    let others = [
        ("1004", 1),
        ("1004", 8),
        ("1000", 4),
        ("2004", 4),
        ("7004", 4),
    ];
    let mut timeline = Timeline::new(&stats(), WHOLE);
    for (offset, len) in others {
        timeline.read(&write(offset, len)).unwrap();
    }
    timeline.read(&write("0004", 4)).unwrap();
    let trace = timeline.finish();
    assert_eq!(marks(&trace), [(1, "requests 1800 MHz")]);
    let counted = &trace["otherData"]["requests_by_vcpu"];
    assert_eq!(counted, &json!({ "0": 1, "1": 0 }));
}

#[test]
fn requests_that_no_trace_has_are_not_counted_as_none() {
    let mut shared = stats();
    shared.vcpus[0].path = Path::Shm;
    let mut timeline = Timeline::new(&stats(), WHOLE);
    timeline.read(TEXT).unwrap();
    timeline.sample(&shared);
    let trace = timeline.finish();
    let counted = &trace["otherData"]["requests_by_vcpu"];
    assert_eq!(counted, &json!({ "0": null, "1": 1 }));
    // Of a kernel without KVM's events, of no vCPU.
    let without = Recording {
        accesses: false,
        ..WHOLE
    };
    let trace = Timeline::new(&stats(), without).finish();
    let counted = &trace["otherData"]["requests_by_vcpu"];
    assert_eq!(counted, &json!({ "0": null, "1": null }));
}

#[test]
fn a_vcpu_that_runs_at_the_start_has_a_slice_from_there() {
    let out = " vcpu0-98 [001] d..2. 1.000300: sched_switch: prev_comm=vcpu0 prev_pid=98 prev_prio=120 prev_state=S ==> next_comm=x next_pid=7 next_prio=120\n";
    let exit = " vcpu0-98 [001] d.... 1.000400: kvm_exit: IRQ: HSR_EC: 0x0000 (UNKNOWN), PC: 0x8\n";
    let wake =
        " x-7 [002] d..2. 1.000200: sched_wakeup: comm=vcpu0 pid=98 prio=120 target_cpu=001\n";
    let ran = [("on pCPU 1", 999_000, 1300)];
    let rows = [
        (out.to_owned(), 0, &ran[..]),
        // It is never switched out.
        (exit.to_owned(), 0, &[("on pCPU 1", 999_000, 1400)]),
        // Once it is away, it is.
        (format!("{out}{out}"), 0, &ran),
        (format!("{wake}{out}"), 0, &[]),
        // What brought it there may be lost.
        (out.to_owned(), 1, &[]),
    ];
    for (text, lost, expected) in rows {
        let mut timeline = Timeline::new(&stats(), Recording { lost, ..WHOLE });
        timeline.read(&text).unwrap();
        let trace = timeline.finish();
        let slices = slices(&trace, THREADS);
        let ran: Vec<_> = slices.iter().filter(|of| of.0 != "waiting").collect();
        assert_eq!(ran, Vec::from_iter(expected), "{text} {lost}");
        assert_eq!(trace["otherData"]["lost_events"], lost);
    }
}

/// Track, time and frequency of each counter of a pCPU.
fn frequencies(trace: &Value) -> Vec<(&str, u64, f64)> {
    let events = trace["traceEvents"].as_array().unwrap().iter();
    let counters = events.filter(|one| one["ph"] == "C" && one["pid"] == HOST);
    let counters = counters.map(|one| {
        let (name, us) = (one["name"].as_str().unwrap(), one["ts"].as_u64().unwrap());
        (name, us, one["args"]["MHz"].as_f64().unwrap())
    });
    counters.collect()
}

#[test]
fn each_pcpu_of_the_vm_has_its_frequency_from_the_start() {
    let at = |us: u64, pcpu, khz| {
        let mut stats = stats();
        stats.at_ns = us * 1000;
        (stats.vcpus[0].pcpu, stats.vcpus[0].pcpu_khz) = (Some(pcpu), Some(khz));
        stats
    };
    let other = " x-7 [002] d..2. 1.000250: cpu_frequency: state=900000 cpu_id=5\n";
    let mut timeline = Timeline::new(&stats(), WHOLE);
    timeline.read(&format!("{TEXT}{other}")).unwrap();
    // pCPU 0 never changes, 3 is the vCPU's later, and 2 was known before.
    for (us, pcpu) in [(999_010, 0), (1_000_300, 3), (1_000_320, 2), (1_000_340, 3)] {
        timeline.sample(&at(us, pcpu, 600_000));
    }
    let expected = [
        ("pCPU 0", 999_000, 600.0),
        ("pCPU 2", 1_000_200, 1800.0),
        ("pCPU 2", 1_001_000, 600.0),
        ("pCPU 3", 1_000_300, 600.0),
    ];
    assert_eq!(frequencies(&timeline.finish()), expected);
}

/// A write of each of these by vCPU 1, and the guest's events of it by a clock that is ahead; how
/// long it takes from one to the next differs.
fn both_texts(ahead_us: i64) -> (String, String) {
    let (mut host, mut guest) = (String::new(), String::new());
    for at in 0..12_u32 {
        let us = 1_100_000 + u64::from(at * at * 7919 % 5_000 + at * 6_000);
        let khz = [600_000, 1_200_000, 1_800_000][usize::try_from(at * 5 % 3).unwrap()];
        host += &format!(
            " vcpu1-99 [002] ..... {}.{:06}: kvm_mmio: mmio write len 4 gpa 0xa001004 val {khz:#x}\n",
            us / 1_000_000,
            us % 1_000_000
        );
        let us = us.checked_add_signed(ahead_us).unwrap() + 10;
        let stamp = format!("{}.{:06}", us / 1_000_000, us % 1_000_000);
        guest += &format!(" a-7 [001] d..2. {stamp}: cpu_frequency: state={khz} cpu_id=1\n");
        guest += &format!(" a-7 [001] {stamp}: sched_switch: a:7 [120] S ==> b:{at} [120]\n");
    }
    (host, guest)
}

#[test]
fn a_guests_own_trace_is_on_the_hosts_axis() {
    for ahead_us in [5_000_000_i64, 0, -1_050_000] {
        let (host, guest) = both_texts(ahead_us);
        let mut timeline = Timeline::new(&stats(), WHOLE);
        timeline.read(&host).unwrap();
        assert!(timeline.join(&GuestTrace::of_text(&guest)), "{ahead_us}");
        let trace = timeline.finish();
        let clock = json!({ "ahead_us": ahead_us + 10, "within_us": 0, "pairs": 11 });
        assert_eq!(trace["otherData"]["guest_clock"], clock);
        let events = trace["traceEvents"].as_array().unwrap().iter();
        let own = events.filter(|one| one["pid"] == GUEST);
        let of = |kind: &str| own.clone().filter(|one| one["ph"] == kind).count();
        assert_eq!(of("C"), 12);
        // Its name, its place and its CPU's name.
        assert_eq!(of("M"), 3);
        let first = own.clone().find(|one| one["ph"] == "C").unwrap();
        assert_eq!(
            (&first["name"], &first["ts"]),
            (&json!("CPU 1"), &json!(1_100_000))
        );
    }
}

#[test]
fn a_guest_whose_clock_cannot_be_told_is_not_in_it() {
    let (host, guest) = both_texts(0);
    let of_cpu_0 = guest.replace("cpu_id=1", "cpu_id=0");
    for text in ["", "garbage\n", &of_cpu_0, &guest[..300]] {
        let mut timeline = Timeline::new(&stats(), WHOLE);
        timeline.read(&host).unwrap();
        assert!(!timeline.join(&GuestTrace::of_text(text)), "{text}");
        let trace = timeline.finish();
        let of_guest = |one: &Value| one["pid"] == GUEST;
        assert!(
            !trace["traceEvents"]
                .as_array()
                .unwrap()
                .iter()
                .any(of_guest)
        );
        assert!(trace["otherData"].get("guest_clock").is_none());
    }
}

#[test]
fn a_clamp_has_its_cause() {
    let mut timeline = Timeline::new(&stats(), WHOLE);
    let tuned = TuningStats {
        handle: 7,
        vcpu: 1,
        floor_khz: Some(2_000_000),
        ..TuningStats::default()
    };
    let decided = Stats {
        decided_by: Some(DeciderStats::default()),
        ..stats()
    };
    // A tuning counts above a policy's answer.
    let with = Stats {
        tunings: vec![tuned],
        ..decided.clone()
    };
    let moments = [stats(), stats(), decided, with.clone(), with, stats()];
    for moment in moments {
        timeline.sample(&moment);
    }
    let trace = timeline.finish();
    let expected = [
        (1, "uclamp 0 to 0, by guest"),
        (2, "uclamp 0 to 0, by guest"),
        (1, "uclamp 0 to 0, by policy"),
        (2, "uclamp 0 to 0, by policy"),
        (2, "uclamp 0 to 0, by tune"),
        (2, "tuned"),
        (1, "uclamp 0 to 0, by guest"),
        (2, "uclamp 0 to 0, by guest"),
    ];
    assert_eq!(marks(&trace), expected);
}
