// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq rt compare`: two reports that `rt report` wrote, beside each other.

use std::{fs, path::Path};

use anyhow::{Context as _, ensure};
use serde::Deserialize as _;
use serde_json::Value;

use super::{
    args::CompareArgs,
    output::{DrawReports, plain, print},
    result_file::{ResultFile, check_different},
};
use crate::measure::{ComparedReport, ReportComparison};

/// Compares and prints; returns the exit code: 1 if a latency got worse.
///
/// # Errors
/// A file that is no report, reports without a test in common, a page that can't be written.
pub(super) fn compare(args: &CompareArgs, draw: DrawReports) -> anyhow::Result<u8> {
    let page = match &args.html {
        None => None,
        Some(path) => {
            for report in [&args.first, &args.second] {
                check_different(&[path.as_path(), report.as_path()])?;
            }
            Some(ResultFile::at(path)?)
        }
    };
    let both = [&args.first, &args.second].map(|path| read(path));
    let [(first, first_json), (second, second_json)] = match both {
        [Ok(first), Ok(second)] => [first, second],
        [Err(why), _] | [_, Err(why)] => return Err(why),
    };
    let compared = ReportComparison::new(&first, &second);
    ensure!(
        !compared.is_empty(),
        "{} and {} have no complete test of the same place, load and CPU; compare reports that do",
        args.first.display(),
        args.second.display()
    );
    if let Some(page) = &page {
        let named = |path: &Path, json| (path.display().to_string(), json);
        let reports = [
            named(&args.first, first_json),
            named(&args.second, second_json),
        ];
        page.write(&draw(&reports))?;
    }
    match args.json {
        true => {
            let compared = serde_json::to_value(&compared)?;
            print(format!("{compared:#}\n"))?;
        }
        false => print(plain(&compared.text()))?,
    }
    Ok(u8::from(compared.is_worse()))
}

fn read(path: &Path) -> anyhow::Result<(ComparedReport, Value)> {
    let name = path.display();
    let text = fs::read_to_string(path);
    let text = text.with_context(|| format!("{name} can't be read; check the path"))?;
    let json: Option<Value> = serde_json::from_str(&text).ok();
    let report = json.and_then(|json| Some((ComparedReport::deserialize(&json).ok()?, json)));
    report.with_context(|| format!("{name} is no report; write one with rt report --out FILE"))
}
