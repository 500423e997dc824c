// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Limits of the whole process, and whether each of its threads is confined.

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, bail};
use caps::CapsHashSet;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use vcpufreq_host::Tid;

use crate::{patience::patience, sys::ignore};

/// How often to look whether a thread that has just started is confined, and how long it may take.
const PAUSE: Duration = Duration::from_millis(2);
pub const CONFINED_WITHIN: Duration = patience(5);
/// More than a file has to which stderr is redirected: nothing that a guest does adds a line each
/// time.
const LOG: u64 = 1 << 30;
/// Files that the VMM opens besides those of vCPUs: a virtual machine, its interrupt controller and
/// eventfds, clients of `vcpufreq stats`, perf events of pCPUs that come online.
const MORE_FILES: u64 = 512;

/// What the process may use from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// vCPUs: a guest that resets has new files for each.
    pub vcpus: usize,
    /// Bytes that the guest's own file may have; `None`: no file has a limit.
    pub file_bytes: Option<u64>,
}

impl Limits {
    /// Sets them.
    ///
    /// # Errors
    /// As setrlimit(2); when /proc can't be read.
    pub fn set(self) -> anyhow::Result<()> {
        let failed = "can't set the limits of the VMM";
        let open = fs::read_dir("/proc/self/fd").context(failed)?;
        let highest = open
            .filter_map(|file| file.ok()?.file_name().to_str()?.parse().ok())
            .max()
            .unwrap_or(0u64);
        let of_vcpus = u64::try_from(self.vcpus).unwrap_or(u64::MAX);
        let files = highest
            .saturating_add(of_vcpus.saturating_mul(4))
            .saturating_add(MORE_FILES);
        let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
        let files = files.min(most);
        setrlimit(Resource::RLIMIT_NOFILE, files, files).context(failed)?;
        if let Some(bytes) = self.file_bytes {
            let bytes = bytes.saturating_add(LOG);
            setrlimit(Resource::RLIMIT_FSIZE, bytes, bytes).context(failed)?;
            // A write beyond it fails, and doesn't end the VMM.
            ignore(Signal::SIGXFSZ);
        }
        // What CAP_IPC_LOCK allowed: memory of a real-time guest, rings of perf events. Without
        // CAP_SYS_RESOURCE the limit is what it may be raised to.
        let memory = Resource::RLIMIT_MEMLOCK;
        if setrlimit(memory, RLIM_INFINITY, RLIM_INFINITY).is_err() {
            let (_, most) = getrlimit(memory).context(failed)?;
            setrlimit(memory, most, most).context(failed)?;
        }
        Ok(())
    }
}

/// The line of a thread's status with the number of its filters.
const FILTERS: &str = "Seccomp_filters:";

/// How many filters the calling thread has: a container's, or a service manager's.
pub fn filters_of_this_thread() -> u32 {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let count = value(&status, FILTERS);
    count.and_then(|count| count.parse().ok()).unwrap_or(0)
}

/// What follows `key` in a thread's status.
fn value<'a>(status: &'a str, key: &str) -> Option<&'a str> {
    let mut lines = status.lines();
    lines.find_map(|line| line.strip_prefix(key)).map(str::trim)
}

/// Whether every thread but the calling one is confined, with no capability but `kept`. One that has just
/// started is waited for, `within` so long.
///
/// # Errors
/// Which one isn't; /proc can't be read.
pub fn check_others(
    within: Duration,
    outer_filters: u32,
    kept: &CapsHashSet,
) -> anyhow::Result<()> {
    let own = Tid::current().to_string();
    let kept = kept
        .iter()
        .fold(0, |mask, capability| mask | capability.bitmask());
    let pauses = within.as_millis() / PAUSE.as_millis();
    for pause in 0..=pauses {
        let Some(name) = unconfined(&own, outer_filters, kept)? else {
            return Ok(());
        };
        if pause == pauses {
            bail!("the thread {name} isn't confined, and no guest runs beside it");
        }
        sleep(PAUSE);
    }
    Ok(())
}

/// The name of a thread that isn't confined.
fn unconfined(own: &str, outer_filters: u32, kept: u64) -> anyhow::Result<Option<String>> {
    for task in fs::read_dir("/proc/self/task").context("can't list the VMM's threads")? {
        let task = task?;
        if task.file_name().to_str() == Some(own) {
            continue;
        }
        // A thread that has ended meanwhile has no file any more.
        let Ok(status) = fs::read_to_string(task.path().join("status")) else {
            continue;
        };
        let value = |key| value(&status, key);
        // Kernels before 5.9 don't count them.
        let filters = value(FILTERS).and_then(|count| count.parse::<u32>().ok());
        let confined = value("Seccomp:") == Some("2")
            && filters.is_none_or(|count| count > outer_filters)
            && value("NoNewPrivs:") == Some("1")
            && value("CapPrm:").and_then(|set| u64::from_str_radix(set, 16).ok()) == Some(kept);
        if !confined {
            return Ok(Some(value("Name:").unwrap_or("?").to_owned()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_is_not_confined_is_found() {
        // The harness' own threads are there, too.
        let own = Tid::current().to_string();
        assert!(unconfined(&own, 0, 0).unwrap().is_some());
    }
}
