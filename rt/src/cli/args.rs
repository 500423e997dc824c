// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The options of `vcpufreq rt`: flags and file, and from there to a partition and a profile.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::{Path, PathBuf},
};

use anyhow::Context;
use clap::{Args, Subcommand};
use serde::Deserialize;
use vcpufreq_host::{CpuList, CpuListError};

use super::report::ReportArgs;
use vcpufreq_host::undo::ReadHost;

use crate::{
    partition::{Partition, PartitionGuest},
    profile::{Profile, SHIPPED, one_line, shipped_text},
};

/// The profile where no other is named.
const DEFAULT_PROFILE: &str = "kvm-rt";

const CHECK_HELP: &str = "\
Exit codes:
  0  everything is set and effective
  1  findings: something isn't, or can't be seen, or needs a reboot
  2  error: one line on stderr with the cause and the next step";

const PLAN_HELP: &str = "\
Exit codes:
  0  done
  1  done, but not everything could be seen
  2  error: one line on stderr with the cause and the next step";

const CHANGE_HELP: &str = "\
Exit codes:
  0  done
  1  done, but the kernel refused some, which are named on stderr
  2  error, nothing was changed: one line on stderr with the cause and the next step";

const EXEC_HELP: &str = "\
CMD gets the signals that a process sends to exec, and SIGTERM if exec is killed.

Exit codes:
  CMD's, or 128 and the number of the signal that ended it
  127  CMD doesn't exist
  126  CMD can't be started
  2    error, CMD was not started: one line on stderr with the cause and the next step";

const REPORT_HELP: &str = "\
Exit codes:
  0  measured; the budget, if any, was kept, or no verdict is possible here
  1  a latency was above the budget, or a test had fewer wake-ups than it should
  2  error: one line on stderr with the cause and the next step";

const COMPARE_HELP: &str = "\
Exit codes:
  0  no latency became longer by more than the spread, or no verdict is possible
  1  a latency did
  2  error: one line on stderr with the cause and the next step";

