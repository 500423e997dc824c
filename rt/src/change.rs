// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A change of a host: the target, the old value and the new one.

use serde::Serialize;
use vcpufreq_host::undo::Target;

/// One change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// What is changed.
    #[serde(flatten)]
    pub target: Target,
    /// Its value now; `None` for a file of a folder that isn't there yet.
    pub now: Option<String>,
    /// The value wanted. `None`: the value is lost by another change and brought back with it.
    pub want: Option<String>,
}

impl Change {
    /// Whether nothing has to be done.
    #[must_use]
    pub fn is_set(&self) -> bool {
        match (&self.now, &self.want) {
            (Some(now), Some(want)) => self.target.same(now, want),
            (_, None) => true,
            (None, Some(_)) => false,
        }
    }
}
