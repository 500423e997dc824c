// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A trace instance of one's own: what else is traced isn't in it, and goes on.

use std::fs::{self, File};

use anyhow::{Context, Result, ensure};

/// Where all instances are.
pub const INSTANCES: &str = "/sys/kernel/tracing/instances";

/// The instance; removing it switches its events off. Dropping it does so too, where
/// something else has failed.
#[derive(Debug)]
pub struct Instance {
    path: String,
}

impl Instance {
    /// An empty one that records nothing yet, on CLOCK_MONOTONIC, with that much room for each
    /// CPU. Removes one of this name that was left.
    pub fn create(name: &str, kib: u32) -> Result<Self> {
        let path = format!("{INSTANCES}/{name}");
        if fs::exists(&path)? {
            fs::remove_dir(&path).with_context(|| format!("removing {path}"))?;
        }
        fs::create_dir(&path).with_context(|| format!("making {path}; run as root"))?;
        let own = Self { path };
        own.set("tracing_on", 0)?;
        own.set("buffer_size_kb", kib)?;
        own.set("trace_clock", "mono")?;
        Ok(own)
    }

    /// Writes one of its files.
    fn set(&self, file: &str, value: impl ToString) -> Result<()> {
        let (path, value) = (format!("{}/{file}", self.path), value.to_string());
        fs::write(&path, &value).with_context(|| format!("writing '{value}' to {path}"))
    }

    /// Switches events on, which patches the kernel: work on every CPU.
    pub fn enable(&self, events: &[&str]) -> Result<()> {
        let mut events = events.iter();
        events.try_for_each(|event| self.set(&format!("events/{event}/enable"), 1))
    }

    /// Has each of this event followed by the functions that led to it.
    pub fn with_stack(&self, event: &str) -> Result<()> {
        self.set(&format!("events/{event}/trigger"), "stacktrace")
    }

    /// Records them from now on, into an empty buffer.
    pub fn start(&self) -> Result<()> {
        self.set("trace", "")?;
        self.set("tracing_on", 1)
    }

    /// Records no more.
    pub fn pause(&self) -> Result<()> {
        self.set("tracing_on", 0)
    }

    /// The same; an error when events are missing.
    pub fn stop(&self) -> Result<()> {
        self.pause()?;
        let lost = self.lost()?;
        ensure!(lost == 0, "{} lost {lost} events", self.path);
        Ok(())
    }

    /// How many events it has lost, since they came faster than its room allows.
    pub fn lost(&self) -> Result<u64> {
        let mut sum = 0;
        for cpu in fs::read_dir(format!("{}/per_cpu", self.path))? {
            let path = cpu?.path().join("stats");
            let stats = fs::read_to_string(&path)?;
            sum += lost(&stats).with_context(|| format!("{}: {stats}", path.display()))?;
        }
        Ok(sum)
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
        let path = format!("{}/trace", self.path);
        fs::read_to_string(&path).with_context(|| path.clone())
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

/// How many events a CPU's `stats` count as lost: `overrun: 0` and `dropped events: 0`, each on a
/// line.
pub fn lost(stats: &str) -> Option<u64> {
    let of = |name: &str| {
        let mut lines = stats.lines();
        lines.find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok())
    };
    Some(of("overrun:")? + of("dropped events:")?)
}

#[cfg(test)]
mod tests {
    //! Promise: a trace that lost events is known as such.
    use super::lost;

    #[test]
    fn lost_events_are_counted() {
        let stats = "entries: 9\noverrun: 3\ncommit overrun: 0\nbytes: 5\ndropped events: 1\n";
        assert_eq!(lost(stats), Some(4));
        assert_eq!(lost("entries: 9"), None);
    }
}
