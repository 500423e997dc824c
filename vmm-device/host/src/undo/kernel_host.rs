// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The running host, or a directory tree that stands for it (for looking).

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use super::{
    host::{ReadHost, Reading, Unread, WriteHost},
    value,
};
use crate::{HostRoot, SchedAttr, Tid};
use nix::errno::Errno;

/// The longest text that is read, in bytes: procfs also shows what other users' processes made.
const LONGEST: u64 = 16 << 20;

/// The host below a root; `/` is the running one.
#[derive(Clone, Debug, Default)]
pub struct KernelHost(HostRoot);

impl KernelHost {
    /// The host below `root`.
    #[must_use]
    pub fn at(root: &Path) -> Self {
        Self(HostRoot::at(root))
    }

    /// The host below `root`; without one, the running one.
    #[must_use]
    pub fn at_or_running(root: Option<&Path>) -> Self {
        root.map_or_else(Self::default, Self::at)
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path(path)
    }
}

impl From<&HostRoot> for KernelHost {
    fn from(root: &HostRoot) -> Self {
        Self(root.clone())
    }
}

/// All of a text, which may not be longer than [`LONGEST`].
fn bounded(source: impl Read) -> io::Result<String> {
    let mut text = Vec::new();
    source.take(LONGEST + 1).read_to_end(&mut text)?;
    match text.len() as u64 > LONGEST {
        true => Err(io::ErrorKind::FileTooLarge.into()),
        false => Ok(String::from_utf8_lossy(&text).into_owned()),
    }
}

impl From<io::Error> for Unread {
    fn from(error: io::Error) -> Self {
        // procfs' error for a process that ends while its file is open.
        if error.raw_os_error() == Some(Errno::ESRCH as i32) {
            return Self::Missing;
        }
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Self::Missing,
            io::ErrorKind::PermissionDenied => Self::Denied,
            _ => Self::Refused,
        }
    }
}

impl ReadHost for KernelHost {
    fn read(&self, path: &str) -> Reading {
        let text = bounded(File::open(self.path(path))?)?;
        Ok(text.trim().to_owned())
    }

    fn bytes(&self, path: &str) -> Result<Vec<u8>, Unread> {
        Ok(fs::read(self.path(path))?)
    }

    fn list(&self, path: &str) -> Result<Vec<String>, Unread> {
        let mut names = Vec::new();
        for entry in fs::read_dir(self.path(path))? {
            names.extend(entry?.file_name().into_string().ok());
        }
        names.sort_by_key(|name| (name.parse::<u32>().unwrap_or(u32::MAX), name.clone()));
        Ok(names)
    }

    fn writable(&self, path: &str) -> bool {
        fs::metadata(self.path(path)).is_ok_and(|file| file.permissions().mode() & 0o222 != 0)
    }

    fn link_name(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.path(path)).ok()?;
        Some(target.file_name()?.to_str()?.to_owned())
    }

    fn root(&self) -> &HostRoot {
        &self.0
    }
}

impl WriteHost for KernelHost {
    fn as_look(&self) -> &dyn ReadHost {
        self
    }

    fn write(&self, path: &str, value: &str) -> io::Result<()> {
        let mut file = File::options()
            .write(true)
            // Of a regular file, as tests have them, the old text goes; the kernel's files take no notice.
            .truncate(true)
            .open(self.path(path))?;
        // One call: the kernel takes each as a whole value.
        match file.write(value.as_bytes())? {
            written if written == value.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    fn make_dir(&self, path: &str) -> io::Result<()> {
        fs::create_dir(self.path(path))
    }

    fn remove_dir(&self, path: &str) -> io::Result<()> {
        fs::remove_dir(self.path(path))
    }

    fn schedule(&self, pid: u32, policy: &str) -> io::Result<()> {
        let (policy, priority) = value::scheduling(policy).ok_or(io::ErrorKind::InvalidInput)?;
        let tid = i32::try_from(pid).ok().and_then(Tid::new);
        let tid = tid.ok_or(io::ErrorKind::InvalidInput)?;
        let attr = SchedAttr {
            policy,
            priority,
            nice: SchedAttr::nice_of(tid)?,
            ..SchedAttr::default()
        };
        attr.set(tid)
    }
}

#[cfg(test)]
mod tests {
    //! Promise: what is read has a bound.
    use super::*;

    #[test]
    fn what_is_read_is_bounded() {
        assert!(bounded(io::repeat(b'x').take(LONGEST)).is_ok());
        assert!(bounded(io::repeat(b'x')).is_err());
    }
}
