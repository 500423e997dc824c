// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The scenarios, in the order in which they are measured; each in words in
//! `docs/bench.md`.

use crate::metric::Metric;
use crate::scenario::{Hold, PLAIN, Place, Scenario};
use crate::variant::Variant;

/// rt-app's work in µs at full speed of each 20 ms, at five duties that are
/// away from an OPP's edge; and how often.
macro_rules! period {
    ($count:literal) => {
        concat!(
            "pin={first} {calm} sleep=300000 mark=start rt-app={duty10}/20000/",
            $count,
            " {calm} sleep=300000 rt-app={duty20}/20000/",
            $count,
            " {calm} sleep=300000 rt-app={duty40}/20000/",
            $count,
            " {calm} sleep=300000 rt-app={duty60}/20000/",
            $count,
            " {calm} sleep=300000 rt-app={duty80}/20000/",
            $count,
            " mark=end"
        )
    };
}

/// At 20 and 60 % as they are, where OPPs of the lab's CPUs have their edges.
macro_rules! period_at_edge {
    ($count:literal) => {
        concat!(
            "pin={first} {calm} sleep=300000 mark=start rt-app=4000/20000/",
            $count,
            " {calm} sleep=300000 rt-app=12000/20000/",
            $count,
            " mark=end"
        )
    };
}

/// A job that may run anywhere, begun on a little CPU.
macro_rules! job {
    ($before:literal, $job:literal) => {
        &[concat!(
            $before,
            " pin={first} {calm} sleep=400000 pin={all} sleep=100000 mark=start ",
            $job,
            " mark=end"
        )]
    };
}

/// The same on one CPU.
macro_rules! pinned_job {
    ($before:literal, $job:literal) => {
        &[concat!(
            $before,
            " pin={first} {calm} sleep=500000 mark=start ",
            $job,
            " mark=end"
        )]
    };
}

/// All of them; those of one name are cases of one scenario.
pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "big-ramp",
        steps: &["pin={first} {calm} sleep=500000 mark=start busy=300000 mark=end"],
        metrics: &[Metric::ToFmax],
        ..PLAIN
    },
    // Busy for so long that load tracking is full, and pauses longer than a tick:
    // see docs/bench.md.
    step_down(
        "",
        &[
            "pin={first} {calm} sleep=500000 mark=start busy=600000 mark=end \
                  light=50/5000/60 mark=done",
        ],
    ),
    step_down(
        "other_thread",
        &[
            "pin={first} {calm} sleep=500000 mark=start busy=600000 mark=end \
                  sleep=300000 mark=done",
            // Begins some 20 ms after the first one's end.
            "pin={first} {calm} sleep=1120000 light=50/4000/70",
        ],
    ),
    Scenario {
        name: "new-thread",
        place: Place::Little,
        steps: &["pin={first} {calm} sleep=500000 fresh mark=start busy=300000 mark=end"],
        metrics: &[Metric::ToFmax],
        ..PLAIN
    },
    Scenario {
        name: "little-to-big",
        place: Place::LittleToAll,
        steps: &[
            "pin={first} {calm} sleep=400000 pin={all} sleep=100000 mark=start \
                  busy=600000 mark=end",
        ],
        metrics: &[
            Metric::ToBigFmax,
            Metric::Migrate,
            Metric::ToBig,
            Metric::EndsOnBig,
        ],
        ..PLAIN
    },
    Scenario {
        name: "io-wake",
        steps: &["pin={first} {calm} sleep=500000 mark=start io=500/100 mark=end"],
        metrics: &[Metric::TopKhz, Metric::ToHostTop],
        ..PLAIN
    },
    shared("", None, ""),
    // The kernel's word for: don't use the stolen time that you are told.
    shared("steal_untold", Some(Variant::VmBridge), "no-steal-acc"),
    placement("", None, None),
    placement(
        "no_energy_model",
        Some(Variant::VmBridge),
        Some(["/proc/sys/kernel/sched_energy_aware", "0", "1"]),
    ),
    periodic(&[period!(12)], Hold::No, 3),
    periodic(&[period!(5)], Hold::Min, 1),
    periodic(&[period!(8)], Hold::Max, 1),
    at_edge(&[period_at_edge!(12)], Hold::No, 3),
    at_edge(&[period_at_edge!(5)], Hold::Min, 1),
    at_edge(&[period_at_edge!(8)], Hold::Max, 1),
    work("infer_cached", job!("weights=32", "infer=8")),
    work_at_max("infer_cached", pinned_job!("weights=32", "infer=8")),
    work("infer_small", job!("weights=1024", "infer=8")),
    work_at_max("infer_small", pinned_job!("weights=1024", "infer=8")),
    work("infer_large", job!("weights=32768", "infer=8")),
    work_at_max("infer_large", pinned_job!("weights=32768", "infer=8")),
    Scenario {
        // Where it runs is a matter of chance in each: of three the median differs by 5 %.
        repeats: 9,
        most: 9,
        ..work("io", job!("", "requests=100000/60"))
    },
    Scenario {
        most: 3,
        ..work_at_max("io", pinned_job!("", "requests=100000/60"))
    },
    work("frames", job!("", "frames=16667/400000/96")),
    work_at_max("frames", pinned_job!("", "frames=16667/400000/96")),
];

