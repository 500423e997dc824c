// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq stats --json` on a running VMM agrees with the guest's actions, the host's tracepoints
//! and the events file, by each path, also over a reset. So does `--openmetrics`.
//! Times at OPPs add up to the time that passes, and are those of the request in force. After kill -9
//! its socket is gone.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::harness::cur_perf as reports;
use crate::harness::frequency::let_ticks_pass;
use crate::harness::plan::{Plan, first_cpus, last_of, registers};
use crate::harness::policy::Policy;
use crate::harness::stats::{of, openmetrics};
use crate::harness::trace::exits::{Exits, SeenExits};
use crate::harness::vm::{Setup, Vm, events};

const PATHS: [&str; 3] = ["exit", "ioeventfd", "bpf"];
/// Reads and writes of a vCPU's registers at once.
const MANY: u64 = 300;
/// Further ones after a reset.
const FEW: u64 = 40;
/// Writes of a value that isn't in the table: they exit by the path `ioeventfd` too.
const ODD: u64 = 5;
/// How fast a vCPU may ask, and how often at once: less than [`ODD`].
const LIMIT: &str = "200:2";
/// How long a request is held. By `bpf` the VMM sees it after up to 100 ms.
const HELD: Duration = Duration::from_millis(600);
const SEEN_AFTER: Duration = Duration::from_millis(150);
/// Between the times of an answer and its `at_ns`.
const ANSWER_US: u64 = 5_000;
/// The kernel's unit of `time_in_state`.
const UNIT_US: u64 = 10_000;

pub fn run(_plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let mut results = Vec::new();
    let mut last = None;
    for path in PATHS {
        if let Some(vm) = last.take() {
            Vm::quit(vm)?;
        }
        let (vm, result) = by_path(path, &policies).with_context(|| format!("path {path}"))?;
        results.push(result);
        last = Some(vm);
    }
    let killed = after_kill(last.context("no path")?)?;
    Ok(LabVerdict::default()
        .parts("by_path", results)
        .part("after_kill", killed))
}

/// Without a driver, which would make requests, too. The guest goes on. By `exit` it isn't reset: a
/// reset is the same by `ioeventfd`.
fn by_path(path: &str, policies: &[Policy]) -> Result<(Vm, LabVerdict)> {
    let (last, policy) = last_of(policies)?;
    let setup =
        Setup::mirroring(&first_cpus(policies)).with(&["--path", path, "--rate-limit", LIMIT]);
    // All that is asked for is its ends.
    let table = reports::coarse_table(last, policy);
    let setup = setup.with(&table.each_ref().map(String::as_str));
    let mut vm = Vm::boot(&setup)?;
    let mut made = Made {
        count: MANY,
        resets: 0,
        traced: vec![Traced::default(); policies.len()],
    };
    access(&mut vm, policies, MANY, &mut made.traced)?;
    let before = of(&vm)?;
    let wrong_before = differences(&before, path, &made)?;
    if path != "exit" {
        vm.tell("restart")?;
        vm.expect("@ready", Duration::from_secs(120))?;
        made.resets = 1;
        access(&mut vm, policies, FEW, &mut made.traced)?;
        made.count += FEW;
    }
    let after = of(&vm)?;
    let wrong_after = differences(&after, path, &made)?;
    let unlike = unlike_metrics(&after, &openmetrics()?)?;
    let odd_times = odd_times(&mut vm, policies)?;
    let report = reports::nearest_entries(&mut vm, last, policy)?;
    let figures = json!({
        "path": path, "not_in_openmetrics": unlike, "odd_times": odd_times, "wrong": wrong_before, "wrong_after_reset": wrong_after,
        "stats": after["vcpus"],
    });
    let result = LabVerdict::with_figures(figures)
        .check_none("counts are right", &wrong_before)
        .check_none("counts are right after a reset", &wrong_after)
        .check_none("OpenMetrics has the same", &unlike)
        .check_none("times are right", &odd_times)
        .part("report_table", report);
    Ok((vm, result))
}

