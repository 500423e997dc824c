// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `make bench` and `make bench-paths`: measuring programs on an emulated
//! host, and what they leave in `out/`.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::artifacts::Artifacts;
use crate::out;
use crate::run::{DEFAULT_CPU, Options, bounds_hold};

/// All scenarios take about so long on two CPUs.
const ABOUT_S: u64 = 360;

/// Runs `vcpufreq bench`, for these scenarios alone if there are any; whether all was measured,
/// and is as it has to be.
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
        // Beside another emulated host, 4+3+1 took 1980 s on two cores.
        limit_s: 3600,
        about_s: scenarios.is_empty().then_some(ABOUT_S),
        ..Options::of(&[&names.join(":")])
    };
    let report = options.report(artifacts, repo)?;
    let mut result = report.results.into_iter().next().context("no result")?;
    let mut json = result["report"].take();
    let text = |key: &str| result[key].as_str().unwrap_or_default();
    if json["results"].as_array().is_none() {
        bail!(
            "the bench gave no report: {} {}",
            text("error"),
            text("said")
        );
    }
    json["conditions"]["emulated"] = true.into();
    json["conditions"]["topology"] = topology.into();
    out::text(repo, "ramp.html", text("html"))?;
    out::write(repo, "ramp.json", json.clone())?;
    if scenarios.is_empty() {
        out::write(repo, &format!("bench-{topology}.json"), json.clone())?;
    }
    eprintln!("{}", text("said"));
    println!(
        "\nEmulated Arm host, topology {topology}, Linux {}: {} repeats, or n of the report\n\n{}\n",
        json["conditions"]["host_kernel"].as_str().unwrap_or("?"),
        json["conditions"]["repeats"],
        text("table")
    );
    println!("out/ramp.json has the same figures, out/ramp.html shows them.");
    Ok(json["bounds"].is_array() && bounds_hold(&json) && result["held"] == true)
}

/// What an access costs by each path, as far as the emulated host tells: `out/paths-lab.json`.
pub fn paths(artifacts: &Artifacts, repo: &Path) -> Result<bool> {
    let names = ["paths", "bpf-switch-cost"];
    let mut object = json!({ "cpu": DEFAULT_CPU });
    // A host for each: what the first one does isn't in the second one's figures.
    for name in names {
        let report = Options::of(&[name]).report(artifacts, repo)?;
        let result = report.results.into_iter().next().context("no result")?;
        ensure!(result["error"].is_null(), "{name}: {}", result["error"]);
        object[name] = result;
    }
    let held = names
        .iter()
        .all(|name| object[name]["held"] == Value::Bool(true));
    out::write(repo, "paths-lab.json", object)?;
    Ok(held)
}
