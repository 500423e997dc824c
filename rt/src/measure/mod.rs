// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Measuring what the tuning is for: wake-up latencies of real-time CPUs, on the host and in the
//! guest, beside a budget.
//!
//! ```text
//! Test + Beside ─ script ─▶ sh, here or in the guest ─ text ─▶ cyclictest::parse ─▶ Report ─▶ text, JSON, HTML
//!                              host's trace ─▶ trace::parse ─▶ cause::causes ────────┘
//! ```
//! Only [`Trace`] touches the host; the command line runs the scripts.

mod cause;
mod cyclictest;
mod html;
mod machine;
mod report;
mod script;
mod trace;

pub use cause::{Late, Measured, causes};
pub use cyclictest::{Length, Printed, Spike, Test, parse};
pub use html::page;
pub use machine::machine;
pub use report::{Conditions, Place, Report, Run, Verdict, Worst};
pub use script::{Beside, Hackbench, Load, load_script, script};
pub use trace::Trace;
