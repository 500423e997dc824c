// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a bench changes on the host: files that it writes, and a trace instance. A signal undoes it
//! before it ends the program. After SIGKILL a record lists what to undo, and the next bench or
//! `vcpufreq cleanup` does it.
//!
//! Root acts on records, so one counts only if no other user could have written it, and of what is
//! in it only what a bench changes.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use serde::{Deserialize, Serialize};
use vcpufreq_host::ignored_signals;
use vcpufreq_host::undo::{
    ABSENT, Format, Journal, JournalScope, KernelHost, LockedFile, OldValue, Owner, OwnerStatus,
    ReadHost as _, Target, ValueNow, read_strictly,
};

use crate::machine::SCHEDUTIL;

/// What real-time threads may have of each second, in µs.
pub const RT_RUNTIME: &str = "/proc/sys/kernel/sched_rt_runtime_us";
/// How the names of benches' trace instances begin.
pub const INSTANCE: &str = "vcpufreq-bench-";

/// A record for each bench that runs: the name is its process.
const RECORDS: &str = "/run/vcpufreq-bench";
/// What a record may name.
const SCOPE: JournalScope = JournalScope {
    files: &[
        RT_RUNTIME,
        "/sys/devices/system/cpu/cpufreq/policy*/scaling_governor",
        "/sys/devices/system/cpu/cpufreq/policy*/scaling_max_freq",
        "/sys/devices/system/cpu/cpufreq/policy*/scaling_min_freq",
    ],
    // What the governor userspace was set to, and the tunables of all.
    inside: &[
        "/sys/devices/system/cpu/cpufreq/policy*/scaling_setspeed",
        "/sys/devices/system/cpu/cpufreq/!policy*/*",
        "/sys/devices/system/cpu/cpufreq/policy*/*/*",
    ],
    shown_in: &[],
    dirs: &["/sys/kernel/tracing/instances/vcpufreq-bench-*"],
    threads: &[],
};
const SIGNALS: [Signal; 4] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
];
const GOVERNOR: &str = "scaling_governor";
/// What the governor userspace was set to.
const SETSPEED: &str = "scaling_setspeed";
/// A trace instance that is being read can't be removed: so long it is tried.
const PATIENCE: Duration = Duration::from_secs(1);

/// What there is to undo now, the first change first. A change is made and noted under this lock, and
/// so is its undoing.
static CHANGES: Mutex<Vec<OldValue>> = Mutex::new(Vec::new());

/// Changes of one bench.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BenchRecord {
    owner: Owner,
    changes: Vec<OldValue>,
}

/// Writes a file; returns what was in it.
pub fn write(path: &Path, value: &str) -> Result<String> {
    let failed = || format!("writing {value} to {}; run as root", path.display());
    let mut changes = changes();
    let target = Target::File {
        path: text(path),
        format: Format::Text,
        shown_in: None,
    };
    // A governor that is chosen meanwhile stays.
    let is_governor = path.file_name().is_some_and(|name| name == GOVERNOR);
    let only_if = is_governor.then(|| SCHEDUTIL.to_owned());
    let old = add(&mut changes, path, target, only_if).with_context(failed)?;
    let recorded = record(&changes);
    let written = recorded.and_then(|()| Ok(fs::write(path, value)?));
    if written.is_err() {
        changes.pop();
        // A record that stays puts back what is there.
        let _ = record(&changes);
    }
    written.map(|()| old).with_context(failed)
}

