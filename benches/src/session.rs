// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One variant, from the start of its load programs to their end, and each
//! repeat from the settled state to what was observed.

use anyhow::{Context, Result, bail};
use vcpufreq_load::load_log::LoadLog;
use vcpufreq_load::work::now_ns;

use crate::args::BenchArgs;
use crate::cycles::ALL_WORK;
use crate::freq_limits::FreqLimits;
use crate::guest::{Guest, keep_on};
use crate::load_client::LoadClient;
use crate::load_log::{Mark, frames, marks};
use crate::machine::{BenchMachine, Cluster};
use crate::observed::{Observed, Unsettled};
use crate::progress::Progress;
use crate::rest::{Rounds, SideAboveMinimum, settled};
use crate::scenario::{Hold, Scenario, expanded};
use crate::scx::ScxProcess;
use crate::target_sampler::{TargetSampler, means};
use crate::trace::{RepeatEvents, RepeatTrace};
use crate::variant::Variant;

/// Rounds of wake-ups until the governors are given up on, where each changes something.
const SETTLE_ROUNDS: u32 = 12;
/// Wake-ups of each CPU in a round, and µs between them: 0.4 s, in which load
/// tracking halves 12 times, and util_est loses a quarter at each.
const WAKES: &str = "20 20000";
/// Questions for the other clock; the tightest answers count.
const CLOCK_QUESTIONS: u32 = 6;

/// Load programs that are running.
#[derive(Debug)]
pub struct Session<'a> {
    machine: &'a BenchMachine,
    variant: Variant,
    host: LoadClient,
    guest: Option<Guest>,
    /// What runs beside the load in a guest of its own.
    second: Option<Guest>,
    /// The same on the host alone, in a process of its own: rt-app's files are a process's.
    second_host: Option<LoadClient>,
    /// By what a job's work in a guest is scaled.
    scale: u64,
    /// What the last settled state left above its minimum.
    rest: Vec<SideAboveMinimum>,
    // Ended after its guests.
    scx: Option<ScxProcess>,
}

impl<'a> Session<'a> {
    /// Starts the load program on the host, and the guest if there is one, or two, with more
    /// words for the command line.
    pub fn start(
        machine: &'a BenchMachine,
        variant: Variant,
        (words, two): (&str, bool),
        args: &BenchArgs,
    ) -> Result<Self> {
        let scx = (variant == Variant::Scx)
            .then(ScxProcess::start)
            .transpose()?;
        let host = LoadClient::on_host()?;
        let clamp = ["--clamp", &args.clamp];
        let guest = |wanted: bool| -> Result<_> {
            let shape = variant.guest().filter(|_| wanted);
            let guest = shape.map(|one| Guest::boot(machine, (one, &clamp), words, &args.guest));
            guest.transpose()
        };
        let (guest, second) = (guest(true)?, guest(two)?);
        let alone = two && variant == Variant::Host;
        let second_host = alone.then(LoadClient::on_host).transpose()?;
        Ok(Self {
            machine,
            variant,
            host,
            guest,
            second,
            second_host,
            scale: ALL_WORK,
            rest: Vec::new(),
            scx,
        })
    }

    /// Repeats a scenario.
    pub fn measure(
        &mut self,
        scenario: &Scenario,
        trace: &RepeatTrace,
        progress: &mut Progress,
    ) -> Result<Vec<Observed>> {
        self.keep_aside(scenario)?;
        self.write_in_guest(scenario, |[path, during, _]| (path, during))?;
        let _held = FreqLimits::frequencies(scenario, self.machine)?;
        let mut observed = (0..progress.repeats_of(scenario))
            .map(|repeat| {
                progress.begins(scenario, self.variant, repeat);
                let observed = settled(|| self.once(scenario, trace, repeat))?;
                progress.measured();
                Ok(observed)
            })
            .collect::<Result<Vec<_>>>();
        if let (Ok([first, ..]), Some(_)) = (observed.as_deref_mut(), &self.scx) {
            first.targets = self.targets(scenario, trace)?;
        }
        self.write_in_guest(scenario, |[path, _, after]| (path, after))?;
        observed
    }

    /// Scales the work of scenarios in a guest, in ten-thousandths, until the next.
    pub fn scale(&mut self, per_10_000: u64) {
        self.scale = per_10_000;
    }

