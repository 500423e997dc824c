// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Connections that aren't served. One that comes again and again neither fills a log nor keeps the
//! server busy.

use std::{
    thread::sleep,
    time::{Duration, Instant},
};

use crate::message::warn;

/// Lines about them are at least so far apart.
const LINES_APART: Duration = Duration::from_secs(1);
/// So many in a row cost some 1 ms; then the server rests. Longer than a listener's queue, so that
/// a VMM behind a full one waits for one rest.
const ROW: u32 = 128;
const REST: Duration = Duration::from_millis(50);

/// Counts them.
#[derive(Default)]
pub struct Refusals {
    last_line: Option<Instant>,
    row: u32,
    /// The reason for the newest refusal of a VMM that ran.
    reason: Option<String>,
}

impl Refusals {
    /// One more, with its message.
    pub fn add(&mut self, line: impl FnOnce() -> String) {
        let (is_said, rest) = self.count(Instant::now());
        if is_said {
            warn(&line());
        }
        sleep(rest);
    }

    /// One of a VMM that runs, and ends for it: QEMU's own last words are that a server "sent version
    /// -1".
    pub fn refuse(&mut self, line: impl FnOnce() -> String) {
        let line = line();
        self.reason = Some(line.clone());
        self.add(|| line);
    }

    /// Whether a VMM that ran was refused.
    pub fn has_refused(&self) -> bool {
        self.reason.is_some()
    }

    /// What a VMM's user is to read behind QEMU's last words, if one was refused.
    pub fn last_words(self) -> Option<String> {
        let why = self.reason?;
        Some(format!("the reason for QEMU's \"version -1\": {why}"))
    }

    /// Whether one at `now` is a line, and how long to rest after it.
    fn count(&mut self, now: Instant) -> (bool, Duration) {
        let since = self
            .last_line
            .map(|last| now.saturating_duration_since(last));
        let is_said = since.is_none_or(|since| since >= LINES_APART);
        if is_said {
            self.last_line = Some(now);
        }
        self.row = (self.row + 1) % ROW;
        let rest = if self.row == 0 { REST } else { Duration::ZERO };
        (is_said, rest)
    }
}

#[cfg(test)]
mod tests {
    //! A flood costs little; a single one delays none.
    use super::*;

    #[test]
    fn a_flood_is_a_line_a_second_and_mostly_rest() {
        let mut refusals = Refusals::default();
        let start = Instant::now();
        let (mut now, mut lines, mut most) = (start, 0, 0);
        // One takes 10 us of the server's time.
        while now < start + Duration::from_secs(10) {
            let (is_said, rest) = refusals.count(now);
            lines += u32::from(is_said);
            most += 1;
            now += Duration::from_micros(10) + rest;
        }
        assert_eq!(lines, 10);
        assert!(most * 10 < 10_000_000 / 20, "{most} take a twentieth");
    }

    #[test]
    fn the_reason_of_one_that_ran_is_kept() {
        let mut refusals = Refusals::default();
        refusals.add(|| "process 7 isn't served: it has ended".to_owned());
        assert_eq!(refusals.last_words(), None);
        let mut refusals = Refusals::default();
        refusals.refuse(|| "process 7 isn't served: no".to_owned());
        refusals.add(|| "process 8 isn't served: it has ended".to_owned());
        let words = "the reason for QEMU's \"version -1\": process 7 isn't served: no";
        assert_eq!(refusals.last_words().as_deref(), Some(words));
    }

    #[test]
    fn a_single_one_is_a_line_and_no_rest() {
        let mut refusals = Refusals::default();
        let start = Instant::now();
        for second in 0..100 {
            let now = start + Duration::from_secs(second);
            assert_eq!(refusals.count(now), (true, Duration::ZERO));
        }
    }
}
