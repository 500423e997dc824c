// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The actuator `scx` and its service, `vcpufreq scx`.

mod deaths;
mod fallback;
mod most;
mod races;
mod refusals;
mod requests;
mod service;
mod threads;
mod unit;

pub(super) use service::{ServiceProcess, scx};

use anyhow::Result;
use vcpufreq_tests::LabVerdict;

use crate::harness::plan::Plan;

/// Carries out a scenario by name, when it is one of these.
pub fn run(name: &str, plan: &Plan) -> Option<Result<LabVerdict>> {
    match name {
        "scx-deaths" => Some(deaths::run()),
        "scx-fallback" => Some(fallback::run(plan)),
        "scx-races" => Some(races::run(plan)),
        "scx-none" => Some(refusals::none()),
        "scx-requests" => Some(requests::run()),
        "scx-service" => Some(refusals::run()),
        "scx-unit" => Some(unit::run()),
        _ => None,
    }
}
