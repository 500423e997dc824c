// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq scx`: the host's service that lets requests add up, by a sched_ext scheduler that
//! schedules nothing. VMs use it with `run --actuator scx`.

mod lock;
#[cfg(feature = "bpf")]
mod service;

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Subcommand;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};

use lock::Lock;
use vcpufreq_host_bpf::PINS;

use crate::message::print;

/// How long `stop` waits: the kernel takes a tenth of a second.
const ENDS_WITHIN: Duration = Duration::from_secs(10);
const BETWEEN: Duration = Duration::from_millis(20);

/// What to do with the service.
#[derive(Debug, Subcommand)]
pub enum ScxCommand {
    /// Load the scheduler and keep it until a signal comes, as a service does
    Start,
    /// End the service that runs; its VMs go on with clamps
    Stop,
    /// Print whether the service runs; exit code 1 if it doesn't
    Status,
}

/// Carries it out; returns the exit code.
///
/// # Errors
/// What is missing, in the way, or refused, in one line.
pub fn run(command: &ScxCommand) -> anyhow::Result<u8> {
    match command {
        ScxCommand::Start => start(),
        ScxCommand::Stop => stop(),
        ScxCommand::Status => status(),
    }
}

#[cfg(feature = "bpf")]
fn start() -> anyhow::Result<u8> {
    service::start()
}

#[cfg(not(feature = "bpf"))]
fn start() -> anyhow::Result<u8> {
    bail!("this program is built without BPF; build it without --no-default-features")
}

fn stop() -> anyhow::Result<u8> {
    let Some(owner) = Lock::owner()? else {
        bail!("no vcpufreq scx service runs");
    };
    kill(owner, Signal::SIGTERM)
        .with_context(|| format!("can't end process {owner}, the service; run it as root"))?;
    for _ in 0..ENDS_WITHIN.as_millis() / BETWEEN.as_millis() {
        if Lock::owner()? != Some(owner) {
            return Ok(0);
        }
        sleep(BETWEEN);
    }
    bail!("the service, process {owner}, has not ended within 10 s; kill -9 {owner} ends it too")
}

/// Removes what a killed service has left; the paths. One that runs, or another user's, stays.
///
/// # Errors
/// When a pin can't be listed or removed; what was removed before is gone.
pub fn clean() -> anyhow::Result<Vec<PathBuf>> {
    let pins = Path::new(PINS);
    let left = pins.exists() || Lock::exists();
    if !left || !geteuid().is_root() || Lock::owner()?.is_some() {
        return Ok(Vec::new());
    }
    let Ok(lock) = Lock::take(None) else {
        // One has just started.
        return Ok(Vec::new());
    };
    let mut removed = Vec::new();
    if pins.exists() {
        // Maps of a service's alone, and nothing below.
        for entry in fs::read_dir(pins).with_context(|| format!("can't read {PINS}"))? {
            let path = entry?.path();
            fs::remove_file(&path).with_context(|| format!("can't remove {}", path.display()))?;
        }
        fs::remove_dir(pins).with_context(|| format!("can't remove {PINS}"))?;
        removed.push(pins.to_owned());
    }
    removed.push(lock.path().to_owned());
    Ok(removed)
}

fn status() -> anyhow::Result<u8> {
    let (text, code) = match Lock::owner()? {
        Some(owner) => running(owner),
        None => ("not running".to_owned(), 1),
    };
    print(format!("{text}\n"))?;
    Ok(code)
}

#[cfg(feature = "bpf")]
fn running(owner: Pid) -> (String, u8) {
    match vcpufreq_host_bpf::ScxPins::open() {
        Ok(pins) => {
            let vcpus = pins.vcpus();
            (format!("running, process {owner}, {vcpus} vCPUs"), 0)
        }
        Err(why) => (format!("process {owner} runs, not in force: {why}"), 1),
    }
}

#[cfg(not(feature = "bpf"))]
fn running(owner: Pid) -> (String, u8) {
    (format!("running, process {owner}"), 0)
}
