// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Workloads that rt-app can do, as its own files: anybody can run the same, with `calibration` set to
//! the ns that a turn of rt-app's loop takes on the machine's largest CPU (`rt-app` prints it as
//! pLoad). Threads meet at barriers; what a thread does between two of them is paced by one timer.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::jobs::WorkScale;
use crate::load_log::LoadLog;
use crate::signals::run_in;
use anyhow::{Context, Result, ensure};

/// A file, and what is read of its logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RtAppFile {
    name: &'static str,
    text: &'static str,
    /// The thread whose timer begins frames.
    begins: &'static str,
    /// The thread that ends them, if another one does.
    ends: Option<&'static str>,
    /// How long after its begin a frame is due, in µs.
    due_us: u64,
}

const FILES: [RtAppFile; 3] = [
    RtAppFile {
        name: "game60",
        text: include_str!("../rt-app/game60.json"),
        begins: "main-0",
        ends: Some("render-3"),
        // Two periods: the next frame begins while this one is drawn, and it is shown at the
        // second refresh after its begin.
        due_us: 33_334,
    },
    RtAppFile {
        name: "game120",
        text: include_str!("../rt-app/game120.json"),
        begins: "main-0",
        ends: Some("render-3"),
        due_us: 16_667,
    },
    RtAppFile {
        name: "bursts",
        text: include_str!("../rt-app/bursts.json"),
        begins: "interface-0",
        ends: None,
        // What web.dev/articles/rail allows a program to answer an input in.
        due_us: 50_000,
    },
];

/// A line of rt-app's log, in µs.
#[derive(Debug, PartialEq, Eq)]
struct RtAppLine {
    start: u64,
    end: u64,
    /// Of the timer at its end: what was left, negative if nothing was.
    slack: i64,
    /// How much later than the timer the thread then ran.
    late: u64,
}

impl RtAppFile {
    /// The one of this name.
    ///
    /// # Errors
    /// Names those that there are.
    pub fn named(name: &str) -> Result<Self> {
        let found = FILES.into_iter().find(|one| one.name == name);
        found.with_context(|| {
            let names = FILES.map(|one| one.name).join(", ");
            format!("no rt-app file '{name}'; there are: {names}")
        })
    }

    /// Runs it with so much of its work; logs its frames.
    pub fn carry_out(&self, log: &mut LoadLog, scale: WorkScale) -> Result<()> {
        let dir = std::env::temp_dir().join(format!("vcpufreq-load-{}", std::process::id()));
        let config = dir.join("rt-app.json");
        let text = self.config(&dir, scale)?;
        let fill = || fs::write(&config, text).with_context(|| config.display().to_string());
        let read = |output: &Output| -> Result<_> {
            let said = String::from_utf8_lossy(&output.stderr);
            ensure!(
                output.status.success(),
                "rt-app ended with {}: {}",
                output.status,
                said.trim()
            );
            let lines = |thread: &str| lines(&dir.join(format!("{}-{thread}.log", self.name)));
            Ok((lines(self.begins)?, self.ends.map(lines).transpose()?))
        };
        let mut rt_app = Command::new("rt-app");
        let (begins, ends) = run_in(&dir, rt_app.arg(&config), fill, read)??;
        self.log(log, &begins, ends.as_deref());
        Ok(())
    }

    /// The file, with its logs in `dir`. Its text is kept: rt-app does what it reads in this order.
    fn config(&self, dir: &Path, scale: WorkScale) -> Result<String> {
        let mut parts = self.text.split("\"run");
        let mut text = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            let (number, rest) = part.split_once(": ").context(self.name)?;
            let digits = rest
                .find(|digit: char| !digit.is_ascii_digit())
                .unwrap_or(rest.len());
            let (us, rest) = rest.split_at(digits);
            let us = scale.scaled(us.parse().context(self.name)?);
            text += &format!("\"run{number}: {us}{rest}");
        }
        let logs = format!("\"logdir\": \"{}\"", dir.display());
        Ok(text.replace("\"logdir\": \"/tmp\"", &logs))
    }

    fn log(&self, log: &mut LoadLog, begins: &[RtAppLine], ends: Option<&[RtAppLine]>) {
        let mut late = 0;
        for (number, line) in begins.iter().enumerate() {
            // The timer of the line before it begins a frame.
            let begin = line.start.saturating_sub(late);
            late = line.late;
            let left = u64::try_from(line.slack).unwrap_or(0);
            let end = match ends {
                Some(ends) => ends.get(number).map(|line| line.end),
                None => Some(line.end.saturating_sub(line.late + left)),
            };
            if let Some(end) = end {
                log.frame(begin * 1000, end * 1000);
            }
        }
        log.figure("done", u64::try_from(log.frames.len()).unwrap_or(u64::MAX));
        log.figure("due_us", self.due_us);
    }
}

