// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Workloads with the host's cycles in guests, measured where they are named.

use crate::metric::Metric;
use crate::scenario::{CpuSelection, PLAIN, Scenario};

/// All of them.
pub const WORKLOADS: &[Scenario] = &[
    demand(
        "d50",
        &["{start_unpinned} steady=16667/400000/240 mark=end"],
    ),
    demand(
        "d70",
        &["{start_unpinned} steady=16667/560000/240 mark=end"],
    ),
    demand(
        "d90",
        &["{start_unpinned} steady=16667/720000/240 mark=end"],
    ),
    demand(
        "d100",
        &["{start_unpinned} steady=16667/800000/240 mark=end"],
    ),
    Scenario {
        overloads: true,
        ..demand(
            "d110",
            &["{start_unpinned} steady=16667/880000/240 mark=end"],
        )
    },
    paced("game60", &["{start_unpinned} rt-app-file=game60 mark=end"]),
    paced(
        "game120",
        &["{start_unpinned} rt-app-file=game120 mark=end"],
    ),
    paced("bursts", &["{start_unpinned} rt-app-file=bursts mark=end"]),
    paced(
        "background",
        &[
            "{start_unpinned} steady=16667/400000/240 mark=end",
            BACKGROUND,
            BACKGROUND,
        ],
    ),
    unpaced("build", &["{start_unpinned} build=400000/60/4 mark=end"]),
    unpaced(
        "team",
        &["weights=1024 {start_unpinned} team=4/24 mark=end"],
    ),
    unpaced("disk", &["{start_unpinned} disk=60000/40/4 mark=end"]),
    twice(
        paced("", &["{start_unpinned} rt-app-file=game60 mark=end"]),
        "game60_twice",
        &[
            Metric::FrameTime(95),
            Metric::Late,
            Metric::JobEnergy,
            Metric::Fairness,
        ],
    ),
    twice(
        unpaced("", &["{start_unpinned} build=400000/60/4 mark=end"]),
        "build_twice",
        &[Metric::JobScore, Metric::JobEnergy, Metric::Fairness],
    ),
];

/// Two guests' vCPUs on the pCPUs of one.
const fn twice(one: Scenario, case: &'static str, metrics: &'static [Metric]) -> Scenario {
    Scenario {
        case,
        twin: true,
        overloads: true,
        metrics,
        ..one
    }
}

/// Storage, by fio, measured where it is named. Its guests have the host's device as their disk.
pub const STORAGE: &[Scenario] = &[
    fio(
        "seq_read",
        &["pin={first} {calm} sleep=400000 fio=seq_read/200"],
    ),
    fio(
        "seq_write",
        &["pin={first} {calm} sleep=400000 fio=seq_write/200"],
    ),
    fio(
        "rand_read",
        &["pin={first} {calm} sleep=400000 fio=rand_read/200"],
    ),
    fio(
        "rand_write",
        &["pin={first} {calm} sleep=400000 fio=rand_write/200"],
    ),
];

const fn fio(case: &'static str, steps: &'static [&'static str]) -> Scenario {
    Scenario {
        name: "fio",
        case,
        place: CpuSelection::Big,
        steps,
        speed: true,
        most: 3,
        about_s: 5,
        metrics: &[Metric::Score, Metric::Energy, Metric::PerJoule],
        ..PLAIN
    }
}

/// Work that is allowed a tenth of a big CPU, and on the host takes about as long as the frames.
const BACKGROUND: &str = "pin={first} {calm} uclamp=0/110 sleep=400000 pin={all} sleep=100000 even=2000000/12000000/1 uclamp=0/1024";

/// What a job is judged by that does as much as it can.
const UNPACED: &[Metric] = &[Metric::JobScore, Metric::JobEnergy, Metric::Cycles];

/// What a paced job is judged by.
const PACED: &[Metric] = &[
    Metric::FrameTime(50),
    Metric::FrameTime(95),
    Metric::FrameTime(99),
    Metric::Late,
    Metric::JobEnergy,
    Metric::Cycles,
];

const fn paced(case: &'static str, steps: &'static [&'static str]) -> Scenario {
    Scenario {
        name: "workload",
        ..demand(case, steps)
    }
}

const fn unpaced(case: &'static str, steps: &'static [&'static str]) -> Scenario {
    Scenario {
        metrics: UNPACED,
        ..paced(case, steps)
    }
}

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

#[cfg(test)]
mod tests {
    //! A job is paced, and judged by its frames, or not, and judged by its work; all have the host's
    //! cycles in guests, and steps that the load program knows.

    use super::*;
    use crate::measure_tests::machine;
    use crate::scenario::expanded;

    #[test]
    fn each_job_is_judged_by_what_it_can_fail() {
        for one in WORKLOADS {
            let has = |metric| one.metrics.contains(&metric);
            let paced = has(Metric::FrameTime(95)) && has(Metric::Late);
            assert_ne!(paced, has(Metric::JobScore), "{}", one.title());
            assert!(
                one.equal_cycles && has(Metric::JobEnergy),
                "{}",
                one.title()
            );
            let logs_frames = ["steady=", "rt-app-file="];
            let logs = logs_frames.iter().any(|step| one.steps[0].contains(step));
            assert_eq!(logs, paced, "{}", one.title());
        }
    }

    #[test]
    fn each_step_is_one_that_the_load_program_knows() {
        for one in WORKLOADS.iter().chain(STORAGE) {
            for steps in one.steps {
                let steps = expanded(steps, &machine(), ("0", "0,1"), 0);
                let words: Vec<&str> = steps.split_whitespace().collect();
                vcpufreq_load::phases::steps(&words).unwrap();
            }
        }
    }
}
