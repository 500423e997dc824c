// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The tests of a report, one after the other, each in parts.

use anyhow::{Context as _, bail};
use vcpufreq_host::CpuList;

use super::{
    args::{ReportArgs, WantedHost},
    cap_watch::RunCapWatch,
    guest::MeasuredGuest,
    progress::TestProgress,
    shell::Shell,
    written::WrittenReport,
};
use vcpufreq_host::undo::KernelHost;

use crate::measure::{
    self, Beside, Latencies, RunCaps, Spikes, Test, TestLoad, TestPlace, TestRun,
};

/// How often a part is measured again before the report ends.
const LOST_MAX: u64 = 3;

/// Measures a part beside a load, and calls what is to be done meanwhile; its output, or `None` if
/// the part was lost.
type PartRun<'a> = dyn Fn(&Test, TestLoad, &mut dyn FnMut()) -> anyhow::Result<Option<String>> + 'a;

/// What all tests share.
pub(super) struct ReportSession<'a> {
    pub(super) args: &'a ReportArgs,
    pub(super) wanted: &'a WantedHost,
    pub(super) host: &'a KernelHost,
    pub(super) here: Shell,
}

impl ReportSession<'_> {
    /// The tests on the host.
    pub(super) fn host(&self, written: &mut WrittenReport) -> anyhow::Result<()> {
        // In a group that has the measured CPUs alone, the main thread has no other.
        let main = self.wanted.others.iter().last();
        let main = main.filter(|_| self.wanted.group.is_none());
        let test = self.args.test(&self.wanted.cpus, main);
        self.tests(
            (TestPlace::Host, &test),
            written,
            &|part, load, meanwhile| {
                let beside = self.beside(load, &self.wanted.others);
                let script = measure::script(part, &beside, self.wanted.group.as_deref());
                let text = self.here.run_while(&script, meanwhile);
                text.context("on this host").map(Some)
            },
        )
    }

    /// The tests in the guest.
    pub(super) fn guest(
        &self,
        guest: &MeasuredGuest,
        written: &mut WrittenReport,
    ) -> anyhow::Result<()> {
        let test = self.args.test(&guest.cpus, guest.others.iter().next());
        self.tests(
            (TestPlace::Guest, &test),
            written,
            &|part, load, meanwhile| {
                // What has no CPU to load there has none.
                let inside = match guest.others.is_empty() {
                    true => TestLoad::Idle,
                    false => load,
                };
                let script = measure::script(part, &self.beside(inside, &guest.others), None);
                let beside = self.beside(load, &self.wanted.others);
                let outside = self.here.begin(&measure::load_script(part, &beside))?;
                let text = guest.run(&script, part, meanwhile);
                let ended = outside.end();
                // Beside a shell that was lost it may have ended by itself.
                if !matches!(text, Ok(None)) {
                    ended.context("the load on this host")?;
                }
                let text = text.context("in the guest")?;
                if text.is_none() {
                    guest.recover()?;
                }
                Ok(text)
            },
        )
    }

    /// The test beside each load, so many times.
    fn tests(
        &self,
        (place, test): (TestPlace, &Test),
        written: &mut WrittenReport,
        run: &PartRun,
    ) -> anyhow::Result<()> {
        for load in &self.args.loads {
            for draw in 1..=self.args.draws {
                written.add(TestRun {
                    place,
                    load: *load,
                    command: test
                        .next_part(0, self.args.part)
                        .unwrap_or(test.clone())
                        .command(),
                    latencies: Vec::new(),
                    due: Vec::new(),
                    spikes: None,
                    losses: 0,
                    held: RunCaps::default(),
                });
                self.test((test, *load, draw), written, run)?;
            }
        }
        Ok(())
    }

    /// One test, which is the last of the report so far.
    fn test(
        &self,
        (test, load, draw): (&Test, TestLoad, u64),
        written: &mut WrittenReport,
        run: &PartRun,
    ) -> anyhow::Result<()> {
        let mut watch = RunCapWatch::start(self.host, &self.wanted.cpus);
        let mut progress = TestProgress::begin(self.name(written, draw), test.seconds());
        let (mut done, mut lost) = (0, 0);
        while let Some(part) = test.next_part(done, self.args.part) {
            let longest = written.longest_us();
            let text = run(&part, load, &mut || {
                watch.look_again();
                progress.look(longest);
            })?;
            let Some(so_far) = written.last() else { break };
            let Some(text) = text else {
                so_far.losses += 1;
                lost += 1;
                if lost == LOST_MAX {
                    bail!(
                        "the guest's shell was lost {lost} times in one part; try a shorter --part"
                    );
                }
                continue;
            };
            lost = 0;
            done += part.length.amount();
            so_far.add(&text, &part)?;
            so_far.held = watch.so_far();
            so_far.due = (0..)
                .take(so_far.latencies.len())
                .map(|n| test.due(n))
                .collect();
            written.write()?;
            if test.is_broken_by(written.longest_us()) {
                break;
            }
        }
        Ok(())
    }

    /// The name of the test that begins, for its progress.
    fn name(&self, written: &mut WrittenReport, draw: u64) -> String {
        let name = written.last().map(|run| run.name()).unwrap_or_default();
        match self.args.draws {
            1 => name,
            draws => format!("{name} ({draw} of {draws})"),
        }
    }

    fn beside(&self, load: TestLoad, cpus: &CpuList) -> Beside {
        Beside {
            load,
            cpus: cpus.clone(),
            percent: self.args.load_percent,
            stress_fifo: self.args.stress_fifo,
            hackbench: self.args.hackbench(),
            net_to: self.args.net_to,
        }
    }
}

impl TestRun {
    /// Adds what a part printed.
    fn add(&mut self, text: &str, part: &Test) -> anyhow::Result<()> {
        let latencies: Vec<Latencies> = measure::parse(text, part)?;
        match self.latencies.is_empty() {
            true => self.latencies = latencies,
            false => {
                for (all, one) in self.latencies.iter_mut().zip(&latencies) {
                    all.add(one)?;
                }
            }
        }
        let spikes = Spikes::parse(text, part);
        match (&mut self.spikes, spikes) {
            (Some(all), Some(spikes)) => all.add(spikes),
            (all, spikes) => *all = spikes,
        }
        Ok(())
    }
}
