// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The three commands that run tests.

/// Which command carries a test out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Set {
    /// `make test`, with the checks on the sources and the crates' own tests.
    Short,
    /// `make test-long`.
    Long,
    /// `make test-instrumented`.
    Instrumented,
}
