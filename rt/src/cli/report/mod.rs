// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq rt report`: runs the tests, here and in the guest, and prints the report.

mod args;
mod cap_watch;
mod running;
mod shell;

use anyhow::{Context as _, ensure};
use vcpufreq_device::host::CpuList;

use crate::{
    cli::print,
    host::Look as _,
    kernel_host::KernelHost,
    measure::{
        self, Beside, Conditions, LatencyReport, LatencyVerdict, Test, TestLoad, TestPlace, TestRun,
    },
    settings::CPU,
};

pub use args::ReportArgs;
use args::WantedHost;
use cap_watch::RunCapWatch;
use running::{Ending, ReportProcesses};
use shell::Shell;

/// Measures and prints; returns the exit code: 1 if the budget was exceeded or a test is incomplete.
///
/// # Errors
/// Why there is no report: a program that is missing, CPUs that don't fit, a test or load that
/// failed, a signal.
pub fn report(args: &ReportArgs) -> anyhow::Result<u8> {
    let host = KernelHost::at_or_running(args.root.as_deref());
    let wanted = args.wanted(&host)?;
    let guest = args.guest(&wanted.cpus)?;
    let running = ReportProcesses::default();
    let _ending = Ending::watch(&running)?;
    let guest = guest.map(|(shell, cpus)| MeasuredGuest::new(&shell, cpus, args, &running));
    let guest = guest.transpose()?;
    let here = Shell::here(&running);
    here.require(&args.loads).context("on this host")?;
    let session = ReportSession {
        args,
        wanted: &wanted,
        host: &host,
        here,
    };
    let mut runs = match args.guest_only {
        true => Vec::new(),
        false => session.host()?,
    };
    if let Some(guest) = &guest {
        runs.extend(session.guest(guest)?);
    }
    let report = LatencyReport::new(conditions(args, &wanted, &host), args.budget_us, runs);
    match args.json {
        true => print(format!("{}\n", serde_json::to_string_pretty(&report)?))?,
        false => print(report.text())?,
    }
    Ok(u8::from(matches!(
        report.verdict,
        LatencyVerdict::Exceeded { .. } | LatencyVerdict::Incomplete { .. }
    )))
}

fn conditions(args: &ReportArgs, wanted: &WantedHost, host: &KernelHost) -> Conditions {
    let governors = wanted.cpus.iter().filter_map(|cpu| {
        let path = format!("{CPU}/cpu{cpu}/cpufreq/scaling_governor");
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
        governors,
    }
}

/// A guest and its CPUs.
#[derive(Debug)]
struct MeasuredGuest {
    shell: Shell,
    cpus: CpuList,
    others: CpuList,
}

impl MeasuredGuest {
    fn new(
        command: &str,
        cpus: CpuList,
        args: &ReportArgs,
        running: &ReportProcesses,
    ) -> anyhow::Result<Self> {
        let shell = Shell::by(command, running)?;
        shell.require(&args.loads).context("in the guest")?;
        let others = args.guest_others.clone().unwrap_or_default();
        Ok(Self {
            shell,
            cpus,
            others,
        })
    }
}

/// Runs a test beside a load, and calls what is to be done meanwhile; its output.
type ScriptRun<'a> = dyn Fn(TestLoad, &mut dyn FnMut()) -> anyhow::Result<String> + 'a;

/// What all tests share.
struct ReportSession<'a> {
    args: &'a ReportArgs,
    wanted: &'a WantedHost,
    host: &'a KernelHost,
    here: Shell,
}

impl ReportSession<'_> {
    fn host(&self) -> anyhow::Result<Vec<TestRun>> {
        // In a group that has the measured CPUs alone, the main thread has no other.
        let main = self.wanted.others.iter().last();
        let main = main.filter(|_| self.wanted.group.is_none());
        let test = self.args.test(&self.wanted.cpus, main);
        self.runs(TestPlace::Host, &test, &|load, meanwhile| {
            let beside = self.beside(load, &self.wanted.others);
            let script = measure::script(&test, &beside, self.wanted.group.as_deref());
            let text = self.here.run_while(&script, meanwhile);
            text.context("on this host")
        })
    }

    fn guest(&self, guest: &MeasuredGuest) -> anyhow::Result<Vec<TestRun>> {
        let test = self.args.test(&guest.cpus, guest.others.iter().next());
        self.runs(TestPlace::Guest, &test, &|load, meanwhile| {
            // What has no CPU to load there has none.
            let inside = match guest.others.is_empty() {
                true => TestLoad::Idle,
                false => load,
            };
            let script = measure::script(&test, &self.beside(inside, &guest.others), None);
            let beside = self.beside(load, &self.wanted.others);
            let outside = self.here.begin(&measure::load_script(&test, &beside))?;
            let text = guest.shell.run_while(&script, meanwhile);
            let text = text.context("in the guest");
            outside.end().context("the load on this host")?;
            text
        })
    }

    /// The test beside each load.
    fn runs(&self, place: TestPlace, test: &Test, run: &ScriptRun) -> anyhow::Result<Vec<TestRun>> {
        let one = |&load: &TestLoad| {
            let mut watch = RunCapWatch::start(self.host, &self.wanted.cpus);
            let text = run(load, &mut || watch.look_again())?;
            let held = watch.end();
            let latencies = measure::parse(&text, test)?;
            Ok(TestRun {
                place,
                load,
                command: test.command(),
                due: (0..).take(latencies.len()).map(|n| test.due(n)).collect(),
                latencies,
                held,
            })
        };
        self.args.loads.iter().map(one).collect()
    }

    fn beside(&self, load: TestLoad, cpus: &CpuList) -> Beside {
        Beside {
            load,
            cpus: cpus.clone(),
            percent: self.args.load_percent,
            hackbench: self.args.hackbench(),
        }
    }
}

/// What a script needs that isn't part of every system.
fn programs(loads: &[TestLoad]) -> Vec<&'static str> {
    let mut programs = vec!["cyclictest"];
    for load in loads {
        programs.extend(match load {
            TestLoad::Idle => [].as_slice(),
            TestLoad::Stress => ["stress-ng"].as_slice(),
            TestLoad::Hackbench => ["hackbench", "setsid", "taskset"].as_slice(),
        });
    }
    programs
}

impl Shell {
    fn require(&self, loads: &[TestLoad]) -> anyhow::Result<()> {
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
