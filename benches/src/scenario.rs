// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a scenario is: a load, where it runs, under which conditions, and its
//! metrics. Which there are: `scenarios.rs`; in words: `docs/bench.md`.

use std::path::Path;

use vcpufreq_load::{IO_DEVICE, NULL_BLK, other_null_blk};

use crate::duty_cycle::{self, DUTIES};
use crate::machine::{BenchMachine, Cluster};
use crate::metric::Metric;
use crate::variant::Variant;

/// A load and what is read off it.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// Its name in reports.
    pub name: &'static str,
    /// Which of the scenario's cases; the prefix of its metrics' names.
    pub case: &'static str,
    /// Its CPUs.
    pub place: CpuSelection,
    /// The steps of its threads, with the words of [`expanded`]; the first one's marks count.
    pub steps: &'static [&'static str],
    /// Steps of a thread on the host beside it, also when the load is in a guest.
    pub beside: Option<&'static str>,
    /// That thread is in a second guest, where the load is in a guest.
    pub beside_in_guest: bool,
    /// The load is there twice: in a second guest too, where it is in a guest.
    pub twin: bool,
    /// What the frequencies of all pCPUs are held at.
    pub hold: Hold,
    /// Speed follows frequency, where that has to be switched on.
    pub speed: bool,
    /// A guest does so much less of its work that it takes the host's cycles.
    pub equal_cycles: bool,
    /// It demands more than the host can do.
    pub overloads: bool,
    /// Measured on this variant alone.
    pub only: Option<Variant>,
    /// More words for the guest's command line: a guest of its own.
    pub cmdline: &'static str,
    /// In the guest: a file, what it shall hold meanwhile, and afterwards.
    pub guest_file: Option<[&'static str; 3]>,
    /// Repeats, where no number is given.
    pub repeats: u32,
    /// Repeats at most.
    pub most: u32,
    /// Seconds that a repeat takes, about, with the wake-ups before it.
    pub about_s: u32,
    /// What is measured.
    pub metrics: &'static [Metric],
}

/// What most scenarios have in common.
pub const PLAIN: Scenario = Scenario {
    name: "",
    case: "",
    place: CpuSelection::Big,
    steps: &[],
    beside: None,
    beside_in_guest: false,
    twin: false,
    hold: Hold::No,
    speed: false,
    equal_cycles: false,
    overloads: false,
    only: None,
    cmdline: "",
    guest_file: None,
    repeats: 5,
    most: u32::MAX,
    about_s: 4,
    metrics: &[],
};

/// Steps with their words replaced: `{start}`, a start on the first CPU; `{start_unpinned}`, one
/// from there to any; `{duties/N}` and `{edges/N}`, N periods of rt-app at each duty away from
/// OPPs' edges, or at 20 and 60 % as they are; `{first}` and `{all}`, the CPUs; `{calm}`. `{phase}`,
/// µs that change from repeat to repeat through 10 ms; `{above_little}`, a utilization that a little
/// CPU just can't give.
pub fn expanded(
    steps: &str,
    machine: &BenchMachine,
    (first, all): (&str, &str),
    repeat: u32,
) -> String {
    let periods = |us: &[u32], count: &str| {
        let period = |us: &u32| format!("{{calm}} sleep=300000 rt-app={us}/20000/{count}");
        let all: Vec<String> = us.iter().map(period).collect();
        let all = all.join(" ");
        // The first one begins with the mark.
        let all = all.replacen("rt-app", "mark=start rt-app", 1);
        format!("pin={{first}} {all} mark=end")
    };
    let duties = DUTIES.map(|duty| duty_cycle::run_us(duty, machine.big()));
    let edges = [20, 60].map(duty_cycle::plain_us);
    let above_little = machine.little().capacity.saturating_add(16).min(1024);
    let count = |name: &str| steps.strip_prefix(name)?.strip_suffix('}');
    let steps = match (count("{duties/"), count("{edges/")) {
        (Some(count), _) => periods(&duties, count),
        (_, Some(count)) => periods(&edges, count),
        _ => steps.to_owned(),
    };
    steps
        .replace("{start}", "pin={first} {calm} sleep=500000 mark=start")
        .replace(
            "{start_unpinned}",
            "pin={first} {calm} sleep=400000 pin={all} sleep=100000 mark=start",
        )
        .replace("{first}", first)
        .replace("{all}", all)
        .replace("{phase}", &(repeat % 5 * 2000).to_string())
        .replace("{above_little}", &above_little.to_string())
        .replace("{calm}", CALM)
}

/// Clears a thread's utilization of earlier activations (util_est): each short activation removes a
/// quarter, so that nothing of 1024 is left after 40.
const CALM: &str = "calm=20/10000/40";

/// Which CPUs a scenario is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CpuSelection {
    /// The first of the least capable cluster.
    Little,
    /// The first of the most capable one.
    Big,
    /// From a little CPU to any.
    LittleToAll,
}

