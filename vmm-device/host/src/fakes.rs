// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A host that is a directory, for tests.

#![forbid(unsafe_code)]

mod fake_host;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::{fs, io};

pub use fake_host::FakeHost;

use crate::CgroupTree;

/// A cgroup tree in an ordinary directory: making a group makes its control files too. Writing to
/// them moves no process and switches nothing.
#[derive(Debug, Default)]
pub struct DirTree {
    busy: Mutex<Vec<PathBuf>>,
}

impl DirTree {
    /// What a new group's control files hold.
    pub const FILES: [(&str, &str); 10] = [
        ("cgroup.type", "domain\n"),
        ("cgroup.controllers", "cpu\n"),
        ("cgroup.subtree_control", "\n"),
        ("cgroup.events", "populated 0\nfrozen 0\n"),
        ("cgroup.procs", ""),
        ("cgroup.threads", ""),
        ("cgroup.pressure", "1\n"),
        ("cpu.stat", "usage_usec 0\nuser_usec 0\n"),
        ("cpu.uclamp.min", "0.00\n"),
        ("cpu.uclamp.max", "max\n"),
    ];

    /// From now on, groups can't be made or removed at `dirs`.
    pub fn set_busy(&self, dirs: Vec<PathBuf>) {
        *self.busy() = dirs;
    }

    fn busy(&self) -> MutexGuard<'_, Vec<PathBuf>> {
        self.busy.lock().expect("no test has panicked")
    }

    fn check(&self, dir: &Path) -> io::Result<()> {
        if self.busy().iter().any(|busy| busy == dir) {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        Ok(())
    }
}

impl CgroupTree for DirTree {
    fn make(&self, dir: &Path) -> io::Result<()> {
        self.check(dir)?;
        fs::create_dir(dir)?;
        for (name, text) in Self::FILES {
            fs::write(dir.join(name), text)?;
        }
        Ok(())
    }

    fn remove(&self, dir: &Path) -> io::Result<()> {
        self.check(dir)?;
        for (name, _) in Self::FILES {
            fs::remove_file(dir.join(name))?;
        }
        fs::remove_dir(dir)
    }
}
