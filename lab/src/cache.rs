// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is fetched or built once, kept outside the repository.
//!
//! An entry is a directory named after what it is made of. It is built under a temporary name while
//! an exclusive lock is held, and renamed into place. A reader sees a whole entry or none. Two runs
//! at once build it once. The next run removes an interrupted one's temporary directory. What
//! wasn't used for 30 days is removed when something of the same name is made.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};
use nix::fcntl::{Flock, FlockArg};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::namespace::{self, Users};
use crate::progress::above;

const KEEP: Duration = Duration::from_secs(30 * 24 * 3600);
/// A failed run's logs.
const KEEP_RUNS: Duration = Duration::from_secs(7 * 24 * 3600);

/// Digest over the parts an entry is made of, as 16 hexadecimal digits.
///
/// Each part is preceded by its length, so that moving a byte from one part
/// to the next gives another key.
pub fn key<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let mut first = [0; 8];
    first.copy_from_slice(&hash.finalize()[..8]);
    format!("{:016x}", u64::from_be_bytes(first))
}

/// What of a run's needs was in the cache before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheState {
    /// Nothing.
    Empty,
    /// Of its toolchain root a part, or one that was made anew.
    Partly,
    /// All of that.
    Filled,
}

/// The cache folder.
#[derive(Debug, Clone)]
pub struct Cache {
    dir: PathBuf,
}

impl Cache {
    /// Opens the user's cache: `$VCPUFREQ_CACHE`, or `vcpufreq` under
    /// `$XDG_CACHE_HOME`, or under `~/.cache`.
    pub fn open() -> Result<Self> {
        let dir = std::env::var_os("VCPUFREQ_CACHE")
            .map(PathBuf::from)
            .or_else(|| {
                std::env::var_os("XDG_CACHE_HOME").map(|dir| PathBuf::from(dir).join("vcpufreq"))
            })
            .or_else(|| {
                std::env::var_os("HOME").map(|dir| PathBuf::from(dir).join(".cache/vcpufreq"))
            })
            .context("no cache folder: set HOME, XDG_CACHE_HOME or VCPUFREQ_CACHE")?;
        fs::create_dir_all(&dir)
            .with_context(|| format!("cannot create the cache folder {}", dir.display()))?;
        let dir = dir.canonicalize()?;
        Ok(Self { dir })
    }

    /// One in a test's folder.
    #[cfg(test)]
    pub fn at(dir: &Path) -> Self {
        Self {
            dir: dir.to_path_buf(),
        }
    }

    /// The folder itself.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The entry `name` made of `key`, if it is there.
    pub fn found(&self, name: &str, key: &str) -> Option<PathBuf> {
        let path = self.dir.join(format!("{name}-{key}"));
        path.exists().then(|| used(path))
    }

    /// The entry `name` made of `key`; `build` fills a fresh directory when
    /// it isn't there yet.
    pub fn entry(
        &self,
        name: &str,
        key: &str,
        build: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        if let Some(path) = self.found(name, key) {
            return Ok(path);
        }
        let _lock = self.lock(name)?;
        if let Some(path) = self.found(name, key) {
            return Ok(path);
        }
        let path = self.dir.join(format!("{name}-{key}"));
        self.prune(name)?;
        let fresh = self.dir.join(format!("{name}-{key}.partial"));
        // What an interrupted run left, whatever its key. No other process fills it while the lock
        // is held.
        remove_tree(&fresh)?;
        fs::create_dir(&fresh).with_context(|| format!("cannot create {}", fresh.display()))?;
        if let Err(error) = build(&fresh) {
            // What failed is removed at once; a failure to remove it is the
            // lesser news, and the next run tries again.
            let _ = remove_tree(&fresh);
            return Err(error);
        }
        fs::rename(&fresh, &path)
            .with_context(|| format!("cannot put {} in its place", path.display()))?;
        Ok(path)
    }

    /// A folder `name` for `key` that other programs fill and keep in order;
    /// made when it isn't there.
    pub fn folder(&self, name: &str, key: &str) -> Result<PathBuf> {
        let path = self.dir.join(format!("{name}-{key}"));
        if !path.exists() {
            self.prune(name)?;
            fs::create_dir_all(&path)
                .with_context(|| format!("cannot create {}", path.display()))?;
        }
        Ok(used(path))
    }

