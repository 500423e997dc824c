// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `make bench` and `make bench-paths`: measuring programs on an emulated
//! host, and what they leave in `out/`.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::artifacts::Artifacts;
use crate::boot::DEFAULT_CPU;
use crate::out;
use crate::run::{Options, bounds_hold};

/// All scenarios take about so long on two CPUs.
const ABOUT_S: u64 = 360;
/// CPU time of the emulator that a bench may take: 4+3+1 took 1980 s, beside another.
const LIMIT_S: u64 = 3600;
/// The same of an ablation: 11 variants.
const ABLATION_LIMIT_S: u64 = 12 * 3600;

/// Runs `vcpufreq bench`, for these scenarios alone if there are any; whether all was measured,
/// and is as it has to be.
pub fn run(
    artifacts: &Artifacts,
    repo: &Path,
    topology: &str,
    scenarios: &[String],
) -> Result<bool> {
    let words = [&["bench".to_owned()], scenarios].concat();
    let (verdict, json) = measured(artifacts, repo, topology, (&words, LIMIT_S))?;
    let text = |key: &str| verdict.get(key).as_str().unwrap_or_default();
    out::page(repo, "ramp.html", text("html"))?;
    out::write(repo, "ramp.json", json.clone())?;
    if scenarios.is_empty() {
        out::write(repo, &format!("bench-{topology}.json"), json.clone())?;
    }
    println!("out/ramp.json has the same figures, out/ramp.html shows them.");
    Ok(json["bounds"].is_array() && bounds_hold(&json) && verdict.held())
}

/// Runs the bench with these words, and prints its table; its verdict and report.
fn measured(
    artifacts: &Artifacts,
    repo: &Path,
    topology: &str,
    (words, limit_s): (&[String], u64),
) -> Result<(LabVerdict, Value)> {
    let options = Options {
        topology: topology.to_owned(),
        limit_s,
        about_s: (words.len() == 1).then_some(ABOUT_S),
        ..Options::of(&[&words.join(":")])
    };
    let report = options.report(artifacts, repo)?;
    let result = report.results.into_iter().next().context("no result")?;
    let verdict = result.verdict;
    let mut json = verdict.get("report").clone();
    let text = |key: &str| verdict.get(key).as_str().unwrap_or_default();
    if json["results"].as_array().is_none() {
        bail!(
            "the bench gave no report: {} {}",
            text("error"),
            text("said")
        );
    }
    json["conditions"]["emulated"] = true.into();
    json["conditions"]["topology"] = topology.into();
    eprintln!("{}", text("said"));
    println!(
        "\nEmulated Arm host, topology {topology}, Linux {}: {} repeats, or n of the report\n\n{}\n",
        json["conditions"]["host_kernel"].as_str().unwrap_or("?"),
        json["conditions"]["repeats"],
        text("table")
    );
    Ok((verdict, json))
}

/// Runs `vcpufreq bench --ablation`, for these scenarios alone if there are any: `out/ablation-*.json`.
/// Guests without an ingredient are no failure: whether all was measured.
pub fn ablation(
    artifacts: &Artifacts,
    repo: &Path,
    topology: &str,
    scenarios: &[String],
) -> Result<bool> {
    let words = ["bench", "--ablation"].map(str::to_owned);
    let words = [&words, scenarios].concat();
    let (verdict, json) = measured(artifacts, repo, topology, (&words, ABLATION_LIMIT_S))?;
    out::write(repo, &format!("ablation-{topology}.json"), json)?;
    println!(
        "out/ablation-{topology}.json has the figures; make figures makes out/ablation.md of it."
    );
    Ok(verdict.held())
}

/// What an access costs by each path, as far as the emulated host tells: `out/paths-lab.json`.
pub fn paths(artifacts: &Artifacts, repo: &Path) -> Result<bool> {
    let names = ["paths", "bpf-switch-cost"];
    let mut object = json!({ "cpu": DEFAULT_CPU });
    let mut held = true;
    // A host for each: what the first one does isn't in the second one's figures.
    for name in names {
        let report = Options::of(&[name]).report(artifacts, repo)?;
        let result = report.results.into_iter().next().context("no result")?;
        let error = result.verdict.get("error");
        ensure!(error.is_null(), "{name}: {error}");
        held &= result.verdict.held();
        object[name] = result.json();
    }
    out::write(repo, "paths-lab.json", object)?;
    Ok(held)
}