    /// CPU time that a scenario's job takes with all pCPUs at their highest frequency, in µs.
    pub fn job_us(&mut self, scenario: &Scenario, trace: &RepeatTrace) -> Result<u64> {
        let at_top = scenario.at_top();
        self.keep_aside(&at_top)?;
        // A guest that has just booted still does other work, which would count as the machine's own.
        self.settle(scenario)?;
        let _held = FreqLimits::frequencies(&at_top, self.machine)?;
        let observed = self.once(&at_top, trace, 0)?;
        let us = observed.job_us(self.machine).filter(|us| *us > 0);
        us.with_context(|| {
            format!(
                "{} took no CPU time at the highest frequency",
                scenario.title()
            )
        })
    }

    /// What the host knows of the load's pCPU, beside one more repeat.
    fn targets(&mut self, scenario: &Scenario, trace: &RepeatTrace) -> Result<Option<[u64; 2]>> {
        let vmm = self.guest.as_ref().and_then(|guest| guest.processes.last());
        let sampler = TargetSampler::start(*vmm.context("scx is for guests")?);
        let repeat = self.once(scenario, trace, 0);
        let (samples, repeat) = (sampler.samples()?, repeat?);
        let of = |start: Mark| {
            Some(means(
                &samples,
                start.cpu,
                (start.us, repeat.marks.last()?.us),
            ))
        };
        Ok(repeat.start().and_then(of).flatten())
    }

