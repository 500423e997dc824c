// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `make bench`: `vcpufreq bench` on an emulated host; `out/ramp.json`,
//! `out/ramp.html` and `out/ramp.trace.json`.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::artifacts::Artifacts;
use crate::bounds;
use crate::run::Options;

/// All scenarios take about so long on two CPUs.
const ABOUT_S: u64 = 360;

/// Runs the bench, for these scenarios alone if there are any; whether all
/// was measured, and is as it has to be.
pub fn run(
    artifacts: &Artifacts,
    repo: &Path,
    topology: &str,
    scenarios: &[String],
) -> Result<bool> {
    let names: Vec<&str> = std::iter::once("bench")
        .chain(scenarios.iter().map(String::as_str))
        .collect();
    let options = Options {
        topology: topology.to_owned(),
        limit_s: 1800,
        about_s: scenarios.is_empty().then_some(ABOUT_S),
        ..Options::of(&[&names.join(":")])
    };
    let report = options.report(artifacts, repo)?;
    let mut result = report.results.into_iter().next().context("no result")?;
    let mut json = result["report"].take();
    let said = result["said"].as_str().unwrap_or_default();
    if json["results"].as_array().is_none() {
        let error = result["error"].as_str().unwrap_or_default();
        bail!("the bench gave no report: {error} {said}");
    }
    json["conditions"]["emulated"] = true.into();
    json["conditions"]["topology"] = topology.into();
    let out = repo.join("out");
    fs::create_dir_all(&out)?;
    fs::write(out.join("ramp.json"), format!("{json:#}\n"))?;
    for (name, key) in [("ramp.html", "html"), ("ramp.trace.json", "trace")] {
        fs::write(out.join(name), result[key].as_str().unwrap_or_default())?;
    }
    eprintln!("{said}");
    println!(
        "\nEmulated Arm host, topology {topology}, Linux {}: median (min..max) of {} repeats, or of as many as n in the report says\n\n{}\n",
        json["conditions"]["host_kernel"].as_str().unwrap_or("?"),
        json["conditions"]["repeats"],
        result["table"].as_str().unwrap_or_default()
    );
    println!(
        "out/ramp.json has the same figures, out/ramp.html shows them, out/ramp.trace.json opens in ui.perfetto.dev."
    );
    let bounds = bounds::of(&json, bounds::TWO_TICKS_US);
    println!("\nWhat has to hold:");
    for bound in &bounds {
        let verdict = match bound.held {
            Some(true) => "holds   ",
            Some(false) => "DOESN'T ",
            None => "no bound",
        };
        println!("{verdict}  {}", bound.text);
    }
    let within = bounds.iter().all(|bound| bound.held != Some(false));
    Ok(within && result["held"] == Value::Bool(true))
}
