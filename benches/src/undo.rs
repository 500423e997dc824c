// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a bench changes on the host: files that it writes and folders that it makes. A signal
//! undoes it before it ends the program. After SIGKILL a record says what to undo, and the next
//! bench or `vcpufreq cleanup` does it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use serde::{Deserialize, Serialize};

/// A file for each bench that runs: the name is its process.
const RECORDS: &str = "/run/vcpufreq-bench";
const SIGNALS: [Signal; 3] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM];
/// A trace instance that is being read can't be removed: so often, with a pause behind each.
const TRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(20);

/// What there is to undo now.
static CHANGES: Mutex<Changes> = Mutex::new(Changes {
    files: Vec::new(),
    folders: Vec::new(),
});

/// Changes of one bench.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Changes {
    /// Files, and what was in them.
    files: Vec<(PathBuf, String)>,
    folders: Vec<PathBuf>,
}

/// To be called before a file is written that has this in it.
pub fn will_write(path: &Path, old: &str) -> Result<()> {
    change(|changes| changes.files.push((path.to_owned(), old.to_owned())))
}

/// A folder that is made; when this is dropped, there is none to remove any more.
#[derive(Debug)]
pub struct Made(PathBuf);

impl Made {
    /// To be called before it is made.
    pub fn will_be(folder: PathBuf) -> Result<Self> {
        change(|changes| changes.folders.push(folder.clone()))?;
        Ok(Self(folder))
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        // A record that stays names a folder that is gone: the next bench removes it.
        let _ = undone(&self.0);
    }
}

/// There is nothing to undo of this path any more.
pub fn undone(path: &Path) -> Result<()> {
    change(|changes| {
        changes.files.retain(|(file, _)| file != path);
        changes.folders.retain(|folder| folder != path);
    })
}

/// Changes what there is to undo, and then the record of it.
fn change(change: impl FnOnce(&mut Changes)) -> Result<()> {
    let mut changes = changes();
    change(&mut changes);
    record(Path::new(RECORDS), &changes)
}

fn changes() -> MutexGuard<'static, Changes> {
    // A thread that panicked has left a list that is as good.
    CHANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has a signal undo all before it ends the program. To be called before other threads are started;
/// again it does nothing.
///
/// # Errors
/// The kernel's.
pub fn on_signals() -> Result<()> {
    static WAITS: AtomicBool = AtomicBool::new(false);
    if WAITS.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    let signals = SigSet::from_iter(SIGNALS);
    signals.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            let Ok(signal) = signals.wait() else { return };
            // The lock stays with this thread, so that no change comes behind.
            let mut changes = changes();
            for left in changes.undo() {
                eprintln!("vcpufreq: {left}");
            }
            let _ = record(Path::new(RECORDS), &changes);
            std::process::exit(128 + signal as i32);
        })?;
    Ok(())
}

/// Undoes what killed benches left: a line for each thing that was put back, and for each that
/// couldn't be.
#[must_use]
pub fn undo_killed() -> (Vec<PathBuf>, Vec<String>) {
    of_killed(Path::new(RECORDS), |pid| {
        Path::new("/proc").join(pid).exists()
    })
}

fn of_killed(records: &Path, lives: impl Fn(&str) -> bool) -> (Vec<PathBuf>, Vec<String>) {
    let (mut done, mut left) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(records).into_iter().flatten().flatten() {
        if lives(&entry.file_name().to_string_lossy()) {
            continue;
        }
        let path = entry.path();
        let text = fs::read_to_string(&path).unwrap_or_default();
        // One that was killed before its first change.
        let mut changes: Changes = serde_json::from_str(&text).unwrap_or_default();
        let files = changes.files.iter().map(|(file, _)| file);
        let all: Vec<_> = files.chain(&changes.folders).cloned().collect();
        left.extend(changes.undo());
        let still = |path: &PathBuf| {
            let mut files = changes.files.iter().map(|(file, _)| file);
            files.any(|file| file == path) || changes.folders.contains(path)
        };
        done.extend(all.into_iter().filter(|path| !still(path)));
        if changes.is_empty() {
            // A record that stays is looked at again.
            let _ = fs::remove_file(path);
        }
    }
    (done, left)
}

impl Changes {
    fn is_empty(&self) -> bool {
        self.files.is_empty() && self.folders.is_empty()
    }

    /// Undoes the last change first; what could not be undone stays, a line for each.
    fn undo(&mut self) -> Vec<String> {
        let mut left = Vec::new();
        let mut files = std::mem::take(&mut self.files);
        while let Some((path, old)) = files.pop() {
            if let Err(error) = fs::write(&path, &old) {
                let path_shown = path.display();
                left.push(format!(
                    "{path_shown} can't be set back ({error}); write {old} to it"
                ));
                self.files.push((path, old));
            }
        }
        for folder in std::mem::take(&mut self.folders) {
            if let Err(error) = remove(&folder) {
                left.push(format!("{error:#}; remove it"));
                self.folders.push(folder);
            }
        }
        left
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

/// Writes the record of this process, or removes that of nothing.
fn record(records: &Path, changes: &Changes) -> Result<()> {
    let path = records.join(std::process::id().to_string());
    let done = if changes.is_empty() {
        match fs::remove_file(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    } else {
        let new = path.with_extension("new");
        fs::create_dir_all(records)
            .and_then(|()| fs::write(&new, serde_json::to_vec(changes)?))
            .and_then(|()| fs::rename(&new, &path))
    };
    done.with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    //! Promises: what a killed bench changed is put back once; of one that lives nothing is.
    use super::*;

    #[test]
    fn what_a_killed_bench_changed_is_put_back() {
        let dir = tempfile::tempdir().unwrap();
        let (records, file) = (dir.path().join("records"), dir.path().join("limit"));
        let folder = dir.path().join("instance");
        fs::create_dir(&folder).unwrap();
        fs::write(&file, "1800000").unwrap();
        let changes = Changes {
            files: vec![
                (file.clone(), "600000".to_owned()),
                (file.clone(), "700000".to_owned()),
                (dir.path().join("none/none"), "1".to_owned()),
            ],
            folders: vec![folder.clone()],
        };
        record(&records, &changes).unwrap();
        assert_eq!(of_killed(&records, |_| true), (Vec::new(), Vec::new()));
        let (done, left) = of_killed(&records, |_| false);
        assert_eq!(done, [file.clone(), file.clone(), folder.clone()]);
        assert!(left[0].contains("none/none can't be set back"), "{left:?}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "600000");
        assert!(!folder.exists());
        // What couldn't be undone is tried again.
        assert!(records.read_dir().unwrap().next().is_some());
    }

    #[test]
    fn a_record_of_nothing_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let mut changes = Changes {
            folders: vec!["/nowhere".into()],
            ..Changes::default()
        };
        record(dir.path(), &changes).unwrap();
        assert_eq!(dir.path().read_dir().unwrap().count(), 1);
        assert!(changes.undo().is_empty());
        record(dir.path(), &changes).unwrap();
        assert_eq!(dir.path().read_dir().unwrap().count(), 0);
    }
}
