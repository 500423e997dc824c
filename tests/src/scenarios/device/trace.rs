// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq trace` beside another tracer, by each path: its requests equal those that `stats` counts,
//! its threads and exits are there, a floor is named as a clamp's cause, and tracefs is as before, also
//! after a signal.

use std::collections::BTreeSet;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use vcpufreq_bench::tracefs::INSTANCES;
use vcpufreq_tests::LabVerdict;

use crate::harness::plan::{Plan, first_cpus, last_of, registers};
use crate::harness::policy::Policy;
use crate::harness::stats;
use crate::harness::trace::Trace;
use crate::harness::vm::{Setup, Vm};
use crate::harness::wait::wait_for;

const PATHS: [&str; 3] = ["exit", "ioeventfd", "bpf"];
pub(super) const OUT: &str = "/tmp/trace.json";
const REQUESTS: usize = 30;
const STARTS: Duration = Duration::from_secs(20);

pub fn run(_plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let before = instances()?;
    let results: Vec<Value> = PATHS
        .iter()
        .map(|path| by_path(path, &policies).with_context(|| format!("path {path}")))
        .collect::<Result<_>>()?;
    let left: Vec<_> = instances()?.difference(&before).cloned().collect();
    let figures = json!({ "by_path": results, "left": left });
    Ok(LabVerdict::with_figures(figures)
        .check_rows("each path", &results)
        .check_none("no instance is left", &left))
}

fn instances() -> Result<BTreeSet<String>> {
    let entries = fs::read_dir(INSTANCES)?;
    entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}

fn by_path(path: &str, policies: &[Policy]) -> Result<Value> {
    let (vcpu, policy) = last_of(policies)?;
    let setup = Setup::mirroring(&first_cpus(policies)).with(&["--path", path]);
    let mut vm = Vm::boot(&setup)?;
    let set_perf = registers(&mut vm)? + 0x1000 * u64::try_from(vcpu)? + 4;
    vm.ask(format!("start busy busy {vcpu}"))?;
    let other = Trace::start()?;
    let counted = requests(&vm, vcpu)?;
    let mut tracer = start(&vm, "6s", &[])?;
    // The last one is below the floor.
    for khz in [policy.max(), policy.min()].iter().cycle().take(REQUESTS) {
        vm.ask(format!("poke {vcpu} {set_perf:#x} {khz}"))?;
    }
    let tuned = tune(&vm, vcpu, policy)?;
    let status = tracer.wait()?;
    let counted = requests(&vm, vcpu)? - counted;
    let trace: Value = serde_json::from_slice(&fs::read(OUT)?)?;
    let other = other.stop()?;
    let interrupted = interrupt(&vm)?;
    vm.quit()?;
    let has = |kind: &str, name: &str| {
        let events = trace["traceEvents"].as_array().into_iter().flatten();
        let named = |one: &&Value| one["name"].as_str().is_some_and(|of| of.starts_with(name));
        events.filter(|one| one["ph"] == kind).filter(named).count()
    };
    let traced = trace["otherData"]["requests_by_vcpu"][vcpu.to_string()].as_u64();
    let tuned_requests = 2;
    let counts_equal =
        traced == Some(REQUESTS as u64) && counted == REQUESTS as u64 + tuned_requests;
    let seen = [
        has("i", "requests "),
        has("X", "on pCPU "),
        has("X", "DABT_LOW"),
        has("C", "pCPU "),
        has("i", "tuned"),
    ];
    let by_tune = trace.to_string().contains("by tune");
    let right = status.success()
        && tuned
        && by_tune
        && counts_equal
        && seen.iter().all(|count| *count > 0)
        && trace["otherData"]["lost_events"] == 0
        && !other.frequencies.is_empty()
        && interrupted;
    Ok(json!({
        "right": right, "path": path, "code": status.code(), "traced": traced,
        "counted": counted, "seen": seen, "by_tune": by_tune, "tuned": tuned,
        "lost": trace["otherData"]["lost_events"], "interrupted": interrupted,
        "other_tracer": other.frequencies.len(),
    }))
}

pub(super) fn requests(vm: &Vm, vcpu: usize) -> Result<u64> {
    let stats = stats::of(vm)?;
    let requests = stats["vcpus"][vcpu]["counts"]["requests"].as_u64();
    requests.context("no requests in the stats")
}

/// A tracer with more options that records by now.
pub(super) fn start(vm: &Vm, lasts: &str, more: &[&str]) -> Result<Child> {
    let child = Command::new("/bin/vcpufreq")
        .args([
            "trace",
            &vm.program().to_string(),
            "--for",
            lasts,
            "--out",
            OUT,
        ])
        .args(more)
        .stdout(Stdio::null())
        .spawn()?;
    let on = format!("{INSTANCES}/vcpufreq-bench-{}/tracing_on", child.id());
    wait_for("the tracer", STARTS, || {
        let on = fs::read_to_string(&on).is_ok_and(|text| text.trim() == "1");
        let ready = on && fs::read_to_string(format!("/proc/{}/wchan", child.id())).is_ok();
        Ok(ready.then_some(()))
    })?;
    // It is on from its start; its buffer is emptied when all events are.
    std::thread::sleep(Duration::from_secs(1));
    Ok(child)
}

/// A floor for a moment.
pub(super) fn tune(vm: &Vm, vcpu: usize, policy: &Policy) -> Result<bool> {
    let (pid, vcpu, khz) = (
        vm.program().to_string(),
        vcpu.to_string(),
        policy.max().to_string(),
    );
    let words = [
        "tune", &pid, "--vcpu", &vcpu, "--floor", &khz, "--for", "200ms",
    ];
    let output = Command::new("/bin/vcpufreq").args(words).output()?;
    Ok(output.status.success())
}

/// A signal ends it, and leaves tracefs as it was.
fn interrupt(vm: &Vm) -> Result<bool> {
    let before = instances()?;
    let mut tracer = start(vm, "60s", &[])?;
    ensure!(
        instances()?.len() == before.len() + 1,
        "no instance of its own"
    );
    kill(Pid::from_raw(i32::try_from(tracer.id())?), Signal::SIGINT)?;
    let status = tracer.wait()?;
    Ok(status.code() == Some(130) && instances()? == before)
}
