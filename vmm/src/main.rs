// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The program `vcpufreq`: runs the command's part of the library, and turns its result into output
//! and exit code. Under the name `vcpufreq-load` it is the load program of `bench` and `demo`.
#![forbid(unsafe_code)]

use std::{path::Path, process::ExitCode, time::Duration};

use anyhow::Context as _;
use vcpufreq::{
    cli::{Cli, Command, rt},
    doctor::{
        self,
        facts::{DoctorFacts, Live},
    },
    dt,
    host_guest::HostGuest,
    lifecycle::{cleanup::Cleaner, guard, state::StateDir},
    message::{chain, print, warn},
    options, path, policy, qemu, report, run, scx, serve, stats, trace, tune,
};
use vcpufreq_host::HostRoot;
use vcpufreq_vm::layout::CPUFREQ_BASE;

/// The exit code of errors.
const ERROR: u8 = 2;

fn main() -> ExitCode {
    let name = std::env::args_os().next();
    if name.is_some_and(|name| Path::new(&name).file_name() == Some(vcpufreq_bench::LOAD.as_ref()))
    {
        return vcpufreq_bench::load();
    }
    let done = match Cli::read(std::env::args_os().collect()) {
        Ok(cli) => execute(cli.command),
        Err(error) => match error.downcast::<clap::Error>() {
            Ok(help) => help.print().map(|()| 0).map_err(Into::into),
            Err(error) => Err(error),
        },
    };
    match done {
        Ok(code) => code.into(),
        Err(error) => {
            warn(&chain(&error));
            ERROR.into()
        }
    }
}

fn execute(command: Command) -> anyhow::Result<u8> {
    match command {
        Command::Run(args) => run::run(*args),
        Command::Qemu(args) => qemu::qemu(*args),
        Command::Serve(args) => serve::serve(*args),
        Command::Demo(mut args) => {
            let _guest = HostGuest::complete(&HostRoot::default(), &mut args.guest, None);
            args.guest.note = path::without_bpf(&args.guest.path, path::offer_bpf());
            vcpufreq_bench::demo(&args, CPUFREQ_BASE)
        }
        Command::Bench(mut args) => {
            let boots = args.guests().is_some();
            let named = args.qemu.as_deref();
            let complete = || HostGuest::complete(&HostRoot::default(), &mut args.guest, named);
            let _guest = boots.then(complete).flatten();
            args.guest.note = path::without_bpf(&args.guest.path, path::offer_bpf());
            vcpufreq_bench::bench(&args, CPUFREQ_BASE)
        }
        Command::Report(mut args) => {
            report::report(&mut args, &HostRoot::default(), &doctor_facts())
        }
        Command::Doctor {
            json,
            domain: Some(name),
        } => doctor_of_domain(&name, json),
        Command::Doctor { json, domain: None } => doctor(json),
        Command::Dt(args) => {
            print(dt::dt(&args, &HostRoot::default())?)?;
            Ok(0)
        }
        Command::Stats {
            pid,
            openmetrics: true,
            http,
            ..
        } => openmetrics(pid, http),
        Command::Stats { pid, json, .. } => stats(pid, json),
        Command::Top { pid, every } => {
            let socket = stats::choose(&StateDir::of_user()?, pid)?;
            stats::top(&socket, Duration::from_millis(every)).map(|()| 0)
        }
        Command::Tune(args) => tune::tune(&args),
        Command::Retune { pid, handle, lasts } => tune::retune(pid, handle, lasts).map(|()| 0),
        Command::Untune { pid, handle } => tune::untune(pid, handle).map(|()| 0),
        Command::Policy(command) => policy::run(&command),
        Command::Trace(args) => trace::trace(&args),
        Command::Rt(command) => rt::run(&command, vcpufreq_bench::latency_page),
        Command::Scx(command) => scx::run(&command),
        Command::Cleanup => cleanup(),
        Command::Guardian { pid } => guard::guard(pid).map(|()| 0),
    }
}

fn doctor(json: bool) -> anyhow::Result<u8> {
    let facts = doctor_facts();
    let findings = doctor::findings(&facts);
    print(match json {
        true => format!("{:#}\n", doctor::json(&facts, &findings)),
        false => doctor::text(&findings),
    })?;
    Ok(doctor::exit_code(&findings))
}

fn doctor_of_domain(name: &str, json: bool) -> anyhow::Result<u8> {
    let found = doctor::domain::look(name, &HostRoot::default(), std::env::consts::ARCH)?;
    print(match json {
        true => format!("{:#}\n", found.json()),
        false => doctor::text(&found.findings),
    })?;
    Ok(doctor::exit_code(&found.findings))
}

fn doctor_facts() -> DoctorFacts {
    let live = Live::ask(Path::new(options::KVM_DEVICE));
    DoctorFacts::read(&HostRoot::default(), std::env::consts::ARCH, live)
}

fn stats(pid: Option<u32>, json: bool) -> anyhow::Result<u8> {
    let stats = stats::ask(&stats::choose(&StateDir::of_user()?, pid)?)?;
    let text = if json {
        format!("{:#}\n", serde_json::to_value(&stats)?)
    } else {
        stats::table(&stats)
    };
    print(text)?;
    Ok(0)
}

/// Of one VMM, or of all that run: one may end or fail meanwhile, and the others still count.
fn metrics(pid: Option<u32>) -> anyhow::Result<String> {
    let dir = StateDir::of_user()?;
    if pid.is_some() {
        return Ok(stats::openmetrics(&[stats::ask(&stats::choose(
            &dir, pid,
        )?)?]));
    }
    let warned = |error: &anyhow::Error| warn(&chain(error));
    let sockets = stats::running(&dir)?.into_iter();
    let sockets = sockets.map(|pid| stats::VmmSocket::find(&dir, pid));
    let sockets: Vec<_> = sockets
        .filter_map(|socket| socket.inspect_err(warned).ok())
        .collect();
    let answers = stats::ask_all(&sockets).into_iter();
    let answers = answers.filter_map(|answer| answer.inspect_err(warned).ok());
    Ok(stats::openmetrics(&answers.collect::<Vec<_>>()))
}

fn openmetrics(pid: Option<u32>, http: bool) -> anyhow::Result<u8> {
    let text = if http {
        stats::answer(std::io::stdin().lock(), || metrics(pid)).context("can't read a request")?
    } else {
        metrics(pid)?
    };
    print(text)?;
    Ok(0)
}

fn cleanup() -> anyhow::Result<u8> {
    let host = HostRoot::default();
    let cleaner = Cleaner::new(&host);
    let mut cleaned = cleaner.by_records(&StateDir::of_user()?)?;
    cleaner.without_records(&mut cleaned);
    match scx::clean() {
        Ok(removed) => cleaned.removed.extend(removed),
        Err(error) => cleaned.left.push(format!("{error:#}")),
    }
    let (undone, left) = vcpufreq_bench::undo_killed();
    cleaned.left.extend(left);
    let undone = undone.iter();
    let undone = undone.map(|path| format!("put back {}\n", path.display()));
    let removed = cleaned.removed.iter();
    let removed = removed.map(|path| format!("removed {}\n", path.display()));
    print(removed.chain(undone).collect::<String>())?;
    for left in &cleaned.left {
        eprintln!("vcpufreq: {left}");
    }
    Ok(u8::from(!cleaned.left.is_empty()))
}
