// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The values of one metric in one variant.

use serde_json::{Value, json};

/// The values of one metric in one variant.
#[derive(Debug)]
pub struct Row {
    /// The scenario's name.
    pub scenario: &'static str,
    /// The variant's.
    pub variant: &'static str,
    /// The metric's, with the scenario's case.
    pub metric: String,
    /// Its unit.
    pub unit: &'static str,
    /// One for each repeat; `None` where it didn't come about.
    pub values: Vec<Option<u64>>,
    /// Why repeats didn't start from the settled state.
    pub unsettled: Vec<String>,
    /// Why others didn't, which were taken anew.
    pub retaken: Vec<String>,
}

impl Row {
    /// Those that came about, rising; one that didn't is later than any.
    fn order(&self, at: usize) -> Option<u64> {
        let mut values = self.values.clone();
        values.sort_by_key(|value| value.unwrap_or(u64::MAX));
        values.get(at).copied().flatten()
    }

    /// The lower one of two.
    pub fn median(&self) -> Option<u64> {
        self.order(self.values.len().saturating_sub(1) / 2)
    }

    fn ends(&self) -> (Option<u64>, Option<u64>) {
        (
            self.order(0),
            self.order(self.values.len().saturating_sub(1)),
        )
    }

    /// As JSON.
    pub fn json(&self) -> Value {
        let (min, max) = self.ends();
        json!({
            "scenario": self.scenario, "variant": self.variant, "metric": self.metric,
            "unit": self.unit, "n": self.values.len(),
            "reached": self.values.iter().flatten().count(),
            "median": self.median(), "min": min, "max": max,
            "values": self.values, "unsettled": self.unsettled,
            "retaken": self.retaken,
        })
    }
}