    /// Removes the folders of runs that were broken off, or failed, long
    /// ago.
    pub fn prune_runs(&self) -> Result<()> {
        // The process, and a number where one process has several.
        let is_run = |name: &str| name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'-'));
        remove_unused(&self.dir.join("runs"), KEEP_RUNS, is_run)
    }

    /// Removes what an interrupted run has left of `name`, and what wasn't
    /// used for long. The caller holds the lock.
    fn prune(&self, name: &str) -> Result<()> {
        remove_unused(&self.dir, Duration::ZERO, |file| {
            file.strip_suffix(".partial")
                .is_some_and(|file| is_entry(file, name))
        })?;
        remove_unused(&self.dir, KEEP, |file| is_entry(file, name))
    }

    /// Takes the lock `name`, for as long as the result lives. The kernel
    /// drops it with the process.
    pub fn lock(&self, name: &str) -> Result<Flock<File>> {
        let path = self.dir.join(format!("{name}.lock"));
        let file =
            File::create(&path).with_context(|| format!("cannot open {}", path.display()))?;
        Flock::lock(file, FlockArg::LockExclusiveNonblock)
            .or_else(|(file, _)| {
                above(|| eprintln!("waiting for another run that prepares '{name}'"));
                Flock::lock(file, FlockArg::LockExclusive)
            })
            .map_err(|(_, error)| error)
            .with_context(|| format!("cannot lock {}", path.display()))
    }

    /// Fails with one line when fewer than `needed_mib` are free.
    pub fn require_free(&self, needed_mib: u64) -> Result<()> {
        let free = free_mib(&self.dir)?;
        if free < needed_mib {
            bail!(
                "too little disk space in {}: {free} MiB free, {needed_mib} MiB needed; \
                 free some, or set VCPUFREQ_CACHE to a folder on a larger disk",
                self.dir.display()
            );
        }
        Ok(())
    }
}

/// Whether a file name is `name` and a key: the folder may be the user's, and
/// hold other things.
fn is_entry(file: &str, name: &str) -> bool {
    file.strip_prefix(name)
        .and_then(|rest| rest.strip_prefix('-'))
        .is_some_and(|key| {
            key.len() == 16
                && key
                    .bytes()
                    .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        })
}

/// Notes that an entry is in use, as its modification time.
fn used(path: PathBuf) -> PathBuf {
    // When it can't be noted, the entry is made anew some day.
    let _ = File::open(&path).and_then(|dir| dir.set_modified(SystemTime::now()));
    path
}

/// Removes the folders in `dir` whose names are `wanted` and that weren't
/// used for `time`.
fn remove_unused(dir: &Path, time: Duration, wanted: impl Fn(&str) -> bool) -> Result<()> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Ok(());
    };
    for entry in entries {
        let entry = entry?;
        let named = entry.file_name().to_str().is_some_and(&wanted);
        if named && is_unused(&entry, time) {
            remove_tree(&entry.path())?;
        }
    }
    Ok(())
}

fn is_unused(entry: &fs::DirEntry, time: Duration) -> bool {
    // A time in the future, or one that can't be read, counts as now.
    let age = entry
        .metadata()
        .and_then(|found| found.modified())
        .ok()
        .and_then(|then| then.elapsed().ok())
        .unwrap_or_default();
    age >= time
}

/// Removes a tree; one that isn't there is fine.
pub fn remove_tree(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        // A Debian tree has folders of users in this user's range.
        Err(error) if error.kind() == ErrorKind::PermissionDenied && !namespace::is_root() => {
            remove_as_all_users(path)
        }
        Err(error) => Err(error),
    }
    .with_context(|| format!("cannot remove {}", path.display()))
}

fn remove_as_all_users(path: &Path) -> std::io::Result<()> {
    let status = namespace::command(Users::All)
        .args(["rm", "-rf", "--one-file-system", "--"])
        .arg(path)
        .status()?;
    if status.success() {
        Ok(())
    } else {
        Err(ErrorKind::PermissionDenied.into())
    }
}

#[expect(unsafe_code, reason = "statvfs is C")]
fn free_mib(path: &Path) -> Result<u64> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let mut stat = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `path` is a C string and `stat` has the size that the call fills.
    let result = unsafe { libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) };
    if result != 0 {
        return Err(std::io::Error::last_os_error()).context("cannot ask for the free disk space");
    }
    // SAFETY: statvfs succeeded and has filled it.
    let stat = unsafe { stat.assume_init() };
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize) >> 20)
}

