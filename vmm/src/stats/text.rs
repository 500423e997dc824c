// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stats as a table for people.

use std::fmt::Write as _;

use super::{Stats, Times, VcpuStats};

/// The table's columns: title and width.
pub(super) const COLUMNS: [(&str, usize); 15] = [
    ("VCPU", 4),
    ("PATH", 6),
    ("ON", 4),
    ("ASKS", 8),
    ("GETS", 8),
    ("UCLAMP", 10),
    ("REQUESTS", 10),
    ("APPLIED", 9),
    ("COALESCED", 9),
    ("LIMITED", 8),
    ("REFUSED", 8),
    ("EXITS", 9),
    ("IN KERNEL", 9),
    ("CLAMP p50", 10),
    ("CLAMP p99", 10),
];

/// A line of titles, one for each vCPU, and one of what has been lost on the
/// host, if anything. Frequencies are in MHz.
#[must_use]
pub fn table(stats: &Stats) -> String {
    let mut text = line(COLUMNS.map(|(title, _)| title.to_owned()));
    for vcpu in &stats.vcpus {
        text.push_str(&line(cells(vcpu)));
    }
    if stats.governors_lost + stats.pins_lost > 0 {
        // Writing to a string can't fail.
        let _ = writeln!(
            text,
            "governors lost {}, pinnings lost {}",
            stats.governors_lost, stats.pins_lost
        );
    }
    text
}

fn line(cells: [String; COLUMNS.len()]) -> String {
    let mut line = String::new();
    for ((_, width), cell) in COLUMNS.iter().zip(cells) {
        // Writing to a string can't fail.
        let _ = write!(line, "{cell:>width$} ");
    }
    line.truncate(line.trim_end().len());
    line.push('\n');
    line
}

/// A vCPU's cells, as [`COLUMNS`] has them.
pub(super) fn cells(vcpu: &VcpuStats) -> [String; COLUMNS.len()] {
    let counts = &vcpu.counts;
    let (min, max) = vcpu.uclamp;
    [
        vcpu.vcpu.to_string(),
        vcpu.path.to_string(),
        vcpu.pcpu.map_or_else(none, |pcpu| pcpu.to_string()),
        vcpu.asks_khz.map_or_else(none, mhz),
        mhz(vcpu.gets_khz),
        format!("{min}..{max}"),
        counts.requests.to_string(),
        counts.applied.to_string(),
        counts.coalesced.to_string(),
        counts.limited.to_string(),
        counts.refused.to_string(),
        vcpu.accesses.exits().to_string(),
        vcpu.accesses.writes_in_kernel.to_string(),
        below(&vcpu.clamp_after, vcpu.clamp_after.p50_below_ns),
        below(&vcpu.clamp_after, vcpu.clamp_after.p99_below_ns),
    ]
}

fn none() -> String {
    "-".to_owned()
}

fn mhz(khz: u32) -> String {
    format!("{}.{}", khz / 1000, khz % 1000 / 100)
}

/// A bound in µs.
fn below(times: &Times, ns: Option<u64>) -> String {
    match ns {
        Some(ns) if times.n > 0 => format!("<{}.{} us", ns / 1000, ns % 1000 / 100),
        _ => none(),
    }
}
