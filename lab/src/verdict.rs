// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What comes of a test, how it is shown, and how it is counted.

use crate::progress::above;

/// What came of one test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It held.
    Passed,
    /// It held in an earlier run, on the same input, and wasn't repeated.
    Kept,
    /// It didn't, with what was seen.
    Failed(String),
    /// It can't be tried here, with the reason.
    Skipped(String),
}

/// A test and what came of it.
#[derive(Debug, Clone)]
pub struct TestResult {
    /// Where and what.
    pub name: String,
    /// What came of it.
    pub verdict: Verdict,
}

impl TestResult {
    /// From whether it held, and what to show when it didn't.
    pub fn new(name: impl Into<String>, held: bool, seen: impl FnOnce() -> String) -> Self {
        let verdict = if held {
            Verdict::Passed
        } else {
            Verdict::Failed(seen())
        };
        Self {
            name: name.into(),
            verdict,
        }
    }

    /// What can't be tried here.
    pub fn skipped(name: impl Into<String>, why: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            verdict: Verdict::Skipped(why.into()),
        }
    }

    /// Whether it held, now or earlier.
    pub fn held(&self) -> bool {
        matches!(self.verdict, Verdict::Passed | Verdict::Kept)
    }
}

/// Shows a test's outcome as it is known.
pub fn tell(tried: &TestResult) {
    let name = &tried.name;
    let line = match &tried.verdict {
        Verdict::Passed => format!("ok       {name}"),
        Verdict::Kept => format!("kept ok  {name}"),
        Verdict::Skipped(why) => format!("skipped  {name}: {why}"),
        Verdict::Failed(seen) => format!("FAILED   {name}: {seen}"),
    };
    above(|| println!("{line}"));
}

/// Tests by what came of them.
#[derive(Debug, Default)]
pub struct Counts {
    /// All that held.
    pub passed: usize,
    /// Those of them that held in an earlier run.
    pub kept: usize,
    /// What didn't hold.
    pub failed: usize,
    /// What can't be tried here.
    pub skipped: usize,
}

impl Counts {
    /// Of these tests.
    pub fn of(tried: &[TestResult]) -> Self {
        let mut counts = Self::default();
        for one in tried {
            match one.verdict {
                Verdict::Passed => counts.passed += 1,
                Verdict::Kept => {
                    counts.passed += 1;
                    counts.kept += 1;
                }
                Verdict::Failed(_) => counts.failed += 1,
                Verdict::Skipped(_) => counts.skipped += 1,
            }
        }
        counts
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { passed, kept, .. } = self;
        write!(f, "{passed} passed")?;
        if *kept > 0 {
            write!(f, " ({kept} earlier, on the same sources and tools)")?;
        }
        write!(f, ", {} failed, {} skipped", self.failed, self.skipped)
    }
}

#[cfg(test)]
mod tests {
    //! Promise: each outcome is counted as what it was.
    use super::*;

    #[test]
    fn counts_tell_what_was_kept() {
        let tried = [
            Verdict::Passed,
            Verdict::Kept,
            Verdict::Kept,
            Verdict::Failed("why".into()),
            Verdict::Skipped("why".into()),
        ];
        let named = |verdict| TestResult {
            name: "one".into(),
            verdict,
        };
        let tried = tried.map(named);
        assert_eq!(
            Counts::of(&tried).to_string(),
            "3 passed (2 earlier, on the same sources and tools), 1 failed, 1 skipped"
        );
        assert_eq!(
            Counts::of(&tried[..1]).to_string(),
            "1 passed, 0 failed, 0 skipped"
        );
    }
}
