// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is measured: each scenario's load, where it runs, and its metrics.
//! `docs/bench.md` says the same in words.

use super::machine::Machine;
use super::measure::Metric;

/// A load and what is read off it.
#[derive(Debug)]
pub struct Scenario {
    /// Its name in reports.
    pub name: &'static str,
    /// Its CPUs.
    pub place: Place,
    /// The steps of its threads, with `{first}`, the CPU that it starts on,
    /// `{all}`, every CPU, and `{calm}`, [`CALM`]; the first one's marks count.
    pub steps: &'static [&'static str],
    /// Steps of a thread on the host beside it, also when the load is in a guest.
    pub beside: Option<&'static str>,
    /// What is measured.
    pub metrics: &'static [Metric],
}

/// What a thread does first so that its own past counts no more: of the
/// utilization that it is remembered with from earlier activations (util_est)
/// each short one takes a quarter, so that of 1024 nothing is left after 40.
pub const CALM: &str = "light=20/10000/40";

/// Which CPUs a scenario is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The first of the least capable cluster.
    Little,
    /// The first of the most capable one.
    Big,
    /// From a little CPU to any.
    LittleToAll,
}

/// All of them, in the order in which they are measured.
pub const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "big-ramp",
        place: Place::Big,
        steps: &["pin={first} {calm} sleep=500000 mark=start busy=300000 mark=end"],
        beside: None,
        metrics: &[Metric::ToFmax],
    },
    Scenario {
        name: "step-down",
        place: Place::Big,
        steps: &[
            "pin={first} {calm} sleep=500000 mark=start busy=300000 mark=end \
                  light=200/8000/100 mark=done",
        ],
        beside: None,
        metrics: &[Metric::ToFmin, Metric::FirstFmin],
    },
    Scenario {
        name: "new-thread",
        place: Place::Little,
        steps: &["pin={first} {calm} sleep=500000 fresh mark=start busy=300000 mark=end"],
        beside: None,
        metrics: &[Metric::ToFmax],
    },
    Scenario {
        name: "little-to-big",
        place: Place::LittleToAll,
        steps: &[
            "pin={first} {calm} sleep=400000 pin={all} sleep=100000 mark=start \
                  busy=600000 mark=end",
        ],
        beside: None,
        metrics: &[Metric::ToBigFmax, Metric::ToBig, Metric::EndsOnBig],
    },
    Scenario {
        name: "io-wake",
        place: Place::Big,
        steps: &["pin={first} {calm} sleep=500000 mark=start io=500/100 mark=end"],
        beside: None,
        metrics: &[Metric::TopKhz, Metric::ToHostTop],
    },
    Scenario {
        name: "shared-pcpu",
        place: Place::Big,
        steps: &["pin={first} {calm} sleep=500000 mark=start busy=1000000 mark=end"],
        beside: Some("pin={first} light=5000/10000/250"),
        metrics: &[Metric::ToFmax, Metric::Work],
    },
    Scenario {
        name: "placement",
        place: Place::LittleToAll,
        steps: &[
            "pin={all} {calm} sleep=500000 mark=start light=12000/20000/50 mark=end",
            "pin={all} {calm} sleep=500000 light=6000/20000/50",
            "pin={all} {calm} sleep=500000 light=2000/20000/50",
            "pin={all} {calm} sleep=500000 light=1000/20000/50",
        ],
        beside: None,
        metrics: &[Metric::OnBig],
    },
];

impl Scenario {
    /// The CPU that the load starts on.
    pub fn first(&self, machine: &Machine) -> u32 {
        match self.place {
            Place::Big => machine.big().first(),
            Place::Little | Place::LittleToAll => machine.little().first(),
        }
    }

    /// A CPU to keep everything else on: of a cluster that isn't measured,
    /// else the last of the least capable one.
    pub fn aside(&self, machine: &Machine) -> u32 {
        let last = |cpus: &[u32]| cpus.last().copied().unwrap_or_default();
        match self.place {
            Place::Little => last(&machine.big().cpus),
            Place::Big | Place::LittleToAll => last(&machine.little().cpus),
        }
    }
}
