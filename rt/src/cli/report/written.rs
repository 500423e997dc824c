// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The report so far, and the files that have it after each part.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::args::ReportArgs;
use crate::{
    cli::{
        output::DrawReports,
        result_file::{ResultFile, check_different},
    },
    measure::{Conditions, LatencyReport, TestRun},
};

/// A report that grows.
pub(super) struct WrittenReport {
    conditions: Conditions,
    budget_us: Option<u64>,
    runs: Vec<TestRun>,
    /// How many tests there will be.
    tests: u64,
    out: Option<ResultFile>,
    html: Option<ResultFile>,
    draw: DrawReports,
}

impl WrittenReport {
    /// Without any test. A file that can't be written shows before the first one; what is in it stays
    /// until something is measured.
    pub(super) fn begin(
        args: &ReportArgs,
        conditions: Conditions,
        tests: u64,
        draw: DrawReports,
    ) -> anyhow::Result<Self> {
        let paths: Vec<&Path> = [&args.out, &args.html]
            .into_iter()
            .filter_map(|path| path.as_deref())
            .collect();
        check_different(&paths)?;
        let file = |path: Option<&PathBuf>| path.map(|path| ResultFile::at(path)).transpose();
        Ok(Self {
            conditions,
            budget_us: args.budget_us,
            runs: Vec::new(),
            tests,
            out: file(args.out.as_ref())?,
            html: file(args.html.as_ref())?,
            draw,
        })
    }

    /// Adds a test that begins.
    pub(super) fn add(&mut self, run: TestRun) {
        self.runs.push(run);
    }

    /// The test that is being measured.
    pub(super) fn last(&mut self) -> Option<&mut TestRun> {
        self.runs.last_mut()
    }

    /// The longest latency of the test that is being measured.
    pub(super) fn longest_us(&self) -> Option<u64> {
        let latencies = self.runs.last()?.latencies.iter();
        latencies
            .filter(|one| one.samples > 0)
            .map(|one| one.max_us)
            .max()
    }

    /// The report so far.
    pub(super) fn report(&self) -> LatencyReport {
        let begun = u64::try_from(self.runs.len()).unwrap_or(u64::MAX);
        let left = self.tests.saturating_sub(begun);
        let runs = (self.runs.clone(), left);
        LatencyReport::new(self.conditions.clone(), self.budget_us, runs)
    }

    /// Writes the files, each as a whole.
    ///
    /// # Errors
    /// When one can't be written.
    pub(super) fn write(&self) -> anyhow::Result<()> {
        if self.out.is_none() && self.html.is_none() {
            return Ok(());
        }
        let json: Value = serde_json::to_value(self.report())?;
        if let Some(file) = &self.out {
            file.write(&format!("{json:#}\n"))?;
        }
        if let Some(file) = &self.html {
            file.write(&(self.draw)(&[("report".to_owned(), json)]))?;
        }
        Ok(())
    }
}
