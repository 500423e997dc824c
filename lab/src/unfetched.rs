// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Why something can't be tried here: packages that the archive lacks.

use std::fmt;

/// Packages that can't be fetched: what needs them is left out.
#[derive(Debug)]
pub struct Unfetched(pub String);

impl std::error::Error for Unfetched {}

impl fmt::Display for Unfetched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
