// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One service for a host: a file with its process, which the kernel unlocks however that ends.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, bail};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::Pid;

/// The file.
const PATH: &str = "/run/vcpufreq-scx";
/// For its owner alone.
const MODE: u32 = 0o600;
/// A service has it for long; `status`, `stop` and `cleanup` for a moment: so many tries are a second.
const TRIES: u32 = 50;
const BETWEEN: Duration = Duration::from_millis(20);

/// The file, locked. Dropping it removes it.
pub struct Lock {
    path: PathBuf,
    _file: Flock<File>,
}

impl Lock {
    /// Takes it: for a service whose process is `owner`; without an owner for a clean-up, which keeps
    /// services from their start.
    ///
    /// # Errors
    /// When a service runs or is starting; `EACCES` without root, or another errno of open(2),
    /// flock(2) or write(2). It isn't held then.
    pub fn take(owner: Option<u32>) -> anyhow::Result<Self> {
        Self::take_at(Path::new(PATH), owner, || sleep(BETWEEN))
    }

    /// The same, with `pause` between tries.
    fn take_at(path: &Path, owner: Option<u32>, mut pause: impl FnMut()) -> anyhow::Result<Self> {
        let failed = || format!("can't take {}; run it as root", path.display());
        loop {
            let mut options = OpenOptions::new();
            let options = options.read(true).write(true).create(true).truncate(false);
            // A lock takes no right to write: another user could hold it up.
            let file = options.mode(MODE).open(path).with_context(failed)?;
            let mode = Permissions::from_mode(MODE);
            file.set_permissions(mode).with_context(failed)?;
            let mut file = match locked(file, &mut pause) {
                Ok(file) => file,
                Err((mut file, Errno::EWOULDBLOCK)) => match pid_in(&mut file) {
                    Some(pid) => bail!("a vcpufreq scx service runs already, process {pid}"),
                    None => bail!("another vcpufreq scx service is starting"),
                },
                Err((_, error)) => return Err(error).with_context(failed),
            };
            // The one before has removed what this has opened.
            let still = fs::metadata(path).map(|there| there.ino()).ok();
            if still != Some(file.metadata().with_context(failed)?.ino()) {
                continue;
            }
            file.set_len(0).with_context(failed)?;
            if let Some(owner) = owner {
                write!(&mut *file, "{owner}").with_context(failed)?;
            }
            return Ok(Self {
                path: path.to_owned(),
                _file: file,
            });
        }
    }

    /// Whether the file is there: locked, or left by one that was killed.
    pub fn exists() -> bool {
        Path::new(PATH).exists()
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The process that has it; `None` when no service runs.
    ///
    /// # Errors
    /// `EACCES` for another user than root, or another errno of open(2) or flock(2).
    pub fn owner() -> anyhow::Result<Option<Pid>> {
        Self::owner_at(Path::new(PATH))
    }

    fn owner_at(path: &Path) -> anyhow::Result<Option<Pid>> {
        let file = match File::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            file => file.with_context(|| format!("can't read {}", path.display()))?,
        };
        match Flock::lock(file, FlockArg::LockSharedNonblock) {
            // Of one that was killed.
            Ok(_) => Ok(None),
            Err((mut file, Errno::EWOULDBLOCK)) => Ok(pid_in(&mut file)),
            Err((_, error)) => Err(error).with_context(|| format!("can't lock {}", path.display())),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Before it is unlocked.
        let _ = fs::remove_file(&self.path);
    }
}

/// `file` with its lock, once no other has that.
fn locked(mut file: File, pause: &mut impl FnMut()) -> Result<Flock<File>, (File, Errno)> {
    for _ in 1..TRIES {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Err((unlocked, Errno::EWOULDBLOCK)) => file = unlocked,
            done => return done,
        }
        pause();
    }
    Flock::lock(file, FlockArg::LockExclusiveNonblock)
}

fn pid_in(file: &mut File) -> Option<Pid> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(32).read_to_string(&mut text).ok()?;
    let pid = text.trim().parse().ok()?;
    Some(Pid::from_raw(pid))
}

#[cfg(test)]
mod tests {
    //! Promises: the owner is known as long as it has the lock, and no longer. A look at it keeps
    //! no service from its start, and a clean-up is no owner.
    use super::*;

    #[test]
    fn one_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        assert_eq!(Lock::owner_at(&path).unwrap(), None);
        let own = std::process::id();
        let lock = Lock::take_at(&path, Some(own), || ()).unwrap();
        let owner = Lock::owner_at(&path).unwrap().unwrap();
        assert_eq!(u32::try_from(owner.as_raw()).unwrap(), own);
        let why = Lock::take_at(&path, Some(1), || ())
            .err()
            .unwrap()
            .to_string();
        assert!(why.contains(&format!("process {own}")), "{why}");
        drop(lock);
        assert_eq!(Lock::owner_at(&path).unwrap(), None);
        // What a killed one leaves is no obstacle.
        fs::write(&path, "1").unwrap();
        assert_eq!(Lock::owner_at(&path).unwrap(), None);
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        let lock = Lock::take_at(&path, Some(own), || ()).unwrap();
        let mode = fs::metadata(&path).unwrap().mode();
        assert_eq!(mode & 0o777, MODE, "another user could lock it");
        drop(lock);
    }

    #[test]
    fn a_look_at_the_owner_does_not_keep_a_service_from_its_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let file = File::create(&path).unwrap();
        let look = Flock::lock(file, FlockArg::LockSharedNonblock).unwrap();
        let mut looks = Some(look);
        // What another test starts has the look's file open, too, until it is another program.
        let end_look = || {
            drop(looks.take());
            let file = File::open(&path).unwrap();
            drop(Flock::lock(file, FlockArg::LockExclusive).unwrap());
        };
        let lock = Lock::take_at(&path, Some(1), end_look).unwrap();
        assert!(looks.is_none());
        assert!(Lock::owner_at(&path).unwrap().is_some());
        drop(lock);
    }

    #[test]
    fn a_clean_up_is_no_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        fs::write(&path, std::process::id().to_string()).unwrap();
        let lock = Lock::take_at(&path, None, || ()).unwrap();
        assert_eq!(Lock::owner_at(&path).unwrap(), None, "stop would end it");
        assert!(Lock::take_at(&path, Some(1), || ()).is_err());
        drop(lock);
    }
}
