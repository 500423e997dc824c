// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A file of a cpufreq policy that is read again and again.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use vcpufreq_host::{CPUS, HostRoot};

/// Longer than any governor's name (CPUFREQ_NAME_LEN, 16) or frequency with its line feed.
const TEXT_LEN: usize = 32;

/// The file, open from the first read on.
#[derive(Debug)]
pub struct PolicyAttribute {
    path: PathBuf,
    file: Option<File>,
}

impl PolicyAttribute {
    /// File `name` of policy number `policy`.
    pub fn new(host: &HostRoot, policy: u32, name: &str) -> Self {
        Self {
            path: host.path(format!("{CPUS}/cpufreq/policy{policy}/{name}")),
            file: None,
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it has now, without blanks around it.
    ///
    /// # Errors
    /// As open(2) and pread(2), such as for a policy that has no CPU online.
    pub fn text(&mut self) -> io::Result<String> {
        let mut text = [0; TEXT_LEN];
        let file = match &self.file {
            Some(file) => file,
            None => self.file.insert(File::open(&self.path)?),
        };
        let read = file.read_at(&mut text, 0);
        if read.is_err() {
            // The file of a driver that has gone stays unreadable: the next look
            // opens the one of its successor.
            self.file = None;
        }
        let text = String::from_utf8_lossy(&text[..read?]);
        Ok(text.trim().to_owned())
    }
}
