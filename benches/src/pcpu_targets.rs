// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What programs add to a pCPU's utilization for vCPUs, over time: a VMM whose guest requests by `scx`
//! writes that to its events file.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, Result};
use serde::Deserialize;
use vcpufreq_device::host::memory_file;

/// An events file, in memory.
#[derive(Debug)]
pub struct EventsFile(File);

/// A pCPU's targets, from a time on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetChange {
    /// In µs of CLOCK_MONOTONIC.
    pub us: u64,
    /// The pCPU.
    pub pcpu: u32,
    /// What all runnable vCPUs add, in 1/1024 of the highest capacity.
    pub sum: u64,
    /// How much of it the kernel got, 0 to 1024.
    pub target: u64,
}

/// The parts of a line that count here.
#[derive(Deserialize)]
struct TargetLine {
    t_ns: u64,
    pcpu: Option<u32>,
    target_sum: Option<u64>,
    target: Option<u64>,
}

impl EventsFile {
    /// An empty one.
    pub fn new() -> Result<Self> {
        let memory = memory_file(c"vcpufreq-events");
        Ok(Self(memory.context("a file in memory")?))
    }

    /// Where a VMM that this process starts can open it.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.0.as_raw_fd())
    }

    /// The changes so far, in order of time.
    pub fn targets(&self) -> Result<Vec<TargetChange>> {
        let read = || -> io::Result<_> {
            let len = self.0.metadata()?.len();
            let mut text = vec![0; usize::try_from(len).map_err(io::Error::other)?];
            self.0.read_exact_at(&mut text, 0)?;
            Ok(text)
        };
        changes(&read().context("reading the VMM's events")?)
    }
}

fn changes(text: &[u8]) -> Result<Vec<TargetChange>> {
    // The last line may not have been written to its end.
    let lines = text.split_inclusive(|byte| *byte == b'\n');
    let mut changes = Vec::new();
    for line in lines.filter(|line| line.ends_with(b"\n")) {
        let line: TargetLine =
            serde_json::from_slice(line).context("a line of the VMM's events")?;
        if let (Some(pcpu), Some(sum), Some(target)) = (line.pcpu, line.target_sum, line.target) {
            let us = line.t_ns / 1000;
            changes.push(TargetChange {
                us,
                pcpu,
                sum,
                target,
            });
        }
    }
    // Of one vCPU they are in order.
    changes.sort_by_key(|change| change.us);
    Ok(changes)
}

/// Sum and target of a pCPU between two times, each times its µs; `None` without a change before the end.
pub fn over_time(changes: &[TargetChange], pcpu: u32, (from, to): (u64, u64)) -> Option<[u64; 2]> {
    let own = changes
        .iter()
        .filter(|change| change.pcpu == pcpu && change.us < to);
    let own: Vec<_> = own.collect();
    let ends = own.iter().skip(1).map(|next| next.us).chain([to]);
    let parts = own.iter().zip(ends).map(|(change, end)| {
        let us = end.max(from) - change.us.max(from);
        [change.sum * us, change.target * us]
    });
    parts.reduce(|one, other| [one[0] + other[0], one[1] + other[1]])
}

#[cfg(test)]
mod tests {
    //! Lines without a target are none, and each target counts for as long as it lasts.

    use super::*;

    #[test]
    fn targets_count_for_as_long_as_they_last() {
        let text = b"{\"t_ns\":1000,\"event\":\"load\",\"pcpu\":2,\"target_sum\":9,\"target\":9}\n\
            {\"t_ns\":5000,\"event\":\"load\",\"pcpu\":2,\"target_sum\":1300,\"target\":1024}\n\
            {\"t_ns\":6000,\"event\":\"load\",\"pcpu\":3,\"target_sum\":7,\"target\":7}\n\
            {\"t_ns\":3000,\"event\":\"request\",\"khz\":600000}\n\
            {\"t_ns\":8000,\"event\":\"load\",\"pcpu\":2,\"target_sum\":0,\"target\":0}\n\
            {\"t_ns\":9000,\"eve";
        let changes = changes(text).unwrap();
        // 1 and 3 µs of what was before 5, and 3 of what was then.
        for (from, sum) in [
            (4, 9 + 3 * 1300),
            (2, 3 * 9 + 3 * 1300),
            (0, 4 * 9 + 3 * 1300),
        ] {
            let found = over_time(&changes, 2, (from, 20)).unwrap();
            assert_eq!(found[0], sum, "from {from}");
        }
        assert_eq!(over_time(&changes, 2, (6, 7)), Some([1300, 1024]));
        assert_eq!(over_time(&changes, 2, (9, 20)), Some([0, 0]));
        assert_eq!(over_time(&changes, 2, (0, 1)), None);
        assert_eq!(over_time(&changes, 0, (0, 20)), None);
    }

    #[test]
    fn a_vmm_can_write_the_file() {
        let file = EventsFile::new().unwrap();
        let line = "{\"t_ns\":5000,\"pcpu\":0,\"target_sum\":1,\"target\":1}\n";
        std::fs::write(file.path(), line).unwrap();
        assert_eq!(file.targets().unwrap().len(), 1);
    }
}