/// Requests the highest OPP of each vCPU for [`HELD`]; where times at OPPs don't show that.
fn odd_times(vm: &mut Vm, policies: &[Policy]) -> Result<Vec<Value>> {
    let base = registers(vm)?;
    let before = of(vm)?;
    for (vcpu, policy) in policies.iter().enumerate() {
        let (set_perf, max) = (base + 0x1000 * u64::try_from(vcpu)? + 4, policy.max());
        vm.ask(format!("stores {vcpu} {set_perf:#x} 1 {max} {max}"))?;
    }
    sleep(HELD);
    let after = of(vm)?;
    let passed = |stats: &Value| Some(stats["at_ns"].as_u64()? / 1000);
    let passed = passed(&after).context("at_ns")? - passed(&before).context("at_ns")?;
    let held = u64::try_from((HELD - SEEN_AFTER).as_micros())?;
    let mut odd = Vec::new();
    for (vcpu, policy) in policies.iter().enumerate() {
        let grown = grown([&before, &after].map(|of| &of["vcpus"][vcpu]["requested"]))?;
        let all: u64 = grown.iter().map(|(_, us)| us).sum();
        let of_max = grown
            .iter()
            .find(|(khz, _)| *khz == u64::from(policy.max()));
        if all.abs_diff(passed) > ANSWER_US || of_max.is_none_or(|(_, us)| *us < held) {
            odd.push(json!({ "vcpu": vcpu, "grown": grown, "passed": passed }));
        }
    }
    let counted = after["policies"].as_array().context("policies")?.len();
    if counted != policies.len() {
        odd.push(json!({ "policies": counted, "expected": policies.len() }));
    }
    for number in 0..counted {
        let grown = grown([&before, &after].map(|of| &of["policies"][number]["opps"]))?;
        let all: u64 = grown.iter().map(|(_, us)| us).sum();
        // Each OPP's time is rounded.
        let rounded = UNIT_US * (1 + grown.len() as u64);
        if all.abs_diff(passed) > rounded + ANSWER_US {
            odd.push(json!({ "policy": number, "grown": grown, "passed": passed }));
        }
    }
    Ok(odd)
}

/// By how many µs the time at each OPP, in kHz, has grown.
fn grown(moments: [&Value; 2]) -> Result<Vec<(u64, u64)>> {
    let [before, after] = moments.map(|times| {
        let times = times.as_array().context("no times")?.iter();
        let time = |one: &Value| Some((one["khz"].as_u64()?, one["us"].as_u64()?));
        times.map(time).collect::<Option<Vec<_>>>().context("times")
    });
    let grown = before?
        .into_iter()
        .zip(after?)
        .map(|((_, before), (khz, after))| (khz, after.saturating_sub(before)));
    Ok(grown.collect())
}

/// What `--json` counts of an idle guest and `--openmetrics` does not.
fn unlike_metrics(stats: &Value, metrics: &str) -> Result<Vec<String>> {
    let pid = &stats["pid"];
    let mut lines = Vec::new();
    for vcpu in stats["vcpus"].as_array().context("no vCPUs")? {
        let labels = format!("pid=\"{pid}\",vcpu=\"{}\"", vcpu["vcpu"]);
        let requests = &vcpu["counts"]["requests"];
        lines.push(format!("vcpufreq_requests_total{{{labels}}} {requests}"));
        let (way, count) = ("write_in_kernel", &vcpu["accesses"]["writes_in_kernel"]);
        lines.push(format!(
            "vcpufreq_accesses_total{{{labels},access=\"{way}\"}} {count}"
        ));
    }
    lines.retain(|line| !metrics.lines().any(|one| one == line));
    Ok(lines)
}

/// On each vCPU: `count` reads of cur_perf, then `count` writes of its table's
/// ends in turn, [`ODD`] of another value, and a read of a register that has none.
fn access(vm: &mut Vm, policies: &[Policy], count: u64, traced: &mut [Traced]) -> Result<()> {
    let base = registers(vm)?;
    let exits = Exits::watch()?;
    for (vcpu, policy) in policies.iter().enumerate() {
        let page = base + 0x1000 * u64::try_from(vcpu)?;
        let (low, high) = (policy.min(), policy.max());
        let set_perf = page + 4;
        vm.ask(format!("loads {vcpu} {page:#x} {count}"))?;
        vm.ask(format!("stores {vcpu} {set_perf:#x} {count} {low} {high}"))?;
        vm.ask(format!("stores {vcpu} {set_perf:#x} {ODD} {}", low + 1))?;
        vm.ask(format!("loads {vcpu} {:#x} 1", page + 0x18))?;
    }
    let seen = exits.stop()?;
    for (traced, page) in traced.iter_mut().zip((base..).step_by(0x1000)) {
        traced.add(&seen, page);
    }
    // What waits for the limit gets its turn, and the file is written.
    let_ticks_pass();
    sleep(Duration::from_millis(100));
    Ok(())
}

/// What tracepoints saw of a vCPU's accesses.
#[derive(Debug, Default, Clone)]
struct Traced {
    reads_exited: u64,
    writes_exited: u64,
    writes_in_kernel: u64,
}

impl Traced {
    /// Adds what was seen at the registers in a page.
    fn add(&mut self, seen: &SeenExits, page: u64) {
        let set_perf = seen.at(page + 4..page + 8);
        self.reads_exited += seen.at(page..page + 0x1000).exited - set_perf.exited;
        self.writes_exited += set_perf.exited;
        self.writes_in_kernel += set_perf.trapped - set_perf.exited;
    }

    /// As the stats have it.
    fn json(&self) -> Value {
        json!({
            "reads_exited": self.reads_exited, "writes_exited": self.writes_exited,
            "writes_in_kernel": self.writes_in_kernel,
        })
    }
}

