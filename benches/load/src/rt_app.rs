// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! rt-app: a thread with so much work in each period, and its log of
//! it. Its work is counted in turns of its loop, so that it takes as long as
//! the CPU lets it.

use std::fs;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};

use crate::load_log::LoadLog;
use crate::signals::run_in;

/// A turn of rt-app's loop in ns on the emulated host's big CPU at its highest
/// frequency, as rt-app measures it. On another machine a duty is another
/// share of the CPU, the same in all variants.
const LOOP_NS: u64 = 474;
/// Turns that don't count: a new thread is given a utilization until it has
/// one of its own, and what starting rt-app has used decays.
const LEAD: usize = 8;

/// Work of `run_us` at full speed each period, so many times, on a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RtApp {
    /// Work in µs at full speed.
    pub run_us: u64,
    /// The period in µs, which is the deadline too.
    pub period_us: u64,
    /// Periods that count.
    pub count: usize,
}

impl RtApp {
    /// Runs it; logs deadlines met of how many, and the time that the work took.
    pub fn carry_out(&self, log: &mut LoadLog, cpu: usize) -> Result<()> {
        let dir = std::env::temp_dir().join(format!("vcpufreq-load-{}", std::process::id()));
        let config = dir.join("rt-app.json");
        let fill = || {
            fs::write(&config, self.config(cpu, &dir.to_string_lossy()))
                .with_context(|| config.display().to_string())
        };
        let mut rt_app = Command::new("rt-app");
        let read = |output: &Output| {
            ensure!(
                output.status.success(),
                "rt-app ended with {}: {}",
                output.status,
                String::from_utf8_lossy(&output.stderr).trim()
            );
            fs::read_to_string(dir.join("rt-app-thread-0.log")).context("the log of rt-app")
        };
        let text = run_in(&dir, rt_app.arg(&config), fill, read)??;
        self.read(log, &text)
    }

    /// `loop` counts only beside `phases`: without them it runs without end.
    fn config(&self, cpu: usize, dir: &str) -> String {
        let turns = self.count + LEAD;
        let Self {
            run_us, period_us, ..
        } = self;
        format!(
            r#"{{"tasks":{{"thread":{{"cpus":[{cpu}],"loop":{turns},"phases":{{"phase":{{
"loop":1,"run":{run_us},"timer":{{"ref":"tick","period":{period_us}}}}}}}}}}},
"global":{{"default_policy":"SCHED_OTHER","calibration":{LOOP_NS},"lock_pages":false,
"logdir":"{dir}","log_basename":"rt-app","log_size":2}}}}"#
        )
    }

    /// A line of the log: `idx perf run period start end rel_st slack ...`, in µs;
    /// slack is the time left when the work is done, negative when it is late.
    fn read(&self, log: &mut LoadLog, text: &str) -> Result<()> {
        let lines = text
            .lines()
            .filter(|line| !line.trim_start().starts_with('#'));
        let (mut met, mut took_us) = (0, Vec::new());
        for line in lines.skip(LEAD) {
            let wrong = || format!("line '{line}' of rt-app's log");
            let words: Vec<&str> = line.split_whitespace().collect();
            let number = |at: usize| -> Result<i64> {
                let word = words.get(at).with_context(wrong)?;
                word.parse().with_context(wrong)
            };
            met += u64::from(number(7)? >= 0);
            took_us.push(u64::try_from(number(2)?).with_context(wrong)?);
        }
        let turns = u64::try_from(took_us.len())?;
        let middle = middle(&mut took_us).context("rt-app logged nothing")?;
        // One load may run it several times.
        for (name, value) in [
            ("done", turns),
            ("met", met),
            ("took_us", took_us.iter().sum()),
            ("middle_us", middle),
        ] {
            log.figure(&format!("{name}/{}", self.run_us), value);
        }
        Ok(())
    }
}

/// The mean of the middle half: neither the turns that were disturbed count,
/// nor on which side of a step most of them lie.
fn middle(values: &mut [u64]) -> Option<u64> {
    values.sort_unstable();
    let quarter = values.len() / 4;
    let half = values.get(quarter..values.len() - quarter)?;
    half.iter()
        .sum::<u64>()
        .checked_div(u64::try_from(half.len()).ok()?)
}

#[cfg(test)]
mod tests {
    //! The log as rt-app writes it, the first turns left out.

    use super::*;

    #[test]
    fn the_middle_moves_with_each_turn_of_a_step_and_not_with_one_far_off() {
        assert_eq!(middle(&mut [6, 6, 9, 6, 6]), Some(6));
        assert_eq!(middle(&mut [9, 6, 9, 6, 9]), Some(8));
        assert_eq!(middle(&mut [6, 6, 9, 6, 600]), Some(7));
        assert_eq!(middle(&mut []), None);
    }

    #[test]
    fn late_turns_and_the_lead_do_not_count_as_met() {
        let mut text =
            "#idx perf run period start end rel_st slack c_duration c_period wu_lat\n".to_owned();
        for (turn, slack) in [9, 9, 9, 9, 9, 9, 9, 9, 500, -20, 0]
            .into_iter()
            .enumerate()
        {
            text += &format!("0 1000 5000 20000 {turn}000 6000 0 {slack} 5000 20000 7\n");
        }
        let mut log = LoadLog::default();
        let run = RtApp {
            run_us: 1000,
            period_us: 20_000,
            count: 3,
        };
        run.read(&mut log, &text).unwrap();
        for (name, value) in [
            ("done", 3),
            ("met", 2),
            ("took_us", 15_000),
            ("middle_us", 5_000),
        ] {
            assert_eq!(log.figures[&format!("{name}/1000")], value, "{name}");
        }
        assert!(run.read(&mut log, "#idx\n").is_err());
    }
}
