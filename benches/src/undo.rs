// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a bench changes on the host: files that it writes, and a trace instance. A signal undoes it
//! before it ends the program. After SIGKILL a record lists what to undo, and the next bench or
//! `vcpufreq cleanup` does it.
//!
//! Root acts on records, so one counts only if no other user could have written it, and of what is
//! in it only what a bench changes.

use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};
use vcpufreq_host::{ignored_signals, process_has_ended, stat_field};

use crate::machine::SCHEDUTIL;
use crate::tracefs::INSTANCES;

/// What real-time threads may have of each second, in µs.
pub const RT_RUNTIME: &str = "/proc/sys/kernel/sched_rt_runtime_us";
/// How the names of benches' trace instances begin.
pub const INSTANCE: &str = "vcpufreq-bench-";

/// A file for each bench that runs: the name is its process.
const RECORDS: &str = "/run/vcpufreq-bench";
const SIGNALS: [Signal; 4] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
];
const POLICIES: &str = "/sys/devices/system/cpu/cpufreq";
const LIMITS: [&str; 2] = ["scaling_min_freq", "scaling_max_freq"];
const GOVERNOR: &str = "scaling_governor";
/// What the governor userspace was set to.
const SETSPEED: &str = "scaling_setspeed";
/// A trace instance that is being read can't be removed: so often, with a pause behind each.
const TRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(20);

/// What there is to undo now. A change is made and noted under this lock, and so is its undoing.
static CHANGES: Mutex<BenchChanges> = Mutex::new(BenchChanges {
    since: 0,
    files: Vec::new(),
    folders: Vec::new(),
});

/// Changes of one bench.
#[derive(Debug, Default, Serialize, Deserialize)]
struct BenchChanges {
    /// The start of the process, in the kernel's ticks since its own.
    since: u64,
    /// Files, and what was in them, the first change first.
    files: Vec<(PathBuf, String)>,
    folders: Vec<PathBuf>,
}

/// Writes a file; returns what was in it.
pub fn write(path: &Path, value: &str) -> Result<String> {
    let failed = || format!("writing {value} to {}; run as root", path.display());
    let mut changes = changes();
    let old = fs::read_to_string(path).with_context(failed)?;
    let old = old.trim().to_owned();
    changes.files.push((path.to_owned(), old.clone()));
    let recorded = changes.record();
    let written = recorded.and_then(|()| Ok(fs::write(path, value)?));
    if written.is_err() {
        changes.files.pop();
        // A record that stays puts back what is there.
        let _ = changes.record();
    }
    written.map(|()| old).with_context(failed)
}

/// Records what is in a file that a change will lose; returns that.
pub fn keep(path: &Path) -> Result<String> {
    let mut changes = changes();
    let old = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let old = old.trim().to_owned();
    changes.files.push((path.to_owned(), old.clone()));
    changes.record()?;
    Ok(old)
}

/// Writes back what [`write`] or [`keep`] has returned; false where that is another's by now.
pub fn put_back(path: &Path, old: &str) -> Result<bool> {
    let mut changes = changes();
    let written = write_back(path, old)?;
    if let Some(at) = changes.files.iter().rposition(|(file, _)| file == path) {
        changes.files.remove(at);
    }
    changes.record()?;
    Ok(written)
}

/// Leaves a governor alone that was chosen meanwhile, and the settings of one that isn't there.
fn write_back(path: &Path, old: &str) -> io::Result<bool> {
    if path.file_name().is_some_and(|name| name == GOVERNOR)
        && fs::read_to_string(path)?.trim() != SCHEDUTIL
    {
        return Ok(false);
    }
    match fs::write(path, old) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && is_of_a_governor(path) => {
            Ok(false)
        }
        written => written.map(|()| true),
    }
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
    changes.folders.push(folder.to_owned());
    changes.record()?;
    let made = make();
    if made.is_err() {
        changes.forget_missing()?;
    }
    made
}

/// Notes which folders have been removed.
pub fn removed() -> Result<()> {
    changes().forget_missing()
}

/// Until this is dropped a signal waits, and nothing may be changed.
pub fn undisturbed() -> impl Drop {
    changes()
}

