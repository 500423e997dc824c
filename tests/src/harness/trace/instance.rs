// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A trace instance of a scenario's own: what else is traced isn't in it.

use std::fs::{self, File};

use anyhow::{Context, Result, ensure};

use crate::harness::sysfs;
use crate::harness::trace::lost;

/// Where all instances are.
pub const INSTANCES: &str = "/sys/kernel/tracing/instances";

/// The instance; removing it switches its events off. Dropping it does so too, where
/// something else has failed.
#[derive(Debug)]
pub struct Instance {
    path: String,
}

impl Instance {
    /// An empty one that records nothing yet, with that much room for each CPU. Removes one that a
    /// failed scenario left.
    pub fn create(name: &str, kib: u32) -> Result<Self> {
        let path = format!("{INSTANCES}/{name}");
        if fs::exists(&path)? {
            fs::remove_dir(&path).with_context(|| path.clone())?;
        }
        fs::create_dir(&path).with_context(|| path.clone())?;
        let own = Self { path };
        own.set("tracing_on", 0)?;
        own.set("buffer_size_kb", kib)?;
        Ok(own)
    }

    /// Writes one of its files.
    pub fn set(&self, file: &str, value: impl ToString) -> Result<()> {
        sysfs::write(format!("{}/{file}", self.path), value)
    }

    /// Switches events on, which patches the kernel: work on every CPU.
    pub fn enable(&self, events: &[&str]) -> Result<()> {
        let mut events = events.iter();
        events.try_for_each(|event| self.set(&format!("events/{event}/enable"), 1))
    }

    /// Records them from now on.
    pub fn start(&self) -> Result<()> {
        self.set("tracing_on", 1)
    }

    /// Records no more; an error when events are missing.
    pub fn stop(&self) -> Result<()> {
        self.set("tracing_on", 0)?;
        for cpu in fs::read_dir(format!("{}/per_cpu", self.path))? {
            let stats = sysfs::text(cpu?.path().join("stats"))?;
            ensure!(
                lost(&stats) == Some(0),
                "{} lost events: {stats}",
                self.path
            );
        }
        Ok(())
    }

    /// Removes it.
    pub fn remove(mut self) -> Result<()> {
        let path = std::mem::take(&mut self.path);
        fs::remove_dir(&path).context(path)
    }

    /// What it has recorded.
    pub fn open(&self) -> Result<File> {
        let path = format!("{}/trace", self.path);
        File::open(&path).with_context(|| path.clone())
    }

    /// The same as text.
    pub fn text(&self) -> Result<String> {
        sysfs::text(format!("{}/trace", self.path))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        if self.path.is_empty() {
            return;
        }
        if let Err(error) = fs::remove_dir(&self.path) {
            eprintln!("{} can't be removed: {error}", self.path);
        }
    }
}
