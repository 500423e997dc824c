// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Long steps show what they do, how far they are, how long they have taken, and about how
//! long they still take.
//!
//! On stderr. On a terminal the last line shows all current steps, updated each second. Elsewhere
//! each stage gets a line, and a step that has printed nothing for half a minute prints its line
//! again.

use std::io::{IsTerminal as _, Write as _, stderr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

/// How long a step may be silent where lines aren't overwritten.
const SILENT: Duration = Duration::from_secs(30);
/// How often the terminal's line is drawn anew.
const TICK: Duration = Duration::from_secs(1);

/// A step that is under way.
#[derive(Debug)]
pub struct Step {
    id: u64,
}

/// What is shown of a step.
#[derive(Debug)]
struct Line {
    id: u64,
    what: String,
    stage: String,
    started: Instant,
    reported: Instant,
    /// When it ends, about.
    end: Option<Instant>,
}

/// The steps that are under way, in the order in which they began.
static LINES: Mutex<Vec<Line>> = Mutex::new(Vec::new());

impl Step {
    /// Announces a step.
    pub fn start(what: impl Into<String>) -> Self {
        static IDS: AtomicU64 = AtomicU64::new(0);
        static TICKER: Once = Once::new();
        TICKER.call_once(|| {
            std::thread::spawn(tick);
        });
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let now = Instant::now();
        lines().push(Line {
            id,
            what: what.into(),
            stage: String::new(),
            started: now,
            reported: now,
            end: None,
        });
        let step = Self { id };
        step.tell("");
        step
    }

    /// Tells how far it is.
    pub fn tell(&self, stage: &str) {
        self.note(stage);
        if !is_terminal() {
            self.line(|line, now| {
                line.reported = now;
                let _ = writeln!(stderr(), "{}", line.text(now));
            });
        }
    }

    /// Tells what changes often, a count: each time on a terminal, elsewhere
    /// when it has been silent for long.
    pub fn note(&self, stage: &str) {
        self.line(|line, _| stage.clone_into(&mut line.stage));
        draw(&lines());
    }

    /// How long it still takes, about; shown until another estimate comes.
    pub fn expect(&self, left: Duration) {
        self.line(|line, now| line.end = now.checked_add(left));
    }

    /// Ends the step.
    pub fn done(self) {
        self.line(|line, _| line.end = None);
        self.tell("done");
    }

    /// Ends the step without a word, where its result is shown.
    pub fn erase(self) {
        let mut lines = lines();
        clear(&lines);
        lines.retain(|line| line.id != self.id);
        draw(&lines);
    }

    fn line(&self, change: impl FnOnce(&mut Line, Instant)) {
        let mut lines = lines();
        if let Some(line) = lines.iter_mut().find(|line| line.id == self.id) {
            change(line, Instant::now());
        }
    }
}

impl Drop for Step {
    /// What is printed next, an error perhaps, gets a line of its own.
    fn drop(&mut self) {
        let mut lines = lines();
        let Some(at) = lines.iter().position(|line| line.id == self.id) else {
            return;
        };
        clear(&lines);
        let line = lines.remove(at);
        if is_terminal() {
            let _ = writeln!(stderr(), "{}", line.text(Instant::now()));
        }
        draw(&lines);
    }
}

impl Line {
    fn text(&self, now: Instant) -> String {
        let elapsed = now.duration_since(self.started).as_secs();
        let left = self.end.map(|end| end.saturating_duration_since(now));
        let left = left.map_or_else(String::new, |left| format!(", {}", about(left)));
        format!("{elapsed:>4} s  {}  {}{left}", self.what, self.stage)
    }
}

/// An estimate in words: to 10 s within two minutes, beyond that to the minute.
fn about(left: Duration) -> String {
    match left.as_secs() {
        0..10 => "almost done".to_owned(),
        s @ 10..120 => format!("about {} s left", s.next_multiple_of(10)),
        s => format!("about {} min left", (s + 30) / 60),
    }
}

/// Prints something else while steps may be under way.
pub fn above(print: impl FnOnce()) {
    let lines = lines();
    clear(&lines);
    print();
    draw(&lines);
}

/// Tells again and again how long it takes.
fn tick() {
    loop {
        std::thread::sleep(TICK);
        let mut lines = lines();
        if !is_terminal() {
            for text in silent(&mut lines, Instant::now()) {
                let _ = writeln!(stderr(), "{text}");
            }
        }
        draw(&lines);
    }
}

/// The lines of the steps that have been silent for too long.
fn silent(lines: &mut [Line], now: Instant) -> Vec<String> {
    let late = |line: &&mut Line| now.duration_since(line.reported) >= SILENT;
    let late = lines.iter_mut().filter(late);
    late.map(|line| {
        line.reported = now;
        line.text(now)
    })
    .collect()
}

/// Empties the terminal's last line.
fn clear(lines: &[Line]) {
    if is_terminal() && !lines.is_empty() {
        let _ = write!(stderr(), "\r\x1b[K");
    }
}

/// Fills the terminal's last line. Progress that can't be shown is no reason
/// to stop.
fn draw(lines: &[Line]) {
    if !is_terminal() || lines.is_empty() {
        return;
    }
    let now = Instant::now();
    let texts: Vec<String> = lines.iter().map(|line| line.text(now)).collect();
    // Cut at the edge: a line that wraps can't be overwritten.
    let _ = write!(stderr(), "\r\x1b[K\x1b[?7l{}\x1b[?7h", texts.join("  | "));
    let _ = stderr().flush();
}

fn is_terminal() -> bool {
    stderr().is_terminal()
}

fn lines() -> MutexGuard<'static, Vec<Line>> {
    LINES.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    //! Promises: where lines aren't overwritten, a step's line comes again when it has been
    //! silent for half a minute, and not before; an estimate runs down.
    use super::*;

    #[test]
    fn silent_steps_tell_their_time() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let line = |id, reported| Line {
            id,
            what: format!("step {id}"),
            stage: "1 of 2".into(),
            started: start,
            reported,
            end: None,
        };
        let mut lines = [line(1, at(0)), line(2, at(20))];
        assert_eq!(silent(&mut lines, at(29)), [""; 0]);
        assert_eq!(silent(&mut lines, at(31)), ["  31 s  step 1  1 of 2"]);
        assert_eq!(silent(&mut lines, at(52)), ["  52 s  step 2  1 of 2"]);
        assert_eq!(silent(&mut lines, at(61)), ["  61 s  step 1  1 of 2"]);
    }

    #[test]
    fn what_is_left_runs_down() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let line = Line {
            id: 1,
            what: "bench".into(),
            stage: "1 of 9".into(),
            started: start,
            reported: start,
            end: Some(at(600)),
        };
        let left = |s| line.text(at(s)).split_off("   0 s  bench  1 of 9, ".len());
        assert_eq!(left(0), "about 10 min left");
        assert_eq!(left(475), "about 2 min left");
        assert_eq!(left(485), "about 120 s left");
        assert_eq!(left(551), "about 50 s left");
        assert_eq!(left(595), "almost done");
        assert_eq!(left(700), "almost done");
    }
}
