// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a thread of the load logged, in the host's time and pCPUs.

use anyhow::{Context, Result};
use vcpufreq_load::load_log::LoadLog;

/// A mark of the load's, in the host's time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// Its name.
    pub name: String,
    /// When, in µs of CLOCK_MONOTONIC.
    pub us: u64,
    /// The pCPU that the load was on.
    pub cpu: u32,
    /// Another process' moment: see [`Stamp::told`](vcpufreq_load::load_log::Stamp::told).
    pub told: bool,
}

/// The marks of a log. `offset_ns` makes host's time of the load's, `pcpu_of`
/// gives the pCPU of a CPU of the load's at a moment of the host's, in µs.
pub fn marks(
    log: &LoadLog,
    offset_ns: i64,
    pcpu_of: impl Fn(usize, u64) -> Option<u32>,
) -> Result<Vec<Mark>> {
    let mark = |stamp: &vcpufreq_load::load_log::Stamp| {
        let wrong = || format!("{stamp:?} of the load program");
        let ns = i64::try_from(stamp.ns)? + offset_ns;
        let us = u64::try_from(ns / 1000).with_context(wrong)?;
        Ok(Mark {
            name: stamp.name.clone(),
            us,
            cpu: pcpu_of(stamp.cpu, us).with_context(wrong)?,
            told: stamp.told,
        })
    };
    log.marks.iter().map(mark).collect()
}

/// The frames of a log: when each began and ended, in µs of the host's time.
pub fn frames(log: &LoadLog, offset_ns: i64) -> Result<Vec<(u64, u64)>> {
    let us = |ns: u64| -> Result<u64> {
        let ns = i64::try_from(ns)? + offset_ns;
        u64::try_from(ns / 1000).with_context(|| format!("a frame at {ns} ns"))
    };
    let frame = |frame: &vcpufreq_load::load_log::FrameSpan| {
        Ok((us(frame.begin_ns)?, us(frame.begin_ns + frame.ns)?))
    };
    log.frames.iter().map(frame).collect()
}

#[cfg(test)]
mod tests {
    //! Times and CPUs become the host's, frames' too; a CPU that isn't known is an error.

    use super::*;

    #[test]
    fn marks_are_the_hosts() {
        let read = |cpu| {
            let text = format!(
                r#"{{"tid":4,"turns":8,"marks":[{{"name":"start","ns":5000,"cpu":{cpu}}}],"figures":{{}},"frames":[]}}"#
            );
            let log = serde_json::from_str(&text).unwrap();
            marks(&log, 1_000, |cpu, us| (cpu == 1 && us == 6).then_some(6))
        };
        let start = Mark {
            name: "start".to_owned(),
            us: 6,
            cpu: 6,
            told: false,
        };
        assert_eq!(read(1).unwrap(), [start]);
        let mut log = LoadLog::default();
        log.frame(7_000, 9_500);
        assert_eq!(frames(&log, 1_000).unwrap(), [(8, 10)]);
        assert!(frames(&log, -8_000).is_err());
        assert!(read(0).is_err());
    }
}
