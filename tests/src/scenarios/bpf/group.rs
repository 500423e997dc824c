// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A cgroup of the scenario's own, with the calling thread in it.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::harness::sysfs;

const TREE: &str = "/sys/fs/cgroup";

/// Dropping it moves the thread back and removes the group.
#[derive(Debug)]
pub struct Group {
    dir: PathBuf,
    tid: nix::unistd::Pid,
    /// Its `cpu.uclamp.min`.
    pub min: File,
    /// Its `cpu.uclamp.max`.
    pub max: File,
}

impl Group {
    /// Makes it and moves the calling thread there.
    pub fn with_current(name: &str) -> Result<Self> {
        let dir = PathBuf::from(TREE).join(name);
        sysfs::write(format!("{TREE}/cgroup.subtree_control"), "+cpu")?;
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

impl Drop for Group {
    fn drop(&mut self) {
        // A group that can't be removed shows when the next one is made.
        let _ = fs::write(format!("{TREE}/cgroup.threads"), self.tid.to_string());
        let _ = fs::remove_dir(&self.dir);
    }
}

/// Writes a utilization as a clamp's file has it: percent, with two digits.
pub fn write_util(file: &File, util: u32) -> Result<()> {
    let percent = (util * 10_000 + 512) / 1024;
    let text = format!("{}.{:02}", percent / 100, percent % 100);
    Ok(file.write_all_at(text.as_bytes(), 0)?)
}
