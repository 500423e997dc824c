// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guardian's end of `vcpufreq policy`.
//!
//! ```text
//! policy ─▶ a line of JSON and the object on PID.policy, beside the VMM's record ─▶ guardian ─▶ kernel
//! ```
//! A confined VMM may load no programs. Its guardian may, and holds the policy: it goes with the
//! guardian, and so with the VM.

#[cfg(feature = "bpf")]
mod server;
pub(crate) mod wire;

#[cfg(feature = "bpf")]
pub use server::PolicyCalls;
