// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The scenarios, in the order in which they are measured; each in words in
//! `docs/bench.md`.

use crate::metric::Metric::{self, Met, Steady, Took};
use crate::scenario::{CpuSelection, Hold, PLAIN, Scenario};
use crate::variant::Variant;

/// All of them; those of one name are cases of one scenario.
pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "boot",
        hold: Hold::Max,
        metrics: &[Metric::FirstProcess],
        ..PLAIN
    },
    Scenario {
        name: "big-ramp",
        steps: &["{start} busy=300000 mark=end"],
        metrics: &[Metric::ToFmax],
        ..PLAIN
    },
    // Busy for so long that load tracking is full, and pauses longer than a tick:
    // see docs/bench.md.
    step_down(
        "",
        &["{start} busy=600000 mark=end light=50/5000/60 mark=done"],
    ),
    step_down(
        "other_thread",
        &[
            "{start} busy=600000 mark=end sleep=300000 mark=done",
            // Begins some 20 ms after the first one's end.
            "pin={first} {calm} sleep=1120000 light=50/4000/70",
        ],
    ),
    Scenario {
        name: "new-thread",
        place: CpuSelection::Little,
        steps: &[
            "pin={first} {calm} sleep=500000 sleep={phase} fresh mark=start busy=300000 mark=end",
        ],
        metrics: &[Metric::ToFmax],
        ..PLAIN
    },
    Scenario {
        name: "little-to-big",
        place: CpuSelection::LittleToAll,
        steps: &["{start_unpinned} busy=600000 mark=end"],
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
        steps: &["{start} io=500/100 mark=end"],
        metrics: &[Metric::TopKhz, Metric::ToHostTop],
        ..PLAIN
    },
    contended("new25", NEW, QUARTER),
    contended("new50", NEW, HALF),
    contended("new75", NEW, THREE_QUARTERS),
    contended("woken25", WOKEN, QUARTER),
    contended("woken50", WOKEN, HALF),
    contended("woken75", WOKEN, THREE_QUARTERS),
    contended_part("part25", QUARTER),
    contended_part("part50", HALF),
    contended(
        "fifo25",
        WOKEN,
        "fresh pin={first} fifo even=10000/208000/160",
    ),
    contended(
        "deadline25",
        WOKEN,
        // It reserves more than it uses, so that it isn't throttled.
        "fresh pin={first} deadline=3000/10000 even=10000/208000/160",
    ),
    Scenario {
        beside_in_guest: true,
        ..contended("guest50", WOKEN, HALF)
    },
    Scenario {
        // The guest's kernel doesn't use the stolen time that the host reports.
        only: Some(Variant::VmBridge),
        cmdline: "no-steal-acc",
        metrics: &[Metric::ToFmax, Metric::Work],
        ..contended("steal_untold", WOKEN, HALF)
    },
    Scenario {
        metrics: &[Metric::TopKhz, Metric::ToHostTop, Metric::Energy],
        ..contended("io50", &["{start} io=500/100 mark=end"], HALF)
    },
    contended_work("infer50", &["weights=1024 {start} infer=8 mark=end"]),
    contended_work("frames50", &["{start} frames=16667/400000/96 mark=end"]),
    placement("", None, None),
    placement(
        "no_energy_model",
        Some(Variant::VmBridge),
        Some(["/proc/sys/kernel/sched_energy_aware", "0", "1"]),
    ),
    capped(
        "four",
        &[FIRST_CAPPED, CAPPED, CAPPED, CAPPED],
        &[Metric::OnBig, Metric::Busiest, Metric::Energy],
    ),
    capped(
        "eight",
        &[
            FIRST_CAPPED,
            CAPPED,
            CAPPED,
            CAPPED,
            CAPPED,
            CAPPED,
            CAPPED,
            CAPPED,
        ],
        &[Metric::OnBig, Metric::Busiest, Metric::Energy],
    ),
    capped(
        "above_little",
        &[
            "pin={first} {calm} uclamp={above_little}/{above_little} sleep=400000 pin={all} sleep=100000 mark=start busy=600000 mark=end uclamp=0/1024",
        ],
        &[Metric::Migrate, Metric::TopKhz, Metric::Energy],
    ),
    Scenario {
        place: CpuSelection::Big,
        // 5 % of the CPU at its highest frequency.
        beside: Some("pin={first} even=20000/83000/110"),
        speed: true,
        ..capped(
            "beside",
            &[
                "pin={first} {calm} uclamp=0/300 sleep=500000 mark=start busy=600000 mark=end uclamp=0/1024",
            ],
            &[Metric::AtFmax, Metric::Work, Metric::Energy],
        )
    },
    periodic(&["{duties/12}"], Hold::No, 3),
    periodic(&["{duties/5}"], Hold::Min, 1),
    periodic(&["{duties/8}"], Hold::Max, 1),
    at_edge(&["{edges/12}"], Hold::No, 3),
    at_edge(&["{edges/5}"], Hold::Min, 1),
    at_edge(&["{edges/8}"], Hold::Max, 1),
    work(
        "infer_cached",
        &["weights=32 {start_unpinned} infer=8 mark=end"],
    ),
    work_at_max("infer_cached", &["weights=32 {start} infer=8 mark=end"]),
    work(
        "infer_small",
        &["weights=1024 {start_unpinned} infer=8 mark=end"],
    ),
    work_at_max("infer_small", &["weights=1024 {start} infer=8 mark=end"]),
    work(
        "infer_large",
        &["weights=32768 {start_unpinned} infer=8 mark=end"],
    ),
    work_at_max("infer_large", &["weights=32768 {start} infer=8 mark=end"]),
    Scenario {
        // Where it runs is a matter of chance in each: of three the median differs by 5 %.
        repeats: 9,
        most: 9,
        ..work("io", &["{start_unpinned} requests=100000/60 mark=end"])
    },
    Scenario {
        most: 3,
        ..work_at_max("io", &["{start} requests=100000/60 mark=end"])
    },
    work(
        "frames",
        &["{start_unpinned} frames=16667/400000/96 mark=end"],
    ),
    work_at_max("frames", &["{start} frames=16667/400000/96 mark=end"]),
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

