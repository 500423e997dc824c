// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Perfetto's own trace processor reads what `vcpufreq trace` writes, without an error: each slice, mark,
//! counter and group of tracks that the file has, and of requests as many as `stats` counts.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use super::trace::{OUT, requests, start, tune};
use crate::harness::plan::{first_cpus, last_of, registers};
use crate::harness::policy::Policy;
use crate::harness::vm::{Setup, Vm};

const REQUESTS: u64 = 30;
/// Of all that is in a trace, by name. Each gives one object.
const QUERIES: [&str; 4] = [
    "select json_group_object(name, n) from (select name, count(*) as n from slice group by name)",
    "select json_group_object(name, n) from (select t.name, count(*) as n from counter c \
     join counter_track t on c.track_id = t.id group by t.name)",
    "select json_group_object(name, pid) from process where name is not null",
    "select json_group_object(name, value) from stats \
     where severity in ('error', 'data_loss') and value > 0",
];
/// In ns.
const RUN_TIME: &str = "select '' || sum(dur) from slice where name glob 'on pCPU *'";

/// How much there is of each name.
type ByName = BTreeMap<String, u64>;

pub fn run() -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let (vcpu, policy) = last_of(&policies)?;
    let mut vm = Vm::boot(&Setup::mirroring(&first_cpus(&policies)))?;
    let set_perf = registers(&mut vm)? + 0x1000 * u64::try_from(vcpu)? + 4;
    vm.ask(format!("start busy busy {vcpu}"))?;
    let before = requests(&vm, vcpu)?;
    let mut tracer = start(&vm, "3s", &[])?;
    for at in 0..REQUESTS {
        let khz = [policy.max(), policy.min()][usize::from(at % 2 == 1)];
        vm.ask(format!("poke {vcpu} {set_perf:#x} {khz}"))?;
    }
    let counted = requests(&vm, vcpu)? - before;
    let tuned = tune(&vm, vcpu, policy)?;
    let status = tracer.wait()?;
    vm.quit()?;
    let trace: Value = serde_json::from_slice(&fs::read(OUT)?)?;
    let events = trace["traceEvents"].as_array().context("no events")?;
    let read = asked(&QUERIES)?;
    let run_ns = asked_texts(&[RUN_TIME])?;
    let [slices, counters, groups, errors] = &read[..] else {
        anyhow::bail!("{read:?}")
    };
    let named = slices.iter().filter(|(name, _)| is_request(name));
    let traced: u64 = named.map(|(_, count)| count).sum();
    let run_us: u64 = (events.iter())
        .filter(|one| {
            one["name"]
                .as_str()
                .is_some_and(|of| of.starts_with("on pCPU "))
        })
        .filter_map(|one| one["dur"].as_u64())
        .sum();
    let figures = json!({ "events": events.len(), "slices": slices, "counters": counters });
    Ok(LabVerdict::with_figures(figures)
        .check("it is traced", status.success() && tuned, status.code())
        .check_eq("requests that stats count", &counted, REQUESTS)
        .check_eq("requests that Perfetto has", &traced, counted)
        .check_eq("slices and marks", slices, slices_of(events))
        .check_eq("counters", counters, counters_of(events))
        .check_eq("groups of tracks", groups, groups_of(events))
        .check_eq("time on pCPUs", &run_ns[0], (run_us * 1000).to_string())
        .check("no error", errors.is_empty(), errors))
}

fn is_request(name: &str) -> bool {
    name.starts_with("requests ")
}

/// A mark is a slice without a length.
fn slices_of(events: &[Value]) -> ByName {
    let is_shown = |one: &&Value| one["ph"] == "X" || one["ph"] == "i";
    let names = events.iter().filter(is_shown).filter_map(name_of);
    counts(names.map(str::to_owned))
}

/// Each value of a counter has a track.
fn counters_of(events: &[Value]) -> ByName {
    let counters = events.iter().filter(|one| one["ph"] == "C");
    counts(counters.flat_map(|one| {
        let values = one["args"].as_object().into_iter().flatten();
        values.filter_map(|(key, _)| Some(format!("{} {key}", name_of(one)?)))
    }))
}

fn groups_of(events: &[Value]) -> ByName {
    let groups = events.iter().filter(|one| one["name"] == "process_name");
    let groups = groups.filter_map(|one| {
        let name = one["args"]["name"].as_str()?;
        Some((name.to_owned(), one["pid"].as_u64()?))
    });
    groups.collect()
}

fn name_of(event: &Value) -> Option<&str> {
    event["name"].as_str()
}

fn counts(names: impl Iterator<Item = String>) -> ByName {
    let mut counts = ByName::new();
    names.for_each(|name| *counts.entry(name).or_default() += 1);
    counts
}

fn asked(queries: &[&str]) -> Result<Vec<ByName>> {
    let texts = asked_texts(queries)?;
    let read = texts.iter().map(|text| serde_json::from_str(text));
    let read: Result<_, _> = read.collect();
    read.with_context(|| format!("{texts:?}"))
}

/// What the processor answers, a line each.
fn asked_texts(queries: &[&str]) -> Result<Vec<String>> {
    let output = Command::new("/bin/node")
        .args(["/lab/perfetto/perfetto.js", "/lab/perfetto", OUT])
        .args(queries)
        .output()
        .context("node")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the trace processor: {said}");
    let text = String::from_utf8(output.stdout)?;
    Ok(text.lines().map(str::to_owned).collect())
}