fn changes() -> MutexGuard<'static, BenchChanges> {
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
    for left in undo_killed().1 {
        say(&left);
    }
    heed_signals()
}

/// Has a signal undo all before it ends a program that measures nothing.
///
/// # Errors
/// The kernel's.
pub fn heed_signals() -> Result<()> {
    on_signals().context("waiting for signals")
}

/// Keeps another bench from this host, whose governors and limits it would measure and put back.
/// A user without the right to change these has no lock.
fn alone() -> Result<()> {
    static LOCKED: OnceLock<Flock<File>> = OnceLock::new();
    let folder = Path::new(RECORDS);
    let opened = make_records(folder).and_then(|()| Ok(File::open(folder)?));
    let Ok(file) = opened else {
        return Ok(());
    };
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => {
            // To be called once.
            let _ = LOCKED.set(lock);
            Ok(())
        }
        Err((_, Errno::EWOULDBLOCK)) => bail!("another demo or bench runs; wait for its end"),
        Err((_, error)) => Err(error).context("locking the records of benches"),
    }
}

fn make_records(folder: &Path) -> Result<()> {
    let failed = || format!("making {}", folder.display());
    fs::create_dir_all(folder).with_context(failed)?;
    fs::set_permissions(folder, Permissions::from_mode(0o700)).with_context(failed)
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
            let mut left = changes.undo();
            left.extend(changes.record().err().map(|error| format!("{error:#}")));
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
    of_killed(Path::new(RECORDS), is_of_a_bench)
}

fn of_killed(
    records: &Path,
    trusted: impl Fn(&Path, Option<&str>) -> bool,
) -> (Vec<PathBuf>, Vec<String>) {
    let (mut done, mut left) = (Vec::new(), Vec::new());
    // Without root the folder can't be read, and it isn't there before the first bench.
    for entry in fs::read_dir(records).into_iter().flatten().flatten() {
        let path = entry.path();
        let name = entry.file_name().to_string_lossy().into_owned();
        let (number, unfinished) = match name.strip_suffix(".new") {
            Some(number) => (number, true),
            None => (name.as_str(), false),
        };
        let Ok(pid) = number.parse() else { continue };
        if unfinished {
            // Of a killed one the record before it counts.
            if started(pid).is_none() {
                let _ = fs::remove_file(&path);
            }
            continue;
        }
        match read(records, &path) {
            Ok(changes) if started(pid) == Some(changes.since) => (),
            Ok(mut changes) => {
                changes.files.retain(|(file, old)| trusted(file, Some(old)));
                changes.folders.retain(|folder| trusted(folder, None));
                let all = changes.paths();
                left.extend(changes.undo());
                let still = changes.paths();
                done.extend(all.into_iter().filter(|path| !still.contains(path)));
                if let Err(error) = changes.write(&path) {
                    left.push(format!("{error:#}"));
                }
            }
            Err(error) => left.push(format!("{error:#}; look at it, then remove it")),
        }
    }
    (done, left)
}

