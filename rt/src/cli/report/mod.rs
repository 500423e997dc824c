// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq rt report`: runs the tests, here and in the guest, and prints the report.

mod args;
mod cap_watch;
mod guest;
mod progress;
mod required;
mod running;
mod session;
mod shell;
mod written;

use anyhow::Context as _;

use vcpufreq_host::undo::{KernelHost, ReadHost as _};

use crate::{
    cli::output::{DrawReports, print},
    measure::{self, Conditions, LatencyVerdict},
    settings::CPU,
};

pub use args::ReportArgs;
use args::WantedHost;
use guest::MeasuredGuest;
use required::RequiredTests;
use running::{Ending, ReportProcesses};
use session::ReportSession;
use shell::Shell;
use written::WrittenReport;

/// Measures and prints; returns the exit code: 1 if the budget was exceeded or a test is incomplete.
///
/// # Errors
/// Why there is no report: a program that is missing, CPUs that don't fit, a test or load that
/// failed, a signal. The files of `--out` and `--html` have what was measured before.
pub fn report(args: &ReportArgs, draw: DrawReports) -> anyhow::Result<u8> {
    args.check_loads()?;
    let host = KernelHost::at_or_running(args.root.as_deref());
    let wanted = args.wanted(&host)?;
    let guest = args.guest(&wanted.cpus)?;
    let running = ReportProcesses::default();
    let _ending = Ending::watch(&running)?;
    let guest = guest.map(|(shell, cpus)| MeasuredGuest::new(&shell, cpus, args, &running));
    let guest = guest.transpose()?;
    let here = Shell::here(&running);
    let required = RequiredTests {
        measured: !args.guest_only,
        loads: &args.loads,
        net_to: args.net_to,
    };
    here.require(&required).context("on this host")?;
    let places = usize::from(!args.guest_only) + usize::from(guest.is_some());
    let tests = u64::try_from(places * args.loads.len())?.saturating_mul(args.draws);
    let conditions = conditions(args, &wanted, &host);
    let session = ReportSession {
        args,
        wanted: &wanted,
        host: &host,
        here,
    };
    let mut written = WrittenReport::begin(args, conditions, tests, draw)?;
    if !args.guest_only {
        session.host(&mut written)?;
    }
    if let Some(guest) = &guest {
        session.guest(guest, &mut written)?;
    }
    let report = written.report();
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
        guest_cpus: args.guest_cpus.clone(),
        guest_others: args.guest_others.clone(),
        test: args.test(&wanted.cpus, None).parameters(args.part),
        load_percent: args.load_percent,
        stress_fifo: args.stress_fifo,
        hackbench: args.hackbench(),
        net_to: args.net_to,
        published: wanted.published.clone(),
        governors,
    }
}
