// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq rt report`: runs the tests, here and in the guest, and prints the report.

mod args;
mod guest;
mod page;
mod running;
mod shell;

use std::{collections::BTreeMap, io::Write as _};

use anyhow::{Context as _, ensure};
use vcpufreq_device::host::CpuList;

use crate::{
    host::Look as _,
    kernel_host::KernelHost,
    measure::{
        self, Beside, Conditions, Late, Length, Load, Measured, Place, Printed, Report, Run, Spike,
        Test, Trace, Verdict, Worst,
    },
    smi::smis,
};

pub use args::ReportArgs;
use args::Wanted;
use guest::Guest;
use page::Page;
use running::{Ending, Running};
use shell::Shell;

/// How many of the longest latencies of a test are looked up in the trace.
const LOOKED_UP: usize = 5;
/// Wake-ups of the test that finds what is long here.
const WARM_UP: u64 = 1000;

/// Measures and prints; returns the exit code: 1 if the budget was exceeded or a test is incomplete.
///
/// # Errors
/// Why there is no report: a program that is missing, CPUs that don't fit, a test or load that
/// failed, a signal.
pub fn report(args: &ReportArgs) -> anyhow::Result<u8> {
    let root = args.root.as_deref();
    let host = root.map_or_else(KernelHost::default, KernelHost::at);
    let wanted = args.wanted(&host)?;
    let guest = args.guest(&wanted.cpus)?;
    let page = args.html.as_deref().map(Page::at).transpose()?;
    let running = Running::default();
    let _ending = Ending::watch(&running)?;
    let guest = match guest {
        Some((shell, cpus)) => Some(Guest::new(&shell, cpus, args, &running)?),
        None => None,
    };
    let here = Shell::here(&running);
    here.require(&args.loads).context("on this host")?;
    let session = Session {
        args,
        wanted: &wanted,
        look: &host,
        here,
        trace: start_trace(args, &wanted.cpus)?,
    };
    let mut runs = Vec::new();
    if !args.guest_only {
        runs.extend(session.host()?);
    }
    if let Some(guest) = &guest {
        runs.extend(session.guest(guest)?);
    }
    let report = Report::new(conditions(args, &wanted, &host), args.budget_us, runs);
    print(args, &report)?;
    // Last: the report is printed by now.
    page.map(|page| page.write(&measure::page(&report)))
        .transpose()?;
    Ok(u8::from(matches!(
        report.verdict,
        Verdict::Exceeded { .. } | Verdict::Incomplete { .. }
    )))
}

fn start_trace(args: &ReportArgs, cpus: &CpuList) -> anyhow::Result<Option<Trace>> {
    let trace = args.trace.then(|| Trace::start(cpus)).transpose();
    trace.context(
        "can't trace; run as root, with tracefs at /sys/kernel/tracing, or without --trace",
    )
}

fn print(args: &ReportArgs, report: &Report) -> anyhow::Result<()> {
    let text = if args.json {
        format!("{}\n", serde_json::to_string_pretty(report)?)
    } else {
        report.text()
    };
    let mut output = std::io::stdout();
    output
        .write_all(text.as_bytes())
        .and_then(|()| output.flush())
        .context("can't write to stdout; check where it goes")
}

fn conditions(args: &ReportArgs, wanted: &Wanted, host: &KernelHost) -> Conditions {
    let governors = wanted.cpus.iter().filter_map(|cpu| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor");
        host.read(&path).ok()
    });
    let mut governors: Vec<String> = governors.collect();
    governors.dedup();
    Conditions {
        machine: measure::machine(host),
        profile: wanted.profile.clone(),
        cpus: wanted.cpus.clone(),
        others: wanted.others.clone(),
        load_percent: args.load_percent,
        hackbench: args.hackbench(),
        traced: args.trace,
        governors,
    }
}

/// What all tests share.
struct Session<'a> {
    args: &'a ReportArgs,
    wanted: &'a Wanted,
    look: &'a KernelHost,
    here: Shell,
    trace: Option<Trace>,
}

