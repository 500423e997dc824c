// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A trace instance that doesn't outlive its program: a signal removes it, and after SIGKILL the next
//! bench or `vcpufreq cleanup` does.

use std::path::Path;

use anyhow::Result;

use crate::tracefs::{INSTANCES, Instance};
use crate::undo::{self, INSTANCE};

/// The instance; dropping it removes it.
#[derive(Debug)]
pub struct RecordedInstance {
    instance: Instance,
    // Dropped behind it.
    _removed: Removed,
}

/// Notes, when it is dropped, that the instance is gone.
#[derive(Debug)]
struct Removed;

impl Drop for Removed {
    fn drop(&mut self) {
        // A record that stays names a folder that the next bench finds gone.
        let _ = undo::removed();
    }
}

impl RecordedInstance {
    /// Makes it, with that much room for each CPU.
    ///
    /// # Errors
    /// As [`Instance::create`]; when it can't be recorded.
    pub fn create(kib: u32) -> Result<Self> {
        let name = format!("{INSTANCE}{}", std::process::id());
        // Dropped behind the instance, also when something fails.
        let removed = Removed;
        let folder = Path::new(INSTANCES).join(&name);
        let instance = undo::make(&folder, || Instance::create(&name, kib))?;
        Ok(Self {
            instance,
            _removed: removed,
        })
    }

    /// The same for a program that is no bench, whose signals remove it from now on. Removes what
    /// killed ones left. To be called before other threads are started.
    ///
    /// # Errors
    /// The same; the kernel's.
    pub fn alone(kib: u32) -> Result<Self> {
        undo::begin_beside_others()?;
        Self::create(kib)
    }

    /// What it is made of.
    #[must_use]
    pub fn instance(&self) -> &Instance {
        &self.instance
    }
}

/// Whether the host's kernel has a trace event, such as `power/cpu_frequency`.
#[must_use]
pub fn has_event(event: &str) -> bool {
    let events = Path::new(INSTANCES).with_file_name("events");
    events.join(event).join("enable").exists()
}
