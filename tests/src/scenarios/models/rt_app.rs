// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! rt-app runs on the host: it ends by itself, and its log has a line for each
//! turn.

use std::process::Command;

use anyhow::{Context, Result};
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use crate::harness::plan::Plan;
use crate::harness::policy::Policy;
use crate::harness::sysfs;

/// Turns: about 5 ms of work each 50 ms.
const TURNS: usize = 5;
/// A turn of rt-app's loop in ns, as it would measure itself.
const LOOP_NS: u32 = 474;

pub fn run(_plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let cpu = policies.last().context("no policy")?.cpu();
    // `loop` counts only beside `phases`: without them it runs without end.
    let config = json!({
        "tasks": { "thread": { "cpus": [cpu], "loop": TURNS, "phases": { "phase": {
            "loop": 1, "run": 5000, "timer": { "ref": "tick", "period": 50000 },
        } } } },
        "global": {
            "default_policy": "SCHED_OTHER", "calibration": LOOP_NS, "lock_pages": false,
            "logdir": "/run", "log_basename": "rt-app", "log_size": 2,
        },
    });
    sysfs::write("/run/rt-app.json", &config)?;
    let output = Command::new("/bin/rt-app")
        .arg("/run/rt-app.json")
        .output()
        .context("rt-app")?;
    let log = sysfs::text("/run/rt-app-thread-0.log")?;
    let runs_us: Vec<u64> = log.lines().filter_map(run_us).collect();
    let said = String::from_utf8_lossy(&output.stderr);
    let figures = json!({ "runs_us": runs_us, "said": said });
    Ok(LabVerdict::with_figures(figures)
        .check("rt-app succeeds", output.status.success(), &said)
        .check("each turn is logged", runs_us.len() == TURNS, &runs_us))
}

/// The third column of a line that isn't a heading: how long the work took.
fn run_us(line: &str) -> Option<u64> {
    let words: Vec<&str> = line.split_whitespace().collect();
    words.get(2)?.parse().ok()
}
