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
use crate::unfetched::Unfetched;
use crate::verdict::{TestResult, Verdict};

/// A command on a part of the checkout.
pub struct Check {
    /// Of the cache's entry.
    pub name: String,
    /// What it looks at.
    pub source: ModuleSource,
    /// Packages that it needs, of those that the toolchain root may be without.
    pub needs: Vec<String>,
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
    /// The same with these packages as its needs.
    pub fn needing(mut self, packages: &[&str]) -> Self {
        self.needs = packages.iter().map(|&one| one.to_owned()).collect();
        self
    }

    /// Runs it, unless it passed before on the same input. When it doesn't
    /// pass, what it printed is the error; without a package that it needs, the error is
    /// [`Unfetched`].
    pub fn carry_out(&self, (cache, root): (&Cache, &Root), repo: &Path) -> Result<PassedCheck> {
        let needs: Vec<&str> = self.needs.iter().map(String::as_str).collect();
        root.require(&needs)?;
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
            Err(error) => not_held(&error),
        };
        TestResult { name, verdict }
    }
}

/// The verdict on what could not be carried out, or did not pass.
pub fn not_held(error: &anyhow::Error) -> Verdict {
    match error.downcast_ref::<Unfetched>() {
        Some(Unfetched(why)) => Verdict::Skipped(why.clone()),
        None => Verdict::Failed(format!("{error:#}")),
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

#[cfg(test)]
mod tests {
    //! Promise: what lacks a package is skipped with the reason, and all else fails.
    use super::*;

    #[test]
    fn what_lacks_a_package_is_skipped() {
        let lacks = || Unfetched("sparse:amd64: trixie lacks it".to_owned());
        let skipped = Verdict::Skipped(lacks().0);
        assert_eq!(not_held(&lacks().into()), skipped);
        let beneath = anyhow::anyhow!("404").context(lacks());
        assert_eq!(not_held(&beneath), skipped);
        assert!(matches!(
            not_held(&anyhow::anyhow!("404")),
            Verdict::Failed(_)
        ));
    }
}
