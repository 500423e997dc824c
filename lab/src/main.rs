// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The lab: an Arm host, emulated on any machine, with stock Debian kernels
//! and real KVM, in which the project's parts are tried and measured.
//!
//! This program makes what the lab needs, boots it, and turns what the agent
//! inside reports into results. It doesn't know what a scenario does; that
//! is the agent's (`tests/`).

mod apt;
mod arch;
mod archive;
mod artifacts;
mod bench;
mod board;
mod boot;
mod boots;
mod bootstrap;
mod browser;
mod c_checks;
mod cache;
mod check_cache;
mod checks;
mod child_output;
mod choice;
mod clean_debian;
mod cpu_time;
mod cross;
mod debian;
mod debian_check;
mod debs;
mod demo;
mod disk_debian;
mod draw;
mod draws;
mod emulator;
mod guest_disk;
mod initramfs;
mod install_check;
mod kernel;
mod kernel_source;
mod known;
mod libvirt;
#[cfg(test)]
mod made_up;
mod monitoring;
mod namespace;
mod out;
mod own_kernel;
mod packages;
mod perfetto;
mod progress;
mod publish;
mod qemu;
mod result_port;
mod root;
mod run;
mod set;
mod shell;
mod shell_check;
mod suite;
mod supply;
mod systemd;
mod taken;
mod tools;
mod topology;
mod tree;
mod unfetched;
mod verdict;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::arch::Arch;
use crate::set::Set;

/// Exit codes: 0 all held, 1 something didn't hold, 2 it could not be tried.
#[derive(Debug, Parser)]
#[command(name = "lab", version)]
struct LabCli {
    #[command(subcommand)]
    command: LabCommand,
}

#[derive(Debug, Subcommand)]
enum LabCommand {
    /// Fetch and build everything, and stop
    Setup,
    /// Show the whole loop: a guest's requests, the host's frequencies
    Demo {
        /// What runs the guests; on an x86-64 host that is QEMU
        #[arg(
            long,
            value_enum,
            default_value = "vcpufreq",
            default_value_if("arch", "x86-64", "qemu")
        )]
        vmm: qemu::GuestVmm,
        /// Architecture of host and guest
        #[arg(long, value_enum, default_value = "arm64")]
        arch: Arch,
    },
    /// Measure what an access costs by each path
    BenchPaths,
    /// Measure host, guest, and guest with the bridge, and report whether the bounds hold
    Bench {
        /// These scenarios alone
        scenarios: Vec<String>,
        /// Topology, as of run
        #[arg(long, default_value = "2+2")]
        topology: String,
    },
    /// Measure workloads on guests of which each has one ingredient of the bridge more
    Ablation {
        /// These scenarios alone, and the bench's options
        scenarios: Vec<String>,
        /// Topology, as of run
        #[arg(long, default_value = "2+2")]
        topology: String,
    },
    /// Run the tests: the short ones, or with --long the others
    Test {
        /// What takes longest: floods, kills, the bench's bounds, other kernels and topologies
        #[arg(long)]
        long: bool,
        /// Hosts and guests on kernels with checks of their own, which are built first
        #[arg(long, conflicts_with = "long")]
        instrumented: bool,
        /// The emulated hosts alone, with a pause of so many us before each scenario, as
        /// `run --later-us` makes: another draw of what depends on chance
        #[arg(long)]
        later_us: Option<u64>,
    },
    /// Make Debian's packages in out/packages, and try them on clean Debian systems
    Packages {
        /// Build them once more from nothing: both builds have to be equal to the byte
        #[arg(long)]
        check: bool,
        /// The same, if no crate has a known vulnerability
        #[arg(long)]
        release: bool,
        /// Make none: try those in out/packages, on the emulated Debian of this architecture
        #[arg(long, value_enum, value_name = "ARCH", conflicts_with_all = ["check", "release"])]
        only_try: Option<Arch>,
    },
    /// Boot the emulated host with a console on this terminal (Ctrl-A x ends it)
    Shell(run::Options),
    /// Run scenarios and print their results as JSON lines
    Run(run::Options),
}

fn main() -> ExitCode {
    match dispatch(LabCli::parse().command) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("lab: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn dispatch(command: LabCommand) -> Result<bool> {
    let started = Instant::now();
    let before = compiled_for();
    let repo = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .map(PathBuf::from)
        .unwrap_or_default();
    out::build(&repo);
    if let LabCommand::Packages {
        check,
        release,
        only_try,
    } = command
    {
        return match only_try {
            Some(arch) => debs::only_try(&repo, arch),
            None => debs::make(&repo, check, release),
        };
    }
    let for_use = match command {
        LabCommand::Demo {
            vmm: qemu::GuestVmm::Vcpufreq,
            ..
        } => tree::RootUse::Demo,
        _ => tree::RootUse::Tests,
    };
    let arch = match &command {
        LabCommand::Demo { arch, .. } => *arch,
        LabCommand::Run(options) | LabCommand::Shell(options) => options.arch,
        _ => Arch::Arm64,
    };
    let artifacts = artifacts::Artifacts::prepare(&repo, arch, for_use)?;
    let named = match &command {
        LabCommand::Demo { .. } if for_use == tree::RootUse::Demo => Some("make demo"),
        LabCommand::Bench { scenarios, .. } if scenarios.is_empty() => Some("make bench"),
        LabCommand::Test {
            long: false,
            instrumented: false,
            later_us: None,
        } => Some("make test"),
        _ => None,
    };
    let held = carry_out(command, &artifacts, &repo, started)?;
    if let Some(name) = named {
        let took = started.elapsed() + before;
        out::time(&repo, name, artifacts.root.found(), took)?;
    }
    Ok(held)
}

/// How long `lab/start` has taken to compile this program.
fn compiled_for() -> Duration {
    let began = std::env::var("LAB_BEGAN").ok().and_then(|s| s.parse().ok());
    let began = began.map(|s| SystemTime::UNIX_EPOCH + Duration::from_secs(s));
    began
        .and_then(|began| began.elapsed().ok())
        .unwrap_or_default()
}

fn carry_out(
    command: LabCommand,
    artifacts: &artifacts::Artifacts,
    repo: &Path,
    started: Instant,
) -> Result<bool> {
    match command {
        // Needs none of these.
        LabCommand::Packages { .. } => Ok(true),
        LabCommand::Setup => Ok(true),
        LabCommand::Demo { vmm, arch } => demo::run(artifacts, repo, (arch, vmm), started),
        LabCommand::BenchPaths => bench::paths(artifacts, repo),
        LabCommand::Bench {
            scenarios,
            topology,
        } => bench::run(artifacts, repo, &topology, &scenarios),
        LabCommand::Ablation {
            scenarios,
            topology,
        } => bench::ablation(artifacts, repo, &topology, &scenarios),
        LabCommand::Test {
            long,
            instrumented,
            later_us,
        } => {
            let set = match (long, instrumented) {
                (true, _) => Set::Long,
                (_, true) => Set::Instrumented,
                _ => Set::Short,
            };
            suite::run(artifacts, repo, set, later_us)
        }
        LabCommand::Shell(options) => options.shell(artifacts, repo).map(|()| true),
        LabCommand::Run(options) => options.run(artifacts, repo),
    }
}