#[cfg(test)]
mod tests {
    //! Promises: a key tells parts apart; an entry is built once, whole or
    //! not at all; what an interrupted run left is not taken for an entry.
    use super::*;

    #[test]
    fn key_depends_on_where_parts_end() {
        assert_ne!(key([&b"ab"[..], b"c"]), key([&b"a"[..], b"bc"]));
        assert_eq!(key([&b"ab"[..]]).len(), 16);
    }

    #[test]
    fn entry_is_built_once() {
        let dir = tempdir("once");
        let cache = Cache::at(&dir);
        let first = cache
            .entry("x", "k", |to| Ok(fs::write(to.join("f"), "1")?))
            .unwrap();
        let second = cache.entry("x", "k", |_| panic!("built twice")).unwrap();
        assert_eq!(first, second);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn failed_build_leaves_nothing() {
        let dir = tempdir("failed");
        let cache = Cache::at(&dir);
        let result = cache.entry("x", "k", |to| {
            fs::write(to.join("half"), "")?;
            bail!("broken off")
        });
        assert!(result.is_err());
        let left: Vec<_> = fs::read_dir(&dir)
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(left, ["x.lock"]);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn interrupted_build_is_started_afresh() {
        let dir = tempdir("interrupted");
        // A version is a key, too.
        for key in ["0123456789abcdef", "0.20.2"] {
            let left = dir.join(format!("x-{key}.partial"));
            fs::create_dir(&left).unwrap();
            fs::write(left.join("stale"), "").unwrap();
            let path = Cache::at(&dir).entry("x", key, |to| {
                assert_eq!(fs::read_dir(to)?.count(), 0);
                Ok(())
            });
            assert!(path.unwrap().exists());
        }
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn unused_is_removed_and_nothing_else() {
        let dir = tempdir("unused");
        let old = SystemTime::now() - KEEP - Duration::from_secs(60);
        let key = "0123456789abcdef";
        let gone = [format!("x-{key}"), format!("x-{key}.partial")];
        let kept = ["x-notes".into(), format!("x-y-{key}"), format!("y-{key}")];
        for name in gone.iter().chain(&kept) {
            fs::create_dir(dir.join(name)).unwrap();
            File::open(dir.join(name))
                .unwrap()
                .set_modified(old)
                .unwrap();
        }
        fs::create_dir(dir.join("x-00000000000000aa")).unwrap();
        let made = Cache::at(&dir)
            .entry("x", "00000000000000bb", |_| Ok(()))
            .unwrap();
        assert!(made.exists() && dir.join("x-00000000000000aa").exists());
        assert!(kept.iter().all(|name| dir.join(name).exists()));
        assert!(!gone.iter().any(|name| dir.join(name).exists()));
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn used_entry_is_not_old() {
        let dir = tempdir("used");
        let path = dir.join("x-0123456789abcdef");
        fs::create_dir(&path).unwrap();
        let old = SystemTime::now() - KEEP - Duration::from_secs(60);
        File::open(&path).unwrap().set_modified(old).unwrap();
        let cache = Cache::at(&dir);
        cache
            .entry("x", "0123456789abcdef", |_| panic!("built again"))
            .unwrap();
        cache.entry("x", "00000000000000bb", |_| Ok(())).unwrap();
        assert!(path.exists());
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn old_runs_are_removed() {
        let dir = tempdir("runs");
        for name in ["runs/1", "runs/1-0", "runs/2", "runs/mine"] {
            fs::create_dir_all(dir.join(name)).unwrap();
        }
        let old = SystemTime::now() - KEEP_RUNS;
        for name in ["runs/1", "runs/1-0", "runs/mine"] {
            File::open(dir.join(name))
                .unwrap()
                .set_modified(old)
                .unwrap();
        }
        Cache::at(&dir).prune_runs().unwrap();
        assert!(!dir.join("runs/1").exists() && !dir.join("runs/1-0").exists());
        assert!(dir.join("runs/2").exists() && dir.join("runs/mine").exists());
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn too_little_disk_is_one_clear_line() {
        let dir = tempdir("disk");
        let error = Cache::at(&dir)
            .require_free(u64::MAX)
            .unwrap_err()
            .to_string();
        assert!(error.contains("free some"), "{error}");
        assert_eq!(error.lines().count(), 1);
        fs::remove_dir_all(dir).unwrap();
    }

    fn tempdir(name: &str) -> PathBuf {
        let dir =
            std::env::temp_dir().join(format!("vcpufreq-cache-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        dir
    }
}
