// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A kernel with checks of its own reports faults that are there on purpose: else "no report" of
//! the other scenarios would mean nothing.

use std::path::Path;

use anyhow::Result;
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use crate::harness::console_commands::{insmod, rmmod};
use crate::harness::kernel_log;

/// What a report contains of each fault. RCU's comes before the locks': after one report of those
/// the kernel checks neither.
const CHECKED: [(&str, &str); 6] = [
    ("rcu", "suspicious RCU usage"),
    ("inversion", "possible circular locking dependency"),
    ("sleep", "sleeping function called from invalid context"),
    ("use-after-free", "KASAN: slab-use-after-free in"),
    ("shift", "UBSAN: shift-out-of-bounds in"),
    ("leak", "leak:"),
];
const KCSAN: [(&str, &str); 1] = [("race", "BUG: KCSAN: data-race in count_up")];

/// Each fault is among the reports that it makes, and nothing was reported before.
pub fn run() -> Result<LabVerdict> {
    let before = kernel_log::look()?.reports;
    let mut missed = Vec::new();
    let mut told = Vec::new();
    let faults = match Path::new("/sys/kernel/debug/kcsan").exists() {
        true => &KCSAN[..],
        false => &CHECKED[..],
    };
    for (fault, sign) in faults {
        insmod("lab_faults", &format!("fault={fault}"))?;
        rmmod("lab_faults")?;
        let mut reports = kernel_log::look()?.reports;
        if *fault == "leak" {
            reports.extend(kernel_log::leaks()?);
            // The scan after the last scenario is to find none.
            kernel_log::forget_leaks()?;
        }
        let reported = reports.iter().any(|one| one.contains(sign));
        if !reported {
            missed.push(*fault);
        }
        told.push(json!({ "fault": fault, "reported": reported, "reports": reports }));
    }
    let figures = json!({ "before": before, "faults": told });
    Ok(LabVerdict::with_figures(figures)
        .check_none("nothing is reported before", &before)
        .check_none("no fault is missed", &missed))
}