impl Session<'_> {
    fn host(&self) -> anyhow::Result<Vec<Run>> {
        // In a group that has the measured CPUs alone, the main thread has no other.
        let main = self.wanted.others.iter().last();
        let main = main.filter(|_| self.wanted.group.is_none());
        let test = self.args.test(&self.wanted.cpus, main);
        let run = |test: &Test, load| {
            let beside = self.beside(load, &self.wanted.others);
            let script = measure::script(test, &beside, self.wanted.group.as_deref());
            self.here.run(&script).context("on this host")
        };
        let test = self.with_spikes(test, &run)?;
        let loads = self.args.loads.iter();
        let one = |load: &Load| {
            self.clear()?;
            let before = smis(self.look, &self.wanted.cpus);
            let printed = measure::parse(&run(&test, *load)?, &test)?;
            let smis = self.smis_since(before);
            let worst = self.worst(&printed, Place::Host, (0, 0))?;
            let done = Self::done(Place::Host, *load, &test, (printed, worst));
            Ok(Run { smis, ..done })
        };
        loads.map(one).collect()
    }

    fn guest(&self, guest: &Guest) -> anyhow::Result<Vec<Run>> {
        let test = self.args.test(&guest.cpus, guest.others.iter().next());
        let run = |test: &Test, load| {
            // What has no CPU to load there has none.
            let inside = if guest.others.is_empty() {
                Load::Idle
            } else {
                load
            };
            let script = measure::script(test, &self.beside(inside, &guest.others), None);
            let beside = self.beside(load, &self.wanted.others);
            let outside = self.here.begin(&measure::load_script(test, &beside))?;
            let text = guest.shell.run(&script).context("in the guest");
            outside.end().context("the load on this host")?;
            text
        };
        let test = self.with_spikes(test, &run)?;
        let loads = self.args.loads.iter();
        let one = |load: &Load| {
            let clocks = match &self.trace {
                Some(_) => guest.clocks()?,
                None => (0, 0),
            };
            self.clear()?;
            let before = smis(self.look, &self.wanted.cpus);
            let printed = measure::parse(&run(&test, *load)?, &test)?;
            let smis = self.smis_since(before);
            let worst = self.worst(&printed, Place::Guest, clocks)?;
            let done = Self::done(Place::Guest, *load, &test, (printed, worst));
            Ok(Run { smis, ..done })
        };
        loads.map(one).collect()
    }

    fn done(place: Place, load: Load, test: &Test, found: (Printed, Vec<Worst>)) -> Run {
        let (printed, worst) = found;
        Run {
            place,
            load,
            command: test.command(),
            due: (0..)
                .take(printed.latencies.len())
                .map(|n| test.due(n))
                .collect(),
            latencies: printed.latencies,
            smis: None,
            worst,
        }
    }

    /// How many system management interrupts there were since.
    fn smis_since(&self, before: Option<BTreeMap<u32, u64>>) -> Option<BTreeMap<u32, u64>> {
        let mut counts = smis(self.look, &self.wanted.cpus)?;
        for (cpu, before) in before? {
            let count = counts.get_mut(&cpu)?;
            *count = count.saturating_sub(before);
        }
        Some(counts)
    }

    fn beside(&self, load: Load, cpus: &CpuList) -> Beside {
        Beside {
            load,
            cpus: cpus.clone(),
            percent: self.args.load_percent,
            hackbench: self.args.hackbench(),
        }
    }

    /// With the threshold above which cyclictest lists latencies, if they are looked up in a trace.
    fn with_spikes(
        &self,
        test: Test,
        run: &dyn Fn(&Test, Load) -> anyhow::Result<String>,
    ) -> anyhow::Result<Test> {
        if self.trace.is_none() {
            return Ok(test);
        }
        if self.args.spike_us.is_some() {
            let spike_us = self.args.spike_us;
            return Ok(Test { spike_us, ..test });
        }
        let short = Test {
            length: Length::Loops(WARM_UP),
            break_us: None,
            ..test.clone()
        };
        let printed = measure::parse(&run(&short, Load::Idle)?, &short)?;
        let usual = printed.latencies.iter().map(|one| one.percentile(9_900));
        // Beyond the histogram is as long as its last bin, at least.
        let usual = usual.map(|us| us.unwrap_or(self.args.bins)).max();
        Ok(Test {
            spike_us: Some(usual.unwrap_or_default().max(1)),
            ..test
        })
    }

    fn clear(&self) -> anyhow::Result<()> {
        let cleared = self.trace.as_ref().map(Trace::clear).transpose();
        cleared.map(drop).context("can't empty the trace")
    }

    /// The longest, with what the trace shows; `clocks` is what to add to the test's times, and
    /// how far off that may be.
    fn worst(
        &self,
        printed: &Printed,
        place: Place,
        clocks: (i64, u64),
    ) -> anyhow::Result<Vec<Worst>> {
        let Some(trace) = &self.trace else {
            return Ok(Vec::new());
        };
        let events = trace.events().context("can't read the trace")?;
        let measured = match place {
            Place::Host => Measured::cyclictest(),
            Place::Guest => Measured::vcpus(&events),
        };
        let mut spikes: Vec<&Spike> = printed.spikes.iter().collect();
        spikes.sort_by_key(|spike| std::cmp::Reverse(spike.latency_us));
        let numbered: Vec<u32> = printed.latencies.iter().map(|one| one.cpu).collect();
        let pcpus: Vec<u32> = self.wanted.cpus.iter().collect();
        let mut worst = Vec::new();
        for spike in spikes.into_iter().take(LOOKED_UP) {
            // Host and guest number them in the same order.
            let index = numbered.iter().position(|cpu| *cpu == spike.cpu);
            let pcpu = index.and_then(|index| pcpus.get(index)).copied();
            let at_us = spike.at_us.checked_add_signed(clocks.0);
            let at_us = at_us.context("the guest's clock is before the host's start")?;
            let pcpu = pcpu.context("a spike on a CPU that wasn't measured")?;
            let late = Late {
                cpu: pcpu,
                at_us,
                latency_us: spike.latency_us,
                off_us: clocks.1,
            };
            worst.push(Worst {
                cpu: spike.cpu,
                latency_us: spike.latency_us,
                at_us,
                off_us: clocks.1,
                in_trace: late.is_in(&events),
                causes: measure::causes(&events, &measured, late, &exit_latencies(pcpu)),
            });
        }
        Ok(worst)
    }
}