/// Records what is in a file that a change will lose; returns that. It may be gone with its governor.
pub fn keep(path: &Path) -> Result<String> {
    let mut changes = changes();
    let target = Target::Inside {
        path: text(path),
        format: Format::Text,
        or_at: None,
    };
    let old = add(&mut changes, path, target, None)?;
    record(&changes)?;
    Ok(old)
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Notes what is in a file; returns that.
fn add(
    changes: &mut Vec<OldValue>,
    path: &Path,
    target: Target,
    only_if: Option<String>,
) -> Result<String> {
    let old = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let old = old.trim().to_owned();
    changes.push(OldValue {
        target,
        old: old.clone(),
        only_if,
    });
    Ok(old)
}

/// Writes back what [`write`] or [`keep`] has read; false where that is another's by now.
pub fn put_back(path: &Path) -> Result<bool> {
    let mut changes = changes();
    let name = text(path);
    let Some(at) = changes.iter().rposition(|of| of.target.name() == name) else {
        return Ok(false);
    };
    let undone = changes[at].undo(&KernelHost::default(), PATIENCE);
    let was = undone.map_err(|why| anyhow!(why))?;
    changes.remove(at);
    record(&changes)?;
    Ok(matches!(was, ValueNow::Old | ValueNow::Changed(_)))
}

/// What the kernel forgets when a policy leaves its governor, `governor`: files that can be written.
pub fn settings_of(policy: &Path, governor: &str) -> Vec<PathBuf> {
    let shared = policy.parent().map(|all| all.join(governor));
    let folders = shared.into_iter().chain([policy.join(governor)]);
    let files = folders.flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    let files = files.map(|entry| entry.path());
    let mut files: Vec<_> = files
        .chain((governor == "userspace").then(|| policy.join(SETSPEED)))
        .filter(|file| fs::metadata(file).is_ok_and(|found| found.mode() & 0o200 != 0))
        .collect();
    files.sort();
    files
}

/// A line for the user. If stderr is gone, what follows is as important.
pub fn say(line: &str) {
    let _ = writeln!(io::stderr(), "vcpufreq: {line}");
}

/// Makes something in a folder that isn't there yet.
pub fn make<T>(folder: &Path, make: impl FnOnce() -> Result<T>) -> Result<T> {
    let mut changes = changes();
    let path = text(folder);
    changes.push(OldValue {
        target: Target::Dir { path },
        old: ABSENT.to_owned(),
        only_if: None,
    });
    record(&changes)?;
    let made = make();
    if made.is_err() {
        forget_missing(&mut changes)?;
    }
    made
}

/// Notes which folders have been removed.
pub fn removed() -> Result<()> {
    forget_missing(&mut changes())
}

fn forget_missing(changes: &mut Vec<OldValue>) -> Result<()> {
    changes.retain(|of| match &of.target {
        Target::Dir { path } => Path::new(path).exists(),
        _ => true,
    });
    record(changes)
}

/// Until this is dropped a signal waits, and nothing may be changed.
pub fn undisturbed() -> impl Drop {
    changes()
}

fn changes() -> MutexGuard<'static, Vec<OldValue>> {
    // A thread that panicked has left a list that is as good.
    CHANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Undoes what killed benches left, and from now on has a signal undo all before it ends the
/// program. To be called before other threads are started; again it does nothing.
///
/// # Errors
/// When another one runs; the kernel's.
pub fn begin() -> Result<()> {
    static BEGUN: AtomicBool = AtomicBool::new(false);
    if BEGUN.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    alone()?;
    begin_beside_others()
}

/// The same for a program that measures nothing, beside which others may run.
///
/// # Errors
/// The kernel's.
pub fn begin_beside_others() -> Result<()> {
    begin_on(&KernelHost::default(), on_signals)
}

fn begin_on(host: &KernelHost, heed_signals: impl FnOnce() -> Result<()>) -> Result<()> {
    for left in of_killed(host).1 {
        say(&left);
    }
    heed_signals().context("waiting for signals")
}

/// Keeps another bench from this host, whose governors and limits it would measure and put back.
/// A user without the right to change these has no lock.
fn alone() -> Result<()> {
    static LOCKED: OnceLock<LockedFile> = OnceLock::new();
    let journal = Journal::at(RECORDS);
    if journal.make().is_err() {
        return Ok(());
    }
    match journal.lock(Duration::ZERO) {
        Ok(lock) => {
            // To be called once.
            let _ = LOCKED.set(lock);
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            bail!("another demo or bench runs; wait for its end")
        }
        Err(error) => Err(error).context("locking the records of benches"),
    }
}

fn on_signals() -> Result<()> {
    // One that is ignored stays so, as SIGHUP by nohup.
    let ignored = ignored_signals()?;
    let heeded = |signal: &Signal| (ignored >> (*signal as i32 - 1)) & 1 == 0;
    let signals: SigSet = SIGNALS.into_iter().filter(heeded).collect();
    signals.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            let Ok(signal) = signals.wait() else { return };
            // The lock stays with this thread, so that no change comes behind.
            let mut changes = changes();
            let mut left = undo(&KernelHost::default(), &mut changes);
            left.extend(record(&changes).err().map(|error| format!("{error:#}")));
            if left.is_empty() {
                left.push(format!(
                    "ended by {signal}; the host's settings are as before"
                ));
            }
            left.iter().for_each(|line| say(line));
            std::process::exit(128 + signal as i32);
        })?;
    Ok(())
}

