// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What comes of a scenario: checks, which alone judge it, and figures for programs and readers.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What came of a scenario, or of a part of one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LabVerdict {
    checks: Vec<LabCheck>,
    figures: Map<String, Value>,
}

/// One of the conditions of a promise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LabCheck {
    /// What has to be so, below the names of the parts that it is of.
    pub name: String,
    /// Whether it is.
    pub held: bool,
    /// What it was judged by; empty if it held.
    pub seen: String,
}

/// A scenario's line on the result port.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ScenarioReport {
    /// The scenario's name.
    pub scenario: String,
    /// What came of it.
    pub verdict: LabVerdict,
}

impl LabVerdict {
    /// These figures, an object, and no check yet.
    pub fn with_figures(figures: Value) -> Self {
        match figures {
            Value::Object(figures) => Self {
                figures,
                ..Self::default()
            },
            other => Self::default().check("the figures are an object", false, other),
        }
    }

    /// What could not be carried out, and why.
    pub fn broken_off(error: &str) -> Self {
        let verdict = Self::default().figure("error", error);
        verdict.check("it could be carried out", false, error)
    }

    /// Adds a condition, and what it was judged by.
    #[must_use]
    pub fn check(mut self, name: &str, held: bool, seen: impl Serialize) -> Self {
        let seen = if held { String::new() } else { text(seen) };
        self.checks.push(LabCheck {
            name: name.to_owned(),
            held,
            seen,
        });
        self
    }

    /// Adds what has to be equal to something, of which the failure tells too.
    #[must_use]
    pub fn check_eq<S, W>(self, name: &str, seen: &S, wanted: W) -> Self
    where
        S: Serialize + PartialEq<W> + ?Sized,
        W: Serialize,
    {
        let held = *seen == wanted;
        let both = || format!("{}, not {}", text(seen), text(&wanted));
        self.check(name, held, if held { String::new() } else { both() })
    }

    /// Adds what has to be empty: all that is wrong.
    #[must_use]
    pub fn check_none<T: Serialize>(self, name: &str, found: &[T]) -> Self {
        self.check(name, found.is_empty(), found)
    }

    /// Adds what has to be right in each row, by the rows' key `right`.
    #[must_use]
    pub fn check_rows<'a>(self, name: &str, rows: impl IntoIterator<Item = &'a Value>) -> Self {
        let rows = rows.into_iter();
        let wrong: Vec<&Value> = rows.filter(|row| row["right"] != true).collect();
        self.check_none(name, &wrong)
    }

    /// Adds a figure.
    #[must_use]
    pub fn figure(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.figures.insert(name.to_owned(), value.into());
        self
    }

    /// Adds a part's checks, and its figures below its name.
    #[must_use]
    pub fn part(mut self, name: &str, part: Self) -> Self {
        self.figures.insert(name.to_owned(), part.json());
        self.checks_of(name, part);
        self
    }

    /// Adds the checks of each of these parts, of which there has to be one, and their figures as a
    /// list.
    #[must_use]
    pub fn parts(mut self, name: &str, parts: Vec<Self>) -> Self {
        let figures = parts.iter().map(Self::json).collect();
        self.figures.insert(name.to_owned(), figures);
        if parts.is_empty() {
            self.checks_of(name, Self::default());
        }
        for (number, part) in parts.into_iter().enumerate() {
            self.checks_of(&format!("{name}[{number}]"), part);
        }
        self
    }

    /// A part that checks nothing can't fail, and is counted as failed.
    fn checks_of(&mut self, name: &str, part: Self) {
        if part.checks.is_empty() {
            let without = LabVerdict::default().check("it has a check", false, "none");
            return self.checks_of(name, without);
        }
        self.checks
            .extend(part.checks.into_iter().map(|one| LabCheck {
                name: format!("{name}: {}", one.name),
                ..one
            }));
    }

    /// Whether all checks held, of which there has to be one.
    pub fn held(&self) -> bool {
        !self.checks.is_empty() && self.checks.iter().all(|one| one.held)
    }

    /// The checks that did not hold, each with what was seen.
    pub fn failed(&self) -> Vec<String> {
        if self.checks.is_empty() {
            return vec!["it has no check".to_owned()];
        }
        let failed = self.checks.iter().filter(|one| !one.held);
        let each = failed.map(|one| format!("{}: {}", one.name, one.seen));
        each.collect()
    }

    /// A figure; null if there is none of that name.
    pub fn get(&self, name: &str) -> &Value {
        self.figures.get(name).unwrap_or(&Value::Null)
    }

    /// The figures, and whether all checks held: what programs and readers get.
    pub fn json(&self) -> Value {
        let mut all = self.figures.clone();
        all.insert("held".to_owned(), self.held().into());
        Value::Object(all)
    }
}