/// Whether a bench changes such a file, in which `old` was, or makes such a folder.
fn is_of_a_bench(path: &Path, old: Option<&str>) -> bool {
    let of_policy = || {
        let below = path.strip_prefix(POLICIES).ok()?;
        let mut parts = below.iter().map(|part| part.to_string_lossy());
        let (policy, file) = (parts.next()?, parts.next()?);
        // The kernel refuses a name that no governor has.
        let own = LIMITS.contains(&&*file) || file == GOVERNOR && is_plain(old?);
        Some(policy.starts_with("policy") && own && parts.next().is_none())
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let instance = path.parent() == Some(Path::new(INSTANCES)) && name.starts_with(INSTANCE);
    path == Path::new(RT_RUNTIME)
        || instance
        || of_policy() == Some(true)
        || is_of_a_governor(path) && old.is_some()
}

/// `POLICIES/GOVERNOR/NAME`, `POLICIES/policyN/GOVERNOR/NAME`, or the speed of userspace.
fn is_of_a_governor(path: &Path) -> bool {
    let Ok(below) = path.strip_prefix(POLICIES) else {
        return false;
    };
    let parts: Option<Vec<&str>> = below.iter().map(|part| part.to_str()).collect();
    let is_policy = |part: &str| part.starts_with("policy");
    match parts.as_deref() {
        Some([policy, SETSPEED]) => is_policy(policy),
        Some([governor, name]) => !is_policy(governor) && is_plain(governor) && is_plain(name),
        Some([policy, governor, name]) => is_policy(policy) && is_plain(governor) && is_plain(name),
        _ => false,
    }
}

fn is_plain(name: &str) -> bool {
    let is_part = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    !name.is_empty() && name.bytes().all(is_part)
}

/// Reads a record that root or this user alone could have written.
fn read(folder: &Path, path: &Path) -> Result<BenchChanges> {
    for path in [folder, path] {
        let found = fs::symlink_metadata(path).with_context(|| path.display().to_string())?;
        let owned = [0, geteuid().as_raw()].contains(&found.uid()) && found.mode() & 0o022 == 0;
        let kind = found.is_dir() || found.is_file();
        ensure!(owned && kind, "{} is no bench's record", path.display());
    }
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    serde_json::from_str(&text).with_context(|| format!("{} is damaged", path.display()))
}

/// When a process started, in the kernel's ticks: field 22 of its stat. `None` if there is none, or
/// one that has ended and is not reaped yet.
fn started(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let ended = process_has_ended(&stat)?;
    stat_field(&stat, 22)?.parse().ok().filter(|_| !ended)
}

impl BenchChanges {
    fn is_empty(&self) -> bool {
        self.files.is_empty() && self.folders.is_empty()
    }

    fn paths(&self) -> Vec<PathBuf> {
        let files = self.files.iter().map(|(file, _)| file);
        files.chain(&self.folders).cloned().collect()
    }

    fn forget_missing(&mut self) -> Result<()> {
        self.folders.retain(|folder| folder.exists());
        self.record()
    }

    /// Undoes the last change first; what could not be undone stays, a line for each.
    fn undo(&mut self) -> Vec<String> {
        let mut left = Vec::new();
        let (files, folders) = (&mut self.files, &mut self.folders);
        let mut kept: Vec<_> = std::mem::take(files)
            .into_iter()
            .rev()
            .filter(|(path, old)| {
                let written = write_back(path, old);
                if let Err(error) = &written {
                    left.push(format!(
                        "{} can't be set back ({error}); write {old} to it",
                        path.display()
                    ));
                }
                written.is_err()
            })
            .collect();
        kept.reverse();
        *files = kept;
        folders.retain(|folder| {
            let removed = remove(folder);
            if let Err(error) = &removed {
                left.push(format!("{error:#}; remove it"));
            }
            removed.is_err()
        });
        left
    }

    /// Records the changes of this process.
    fn record(&mut self) -> Result<()> {
        let pid = std::process::id();
        if self.since == 0 {
            self.since = started(pid).unwrap_or(1);
        }
        self.write(&Path::new(RECORDS).join(pid.to_string()))
    }

    /// Writes a record, or removes that of nothing.
    fn write(&self, path: &Path) -> Result<()> {
        let failed = || format!("writing {}", path.display());
        if self.is_empty() {
            return match fs::remove_file(path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    Err(error).with_context(failed)
                }
                _ => Ok(()),
            };
        }
        make_records(path.parent().unwrap_or(Path::new("/")))?;
        let new = path.with_extension("new");
        let file = File::create(&new).with_context(failed)?;
        file.set_permissions(Permissions::from_mode(0o600))
            .with_context(failed)?;
        serde_json::to_writer(file, self).with_context(failed)?;
        fs::rename(&new, path).with_context(failed)
    }
}

fn remove(folder: &Path) -> Result<()> {
    for _ in 1..TRIES {
        if !folder.exists() || fs::remove_dir(folder).is_ok() {
            return Ok(());
        }
        sleep(PAUSE);
    }
    fs::remove_dir(folder).with_context(|| format!("{} can't be removed", folder.display()))
}

#[cfg(test)]
#[path = "undo_tests.rs"]
mod tests;
