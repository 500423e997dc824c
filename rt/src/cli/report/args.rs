// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The options of `vcpufreq rt report`, checked against the host and the record of apply.

use std::{net::IpAddr, path::PathBuf};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use vcpufreq_host::CpuList;

use vcpufreq_host::undo::{KernelHost, ReadHost as _};

use crate::{
    measure::{Hackbench, Length, Test, TestLoad},
    partition::Partition,
    published::PublishedMaximum,
    record::Record,
    settings::partition_group,
};

/// stress-ng's share of a CPU as a real-time task, %: this program runs there, too.
const FIFO_PERCENT_MAX: u8 = 90;

/// Options of `vcpufreq rt report`.
#[derive(Clone, Debug, Args)]
pub struct ReportArgs {
    /// CPUs of the host to measure [default: those of the guests of apply]
    #[arg(long, value_name = "CPUS")]
    pub cpus: Option<CpuList>,
    /// CPUs of the host for the loads [default: the housekeeping CPUs of apply]
    #[arg(long, value_name = "CPUS")]
    pub others: Option<CpuList>,
    /// Measure in the guest too: a command that runs sh there, with this one's stdin and stdout,
    /// such as 'ssh root@plc sh'
    #[arg(long, value_name = "COMMAND", requires = "guest_cpus")]
    pub guest_shell: Option<String>,
    /// CPUs of the guest to measure, pinned in this order to those of --cpus
    #[arg(long, value_name = "CPUS")]
    pub guest_cpus: Option<CpuList>,
    /// CPUs of the guest for the loads, which run on the host's as well [default: none]
    #[arg(long, value_name = "CPUS")]
    pub guest_others: Option<CpuList>,
    /// Only in the guest
    #[arg(long, requires = "guest_shell")]
    pub guest_only: bool,
    /// Loads, a test with each: idle, stress, hackbench, net
    #[arg(
        long,
        value_name = "LOADS",
        value_delimiter = ',',
        default_value = "idle,stress,hackbench"
    )]
    pub loads: Vec<TestLoad>,
    /// How busy stress-ng keeps each CPU, %
    #[arg(long, value_name = "PERCENT", default_value_t = 60, value_parser = clap::value_parser!(u8).range(1..=100))]
    pub load_percent: u8,
    /// SCHED_FIFO priority of stress-ng [default: none, SCHED_OTHER]
    #[arg(long, value_name = "PRIO", value_parser = clap::value_parser!(u8).range(1..=99))]
    pub stress_fifo: Option<u8>,
    /// Where the load net sends its ping flood: an address that answers
    #[arg(long, value_name = "ADDRESS")]
    pub net_to: Option<IpAddr>,
    /// Groups of hackbench's threads
    #[arg(long, value_name = "N", default_value_t = Hackbench::default().groups, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub hackbench_groups: u16,
    /// Senders of a group, and as many receivers; fewer for a small machine
    #[arg(long, value_name = "N", default_value_t = Hackbench::default().fds, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub hackbench_fds: u16,
    /// Time of each test: 10s, 30m, 24h
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = seconds)]
    pub time: u64,
    /// Wake-ups of each test, instead
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub loops: Option<u64>,
    /// Measure each test so many times: with more than one, rt compare knows the spread
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=100))]
    pub draws: u64,
    /// Measure a longer test in parts of this time, each of which starts cyclictest and its load
    /// anew: --out and --html have each one that is complete, and a lost guest shell costs one. For
    /// one part, as the boards' guides measure, take that of --time
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = seconds)]
    pub part: u64,
    /// Time between two wake-ups, µs
    #[arg(long, value_name = "US", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(100..=1_000_000))]
    pub interval_us: u64,
    /// SCHED_FIFO priority of the measuring threads
    #[arg(long, value_name = "PRIO", default_value_t = 90, value_parser = clap::value_parser!(u8).range(1..=99))]
    pub priority: u8,
    /// Bins of the histogram, a µs each
    #[arg(long, value_name = "N", default_value_t = 400, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    pub bins: u64,
    /// The longest latency that may be, µs
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u64).range(1..=60_000_000))]
    pub budget_us: Option<u64>,
    /// End a test at the first latency above this, µs
    #[arg(long, value_name = "US")]
    pub break_us: Option<u64>,
    /// Record single latencies above this, µs: the first 1024 of each part, the longest of a test
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u64).range(1..=60_000_000))]
    pub spike_us: Option<u64>,
    /// Write the JSON into this file, after each part
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Write the histograms as a page into this file, after each part
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Read facts about the host below this folder
    #[arg(long, value_name = "DIR", hide = true)]
    pub root: Option<PathBuf>,
}

/// `10s`, `30m`, `24h`; a number alone is seconds.
fn seconds(text: &str) -> Result<u64, String> {
    let unit = |last: char| match last {
        's' => Some(1),
        'm' => Some(60),
        'h' => Some(3600),
        _ => None,
    };
    let last = text.chars().last();
    let (digits, factor) = match last.and_then(|last| Some((last, unit(last)?))) {
        Some((last, factor)) => (text.strip_suffix(last).unwrap_or(text), factor),
        None => (text, 1),
    };
    let number = digits.parse::<u64>().ok().filter(|number| *number > 0);
    let seconds = number.and_then(|number| number.checked_mul(factor));
    seconds.ok_or_else(|| "write it as 10s, 30m or 24h".to_owned())
}

