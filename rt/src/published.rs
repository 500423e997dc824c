// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Longest latencies that others have published: a profile's, to be read beside a report's own.

use serde::{Deserialize, Serialize};

/// A published result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct PublishedMaximum {
    /// `host` or `guest`.
    pub place: String,
    /// The load's word in a report.
    pub load: String,
    /// The longest latency, µs.
    pub max_us: u64,
    /// The machine, the kernel and the time of the test.
    pub conditions: String,
    /// Who published it.
    pub source: String,
}
