// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long the README's commands take: `docs/times.json` keeps a run of each on each machine, with
//! empty caches and with filled ones, and `out/times.json` has this machine's newest. A run that found
//! its caches partly filled is in no column.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use super::markdown::{head, row};

const KEPT: &str = "docs/times.json";
const NEW: &str = "out/times.json";

/// Takes the newest runs over, and makes the table.
pub fn table(repo: &Path) -> Result<String> {
    let mut runs = BTreeMap::new();
    for file in [KEPT, NEW] {
        let Ok(text) = fs::read_to_string(repo.join(file)) else {
            continue;
        };
        let read: Vec<Value> = serde_json::from_str(&text).with_context(|| file.to_owned())?;
        for run in read.into_iter().filter(is_shown) {
            let key = ["command", "caches", "machine"].map(|key| run[key].to_string());
            runs.insert(key, run);
        }
    }
    let runs: Vec<Value> = runs.into_values().collect();
    fs::write(
        repo.join(KEPT),
        format!("{:#}\n", Value::from(runs.clone())),
    )?;
    Ok(of_runs(&runs))
}

fn is_shown(run: &Value) -> bool {
    run["caches"] != "partly"
}

fn of_runs(runs: &[Value]) -> String {
    let mut table = head(&["command", "with empty caches", "later"]);
    for command in ["make demo", "make test", "make bench"] {
        let seconds = |caches: &str| {
            let of = runs
                .iter()
                .filter(|run| run["command"] == command && run["caches"] == caches);
            range(of.filter_map(|run| run["s"].as_u64()).collect())
        };
        table += &row([format!("`{command}`"), seconds("empty"), seconds("filled")]);
    }
    let mut machines: Vec<String> = runs
        .iter()
        .filter_map(|run| Some(run["machine"].as_str()?.to_owned()))
        .collect();
    machines.sort();
    machines.dedup();
    table + &format!("\nMeasured on {}.\n", machines.join("; "))
}

/// The least and the most, in seconds up to two minutes. No run took less or more.
fn range(mut seconds: Vec<u64>) -> String {
    seconds.sort_unstable();
    let (Some(&least), Some(&most)) = (seconds.first(), seconds.last()) else {
        return "not measured".to_owned();
    };
    let (unit, divisor) = match most {
        0..=120 => ("s", 1),
        _ => ("min", 60),
    };
    let (least, most) = (least / divisor, most.div_ceil(divisor));
    match least == most {
        true => format!("{most} {unit}"),
        false => format!("{least} to {most} {unit}"),
    }
}

#[cfg(test)]
mod tests {
    //! Promises: the table has the least and the most of all machines; caches that were filled partly
    //! count for neither column.
    use serde_json::json;

    use super::*;

    #[test]
    fn a_range_is_over_all_machines() {
        let run = |machine: &str, caches: &str, s: u64| json!({ "command": "make demo", "machine": machine, "caches": caches, "s": s });
        let runs = [
            run("a", "empty", 240),
            run("b", "empty", 630),
            run("a", "filled", 40),
        ];
        let table = of_runs(&runs);
        assert!(
            table.contains("| `make demo` | 4 to 11 min | 40 s |"),
            "{table}"
        );
        assert!(
            table.contains("| `make bench` | not measured | not measured |"),
            "{table}"
        );
        assert!(table.ends_with("Measured on a; b.\n"), "{table}");
    }

    #[test]
    fn partly_filled_caches_are_in_no_column() {
        let repo = tempfile::tempdir().unwrap();
        for folder in ["docs", "out"] {
            fs::create_dir(repo.path().join(folder)).unwrap();
        }
        let run = |caches: &str, s: u64| json!({ "command": "make test", "machine": "a", "caches": caches, "s": s });
        let new = Value::from(vec![run("partly", 600), run("filled", 90)]);
        fs::write(repo.path().join(NEW), new.to_string()).unwrap();
        let table = table(repo.path()).unwrap();
        let row = "| `make test` | not measured | 90 s |";
        assert!(table.contains(row), "{table}");
        let kept = fs::read_to_string(repo.path().join(KEPT)).unwrap();
        let kept: Value = serde_json::from_str(&kept).unwrap();
        assert_eq!(kept, Value::from(vec![run("filled", 90)]));
    }
}