/// Of a CPU's idle states, by number, in µs.
fn exit_latencies(cpu: u32) -> BTreeMap<u32, u64> {
    let host = KernelHost::default();
    let dir = format!("/sys/devices/system/cpu/cpu{cpu}/cpuidle");
    let latency = |state: u32| host.number(&format!("{dir}/state{state}/latency"));
    let known = (0..).map_while(|state| Some((state, u64::try_from(latency(state)?).ok()?)));
    known.collect()
}

/// What a script needs that isn't part of every system.
fn programs(loads: &[Load]) -> Vec<&'static str> {
    let mut programs = vec!["cyclictest"];
    for load in loads {
        programs.extend(match load {
            Load::Idle => [].as_slice(),
            Load::Stress => ["stress-ng"].as_slice(),
            Load::Hackbench => ["hackbench", "setsid", "taskset"].as_slice(),
        });
    }
    programs
}

impl Shell {
    fn require(&self, loads: &[Load]) -> anyhow::Result<()> {
        let programs = programs(loads).join(" ");
        let script =
            format!("for p in {programs}; do command -v $p > /dev/null || echo $p; done\n");
        let missing = self.run(&script)?;
        let missing: Vec<&str> = missing.split_whitespace().collect();
        ensure!(
            missing.is_empty(),
            "there is no {}; install rt-tests and stress-ng, or leave out loads",
            missing.join(", ")
        );
        Ok(())
    }
}
