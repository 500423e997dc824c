// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the scenarios and the lab share: what comes of a scenario.

#![forbid(unsafe_code)]

mod verdict;

pub use verdict::{LabCheck, LabVerdict, ScenarioReport};