/// A thread that has no past becomes busy.
const NEW: &[&str] = &["pin={first} {calm} sleep=500000 fresh mark=start busy=300000 mark=end"];
/// One that had 1 ms of each 10 becomes busy.
const WOKEN: &[&str] = &[
    "pin={first} {calm} sleep=300000 sleep={phase} calm=1000/10000/20 sleep=9000 mark=start busy=300000 mark=end",
];
/// One that has rested gets 40 % of each 20 ms.
const PART: &[&str] =
    &["pin={first} {calm} sleep=500000 sleep={phase} mark=start even=20000/667000/20 mark=end"];
/// Of a big CPU of the emulated host at its highest frequency, which does 83 turns in a µs; until
/// after the load's end.
const QUARTER: &str = "pin={first} even=10000/208000/160";
const HALF: &str = "pin={first} even=10000/417000/160";
const THREE_QUARTERS: &str = "pin={first} even=10000/625000/160";

const fn contended(
    case: &'static str,
    steps: &'static [&'static str],
    beside: &'static str,
) -> Scenario {
    Scenario {
        name: "contended",
        case,
        steps,
        beside: Some(beside),
        speed: true,
        most: 3,
        metrics: &[
            Metric::ToNeeded,
            Metric::Below,
            Metric::Above,
            Metric::Work,
            Metric::Energy,
        ],
        ..PLAIN
    }
}

const fn contended_part(case: &'static str, beside: &'static str) -> Scenario {
    Scenario {
        metrics: &[
            Metric::ToNeeded,
            Metric::Below,
            Metric::Above,
            Metric::Score,
            Metric::Energy,
        ],
        ..contended(case, PART, beside)
    }
}

const fn contended_work(case: &'static str, steps: &'static [&'static str]) -> Scenario {
    Scenario {
        most: 3,
        about_s: 6,
        metrics: &[Metric::Score, Metric::Energy],
        ..contended(case, steps, "pin={first} even=10000/417000/270")
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
        place: CpuSelection::LittleToAll,
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

/// Always running, and allowed a tenth of a big CPU.
const CAPPED: &str =
    "pin={first} {calm} uclamp=0/110 sleep=400000 pin={all} sleep=100000 busy=600000 uclamp=0/1024";
/// The first of them, whose marks count.
const FIRST_CAPPED: &str = "pin={first} {calm} uclamp=0/110 sleep=400000 pin={all} sleep=100000 mark=start busy=600000 mark=end uclamp=0/1024";

/// After the evaluation in the cover letter of "uclamp sum aggregation": threads with clamps of
/// their own.
const fn capped(
    case: &'static str,
    steps: &'static [&'static str],
    metrics: &'static [Metric],
) -> Scenario {
    Scenario {
        name: "capped",
        case,
        place: CpuSelection::LittleToAll,
        steps,
        most: 3,
        metrics,
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
        about_s: 7,
        metrics: match hold {
            Hold::No => &[
                Met(10),
                Met(20),
                Met(40),
                Met(60),
                Met(80),
                Took(10),
                Took(20),
                Took(40),
                Took(60),
                Took(80),
            ],
            Hold::Min | Hold::Max => &[Steady(10), Steady(20), Steady(40), Steady(60), Steady(80)],
        },
        ..PLAIN
    }
}

const fn at_edge(steps: &'static [&'static str], hold: Hold, most: u32) -> Scenario {
    Scenario {
        case: "at_edge",
        about_s: 4,
        metrics: match hold {
            Hold::No => &[Met(20), Met(60), Took(20), Took(60)],
            Hold::Min | Hold::Max => &[Steady(20), Steady(60)],
        },
        ..periodic(steps, hold, most)
    }
}

const fn work(case: &'static str, steps: &'static [&'static str]) -> Scenario {
    Scenario {
        name: "work",
        case,
        place: CpuSelection::LittleToAll,
        steps,
        speed: true,
        most: 3,
        metrics: &[Metric::Score, Metric::Energy, Metric::PerJoule],
        ..PLAIN
    }
}

/// What virtualization itself costs: the same place and the same frequency on host and guest. The
/// job stays on big CPUs. Otherwise a scheduler that estimates it a little larger could move it,
/// and the ratio would be that of two kinds of CPUs.
const fn work_at_max(case: &'static str, steps: &'static [&'static str]) -> Scenario {
    Scenario {
        place: CpuSelection::Big,
        hold: Hold::Max,
        most: 1,
        ..work(case, steps)
    }
}
