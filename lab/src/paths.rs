// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `make bench-paths`: what an access costs by each path, on the emulated Arm
//! host and on this machine's KVM; a table for people (`docs/paths.md`), a
//! chart, `out/paths.json` for programs.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::artifacts::Artifacts;
use crate::paths_chart::chart;
use crate::paths_kvm;
use crate::paths_report::{report, wrong};
use crate::run::Options;

const DOC: &str = "docs/paths.md";
const BEGIN: &str = "<!-- figures of make bench-paths -->\n";
const END: &str = "<!-- end of the figures -->";

/// Measures, writes and prints; whether all accesses ended where they should.
pub fn run(artifacts: &Artifacts, repo: &Path) -> Result<bool> {
    let lab = one(artifacts, repo, "paths")?;
    let switches = one(artifacts, repo, "bpf-switch-cost")?;
    let kvm = paths_kvm::measure(repo)?;
    let report = report(&lab, &switches, kvm);
    let wrong = wrong(&report);
    ensure!(
        wrong.is_empty(),
        "the report isn't whole: {}",
        wrong.join(", ")
    );
    let out = repo.join("out");
    fs::create_dir_all(&out)?;
    fs::write(out.join("paths.json"), format!("{report:#}\n"))?;
    let results = report["results"].as_array();
    let results = results.map_or(&[][..], Vec::as_slice);
    fs::write(repo.join("docs/paths.svg"), chart(results))?;
    let table = table(&report);
    println!("{table}");
    into_doc(&repo.join(DOC), &table)?;
    println!("out/paths.json has all figures, docs/paths.svg the chart.");
    Ok(lab["held"] == true && switches["held"] == true)
}

fn one(artifacts: &Artifacts, repo: &Path, scenario: &str) -> Result<Value> {
    let report = Options::of(&[scenario]).report(artifacts, repo)?;
    let result = report.results.into_iter().next().context("no result")?;
    ensure!(result["error"].is_null(), "{scenario}: {}", result["error"]);
    Ok(result)
}

/// Of the accesses by a path, one of these on this machine.
fn find<'a>(results: &'a [Value], path: &str, op: &str, machine: &str) -> Option<&'a Value> {
    let mut found = results.iter();
    found.find(|row| row["path"] == path && row["op"] == op && row["machine"] == machine)
}

fn table(report: &Value) -> String {
    let results = report["results"].as_array().cloned().unwrap_or_default();
    let conditions = &report["conditions"];
    let lab = &conditions["lab"];
    let bare = &lab["bare"];
    let mut text = format!(
        "Arm host, **emulated** (virtual ns, 2 ns an instruction; Linux {}, guest of Linux {}):\n\n\
         | path | read, ns (emulated) | p99 | write with a new clamp, ns (emulated) | p99 | against \
         `exit` | exits of a read, of a write |\n|---|---|---|---|---|---|---|\n",
        word(&lab["host_kernel"]),
        word(&lab["guest_kernel"]),
    );
    let median = |path, op| {
        let row = find(&results, path, op, "lab");
        row.and_then(|row| row["median_ns"].as_f64())
    };
    let exit = median("exit", "write").unwrap_or(f64::NAN);
    for path in PATHS {
        let read = find(&results, path, "read", "lab");
        let write = find(&results, path, "write", "lab");
        let number = |row: Option<&Value>, name: &str| {
            row.and_then(|row| row[name].as_f64())
                .map_or_else(|| "-".to_owned(), ns)
        };
        let share =
            median(path, "write").map_or_else(|| "-".into(), |ns| format!("{:.2}", ns / exit));
        text += &format!(
            "| `{path}` | {} | {} | {} | {} | {share} | {}, {} |\n",
            number(read, "median_ns"),
            number(read, "p99_ns"),
            number(write, "median_ns"),
            number(write, "p99_ns"),
            exits(read),
            exits(write),
        );
    }
    text += &format!(
        "\nA load from memory in the same loop takes {} (emulated). The BPF programs of \
         a VM add {} to a switch between tasks of others (emulated).\n",
        ns(bare["load_median_ns"].as_f64().unwrap_or(f64::NAN)),
        ns(lab["added_to_a_switch_of_others_ns"]
            .as_f64()
            .unwrap_or(f64::NAN)),
    );
    text + &kvm_table(&results, &conditions["kvm"])
}

/// All paths, in the order of the table.
pub const PATHS: [&str; 3] = ["exit", "ioeventfd", "bpf"];

fn kvm_table(results: &[Value], conditions: &Value) -> String {
    if let Some(why) = conditions["skipped"].as_str() {
        return format!("\nOn this machine's KVM: skipped, {why}.\n");
    }
    let machine = word(&conditions["machine"]);
    let mut text = format!(
        "\nx86-64, `{machine}`: {} ns for a turn of the bare loop, {} with a load{}. Nothing is clamped \
         there, and writes follow each other at once:\n\n\
         | path | read, ns | p99 | write, ns | p99 |\n|---|---|---|---|---|\n",
        conditions["bare_loop_ns"],
        conditions["bare_load_ns"],
        if machine == "kvm" {
            ""
        } else {
            " (KVM emulates instructions: no figures of hardware)"
        },
    );
    for path in PATHS {
        let row = |op| find(results, path, op, &machine);
        if let (Some(read), Some(write)) = (row("read"), row("write")) {
            let number = |row: &Value, name: &str| ns(row[name].as_f64().unwrap_or(f64::NAN));
            text += &format!(
                "| `{path}` | {} | {} | {} | {} |\n",
                number(read, "median_ns"),
                number(read, "p99_ns"),
                number(write, "median_ns"),
                number(write, "p99_ns"),
            );
        }
    }
    text
}

fn exits(row: Option<&Value>) -> String {
    let count = |name: &str| row.and_then(|row| row[name].as_u64());
    match (count("exits_user"), count("exits_kernel")) {
        (Some(0), Some(0)) => "none".to_owned(),
        (Some(0), Some(_)) => "KVM".to_owned(),
        (Some(_), _) => "VMM".to_owned(),
        _ => "-".to_owned(),
    }
}

fn word(value: &Value) -> String {
    value.as_str().unwrap_or("?").to_owned()
}

/// `12,345`; under a hundred with a digit behind the point.
fn ns(ns: f64) -> String {
    if ns < 100.0 {
        return format!("{ns:.1}");
    }
    let text = format!("{ns:.0}");
    let mut grouped = String::new();
    for (index, digit) in text.chars().enumerate() {
        if index > 0 && (text.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// Puts the table into the page, in place of the one that is there.
fn into_doc(path: &Path, table: &str) -> Result<()> {
    let page = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let (before, rest) = page
        .split_once(BEGIN)
        .context("the page has no place for figures")?;
    let (_, after) = rest
        .split_once(END)
        .context("the page's figures have no end")?;
    fs::write(path, format!("{before}{BEGIN}{table}{END}{after}"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    //! Numbers read as people write them; a row says where accesses end.
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_are_grouped() {
        let rows = [
            (8.04, "8.0"),
            (123.0, "123"),
            (28_800.4, "28,800"),
            (1e6, "1,000,000"),
        ];
        for (number, text) in rows {
            assert_eq!(ns(number), text);
        }
    }

    #[test]
    fn a_row_says_where_accesses_end() {
        let row = |user, kernel| json!({ "exits_user": user, "exits_kernel": kernel });
        assert_eq!(exits(Some(&row(0, 0))), "none");
        assert_eq!(exits(Some(&row(0, 9))), "KVM");
        assert_eq!(exits(Some(&row(9, 0))), "VMM");
        assert_eq!(exits(None), "-");
    }
}
