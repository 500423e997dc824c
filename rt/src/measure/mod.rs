// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Measures wake-up latencies of real-time CPUs, on the host and in the guest, beside a budget.
//!
//! ```text
//! Test + Beside ─ script ─▶ sh, here or in the guest ─ text ─▶ cyclictest::parse ─▶ LatencyReport ─▶ text, JSON
//! ```
//! Nothing here touches the host; the command line runs the scripts.

mod compare;
mod cyclictest;
mod machine;
mod report;
mod report_text;
mod script;
mod spikes;

pub use compare::{ComparedReport, ReportComparison};
pub use cyclictest::{Latencies, Length, Test, parse};
pub use machine::machine;
pub use report::{Conditions, LatencyReport, LatencyVerdict, RunCaps, TestPlace, TestRun};
pub use script::{Beside, Hackbench, TestLoad, load_script, script};
pub use spikes::Spikes;