/// What was done until now, and seen of it.
struct Made {
    /// Reads, and writes of table entries, of each vCPU.
    count: u64,
    /// The other accesses came before and after each of these.
    resets: u64,
    /// Of each vCPU.
    traced: Vec<Traced>,
}

/// Where the stats are wrong.
fn differences(stats: &Value, path: &str, made: &Made) -> Result<Vec<Value>> {
    let &Made { count, resets, .. } = made;
    let events = events()?;
    let vcpus = stats["vcpus"].as_array().context("no vcpus")?;
    let mut wrong = Vec::new();
    for ((vcpu, seen), traced) in vcpus.iter().enumerate().zip(&made.traced) {
        let mut expect = |what: &str, seen: &Value, expected: Value| {
            if *seen != expected {
                wrong.push(json!({ "vcpu": vcpu, what: seen, "expected": expected }));
            }
        };
        let (once, odd) = (1 + resets, ODD * (1 + resets));
        // A page that is in memory reads 0 where there is no register.
        let (exited, in_kernel) = match path {
            "exit" => ((count + once, count + odd), 0),
            "bpf" => ((0, 0), count + odd),
            _ => ((0, odd), count),
        };
        expect("path", &seen["path"], path.into());
        let accesses = json!({
            "reads_exited": exited.0, "writes_exited": exited.1, "writes_in_kernel": in_kernel,
        });
        expect("accesses", &seen["accesses"], accesses);
        expect("accesses by the trace", &seen["accesses"], traced.json());
        let mut counts = counted(&events, vcpu, resets);
        let of = |what: &str| counts[what].as_u64().unwrap_or_default();
        // What is settled while the next request arrives has no time. The module times
        // what a reset takes back, too.
        let mut applied = of("applied");
        if path == "bpf" {
            // Each has its event, also when a newer one takes its place while it waits.
            let settled = applied + of("unchanged") + of("superseded");
            counts["coalesced"] = of("requests").saturating_sub(settled).into();
        } else {
            applied -= resets;
        }
        let timed = seen["clamp_after"]["n"].as_u64().unwrap_or_default();
        expect("timed", &(1..=applied).contains(&timed).into(), true.into());
        // Else this is no test of these two.
        expect("limited", &(counts["limited"] != 0).into(), true.into());
        let coalesced = (counts["coalesced"] != 0).into();
        expect("coalesced", &coalesced, (path != "exit").into());
        // What is added to a request.
        let of_load = |event: &Value| {
            let known = ["pcpu_khz", "uclamp_min", "own_util", "others_util"];
            event["event"] == "load"
                && event["vcpu"] == vcpu
                && known.iter().all(|key| event[key].is_u64())
        };
        let load = events.iter().any(of_load).into();
        expect("an event of the load", &load, (path == "bpf").into());
        let all = json!(count + odd + resets);
        expect("requests", &counts["requests"], all);
        expect("counts", &seen["counts"], counts);
    }
    Ok(wrong)
}

/// A vCPU's counts, from the events. A reset takes the last request back, which
/// is a request without an event of its own.
fn counted(events: &[Value], vcpu: usize, resets: u64) -> Value {
    let of_vcpu = |kind: &'static str| {
        let it = move |event: &&Value| event["vcpu"] == vcpu && event["event"] == kind;
        events.iter().filter(it)
    };
    let count = |kind| of_vcpu(kind).count() as u64;
    let coalesced: u64 = of_vcpu("coalesced")
        .filter_map(|event| event["count"].as_u64())
        .sum();
    json!({
        "requests": count("request") + coalesced + resets,
        "applied": count("applied"),
        "unchanged": count("unchanged"),
        "superseded": count("superseded"),
        "coalesced": coalesced,
        "limited": count("limited"),
        "refused": count("refused"),
        "not_applicable": count("not_applicable"),
        "illegal": count("illegal_access"),
        "source_failures": count("source_failed"),
    })
}

/// The socket is there while the VMM runs, and not when it was killed; then
/// `stats` reports that, with exit code 2.
fn after_kill(vm: Vm) -> Result<LabVerdict> {
    let pid = vm.pid();
    let socket = format!("/run/vcpufreq/{pid}.sock");
    let there = Path::new(&socket).exists();
    vm.kill()?;
    sleep(Duration::from_secs(1));
    let left: Vec<_> = fs::read_dir("/run/vcpufreq")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path().display().to_string())
        .collect();
    let output = Command::new("/bin/vcpufreq").arg("stats").output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let refused = output.status.code() == Some(2) && said.lines().count() == 1;
    let figures = json!({ "socket_was_there": there, "left": left, "stats_said": said.trim() });
    Ok(LabVerdict::with_figures(figures)
        .check("the socket was there", there, &socket)
        .check_none("nothing is left", &left)
        .check("stats refuses with one line", refused, &said))
}
