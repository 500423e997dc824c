// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stats as a table for people.

use super::{
    Stats, Times, VcpuStats,
    residency::{self, mhz},
};

/// A column: title, width, and a vCPU's cell.
type Column = (&'static str, usize, fn(&VcpuStats) -> String);

const COLUMNS: [Column; 17] = [
    ("VCPU", 4, |of| of.vcpu.to_string()),
    ("PATH", 6, |of| of.path.to_string()),
    ("ON", 10, |of| match (of.pcpu, of.pcpu_khz) {
        (Some(cpu), Some(khz)) => format!("{cpu}@{}", mhz(khz)),
        (Some(cpu), None) => cpu.to_string(),
        (None, _) => none(),
    }),
    ("ASKS", 8, |of| of.asks_khz.map_or_else(none, mhz)),
    ("GETS", 8, |of| mhz(of.gets_khz)),
    ("UCLAMP", 10, |of| {
        format!("{}..{}", of.uclamp.0, of.uclamp.1)
    }),
    ("OWN+OTHERS", 10, |of| match (of.own_util, of.others_util) {
        (Some(own), Some(others)) => format!("{own}+{others}"),
        _ => none(),
    }),
    ("SUM>TARGET", 10, |of| match (of.target_sum, of.target) {
        (Some(sum), Some(target)) => format!("{sum}>{target}"),
        _ => none(),
    }),
    ("REQUESTS", 10, |of| of.counts.requests.to_string()),
    ("APPLIED", 9, |of| of.counts.applied.to_string()),
    ("COALESCED", 9, |of| of.counts.coalesced.to_string()),
    ("LIMITED", 8, |of| of.counts.limited.to_string()),
    ("REFUSED", 8, |of| of.counts.refused.to_string()),
    ("EXITS", 9, |of| of.exits().to_string()),
    ("IN KERNEL", 9, |of| {
        of.accesses.writes_in_kernel.to_string()
    }),
    ("CLAMP p50", 10, |of| {
        below(&of.clamp_after, of.clamp_after.p50_below_ns)
    }),
    ("CLAMP p99", 10, |of| {
        below(&of.clamp_after, of.clamp_after.p99_below_ns)
    }),
];

/// A line of titles, one for each vCPU, those of times at OPPs, and one of what has been lost on the
/// host, if anything. Frequencies are in MHz.
#[must_use]
pub fn table(stats: &Stats) -> String {
    let mut text = titles() + "\n";
    for vcpu in &stats.vcpus {
        text += &(row(vcpu) + "\n");
    }
    let more = tunings(stats).chain(decider(stats));
    for line in more.chain(residency::lines(None, stats)) {
        text += &(line + "\n");
    }
    if stats.policies.iter().all(|policy| policy.opps.is_empty()) {
        text += "frequency of pCPUs: this kernel doesn't count times (CONFIG_CPU_FREQ_STAT)\n";
    }
    if stats.governors_lost > 0 || stats.pins_lost > 0 {
        text += &format!(
            "governors lost {}, pinnings lost {}\n",
            stats.governors_lost, stats.pins_lost
        );
    }
    text
}

/// A line for each tuning.
pub(super) fn tunings(stats: &Stats) -> impl Iterator<Item = String> {
    stats.tunings.iter().map(|tuning| {
        let bound = |word, khz: Option<u32>| {
            khz.map_or_else(String::new, |khz| format!(" {word} {} MHz", mhz(khz)))
        };
        format!(
            "tuned: vCPU {}{}{}; handle {}, user {}, process {}, {} ms left",
            tuning.vcpu,
            bound("from", tuning.floor_khz),
            bound("to", tuning.ceiling_khz),
            tuning.handle,
            tuning.user,
            tuning.client,
            tuning.left_ms,
        )
    })
}

/// The line of an operator's policy, if there is one.
pub(super) fn decider(stats: &Stats) -> Option<String> {
    let by = stats.decided_by.as_ref()?;
    let (asked, bounded, silent) = (by.asked, by.bounded, by.silent);
    Some(format!(
        "decided by policy {}: asked {asked}, bounded {bounded}, silent {silent}",
        by.name
    ))
}

/// The line of titles.
pub(super) fn titles() -> String {
    line(|(title, ..)| title.to_owned())
}

/// The line of one vCPU.
pub(super) fn row(vcpu: &VcpuStats) -> String {
    line(|(.., cell)| cell(vcpu))
}

fn line(cell: impl Fn(Column) -> String) -> String {
    let cells = COLUMNS.map(|column| {
        let width = column.1;
        format!("{:>width$}", cell(column))
    });
    cells.join(" ")
}

fn none() -> String {
    "-".to_owned()
}

/// A bound in µs.
fn below(times: &Times, ns: Option<u64>) -> String {
    match ns {
        Some(ns) if times.n > 0 => format!("<{}.{} us", ns / 1000, ns % 1000 / 100),
        _ => none(),
    }
}
