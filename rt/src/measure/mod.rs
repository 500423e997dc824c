// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Measuring what the tuning is for: wake-up latencies of real-time CPUs, on the host and in the
//! guest, beside a budget.
//!
//! ```text
//! Test + Beside ─ script ─▶ sh, here or in the guest ─ text ─▶ cyclictest::parse ─▶ Report ─▶ text, JSON, HTML
//!                              host's trace ─▶ trace::parse ─▶ cause::causes ────────┘
//! ```
//! Only [`Trace`] touches the host; who runs the scripts is the program.

mod cause;
mod cyclictest;
mod html;
mod machine;
mod report;
mod script;
mod trace;

pub use cause::{Cause, Kind, Late, Measured, causes};
pub use cyclictest::{Latencies, Length, ParseError, Printed, Spike, Test, parse};
pub use html::page;
pub use machine::{Machine, machine};
pub use report::{Conditions, Place, Report, Run, Verdict, Worst};
pub use script::{Beside, Hackbench, Load, load_script, script};
pub use trace::{Event, Trace, What};