/// The subcommands of `vcpufreq rt`.
#[derive(Debug, Subcommand)]
pub enum RtCommand {
    /// Show what would be changed, and what only a reboot, the firmware or people can change
    #[command(after_help = PLAN_HELP)]
    Plan(RtArgs),
    /// Change it, after the old values are on disk; prints old → new
    #[command(after_help = CHANGE_HELP)]
    Apply(RtArgs),
    /// Show whether each setting is set and effective; without --guest, each that apply changed
    #[command(after_help = CHECK_HELP)]
    Check(RtArgs),
    /// Bring back exactly what was before apply
    #[command(after_help = CHANGE_HELP)]
    Restore {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Apply, check, run a command, and restore when it has ended, also if exec is killed
    #[command(after_help = EXEC_HELP)]
    Exec(ExecArgs),
    /// Outlive exec and bring back what it changed; started by exec
    #[command(hide = true)]
    Guard(GuardArgs),
    /// Measure wake-up latencies on host and guest, with and without load, beside a budget
    #[command(after_help = REPORT_HELP)]
    Report(Box<ReportArgs>),
    /// Compare two reports: which latencies became longer by more than their tests' spread
    #[command(after_help = COMPARE_HELP)]
    Compare(CompareArgs),
    /// List the shipped profiles, or print one
    Profiles {
        /// The one to print.
        name: Option<String>,
    },
}

/// Options of compare.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// What rt report printed as JSON
    #[arg(value_name = "FIRST.json")]
    pub first: PathBuf,
    /// The same, later
    #[arg(value_name = "SECOND.json")]
    pub second: PathBuf,
    /// Write the histograms of both, one above the other, as a page into this file
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of plan, apply and check.
#[derive(Debug, Default, Args)]
pub struct RtArgs {
    /// Guests and profile.
    #[command(flatten)]
    pub partition: PartitionArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of exec.
#[derive(Debug, Args)]
pub struct ExecArgs {
    /// Guests and profile.
    #[command(flatten)]
    pub partition: PartitionArgs,
    /// Start CMD in the guest's cgroup, on its CPUs: for programs that choose among these themselves, as
    /// cyclictest; vcpufreq qemu enters by itself
    #[arg(long)]
    pub enter: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

/// Options of exec's guardian. The host is below the folder that it starts in: it takes no path.
#[derive(Debug, Args)]
pub struct GuardArgs {
    /// The process of exec
    #[arg(long)]
    pub pid: u32,
    /// When that started, in ticks since boot, as proc_pid_stat(5) has it
    #[arg(long)]
    pub start_ticks: u64,
    /// The CPUs that the guardian may run on
    #[arg(long)]
    pub cpus: Option<CpuList>,
}

/// Guests and profile of a command.
#[derive(Debug, Default, Args)]
pub struct PartitionArgs {
    /// Read options from a TOML file: profile, housekeeping, the table guest with NAME = "CPUS", and
    /// the table settings in place of the profile's; flags win
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// A shipped profile, or a file's path [default: kvm-rt]
    #[arg(long, value_name = "NAME|FILE")]
    pub profile: Option<String>,
    /// A guest and the CPUs of its real-time vCPUs; may be repeated
    #[arg(long, value_name = "NAME=CPUS", value_parser = guest)]
    pub guest: Vec<PartitionGuest>,
    /// CPUs for everything else [default: those that no guest has]
    #[arg(long, value_name = "CPUS")]
    pub housekeeping: Option<CpuList>,
    /// Use a copy of a host's /sys and /proc below this folder; not for apply
    #[arg(long, value_name = "DIR", hide = true)]
    pub root: Option<PathBuf>,
}

/// `NAME=CPUS`: a guest and the CPUs of its real-time vCPUs.
fn guest(text: &str) -> Result<PartitionGuest, String> {
    let (name, cpus) = text.split_once('=').ok_or("write it as NAME=CPUS")?;
    Ok(PartitionGuest {
        name: name.to_owned(),
        cpus: cpus.parse().map_err(|why: CpuListError| why.to_string())?,
    })
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RtFile {
    profile: Option<String>,
    housekeeping: Option<CpuList>,
    guest: BTreeMap<String, CpuList>,
    settings: toml::Table,
}

/// Partition and profile of the options, checked against a host.
#[derive(Debug)]
pub struct Wanted {
    /// The CPUs of each guest and of housekeeping.
    pub partition: Partition,
    /// The profile's name or path.
    pub profile_name: String,
    /// The settings.
    pub profile: Profile,
}

impl PartitionArgs {
    /// Whether the options name a partition at all.
    pub(super) fn names_guests(&self) -> bool {
        !self.guest.is_empty() || self.config.is_some()
    }

    /// The partition and profile for the host that `look` sees.
    ///
    /// # Errors
    /// A file that can't be read or has a wrong key or value, an unknown profile, a partition
    /// that this host can't have.
    pub fn wanted(&self, look: &dyn ReadHost) -> anyhow::Result<Wanted> {
        let file = match &self.config {
            Some(path) => read_file(path)?,
            None => RtFile::default(),
        };
        let named = self.profile.clone().or(file.profile);
        let profile_name = named.unwrap_or_else(|| DEFAULT_PROFILE.to_owned());
        let mut profile = read_profile(&profile_name)?;
        if let Some(path) = self.config.as_ref().filter(|_| !file.settings.is_empty()) {
            profile = profile.with(&path.display().to_string(), file.settings)?;
        }
        let from_file = file.guest.into_iter();
        let guests: Vec<PartitionGuest> = match self.guest.as_slice() {
            [] => from_file
                .map(|(name, cpus)| PartitionGuest { name, cpus })
                .collect(),
            flags => flags.to_vec(),
        };
        let housekeeping = self.housekeeping.clone().or(file.housekeeping);
        let settings = &profile.settings;
        let partition = match guests.is_empty() && housekeeping.is_none() {
            true if settings.need_no_guest() => Partition::without_guests(look)?,
            _ => Partition::new(look, guests, housekeeping, settings.unthrottled())?,
        };
        Ok(Wanted {
            partition,
            profile_name,
            profile,
        })
    }
}

fn read_file(path: &Path) -> anyhow::Result<RtFile> {
    let name = path.display();
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("{name} can't be read; check the path"))?;
    toml::from_str(&text)
        .map_err(|error| anyhow::anyhow!("{name}: {}; see docs/rt.md", one_line(&error)))
}

/// A shipped profile by its name, any other by its path.
fn read_profile(name: &str) -> anyhow::Result<Profile> {
    if !name.contains(['/', '.']) {
        return Ok(Profile::shipped(name)?);
    }
    let text = std::fs::read_to_string(name)
        .with_context(|| format!("profile {name} can't be read; check the path"))?;
    Ok(Profile::parse(name, &text)?)
}

/// Names and descriptions of the shipped profiles; with a name, the text of that one.
///
/// # Errors
/// When no profile has this name.
pub(super) fn profiles(name: Option<&str>) -> anyhow::Result<String> {
    let Some(name) = name else {
        let mut text = String::new();
        for (name, _) in SHIPPED {
            let description = Profile::shipped(name)?.description;
            text += &format!("{name:<16}{description}\n");
        }
        return Ok(text);
    };
    Ok(shipped_text(name)?.to_owned())
}
