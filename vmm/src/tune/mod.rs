// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq tune`, `retune` and `untune`: a program on the host sets a floor or a ceiling of a running
//! guest's vCPU, for a time.
//!
//! ```text
//! tune ─▶ a line of JSON on PID.tune, beside the VMM's record ─▶ server ─▶ BridgeHandle ─▶ clamps
//! ```
//! The connection is the program's life: when it closes, what was set over it ends.

mod client;
mod server;
mod wire;

pub use client::{TuneArgs, retune, tune, untune};
pub use server::start_taking_calls;
pub use wire::Lasts;

#[cfg(test)]
mod tests;