impl ScenarioReport {
    /// The same of the scenario, with its name, and the checks that failed, if any did.
    pub fn json(&self) -> Value {
        let mut all = self.verdict.json();
        all["scenario"] = self.scenario.as_str().into();
        let failed = self.verdict.failed();
        if !failed.is_empty() {
            all["checks_failed"] = failed.into();
        }
        all
    }
}

fn text(seen: impl Serialize) -> String {
    match serde_json::to_value(seen) {
        Ok(Value::String(text)) => text,
        Ok(value) => value.to_string(),
        Err(error) => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    //! Promises: a verdict holds if all of its checks do, and there is one; a failed one names its
    //! parts; figures keep their names.
    use serde_json::json;

    use super::*;

    #[test]
    fn without_a_check_nothing_holds() {
        assert!(!LabVerdict::default().held());
        assert!(!LabVerdict::with_figures(json!({ "held": true })).held());
        assert!(!LabVerdict::with_figures(json!([])).held());
        let held = LabVerdict::default().check("one", true, ());
        assert!(held.held());
        let outer = held.clone().part("part", LabVerdict::default());
        assert_eq!(outer.failed(), ["part: it has a check: none"]);
        assert_eq!(LabVerdict::default().failed(), ["it has no check"]);
        let outer = held.clone().parts("rows", Vec::new());
        assert_eq!(outer.failed(), ["rows: it has a check: none"]);
        assert!(!held.check("two", false, ()).held());
    }

    #[test]
    fn a_failed_check_names_its_parts() {
        let row = |held| LabVerdict::default().check("near", held, json!({ "khz": 3 }));
        let part = LabVerdict::default().parts("rows", vec![row(true), row(false)]);
        let all = LabVerdict::default()
            .check_none("nothing is left", &["a"])
            .check_eq("each is counted", &3, 5)
            .part("by exit", part);
        let wanted = [
            "nothing is left: [\"a\"]",
            "each is counted: 3, not 5",
            "by exit: rows[1]: near: {\"khz\":3}",
        ];
        assert_eq!(all.failed(), wanted);
    }

    #[test]
    fn figures_keep_their_names() {
        let part = LabVerdict::with_figures(json!({ "khz": 3 })).check("near", false, 3);
        let verdict = LabVerdict::with_figures(json!({ "n": 1 })).part("part", part);
        let report = ScenarioReport {
            scenario: "one".to_owned(),
            verdict,
        };
        let line = serde_json::to_string(&report).unwrap();
        let read: ScenarioReport = serde_json::from_str(&line).unwrap();
        assert_eq!(read, report);
        let wanted = json!({
            "scenario": "one", "held": false, "n": 1, "part": { "khz": 3, "held": false },
            "checks_failed": ["part: near: 3"],
        });
        assert_eq!(read.json(), wanted);
    }

    #[test]
    fn what_could_not_be_carried_out_failed() {
        let verdict = LabVerdict::broken_off("no guest");
        assert_eq!(verdict.failed(), ["it could be carried out: no guest"]);
        assert_eq!(verdict.get("error"), "no guest");
    }
}