    fn write_in_guest(
        &mut self,
        scenario: &Scenario,
        which: impl Fn([&'static str; 3]) -> (&'static str, &'static str),
    ) -> Result<()> {
        if let (Some(guest), Some(file)) = (&mut self.guest, scenario.guest_file) {
            let (path, value) = which(file);
            guest.console.ask(&format!("write {path} {value}"))?;
        }
        Ok(())
    }

    /// Ends it all.
    pub fn end(self) -> Result<()> {
        for guest in [self.guest, self.second].into_iter().flatten() {
            guest.console.end()?;
        }
        self.second_host.map_or(Ok(()), LoadClient::end)?;
        self.host.end()
    }

    /// One repeat.
    fn once(&mut self, scenario: &Scenario, trace: &RepeatTrace, repeat: u32) -> Result<Observed> {
        let unsettled = self.settle(scenario)?;
        let speed = FreqLimits::speed(scenario, self.machine)?;
        trace.start()?;
        let khz_before = self
            .machine
            .clusters
            .iter()
            .filter_map(Cluster::now_khz)
            .collect();
        if let Some(beside) = scenario.beside {
            let steps = Self::steps(self.machine, self.second.as_ref(), scenario, (beside, 0));
            self.client_beside().ask(&format!("start beside {steps}"))?;
        }
        let [names, twins] = self.carry_out(scenario, repeat)?;
        trace.stop()?;
        // What follows isn't measured: it need not be as slow.
        drop(speed);
        let client = self.client();
        let joined = names.iter().map(|name| client.ask(&format!("join {name}")));
        let joined = joined.collect::<Result<Vec<_>>>()?;
        let beside = self.client_beside();
        let twins = twins.iter().map(|name| beside.ask(&format!("join {name}")));
        let twins = twins.collect::<Result<Vec<_>>>()?;
        let seen = trace.seen()?;
        if scenario.beside.is_some() {
            self.client_beside().ask("join beside")?;
        }
        let (offset, clock_error_us) = self.clock()?;
        let read = |text: &String| serde_json::from_str::<LoadLog>(text).context(text.clone());
        let logs = joined.iter().map(read).collect::<Result<Vec<_>>>()?;
        let threads = match &self.guest {
            Some(guest) => guest.vcpus.iter().map(|(_, tid)| *tid).collect(),
            None => logs.iter().map(|log| log.tid).collect(),
        };
        let first = logs.into_iter().next();
        let mut first = first.context("a scenario without a thread")?;
        first.figure("turns", first.turns);
        first.figure("pace_ns", pace_ns(&first));
        if let Some(twin) = twins.first() {
            first.figure("twin_pace_ns", pace_ns(&read(twin)?));
        }
        let mut observed = Observed {
            marks: marks(&first, offset, |cpu, us| self.pcpu_of(cpu, &seen, us))?,
            frames: frames(&first, offset)?,
            seen,
            figures: first.figures,
            threads,
            targets: None,
            khz_before,
            khz_at_rest: self.khz_at_rest(),
            rest: texts(&self.rest),
            clock_error_us,
            unsettled,
            put_away: Vec::new(),
        };
        observed.unsettled = observed.not_settled(self.machine, scenario);
        Ok(observed)
    }

    /// The pCPU of a CPU of the load's at a moment: where the host chooses, the one that last ran the
    /// vCPU's thread.
    fn pcpu_of(&self, cpu: usize, seen: &RepeatEvents, us: u64) -> Option<u32> {
        let Some(guest) = &self.guest else {
            return u32::try_from(cpu).ok();
        };
        let (own, thread) = guest.vcpus.get(cpu)?;
        let ran = || seen.ran_on(*thread, us);
        Some(*own)
            .filter(|_| self.variant.stays())
            .or_else(ran)
            .or(Some(*own))
    }

    /// Starts the scenario's threads, and their twins if there are any, and waits for all; their names.
    fn carry_out(&mut self, scenario: &Scenario, repeat: u32) -> Result<[Vec<String>; 2]> {
        let scaled = |guest: Option<&Guest>, steps: &str| {
            let steps = Self::steps(self.machine, guest, scenario, (steps, repeat));
            match (guest, self.scale) {
                (None, _) | (_, ALL_WORK) => steps,
                (Some(_), scale) => format!("scale={scale} {steps}"),
            }
        };
        let rows = |guest: Option<&Guest>| -> Vec<String> {
            scenario
                .steps
                .iter()
                .map(|steps| scaled(guest, steps))
                .collect()
        };
        let own = rows(self.guest.as_ref());
        let twins = match scenario.twin {
            true => rows(self.second.as_ref()),
            false => Vec::new(),
        };
        let names = |kind: &str, rows: &[String]| -> Vec<String> {
            (0..rows.len())
                .map(|number| format!("{}{kind}{number}", scenario.name))
                .collect()
        };
        let (names, twin_names) = (names("", &own), names("-twin", &twins));
        for (name, steps) in names.iter().zip(own) {
            self.client().ask(&format!("start {name} {steps}"))?;
        }
        for (name, steps) in twin_names.iter().zip(twins) {
            self.client_beside().ask(&format!("start {name} {steps}"))?;
        }
        for name in &names {
            self.client().ask(&format!("wait {name}"))?;
        }
        for name in &twin_names {
            self.client_beside().ask(&format!("wait {name}"))?;
        }
        Ok([names, twin_names])
    }

    /// The load program that carries the scenario's load.
    fn client(&mut self) -> &mut LoadClient {
        match &mut self.guest {
            Some(guest) => &mut guest.console,
            None => &mut self.host,
        }
    }

    /// The load program that carries what runs beside it.
    fn client_beside(&mut self) -> &mut LoadClient {
        match (&mut self.second, &mut self.second_host) {
            (Some(guest), _) => &mut guest.console,
            (None, Some(host)) => host,
            (None, None) => &mut self.host,
        }
    }

    /// The steps with this machine's CPUs in them; vCPU n is pinned to the
    /// n-th CPU.
    fn steps(
        machine: &BenchMachine,
        guest: Option<&Guest>,
        scenario: &Scenario,
        (steps, repeat): (&str, u32),
    ) -> String {
        let cpus = machine.cpus();
        let first = scenario.first(machine);
        let number = |cpu: u32| match guest {
            Some(_) => cpus
                .iter()
                .position(|one| *one == cpu)
                .unwrap_or_default()
                .to_string(),
            None => cpu.to_string(),
        };
        let all = scenario.all(machine).into_iter();
        let all: Vec<String> = all.map(number).collect();
        expanded(steps, machine, (&number(first), &all.join(",")), repeat)
    }

    /// Brings every governor to where it rests, and lets all load decay; why
    /// not, if they don't get there. Where frequencies are held high and the
    /// threads on one CPU, nothing asks load tracking what it remembers.
    fn settle(&mut self, scenario: &Scenario) -> Result<Option<Unsettled>> {
        self.rest.clear();
        if scenario.hold == Hold::Max {
            return Ok(None);
        }
        let mut rounds = Rounds::default();
        for _ in 0..SETTLE_ROUNDS {
            let above = self.round()?;
            if !rounds.go_on(above) {
                break;
            }
        }
        let settled = rounds.settled();
        let (rest, above) = rounds
            .above()
            .into_iter()
            .partition(SideAboveMinimum::rests);
        self.rest = rest;
        Ok((!settled).then(|| Unsettled {
            why: texts(&above).join("; "),
            lasting: true,
        }))
    }

    /// A round of wake-ups, in the guest first; what it left above its minimum.
    fn round(&mut self) -> Result<Vec<SideAboveMinimum>> {
        let mut above = Vec::new();
        for (side, answer) in self.ask_both(&format!("settle {WAKES}"))? {
            above.extend(SideAboveMinimum::read(side, &answer)?);
        }
        Ok(above)
    }

    /// The answers of the guests, if there are any, and of the host.
    fn ask_both(&mut self, line: &str) -> Result<Vec<(&'static str, String)>> {
        let mut answers = Vec::new();
        for guest in [&mut self.guest, &mut self.second].into_iter().flatten() {
            answers.push(("guest", guest.console.ask(line)?));
        }
        answers.push(("host", self.host.ask(line)?));
        Ok(answers)
    }

    fn khz_at_rest(&self) -> Vec<u32> {
        let of = |cluster: &Cluster| {
            let policy = cluster.policy();
            let found = self.rest.iter().find_map(|one| one.of_host(&policy));
            found.unwrap_or(cluster.khz.0)
        };
        self.machine.clusters.iter().map(of).collect()
    }

    /// Binds this program, the VMM but its vCPUs, and the load programs' first threads to a CPU: what
    /// they do is a load that governors answer. A VMM that carries a disk's requests out is part of what
    /// is measured, and runs where the host chooses.
    fn keep_aside(&self, scenario: &Scenario) -> Result<()> {
        let aside = [scenario.aside(self.machine)];
        let anywhere = self.machine.cpus();
        let of_guests = match scenario.needs_disk() {
            true => &anywhere[..],
            false => &aside[..],
        };
        let guests = [&self.guest, &self.second].into_iter().flatten();
        keep_on(guests.flat_map(|guest| guest.processes.clone()), of_guests)?;
        let hosts = self.second_host.iter().map(LoadClient::pid);
        let own = [std::process::id(), self.host.pid()];
        keep_on(hosts.chain(own), &aside)
    }

    /// What to add to the load's clock for the host's, and how far that can
    /// be off, in ns and µs. Both run on one counter; a question's time lies
    /// between those of asking and of the answer.
    fn clock(&mut self) -> Result<(i64, u64)> {
        let Some(guest) = &mut self.guest else {
            return Ok((0, 0));
        };
        let (mut least, mut most) = (i64::MIN, i64::MAX);
        for _ in 0..CLOCK_QUESTIONS {
            let before = i64::try_from(now_ns())?;
            let there: i64 = guest.console.ask("now")?.parse()?;
            let after = i64::try_from(now_ns())?;
            least = least.max(before - there);
            most = most.min(after - there);
        }
        if least > most {
            bail!("the guest's clock does not run with the host's");
        }
        Ok((
            least + (most - least) / 2,
            u64::try_from((most - least) / 2000)?,
        ))
    }
}

/// How long a load took for each of its frames in the mean, or for all of its work, in ns.
fn pace_ns(log: &LoadLog) -> u64 {
    let frames: u64 = log.frames.iter().map(|frame| frame.ns).sum();
    let at = |name: &str| {
        log.marks
            .iter()
            .find(|mark| mark.name == name)
            .map(|mark| mark.ns)
    };
    let all = || Some(at("end")?.saturating_sub(at("start")?));
    let mean = u64::try_from(log.frames.len())
        .ok()
        .and_then(|count| frames.checked_div(count));
    mean.or_else(all).unwrap_or_default()
}

fn texts(above: &[SideAboveMinimum]) -> Vec<String> {
    above.iter().map(SideAboveMinimum::text).collect()
}

#[cfg(test)]
mod tests {
    //! A load's pace is that of its frames, else the time from start to end.

    use super::*;

    #[test]
    fn a_load_without_frames_takes_its_time() {
        let mut log = LoadLog::default();
        assert_eq!(pace_ns(&log), 0);
        for name in ["start", "end"] {
            log.mark(name);
        }
        (log.marks[0].ns, log.marks[1].ns) = (1_000, 5_000);
        assert_eq!(pace_ns(&log), 4_000);
        log.frame(0, 10);
        log.frame(100, 120);
        assert_eq!(pace_ns(&log), 15);
    }
}
