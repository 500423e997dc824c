// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The output of a host's second serial port: a line of JSON for each finished scenario, and `#
//! DONE OF WHAT` for each part of the current one.

/// Before a line that is no result.
const PART: &str = "# ";

/// How far a host is with its scenarios.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Far {
    /// Scenarios that have ended.
    pub ended: usize,
    /// Where the next one is, if it tells.
    pub part: Option<ScenarioPart>,
}

/// A part of a scenario that has begun.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScenarioPart {
    /// Parts before it.
    pub done: u32,
    /// All parts.
    pub of: u32,
    /// What it is.
    pub what: String,
}

/// The results alone.
pub fn results(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.starts_with(PART))
}

impl Far {
    /// From what was written so far, whose last line may be half.
    pub fn read(text: &str) -> Self {
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let mut far = Self::default();
        for line in whole.lines() {
            match line.strip_prefix(PART) {
                Some(part) => far.part = ScenarioPart::read(part),
                None => {
                    far = Self {
                        ended: far.ended + 1,
                        part: None,
                    }
                }
            }
        }
        far
    }

    /// The share of so many scenarios that has been carried out.
    pub fn share(&self, scenarios: usize) -> f64 {
        let part = self.part.as_ref();
        let part = part.map_or(0.0, |part| f64::from(part.done) / f64::from(part.of.max(1)));
        ((self.ended as f64 + part) / scenarios.max(1) as f64).min(1.0)
    }
}

impl ScenarioPart {
    fn read(text: &str) -> Option<Self> {
        let (done, rest) = text.split_once(' ')?;
        let (of, what) = rest.split_once(' ')?;
        Some(Self {
            done: done.parse().ok()?,
            of: of.parse().ok()?,
            what: what.trim_end().to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    //! Promise: parts are distinguished from results, and count as progress.
    use super::*;

    const WRITTEN: &str = "{\"scenario\":\"boot\"}\n# 0 4 host: big-ramp, repeat 1 of 2\n\
                           # 1 4 host: big-ramp, repeat 2 of 2\n# 2 4 half a li";

    #[test]
    fn parts_are_told_from_results() {
        assert!(results(WRITTEN).eq(["{\"scenario\":\"boot\"}"]));
        let part = ScenarioPart {
            done: 1,
            of: 4,
            what: "host: big-ramp, repeat 2 of 2".to_owned(),
        };
        let far = Far::read(WRITTEN);
        assert_eq!((far.ended, far.part.clone()), (1, Some(part)));
        assert!((far.share(2) - 0.625).abs() < 1e-9);
    }

    #[test]
    fn parts_end_with_their_scenario() {
        let far = Far::read("# 1 2 kill\n{}\n");
        assert_eq!((far.ended, far.part), (1, None));
        assert_eq!(Far::read(""), Far::default());
    }
}
