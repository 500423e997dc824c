// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The program `vcpufreq`: from the command line to the part that does it, and
//! from what that says to output and exit code.

use std::{
    io::{self, Write},
    path::Path,
    process::ExitCode,
    time::Duration,
};

use anyhow::Context;
use clap::Parser;
use serde_json::json;
use vcpufreq::{
    bench,
    cli::{self, Cli, Command},
    config, doctor,
    doctor::facts::{DoctorFacts, Live},
    dt,
    lifecycle::cleanup::Cleaner,
    lifecycle::guardian,
    lifecycle::state::StateDir,
    options::one_line,
    run, stats,
};
use vcpufreq_device::host::HostRoot;
use vcpufreq_rt::cli as rt;

/// The exit code of errors.
const ERROR: u8 = 2;

fn main() -> ExitCode {
    let command = match Cli::try_parse() {
        Ok(cli) => cli.command,
        Err(error) if !error.use_stderr() => {
            return match error.print() {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ERROR.into(),
            };
        }
        Err(error) => {
            let words = std::env::args_os().map(|word| word.to_string_lossy().into_owned());
            eprintln!("vcpufreq: {}", cli::usage_error(&error, words));
            return ERROR.into();
        }
    };
    match execute(command) {
        Ok(code) => code.into(),
        Err(error) => {
            eprintln!("vcpufreq: {}", said(&error));
            ERROR.into()
        }
    }
}

/// An error and what it comes from in one line; a cause that the error has in
/// its own text already isn't said again.
fn said(error: &anyhow::Error) -> String {
    let mut line = one_line(&error.to_string());
    for cause in error.chain().skip(1) {
        let cause = one_line(&cause.to_string());
        if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line
}

fn execute(command: Command) -> anyhow::Result<u8> {
    match command {
        Command::Run(args) => run::run(&args),
        Command::Bench(args) => bench::bench(&args),
        Command::Doctor { json } => doctor(json),
        Command::Dt(args) => {
            print(&dt::dt(&args, &HostRoot::default())?)?;
            Ok(0)
        }
        Command::Stats { pid, json } => stats(pid, json),
        Command::Top { pid, every } => {
            let path = stats::choose(&StateDir::of_user()?, pid)?;
            stats::top(&path, Duration::from_millis(every)).map(|()| 0)
        }
        Command::Rt(command) => rt::run(&command),
        Command::Cleanup => cleanup(),
        Command::Guardian { record } => guardian::guard(&record).map(|()| 0),
    }
}

fn print(bytes: &[u8]) -> anyhow::Result<()> {
    let mut output = io::stdout();
    output
        .write_all(bytes)
        .and_then(|()| output.flush())
        .context("can't write to stdout; check where it goes")
}

fn doctor(json: bool) -> anyhow::Result<u8> {
    let live = Live::ask(Path::new(config::DEFAULT_KVM_DEVICE));
    let facts = DoctorFacts::read(&HostRoot::default(), std::env::consts::ARCH, live);
    let findings = doctor::findings(&facts);
    let code = doctor::exit_code(&findings);
    if json {
        let report = json!({
            "kernel_release": facts.kernel_release,
            "arch": facts.arch,
            "kvm": facts.kvm.as_ref().ok(),
            "floors": facts.floors,
            "findings": findings,
            "exit_code": code,
        });
        print(format!("{report:#}\n").as_bytes())?;
    } else {
        print(doctor::text(&findings).as_bytes())?;
    }
    Ok(code)
}

fn stats(pid: Option<u32>, json: bool) -> anyhow::Result<u8> {
    let stats = stats::ask(&stats::choose(&StateDir::of_user()?, pid)?)?;
    let text = if json {
        format!("{:#}\n", serde_json::to_value(&stats)?)
    } else {
        stats::table(&stats)
    };
    print(text.as_bytes())?;
    Ok(0)
}

fn cleanup() -> anyhow::Result<u8> {
    let host = HostRoot::default();
    let cleaner = Cleaner::new(&host);
    let mut cleaned = cleaner.by_records(&StateDir::of_user()?)?;
    cleaner.without_records(&mut cleaned);
    let removed = cleaned.removed.iter();
    let removed: String = removed
        .map(|path| format!("removed {}\n", path.display()))
        .collect();
    print(removed.as_bytes())?;
    for left in &cleaned.left {
        eprintln!("vcpufreq: {left}");
    }
    Ok(u8::from(!cleaned.left.is_empty()))
}
