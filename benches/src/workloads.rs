// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Workloads with the host's cycles in guests, measured where they are named.

use crate::metric::Metric;
use crate::scenario::{CpuSelection, PLAIN, Scenario};

/// All of them.
pub const WORKLOADS: &[Scenario] = &[
    demand(
        "d50",
        &["{start_unpinned} steady=16667/400000/120 mark=end"],
    ),
    demand(
        "d70",
        &["{start_unpinned} steady=16667/560000/120 mark=end"],
    ),
    demand(
        "d90",
        &["{start_unpinned} steady=16667/720000/120 mark=end"],
    ),
    demand(
        "d100",
        &["{start_unpinned} steady=16667/800000/120 mark=end"],
    ),
    Scenario {
        overloads: true,
        ..demand(
            "d110",
            &["{start_unpinned} steady=16667/880000/120 mark=end"],
        )
    },
];

/// What a paced job is judged by.
const PACED: &[Metric] = &[
    Metric::FrameTime(50),
    Metric::FrameTime(95),
    Metric::FrameTime(99),
    Metric::Late,
    Metric::JobEnergy,
    Metric::Cycles,
];

/// Frames at 60 Hz, of so many turns in the mean and a quarter more at most. 800,000 are what the
/// emulated host can just do in time.
const fn demand(case: &'static str, steps: &'static [&'static str]) -> Scenario {
    Scenario {
        name: "demand",
        case,
        place: CpuSelection::LittleToAll,
        steps,
        speed: true,
        equal_cycles: true,
        about_s: 6,
        metrics: PACED,
        ..PLAIN
    }
}
