// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the user is told, and by whom: the bridge writes no text anywhere itself.

use std::fmt::Debug;

/// Gets the texts of a bridge, each of one line.
pub trait Diagnostics: Debug + Send + Sync {
    /// Something isn't as it should be, and ends nothing: the cause and the next step.
    fn warn(&self, text: &str);
    /// How a path works on this host.
    fn explain(&self, text: &str);
}
