// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A cgroup of the scenario's own, with the calling thread in it.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::harness::sysfs;

const TREE: &str = "/sys/fs/cgroup";

/// Dropping it moves the thread back and removes the group.
#[derive(Debug)]
pub struct ClampGroup {
    dir: PathBuf,
    tid: nix::unistd::Pid,
    /// Its `cpu.uclamp.min`.
    pub min: File,
    /// Its `cpu.uclamp.max`.
    pub max: File,
}

impl ClampGroup {
    /// Makes it, in place of one that a killed process has left, and moves the calling thread
    /// there.
    pub fn with_current(name: &str) -> Result<Self> {
        Self::below(Path::new(TREE), name)
    }

    /// Makes one in it, which the calling thread moves to.
    pub fn child(&self, name: &str) -> Result<Self> {
        Self::below(&self.dir, name)
    }

    fn below(parent: &Path, name: &str) -> Result<Self> {
        let dir = parent.join(name);
        sysfs::write(parent.join("cgroup.subtree_control"), "+cpu")?;
        // What is in use stays, and shows below.
        let _ = fs::remove_dir(&dir);
        fs::create_dir(&dir).with_context(|| dir.display().to_string())?;
        sysfs::write(dir.join("cgroup.type"), "threaded")?;
        let tid = nix::unistd::gettid();
        sysfs::write(dir.join("cgroup.threads"), tid)?;
        let open = |file: &str| {
            let path = dir.join(file);
            let opened = OpenOptions::new().write(true).open(&path);
            opened.with_context(|| path.display().to_string())
        };
        Ok(Self {
            min: open("cpu.uclamp.min")?,
            max: open("cpu.uclamp.max")?,
            dir,
            tid,
        })
    }
}

impl Drop for ClampGroup {
    fn drop(&mut self) {
        // A group that can't be removed shows when the next one is made.
        let _ = fs::write(format!("{TREE}/cgroup.threads"), self.tid.to_string());
        let _ = fs::remove_dir(&self.dir);
    }
}

/// Whether the kernel can clamp.
pub fn has_uclamp() -> bool {
    sysfs::text("/proc/sys/kernel/sched_util_clamp_min").is_ok()
}

/// Writes a utilization as a clamp's file has it: percent, with two digits.
pub fn write_util(file: &File, util: u32) -> Result<()> {
    let percent = (util * 10_000 + 512) / 1024;
    let text = format!("{}.{:02}", percent / 100, percent % 100);
    Ok(file.write_all_at(text.as_bytes(), 0)?)
}