/// A thread's log: `idx perf run period start end rel_st slack c_duration c_period wu_lat`. Its last
/// line is the end of its last loop again.
fn lines(path: &Path) -> Result<Vec<RtAppLine>> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let lines = text
        .lines()
        .filter(|line| !line.trim_start().starts_with('#'));
    lines.map(line).collect()
}

fn line(text: &str) -> Result<RtAppLine> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let word = |at: usize| words.get(at).copied().unwrap_or_default();
    let wrong = || format!("line '{text}' of rt-app's log");
    Ok(RtAppLine {
        start: word(4).parse().with_context(wrong)?,
        end: word(5).parse().with_context(wrong)?,
        slack: word(7).parse().with_context(wrong)?,
        late: word(10).parse().with_context(wrong)?,
    })
}

#[cfg(test)]
mod tests {
    //! Each file is one that rt-app reads to its end; its work is scaled, and its frames are as its
    //! log has them.

    use std::collections::BTreeMap;

    use serde_json::Value;

    use super::*;

    #[test]
    fn each_barrier_has_the_threads_that_meet_there_once_each() {
        for file in FILES {
            let config: Value = serde_json::from_str(file.text).unwrap();
            let mut meet: BTreeMap<String, u32> = BTreeMap::new();
            let tasks = config["tasks"].as_object().unwrap();
            let loops: Vec<_> = tasks.values().map(|task| &task["loop"]).collect();
            assert!(
                loops.windows(2).all(|pair| pair[0] == pair[1]),
                "{}",
                file.name
            );
            for task in tasks.values() {
                for phase in task["phases"].as_object().unwrap().values() {
                    for (key, name) in phase.as_object().unwrap() {
                        if key.starts_with("barrier") {
                            *meet.entry(name.as_str().unwrap().to_owned()).or_default() += 1;
                        }
                    }
                }
            }
            // rt-app counts each mention of a barrier as a thread that it waits for.
            for (name, threads) in meet {
                let wanted = if name.ends_with("draw") { 2 } else { 3 };
                assert_eq!(threads, wanted, "{} {name}", file.name);
            }
            assert_eq!(config["global"]["log_basename"], file.name);
        }
        let error = RtAppFile::named("game").unwrap_err().to_string();
        assert!(error.contains("game60, game120, bursts"), "{error}");
    }

    #[test]
    fn work_alone_is_scaled() {
        let file = RtAppFile::named("game60").unwrap();
        let text = file
            .config(Path::new("/x"), WorkScale::per_10_000(5_000))
            .unwrap();
        let config: Value = serde_json::from_str(&text).unwrap();
        let even = &config["tasks"]["main"]["phases"]["even"];
        assert_eq!(
            (&even["run0"], &even["timer"]["period"]),
            (&540.into(), &16_667.into())
        );
        assert_eq!(config["global"]["logdir"], "/x");
        let all = file.config(Path::new("/tmp"), WorkScale::ALL).unwrap();
        assert_eq!(all, file.text, "order and all else stay");
    }

    #[test]
    fn a_frame_is_from_its_timer_to_the_end_of_its_last_thread() {
        let of = |texts: &[&str]| {
            texts
                .iter()
                .map(|text| line(text).unwrap())
                .collect::<Vec<_>>()
        };
        let main = of(&[
            "0 100000 1751 16603 1000 17700 665 12786 2000 16667 33",
            "0 125000 1995 16647 17701 36000 17269 -5999 2500 16667 0",
            "0 125000 1995 16647 36001 50000 17269 10 2500 16667 5",
        ]);
        let render = of(&[
            "3 150000 6582 27081 900 9000 2958 0 3000 0 0",
            "3 150000 6582 27081 9001 39000 2958 0 3000 0 0",
        ]);
        let spans = |log: &LoadLog| {
            let spans = log.frames.iter();
            spans
                .map(|one| (one.begin_ns / 1000, one.ns / 1000))
                .collect::<Vec<_>>()
        };
        let mut log = LoadLog::default();
        RtAppFile::named("game60")
            .unwrap()
            .log(&mut log, &main, Some(&render));
        assert_eq!(spans(&log), [(1000, 8000), (17_668, 21_332)]);
        assert_eq!((log.figures["done"], log.figures["due_us"]), (2, 33_334));
        let mut log = LoadLog::default();
        RtAppFile::named("bursts")
            .unwrap()
            .log(&mut log, &main, None);
        let ends = [17_700 - 33 - 12_786, 36_000, 50_000 - 15];
        let expected = [
            (1000, ends[0] - 1000),
            (17_668, ends[1] - 17_668),
            (36_001, ends[2] - 36_001),
        ];
        assert_eq!(spans(&log), expected);
        assert!(line("0 1 2").is_err());
    }
}
