// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How far a long test is, on stderr.

use std::time::{Duration, Instant};

/// A shorter test shows nothing.
const SHORTEST_S: u64 = 120;
/// Lines of a test, at most.
const LINES: u64 = 24;
/// Between two lines, at least.
const BETWEEN_S: u64 = 60;

/// The progress of one test.
pub(super) struct TestProgress {
    name: String,
    begun: Instant,
    all_s: u64,
    next_s: u64,
}

impl TestProgress {
    /// Of a test that begins now.
    pub(super) fn begin(name: String, all_s: u64) -> Self {
        let (begun, next_s) = (Instant::now(), 0);
        Self {
            name,
            begun,
            all_s,
            next_s,
        }
    }

    /// Prints a line, if one is due. `longest_us` is of the parts that are complete.
    pub(super) fn look(&mut self, longest_us: Option<u64>) {
        if let Some(line) = self.line(self.begun.elapsed(), longest_us) {
            eprintln!("vcpufreq: {line}");
        }
    }

    fn line(&mut self, elapsed: Duration, longest_us: Option<u64>) -> Option<String> {
        let now_s = elapsed.as_secs();
        if self.all_s < SHORTEST_S || now_s < self.next_s {
            return None;
        }
        self.next_s = now_s + (self.all_s / LINES).max(BETWEEN_S);
        let longest = longest_us.map(|us| format!("; longest so far {us} µs"));
        Some(format!(
            "{}: {} of {}{}",
            self.name,
            time(now_s),
            time(self.all_s),
            longest.unwrap_or_default()
        ))
    }
}

/// `27:46:40`.
fn time(s: u64) -> String {
    format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60)
}

#[cfg(test)]
mod tests {
    //! Promise: a long test shows its progress seldom, a short one never.
    use super::*;

    #[test]
    fn a_long_test_has_a_line_each_hour_and_a_short_one_none() {
        let mut day = TestProgress::begin("host, idle".to_owned(), 86_400);
        let lines: Vec<String> = (0..86_400)
            .filter_map(|s| day.line(Duration::from_secs(s), (s > 7000).then_some(6)))
            .collect();
        assert_eq!(lines.len(), 24);
        assert_eq!(lines[0], "host, idle: 0:00:00 of 24:00:00");
        assert_eq!(
            lines[2],
            "host, idle: 2:00:00 of 24:00:00; longest so far 6 µs"
        );
        let mut short = TestProgress::begin(String::new(), 119);
        assert_eq!(short.line(Duration::from_secs(100), None), None);
    }
}
