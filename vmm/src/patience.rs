// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long another program may take before it counts as one that hangs.

use std::time::Duration;

/// So many seconds. In a build for tests, which has debug assertions, no less than ten minutes: there
/// a machine that is busy with something else makes no failure.
pub const fn patience(seconds: u64) -> Duration {
    const OF_TESTS: u64 = 600;
    match cfg!(debug_assertions) && seconds < OF_TESTS {
        true => Duration::from_secs(OF_TESTS),
        false => Duration::from_secs(seconds),
    }
}
