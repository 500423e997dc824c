// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Texts for the user. The bridge passes them to the VMM and writes none itself.

use std::fmt::Debug;

/// Receives the texts of a bridge, each of one line.
pub trait Diagnostics: Debug + Send + Sync {
    /// A problem that ends nothing: the cause and the next step.
    fn warn(&self, text: &str);
    /// How a path works on this host.
    fn explain(&self, text: &str);
}
