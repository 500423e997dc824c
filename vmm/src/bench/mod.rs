// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq bench`: the same load on the host, in a guest without the
//! bridge, and in one with it; what it got, from the host's trace.
//!
//! ```text
//! scenario ─▶ steps ─▶ load program, on host or guest ─▶ marks ─┐
//! host's tracepoints: frequencies, who runs where ──────────────┴▶ measure ─▶ report
//! ```
//!
//! One clock measures all: the host's. It judges nothing; what a figure has
//! to be is the reader's.

mod compare;
mod html;
mod machine;
mod measure;
#[cfg(test)]
mod measure_tests;
mod peer;
mod report;

mod scenario;
mod session;
mod trace;

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;

use machine::Machine;
use report::Report;
use scenario::{SCENARIOS, Scenario};
use session::{Session, Variant};
use trace::Trace;

/// Options of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The guest's kernel: an uncompressed arm64 Image
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// The guest's initial ramdisk; the load program is /bin/vcpufreq-load in it
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// The load program for the host [default: vcpufreq-load beside this program]
    #[arg(long, value_name = "FILE")]
    pub load: Option<PathBuf>,
    /// A module in the guest's ramdisk and its options, loaded in this order; may be repeated
    #[arg(long, value_name = "PATH[ OPTION...]")]
    pub guest_module: Vec<String>,
    /// More words for the guest's command line
    #[arg(
        long,
        value_name = "TEXT",
        allow_hyphen_values = true,
        default_value = ""
    )]
    pub guest_cmdline: String,
    /// Measure this scenario alone; may be repeated
    #[arg(long, value_name = "NAME")]
    pub scenario: Vec<String>,
    /// Times that each scenario is measured
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub repeats: u32,
    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Write a page with a chart of each scenario, which needs no network
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Measure nothing; say what differs between two reports: exit code 1 if anything does
    #[arg(long, value_names = ["A.json", "B.json"], num_args = 2)]
    pub compare: Vec<PathBuf>,
}

/// Measures, and reports; returns the exit code: 0, 1 when a scenario failed
/// or a figure is from a state that had not settled, 2 on a host that can't
/// measure.
///
/// # Errors
/// Whatever keeps all scenarios from being measured, in one line.
pub fn bench(args: &BenchArgs) -> anyhow::Result<u8> {
    if let [first, second] = &args.compare[..] {
        let changes = compare::files(first, second)?;
        print(&changes.text())?;
        return Ok(u8::from(changes.any()));
    }
    let scenarios = chosen(&args.scenario)?;
    let machine = match Machine::check(args) {
        Ok(machine) => machine,
        Err(missing) => {
            for line in missing {
                eprintln!("vcpufreq: {line}");
            }
            return Ok(2);
        }
    };
    let mut report = Report::new(&machine, args);
    {
        let trace = Trace::create().context("making a trace of the bench's own")?;
        for variant in Variant::ALL {
            measure_variant((&machine, &trace, args), variant, &scenarios, &mut report);
        }
    }
    let json = report.json();
    write(args.out.as_deref(), || format!("{json:#}\n"))?;
    write(args.html.as_deref(), || html::page(&json))?;
    print(&report.table())?;
    Ok(u8::from(!report.complete()))
}

fn write(path: Option<&Path>, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    std::fs::write(path, text())
        .with_context(|| format!("can't write {}; name another file", path.display()))
}

fn print(text: &str) -> anyhow::Result<()> {
    use std::io::Write as _;
    std::io::stdout()
        .write_all(text.as_bytes())
        .context("can't write to stdout; check where it goes")
}

/// What a variant is measured with.
type Setting<'a> = (&'a Machine, &'a Trace, &'a BenchArgs);

fn measure_variant(
    (machine, trace, args): Setting,
    variant: Variant,
    scenarios: &[&'static Scenario],
    report: &mut Report,
) {
    eprintln!("vcpufreq: {}", variant.name());
    let mut session = match Session::start(machine, variant, args) {
        Ok(session) => session,
        Err(error) => {
            for scenario in scenarios {
                report.failed(scenario, variant, &format!("{error:#}"));
            }
            return;
        }
    };
    for scenario in scenarios {
        let observed = session.measure(scenario, trace, args.repeats);
        match observed {
            Ok(observed) => report.add(machine, scenario, variant, &observed),
            Err(error) => report.failed(scenario, variant, &format!("{error:#}")),
        }
    }
    if let Err(error) = session.end() {
        eprintln!(
            "vcpufreq: the guest of '{}' did not end well: {error:#}",
            variant.name()
        );
    }
}

fn chosen(names: &[String]) -> anyhow::Result<Vec<&'static Scenario>> {
    if names.is_empty() {
        return Ok(SCENARIOS.iter().collect());
    }
    names
        .iter()
        .map(|name| {
            let known = || {
                SCENARIOS
                    .iter()
                    .map(|one| one.name)
                    .collect::<Vec<_>>()
                    .join(", ")
            };
            SCENARIOS
                .iter()
                .find(|one| one.name == name)
                .with_context(|| format!("no scenario '{name}'; there are: {}", known()))
        })
        .collect()
}
