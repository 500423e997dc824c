// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An operator's policy (`bpf/vcpufreq_policy.h`) in the place of the built-in rule, while the guest
//! runs. It is for a process beside the VMM that is not confined: it holds the policy, and the policy
//! goes with it.
//!
//! ```text
//! object ─▶ a program's shape ─▶ verifier ─▶ runs on requests ─▶ attached ─▶ the VM's number of it
//!             └───────────── a refusal, and the VM has what it had ──┘
//! ```
//! The programs of a VM are reached by tail calls from arrays, so that none can replace a function in
//! them (`freplace`, since Linux 6.12). A policy is a program on a function's entry (`fentry`), which
//! answers in a map. Each of the VM's programs that asks has a copy of its own of that function.

#![forbid(unsafe_code)]
// Without the loader, a policy is no more than its instructions.
#![cfg_attr(not(feature = "load"), allow(dead_code))]

mod instructions;
#[cfg(feature = "load")]
mod judge;
#[cfg(feature = "load")]
mod object;
#[cfg(feature = "load")]
mod programs;

#[cfg(feature = "load")]
pub use vm::OperatorVm;
#[cfg(feature = "load")]
mod vm;