/// Where the frequencies of all pCPUs are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hold {
    /// The governor moves them.
    No,
    /// At their lowest.
    Min,
    /// At their highest.
    Max,
}

impl Hold {
    /// What it adds to a metric's name.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::No => "",
            Self::Min => "_at_min",
            Self::Max => "_at_max",
        }
    }
}

impl Scenario {
    /// Whether it is measured on this variant.
    pub fn is_for(&self, variant: Variant) -> bool {
        // Only these don't ask where the load is.
        let anywhere = self.equal_cycles || variant.stays();
        let has_boot = !self.boots() || variant != Variant::Host;
        has_boot && anywhere && self.only.is_none_or(|only| only == variant)
    }

    /// Whether it is the boot of a guest, and no load.
    pub fn boots(&self) -> bool {
        self.metrics == [Metric::FirstProcess]
    }

    /// The guests that it needs: more words for the command line, and whether there are two.
    pub fn guests(&self) -> (&'static str, bool) {
        (self.cmdline, self.beside_in_guest || self.twin)
    }

    /// How often it is measured where so many repeats are asked for.
    pub fn repeats_of(&self, wanted: Option<u32>) -> u32 {
        wanted.unwrap_or(self.repeats).min(self.most)
    }

    /// The CPU that the load starts on.
    pub fn first(&self, machine: &BenchMachine) -> u32 {
        match self.place {
            CpuSelection::Big => machine.big().first(),
            CpuSelection::Little | CpuSelection::LittleToAll => machine.little().first(),
        }
    }

    /// A CPU to keep everything else on: of a cluster that isn't measured, else
    /// the last of the least capable one that the load doesn't start on.
    pub fn aside(&self, machine: &BenchMachine) -> u32 {
        if self.place == CpuSelection::Little {
            return machine.big().last();
        }
        let first = self.first(machine);
        let mut last = machine.clusters.iter().map(Cluster::last);
        last.find(|cpu| *cpu != first).unwrap_or(first)
    }

    /// The same with all pCPUs held at their highest frequency, and the load on those of the most
    /// capable cluster: what CPU time it takes there.
    pub fn at_top(&self) -> Self {
        Self {
            place: CpuSelection::Big,
            hold: Hold::Max,
            twin: false,
            ..*self
        }
    }

    /// The CPUs that an unpinned load may run on.
    pub fn all(&self, machine: &BenchMachine) -> Vec<u32> {
        match self.hold {
            Hold::Max => machine.big().cpus.clone(),
            Hold::No | Hold::Min => machine.cpus(),
        }
    }

    /// Whether a repeat has to start from the lowest frequency: not where it
    /// is held, nor beside another load.
    pub fn starts_low(&self) -> bool {
        self.beside.is_none() && self.hold != Hold::Max
    }

    /// A metric's name in reports: `CASE.METRIC_AT_HOLD`.
    pub fn metric_name(&self, metric: Metric) -> String {
        let dot = if self.case.is_empty() { "" } else { "." };
        let (name, _) = metric.name();
        format!("{}{dot}{name}{}", self.case, self.hold.suffix())
    }

    /// Why it can't be measured here, with what to do; `None` where it can. A guest of the host's own
    /// parts has no rt-app.
    pub fn lacks(&self, guest_of_host: bool) -> Option<String> {
        let is = |names: &[&str], word: &str| names.iter().any(|name| word.starts_with(name));
        let rt_app = ["{duties/", "{edges/", "rt-app"];
        if guest_of_host && self.words().any(|word| is(&rt_app, word)) {
            return Some("its guest needs rt-app in a ramdisk (--kernel, --initrd)".to_owned());
        }
        let io = ["io=", "requests=", "disk=", "fio="];
        let io = self.words().any(|word| is(&io, word));
        match Path::new(IO_DEVICE).exists() {
            _ if !io => None,
            true => other_null_blk(Path::new("/")),
            false => Some(format!(
                "there is no {IO_DEVICE}; modprobe null_blk {NULL_BLK}"
            )),
        }
    }

    /// Whether its guests need a disk.
    pub fn needs_disk(&self) -> bool {
        self.words().any(|word| word.starts_with("fio="))
    }

    /// All steps of its loads.
    fn words(&self) -> impl Iterator<Item = &str> {
        let steps = self.steps.iter().chain(&self.beside);
        steps.flat_map(|steps| steps.split_whitespace())
    }

    /// Whether a name is the scenario's, or with a point and the case's this case's.
    pub fn is_called(&self, name: &str) -> bool {
        let case = name.strip_prefix(self.name);
        case.is_some_and(|case| case.is_empty() || case.strip_prefix('.') == Some(self.case))
    }

    /// What it is called in messages.
    pub fn title(&self) -> String {
        let dot = if self.case.is_empty() { "" } else { " " };
        format!("{}{dot}{}{}", self.name, self.case, self.hold.suffix())
    }
}