/// What to measure on this host.
#[derive(Clone, Debug)]
pub(super) struct WantedHost {
    pub(super) cpus: CpuList,
    pub(super) others: CpuList,
    /// What apply did here.
    pub(super) profile: Option<String>,
    /// What others have measured with it.
    pub(super) published: Vec<PublishedMaximum>,
    /// The cgroup that has the measured CPUs, when apply set them apart.
    pub(super) group: Option<String>,
}

impl ReportArgs {
    pub(super) fn hackbench(&self) -> Hackbench {
        Hackbench {
            groups: self.hackbench_groups,
            fds: self.hackbench_fds,
        }
    }

    pub(super) fn length(&self) -> Length {
        self.loops.map_or(Length::Seconds(self.time), Length::Loops)
    }

    /// A test of these CPUs by the options.
    pub(super) fn test(&self, cpus: &CpuList, main: Option<u32>) -> Test {
        Test {
            cpus: cpus.clone(),
            main,
            length: self.length(),
            interval_us: self.interval_us,
            priority: self.priority,
            bins_us: self.bins,
            break_us: self.break_us,
            spike_us: self.spike_us,
        }
    }

    /// CPUs by the options or by what was applied.
    pub(super) fn wanted(&self, host: &KernelHost) -> anyhow::Result<WantedHost> {
        let record = match Record::read(host) {
            Ok(Some(record)) if !record.is_of_another_boot(host)? => Some(record),
            Ok(_) => None,
            // Without root the record can't be read; then everything is named.
            Err(_) if self.cpus.is_some() && self.others.is_some() => None,
            Err(error) => return Err(error).context("name --cpus and --others"),
        };
        let partition = record.as_ref().map(|record| &record.partition);
        let name = "nothing is applied here; name --cpus and --others";
        let cpus = self.cpus.clone().or(partition.map(Partition::rt));
        let cpus = cpus.filter(|cpus| !cpus.is_empty()).context(name)?;
        let housekeeping = partition.map(|partition| partition.housekeeping.clone());
        let others = self.others.clone().or(housekeeping).context(name)?;
        let both = cpus.and(&others);
        ensure!(
            both.is_empty(),
            "CPU {both} would be measured and loaded; leave it out of --others"
        );
        let online = host.read("/sys/devices/system/cpu/online");
        let online: CpuList = online
            .ok()
            .and_then(|text| text.parse().ok())
            .unwrap_or_default();
        let missing = cpus.or(&others).without(&online);
        ensure!(
            missing.is_empty(),
            "CPU {missing} isn't online here; those that are: {online}"
        );
        let group = match &record {
            Some(record) if record.profile.settings.cpuset.is_some() => group(record, &cpus)?,
            _ => None,
        };
        let published = record
            .as_ref()
            .map(|record| record.profile.published.clone());
        Ok(WantedHost {
            cpus,
            others,
            published: published.unwrap_or_default(),
            profile: record.map(|record| record.profile_name),
            group,
        })
    }

    /// What a load needs beside its name, and what without its load would be ignored.
    pub(super) fn check_loads(&self) -> anyhow::Result<()> {
        let has = |load| self.loads.contains(&load);
        ensure!(
            self.net_to.is_some() || !has(TestLoad::Net),
            "the load net needs an address; name one that answers with --net-to"
        );
        ensure!(
            self.net_to.is_none() || has(TestLoad::Net),
            "--net-to is for the load net; add it to --loads, or leave --net-to out"
        );
        ensure!(
            self.stress_fifo.is_none() || has(TestLoad::Stress),
            "--stress-fifo is for the load stress; add it to --loads, or leave --stress-fifo out"
        );
        ensure!(
            self.stress_fifo.is_none() || self.load_percent <= FIFO_PERCENT_MAX,
            "real-time tasks of {} % leave the housekeeping CPUs no time; --load-percent \
             {FIFO_PERCENT_MAX} at most with --stress-fifo",
            self.load_percent
        );
        Ok(())
    }

    /// The guest's CPUs, one for each of the host's.
    pub(super) fn guest(&self, pcpus: &CpuList) -> anyhow::Result<Option<(String, CpuList)>> {
        let (Some(shell), Some(cpus)) = (&self.guest_shell, &self.guest_cpus) else {
            return Ok(None);
        };
        ensure!(
            cpus.iter().count() == pcpus.iter().count(),
            "--guest-cpus {cpus} and --cpus {pcpus} have to be as many"
        );
        let both = cpus.and(&self.guest_others.clone().unwrap_or_default());
        ensure!(
            both.is_empty(),
            "the guest's CPU {both} would be measured and loaded; leave it out of --guest-others"
        );
        Ok(Some((shell.clone(), cpus.clone())))
    }
}

/// Where apply set these CPUs apart.
fn group(record: &Record, cpus: &CpuList) -> anyhow::Result<Option<String>> {
    if cpus.and(&record.partition.rt()).is_empty() {
        return Ok(None);
    }
    let mut guests = record.partition.guests.iter();
    match guests.find(|guest| cpus.without(&guest.cpus).is_empty()) {
        Some(guest) => Ok(Some(format!("{}/rt", partition_group(&guest.name)))),
        None => bail!("CPUs {cpus} belong to several guests; choose one guest's with --cpus"),
    }
}
