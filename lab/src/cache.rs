// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is fetched or built once, kept outside the repository.
//!
//! An entry is a directory named after what it is made of. It is built under
//! a temporary name while an exclusive lock is held, and renamed into place:
//! a reader sees a whole entry or none, two runs at once build it once, and
//! an interrupted run leaves only a temporary directory that the next one
//! removes.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

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
    hash.finalize()
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect()
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

    /// The folder itself.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The entry `name` made of `key`; `build` fills a fresh directory when
    /// it isn't there yet.
    pub fn entry(
        &self,
        name: &str,
        key: &str,
        build: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<PathBuf> {
        let path = self.dir.join(format!("{name}-{key}"));
        if path.exists() {
            return Ok(path);
        }
        let _lock = self.lock(name)?;
        if path.exists() {
            return Ok(path);
        }
        let fresh = self.dir.join(format!("{name}-{key}.partial"));
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

    /// Takes the lock `name`, for as long as the result lives. The kernel
    /// drops it with the process.
    pub fn lock(&self, name: &str) -> Result<File> {
        let path = self.dir.join(format!("{name}.lock"));
        let file =
            File::create(&path).with_context(|| format!("cannot open {}", path.display()))?;
        if file.try_lock().is_err() {
            eprintln!("waiting for another run that prepares '{name}'");
            file.lock()
                .with_context(|| format!("cannot lock {}", path.display()))?;
        }
        Ok(file)
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

/// Removes a tree; one that isn't there is fine.
pub fn remove_tree(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).with_context(|| format!("cannot remove {}", path.display())),
    }
}

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

    fn cache(dir: &Path) -> Cache {
        Cache {
            dir: dir.to_path_buf(),
        }
    }

    #[test]
    fn key_depends_on_where_parts_end() {
        assert_ne!(key([&b"ab"[..], b"c"]), key([&b"a"[..], b"bc"]));
        assert_eq!(key([&b"ab"[..]]).len(), 16);
    }

    #[test]
    fn entry_is_built_once() {
        let dir = tempdir("once");
        let cache = cache(&dir);
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
        let cache = cache(&dir);
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
        fs::create_dir(dir.join("x-k.partial")).unwrap();
        fs::write(dir.join("x-k.partial/stale"), "").unwrap();
        let path = cache(&dir).entry("x", "k", |to| {
            assert_eq!(fs::read_dir(to)?.count(), 0);
            Ok(())
        });
        assert!(path.unwrap().exists());
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn too_little_disk_is_one_clear_line() {
        let dir = tempdir("disk");
        let error = cache(&dir).require_free(u64::MAX).unwrap_err().to_string();
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
