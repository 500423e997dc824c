// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a scenario changes on the host while it is measured: the range that
//! governors move in, and whether an emulated host's speed follows frequency.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

use super::machine::Machine;
use super::scenario::{Hold, Scenario};

/// Changed files with what they held; dropping it puts that back.
#[derive(Debug, Default)]
pub struct Held(Vec<(PathBuf, String)>);

impl Held {
    /// Holds frequencies where the scenario wants them.
    pub fn frequencies(scenario: &Scenario, machine: &Machine) -> Result<Self> {
        let mut held = Self::default();
        for cluster in &machine.clusters {
            let (file, khz) = match scenario.hold {
                Hold::No => continue,
                Hold::Min => ("scaling_max_freq", cluster.khz.0),
                Hold::Max => ("scaling_min_freq", cluster.khz.1),
            };
            held.set(cluster.cur_freq.with_file_name(file), &khz.to_string())?;
        }
        Ok(held)
    }

    /// Switches the speed model on, if there is one and the scenario wants it.
    pub fn speed(scenario: &Scenario, machine: &Machine) -> Result<Self> {
        let mut held = Self::default();
        if let Some(path) = machine.speed_switch.as_ref().filter(|_| scenario.speed) {
            held.set(path.clone(), "1")?;
        }
        Ok(held)
    }

    fn set(&mut self, path: PathBuf, value: &str) -> Result<()> {
        let failed = || format!("writing {value} to {}; run as root", path.display());
        let old = fs::read_to_string(&path).with_context(failed)?;
        fs::write(&path, value).with_context(failed)?;
        self.0.push((path, old.trim().to_owned()));
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for (path, old) in self.0.drain(..).rev() {
            if let Err(error) = fs::write(&path, &old) {
                eprintln!(
                    "vcpufreq: {} could not be set back ({error}); write {old} to it",
                    path.display()
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! What was changed is put back.

    use super::*;

    #[test]
    fn dropping_puts_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("scaling_min_freq");
        fs::write(&path, "600000\n").unwrap();
        let mut held = Held::default();
        held.set(path.clone(), "1800000").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "1800000");
        drop(held);
        assert_eq!(fs::read_to_string(&path).unwrap(), "600000");
    }
}
