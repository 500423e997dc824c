// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks that aren't repeated on the same input.
//!
//! A passed check stays in the cache with its output, under a key of all its inputs. A failure is
//! never kept.

use std::fs;
use std::path::Path;

use anyhow::{Result, bail};

use crate::cache::{Cache, key, remove_tree};
use crate::child_output;
use crate::kernel::ModuleSource;
use crate::progress::Step;
use crate::root::Root;
use crate::verdict::{TestResult, Verdict};

/// A command on a part of the checkout.
pub struct Check {
    /// Of the cache's entry.
    pub name: String,
    /// What it looks at.
    pub source: ModuleSource,
    /// Runs in the toolchain root.
    pub command: Vec<String>,
    /// And there, in this folder.
    pub place: CheckPlace,
}

/// Where a check runs.
pub enum CheckPlace {
    /// In a folder with nothing but a copy of the source.
    Copy,
    /// In the checkout, with these settings of the environment. They are paths,
    /// and so no part of the key.
    Checkout(Vec<String>),
}

/// A check that passed.
pub struct PassedCheck {
    /// What it printed.
    pub text: String,
    /// Whether that was in an earlier run.
    pub kept: bool,
}

impl Check {
    /// Runs it, unless it passed before on the same input. When it doesn't
    /// pass, what it printed is the error.
    pub fn carry_out(&self, (cache, root): (&Cache, &Root), repo: &Path) -> Result<PassedCheck> {
        let mut input = self.source.content(repo)?;
        input.push(root.id().into_bytes());
        input.extend(self.command.iter().map(|word| word.clone().into_bytes()));
        let key = key(input.iter().map(Vec::as_slice));
        let mut kept = true;
        let dir = cache.entry(&format!("passed-{}", self.name), &key, |to| {
            kept = false;
            let step = Step::start(format!("{} (up to 2 minutes)", self.name));
            let work = to.join("work");
            let mut command = root.command("env");
            match &self.place {
                CheckPlace::Copy => {
                    self.source.copy(repo, &work)?;
                    command.args(["-C", &root.inside(&work)?])
                }
                CheckPlace::Checkout(settings) => command.args(["-C", "/src"]).args(settings),
            };
            let (held, text) = child_output::cargo(command.args(&self.command), &step)?;
            step.done();
            if !held {
                bail!("{text}");
            }
            remove_tree(&work)?;
            Ok(fs::write(to.join("output"), text)?)
        })?;
        let text = fs::read_to_string(dir.join("output"))?;
        Ok(PassedCheck { text, kept })
    }

    /// Runs it as one test.
    pub fn tried(&self, name: String, (cache, root): (&Cache, &Root), repo: &Path) -> TestResult {
        let verdict = match self.carry_out((cache, root), repo) {
            Ok(held) => held.verdict(),
            Err(error) => Verdict::Failed(format!("{error:#}")),
        };
        TestResult { name, verdict }
    }
}

impl PassedCheck {
    /// As the verdict of a test.
    pub fn verdict(&self) -> Verdict {
        if self.kept {
            Verdict::Kept
        } else {
            Verdict::Passed
        }
    }
}
