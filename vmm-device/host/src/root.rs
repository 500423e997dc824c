// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where the host's files are, and how short ones are read.

#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The host's CPUs in sysfs, below a [`HostRoot`].
pub const CPUS: &str = "sys/devices/system/cpu";

/// Major and minor number of a kernel release, such as `6.12.48+deb13`.
#[must_use]
pub fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let major = numbers.next()?.parse().ok()?;
    let minor = numbers.next()?.parse().ok()?;
    Some((major, minor))
}

/// A directory tree that has the host's `/sys` and `/proc`: `/` on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostRoot(PathBuf);

impl HostRoot {
    /// A directory that stands for `/`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self(root.into())
    }

    /// The directory of all pCPUs.
    pub(crate) fn cpus(&self) -> PathBuf {
        self.0.join(CPUS)
    }

    /// The directory of the calling process in procfs.
    pub(crate) fn own_process(&self) -> PathBuf {
        self.0.join("proc/self")
    }

    /// `path` below the root; a leading slash is ignored.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The trimmed text of a file; `None` if it can't be read.
    pub fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let text = std::fs::read_to_string(self.path(path)).ok()?;
        Some(text.trim().to_owned())
    }

    /// The number or list in a file; `None` if it can't be read or is no such thing.
    pub fn number<T: FromStr>(&self, path: impl AsRef<Path>) -> Option<T> {
        self.text(path)?.parse().ok()
    }

    /// Major and minor number of the running kernel.
    pub(crate) fn kernel_version(&self) -> Option<(u32, u32)> {
        version_of(&self.text("proc/sys/kernel/osrelease")?)
    }

    /// A property of the device tree that is one number.
    pub(crate) fn cell(&self, path: impl AsRef<Path>) -> Option<u32> {
        let bytes = std::fs::read(self.path(path)).ok()?;
        Some(u32::from_be_bytes(bytes.try_into().ok()?))
    }

    /// The frequencies in a file of cpufreq, in its order.
    pub(crate) fn khz_list(&self, path: impl AsRef<Path>) -> Vec<u32> {
        let text = self.text(path).unwrap_or_default();
        text.split_whitespace()
            .filter_map(|khz| khz.parse().ok())
            .collect()
    }
}

impl Default for HostRoot {
    fn default() -> Self {
        Self(PathBuf::from("/"))
    }
}