const fn step_down(case: &'static str, steps: &'static [&'static str]) -> Scenario {
    Scenario {
        name: "step-down",
        case,
        steps,
        metrics: &[Metric::ToFmin, Metric::FirstFmin],
        ..PLAIN
    }
}

const fn shared(case: &'static str, only: Option<Variant>, cmdline: &'static str) -> Scenario {
    Scenario {
        name: "shared-pcpu",
        case,
        steps: &["pin={first} {calm} sleep=500000 mark=start busy=1000000 mark=end"],
        beside: Some("pin={first} light=5000/10000/250"),
        only,
        cmdline,
        metrics: &[Metric::ToFmax, Metric::Work],
        ..PLAIN
    }
}

const fn placement(
    case: &'static str,
    only: Option<Variant>,
    guest_file: Option<[&'static str; 3]>,
) -> Scenario {
    Scenario {
        name: "placement",
        case,
        place: Place::LittleToAll,
        steps: &[
            "pin={all} {calm} sleep=500000 mark=start frames=20000/500000/50 mark=end",
            "pin={all} {calm} sleep=500000 frames=20000/150000/50",
            "pin={all} {calm} sleep=500000 frames=20000/60000/50",
            "pin={all} {calm} sleep=500000 frames=20000/30000/50",
        ],
        // Work and not time: how long a burst takes would decide where it runs,
        // and where it runs how long it takes.
        speed: true,
        most: 3,
        only,
        guest_file,
        metrics: &[Metric::OnBig, Metric::Score, Metric::Energy],
        ..PLAIN
    }
}

const fn periodic(steps: &'static [&'static str], hold: Hold, most: u32) -> Scenario {
    Scenario {
        name: "periodic",
        steps,
        hold,
        speed: true,
        most,
        metrics: if matches!(hold, Hold::No) {
            &[
                Metric::Met(10),
                Metric::Took(10),
                Metric::Met(20),
                Metric::Took(20),
                Metric::Met(40),
                Metric::Took(40),
                Metric::Met(60),
                Metric::Took(60),
                Metric::Met(80),
                Metric::Took(80),
            ]
        } else {
            &[
                Metric::Steady(10),
                Metric::Steady(20),
                Metric::Steady(40),
                Metric::Steady(60),
                Metric::Steady(80),
            ]
        },
        ..PLAIN
    }
}

const fn at_edge(steps: &'static [&'static str], hold: Hold, most: u32) -> Scenario {
    Scenario {
        case: "at_edge",
        metrics: if matches!(hold, Hold::No) {
            &[
                Metric::Met(20),
                Metric::Took(20),
                Metric::Met(60),
                Metric::Took(60),
            ]
        } else {
            &[Metric::Steady(20), Metric::Steady(60)]
        },
        ..periodic(steps, hold, most)
    }
}

const fn work(case: &'static str, steps: &'static [&'static str]) -> Scenario {
    Scenario {
        name: "work",
        case,
        place: Place::LittleToAll,
        steps,
        speed: true,
        most: 3,
        metrics: &[Metric::Score, Metric::Energy, Metric::PerJoule],
        ..PLAIN
    }
}

/// What virtualization itself costs: the same place and the same frequency on
/// host and guest. Where the job could run anywhere, a scheduler that takes it
/// for a little larger would put it on another CPU, and the ratio would be that
/// of two kinds of CPUs.
const fn work_at_max(case: &'static str, steps: &'static [&'static str]) -> Scenario {
    Scenario {
        place: Place::Big,
        hold: Hold::Max,
        most: 1,
        ..work(case, steps)
    }
}
