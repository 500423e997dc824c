// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A report as text for people.

use std::fmt::Write as _;

use super::{
    report::{LatencyReport, LatencyVerdict, TestRun},
    script::TestLoad,
};
use crate::published::PublishedMaximum;

impl LatencyReport {
    /// As the lab's figures are marked wherever they are shown.
    #[must_use]
    fn mark(&self) -> &'static str {
        match self.conditions.machine.emulated {
            Some(_) => " (emulated)",
            None => "",
        }
    }

    /// The verdict as a line.
    #[must_use]
    pub fn verdict_line(&self) -> String {
        let budget = self.budget_us.unwrap_or_default();
        match &self.verdict {
            LatencyVerdict::None => "no budget was given".to_owned(),
            LatencyVerdict::Incomplete { why } => {
                format!("no verdict: {why}; the test was cut short, run it again")
            }
            LatencyVerdict::Kept => format!("kept: no latency was above the budget of {budget} µs"),
            LatencyVerdict::Exceeded { max_us } => {
                format!("exceeded: the longest latency was {max_us} µs, the budget is {budget} µs")
            }
            LatencyVerdict::Refused { why } => {
                format!("no verdict on the budget of {budget} µs: {why}; run it on the hardware")
            }
        }
    }

    /// For people.
    #[must_use]
    pub fn text(&self) -> String {
        let mark = self.mark();
        let mut text = format!(
            "{:<6}{:<10}{:>4}{:>12}{:>8}{:>8}{:>10}{:>8}  µs{mark}\n",
            "where", "load", "CPU", "samples", "min", "avg", "p99.99", "max"
        );
        for run in &self.runs {
            text += &rows(run);
        }
        text += "\n";
        for run in &self.runs {
            for line in lines(run) {
                let _ = writeln!(text, "{}: {line}", run.name());
            }
        }
        for one in &self.conditions.published {
            let _ = writeln!(text, "published: {}", self.beside(one));
        }
        text + &self.verdict_line() + "\n"
    }

    /// A published maximum, beside this report's own and what that depends on: a longer test, or
    /// another CPU, finds longer latencies.
    fn beside(&self, one: &PublishedMaximum) -> String {
        let of = |run: &&TestRun| run.place.name() == one.place && run.load.name() == one.load;
        let own = self.runs.iter().filter(of);
        let own = own.flat_map(|run| run.latencies.iter().map(move |one| (run, one)));
        let longest = own.max_by_key(|(_, latencies)| latencies.max_us);
        let here = match (&self.conditions.machine.emulated, longest) {
            (Some(_), _) => "figures here are no hardware's".to_owned(),
            (None, Some((run, longest))) => {
                let so_far = run.incomplete().map_or("", |_| " so far");
                format!(
                    "here {} µs{so_far} (CPU {}, {})",
                    longest.max_us,
                    longest.cpu,
                    self.own_conditions(run)
                )
            }
            (None, None) => "not measured here".to_owned(),
        };
        let PublishedMaximum {
            place,
            load,
            max_us,
            conditions,
            source,
        } = one;
        format!("{place}, {load}: at most {max_us} µs ({conditions}; {source}); {here}")
    }

    /// What published figures name of theirs: time, kernel, load.
    fn own_conditions(&self, run: &TestRun) -> String {
        let conditions = &self.conditions;
        let load = match (run.load, conditions.stress_fifo) {
            (TestLoad::Stress, Some(priority)) => format!(
                ", stress-ng at {} % with SCHED_FIFO {priority}",
                conditions.load_percent
            ),
            (TestLoad::Stress, None) => format!(", stress-ng at {} %", conditions.load_percent),
            _ => String::new(),
        };
        let (length, kernel) = (conditions.test.length(), &conditions.machine.kernel);
        format!("{length}, kernel {kernel}{load}")
    }
}

/// A row for each CPU of a run.
fn rows(run: &TestRun) -> String {
    let held = match run.held.lines().is_empty() {
        true => "",
        false => "  capped",
    };
    let mut text = String::new();
    for one in &run.latencies {
        let p9999 = one
            .p9999_us
            .map_or("beyond".to_owned(), |us| us.to_string());
        let _ = writeln!(
            text,
            "{:<6}{:<10}{:>4}{:>12}{:>8}{:>8}{p9999:>10}{:>8}{held}",
            run.place.name(),
            run.load.name(),
            one.cpu,
            one.samples,
            one.min_us,
            one.avg_us,
            one.max_us,
        );
    }
    text
}

/// What else there is to know about a run.
fn lines(run: &TestRun) -> Vec<String> {
    let spikes = run.spikes.iter().map(|spikes| spikes.line());
    let lost = match run.losses {
        0 => None,
        1 => Some("a part was measured again, as the guest's shell was lost".to_owned()),
        losses => Some(format!(
            "parts were measured again {losses} times, as the guest's shell was lost"
        )),
    };
    run.held
        .lines()
        .into_iter()
        .chain(spikes)
        .chain(lost)
        .collect()
}
