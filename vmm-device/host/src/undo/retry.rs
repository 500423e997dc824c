// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Waiting for other processes.

use std::time::Duration;

/// How often to try what waits for another process: a lock, a folder that is used, or a cgroup that a
/// thread is just leaving. A killed process takes 1 to 20 ms.
pub(super) const TRY_EVERY: Duration = Duration::from_millis(5);