/// Undoes what killed benches left: the paths that were put back or removed, and a line for each
/// that couldn't be.
#[must_use]
pub fn undo_killed() -> (Vec<PathBuf>, Vec<String>) {
    of_killed(&KernelHost::default())
}

fn of_killed(host: &KernelHost) -> (Vec<PathBuf>, Vec<String>) {
    let journal = Journal::at(host.root().path(RECORDS));
    let (mut done, mut left) = (Vec::new(), Vec::new());
    let names = match journal.names() {
        Ok(names) => names,
        // Without root.
        Err(why) if why.is_denied() => return (done, left),
        Err(why) => return (done, vec![why.to_string()]),
    };
    for name in names {
        let number = name.strip_suffix(".new").unwrap_or(&name);
        if number.parse::<u32>().is_err() {
            continue;
        }
        if number != name {
            // Of a killed one the record before it counts; a living one holds its own.
            let _ = journal.remove_unfinished(number);
            continue;
        }
        match by_record(host, &journal, &name) {
            Ok((paths, lines)) => {
                done.extend(paths);
                left.extend(lines);
            }
            Err(error) => left.push(format!("{error:#}; look at it, then remove it")),
        }
    }
    (done, left)
}

/// The same by one record, if its bench was killed.
fn by_record(
    host: &KernelHost,
    journal: &Journal,
    name: &str,
) -> Result<(Vec<PathBuf>, Vec<String>)> {
    let path = journal.path().join(name);
    let damaged = || format!("{} is no bench's record", path.display());
    // Held before it is read: another process may undo it, and change or remove it.
    let _held = match journal.hold(name, Duration::ZERO) {
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::WouldBlock => return Ok(Default::default()),
            io::ErrorKind::PermissionDenied => return Err(error).with_context(damaged),
            _ => return Err(error).with_context(|| format!("holding {}", path.display())),
        },
        Ok(held) => held,
    };
    let Some(record) = journal.read(name).with_context(damaged)? else {
        return Ok(Default::default());
    };
    let mut record: BenchRecord = read_strictly(&record).with_context(damaged)?;
    match record.owner.status(host) {
        OwnerStatus::InUse => return Ok(Default::default()),
        OwnerStatus::Unseen => bail!(
            "{}: process {} can't be seen from here; run cleanup in its PID namespace",
            path.display(),
            record.owner.pid
        ),
        OwnerStatus::OtherBoot => record.changes.clear(),
        // Others than these it changes by an option of the lab alone.
        OwnerStatus::Stale => record.changes.retain(|of| SCOPE.has(&of.target)),
    }
    let all = record.changes.clone();
    let mut left = undo(host, &mut record.changes);
    let done = all.iter().filter(|of| !record.changes.contains(of));
    let done = done.map(|of| of.target.name().into()).collect();
    let written = write_record(journal, name, &record);
    left.extend(written.err().map(|error| format!("{error:#}")));
    Ok((done, left))
}

/// Undoes the last change first; what could not be undone stays, a line for each.
fn undo(host: &KernelHost, changes: &mut Vec<OldValue>) -> Vec<String> {
    let mut left = Vec::new();
    let mut kept: Vec<OldValue> = Vec::new();
    for of in changes.drain(..).rev() {
        let Err(why) = of.undo(host, PATIENCE) else {
            continue;
        };
        let name = of.target.name();
        left.push(match &of.target {
            Target::Dir { .. } => format!("{name} can't be removed ({why}); remove it"),
            _ => format!("{name} can't be set back ({why}); write {} to it", of.old),
        });
        kept.push(of);
    }
    kept.reverse();
    *changes = kept;
    left
}

/// Records the changes of this process.
fn record(changes: &[OldValue]) -> Result<()> {
    let pid = std::process::id();
    let owner = Owner::read(&KernelHost::default(), pid);
    let owner = owner.map_err(|_| anyhow!("this process can't be seen in /proc; mount it"))?;
    let changes = changes.to_vec();
    write_record(
        &Journal::at(RECORDS),
        &pid.to_string(),
        &BenchRecord { owner, changes },
    )
}

/// Writes a record, or removes that of nothing. The folder stays: this process holds it.
fn write_record(journal: &Journal, name: &str, record: &BenchRecord) -> Result<()> {
    let written = match record.changes.is_empty() {
        true => journal.remove([name]),
        false => journal.write(name, &serde_json::to_string(record)?),
    };
    written.with_context(|| format!("writing {}", journal.path().join(name).display()))
}

#[cfg(test)]
#[path = "undo_tests.rs"]
mod tests;
