// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is changed on the host while it is measured: governors that aren't schedutil, and by a
//! scenario the range that they move in, and whether an emulated host's speed follows frequency.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::machine::{BenchMachine, SCHEDUTIL};
use crate::scenario::{Hold, Scenario};
use crate::undo::{self, RT_RUNTIME};

/// Looks at a file for what was written to it, and the pause between two.
const LOOKS: u32 = 50;
const PAUSE: Duration = Duration::from_millis(10);

/// Changed files with what they held; dropping it puts that back.
#[derive(Debug, Default)]
pub struct FreqLimits(Vec<(PathBuf, String)>);

impl FreqLimits {
    /// Chooses schedutil where another governor is, and says so.
    pub fn governors(machine: &BenchMachine) -> Result<Self> {
        let mut held = Self::default();
        let mut said = Vec::new();
        for cluster in &machine.clusters {
            if cluster.governor != SCHEDUTIL {
                let path = cluster.cur_freq.with_file_name("scaling_governor");
                let policy = path.parent().unwrap_or(&path);
                // They are put back after the governor, which makes their files.
                for file in undo::settings_of(policy, &cluster.governor) {
                    let old = undo::keep(&file)?;
                    held.0.push((file, old));
                }
                held.set(path, SCHEDUTIL)?;
                let (policy, governor) = (cluster.policy(), &cluster.governor);
                said.push(format!("{policy} {governor} → {SCHEDUTIL}"));
            }
        }
        if !said.is_empty() {
            let said = said.join(", ");
            undo::say(&format!("governors, put back at the end: {said}"));
        }
        Ok(held)
    }

    /// Holds frequencies, and the limit on real-time threads, where the scenario wants them.
    pub fn frequencies(scenario: &Scenario, machine: &BenchMachine) -> Result<Self> {
        let mut held = Self::default();
        if scenario
            .beside
            .is_some_and(|steps| steps.contains("deadline="))
        {
            // Else the kernel refuses a SCHED_DEADLINE thread that is pinned.
            held.set(RT_RUNTIME.into(), "-1")?;
        }
        for cluster in &machine.clusters {
            let (file, khz) = match scenario.hold {
                Hold::No => continue,
                Hold::Min => ("scaling_max_freq", cluster.khz.0),
                Hold::Max => ("scaling_min_freq", cluster.khz.1),
            };
            let path = cluster.cur_freq.with_file_name(file);
            held.set(path.clone(), &khz.to_string())?;
            taken(&path, &khz.to_string()).with_context(|| {
                format!(
                    "{}: something else limits this policy, a thermal zone perhaps",
                    path.display()
                )
            })?;
        }
        Ok(held)
    }

    /// Switches the speed model on, if there is one and the scenario wants it.
    pub fn speed(scenario: &Scenario, machine: &BenchMachine) -> Result<Self> {
        let mut held = Self::default();
        if let Some(path) = machine.speed_switch.as_ref().filter(|_| scenario.speed) {
            held.set(path.clone(), "1")?;
        }
        Ok(held)
    }

    fn set(&mut self, path: PathBuf, value: &str) -> Result<()> {
        let old = undo::write(&path, value)?;
        self.0.push((path, old));
        Ok(())
    }
}

impl Drop for FreqLimits {
    fn drop(&mut self) {
        for (path, old) in self.0.drain(..).rev() {
            let back = match undo::put_back(&path) {
                Ok(true) => taken(&path, &old),
                back => back.map(drop),
            };
            if let Err(error) = back {
                let path = path.display();
                undo::say(&format!(
                    "{path} could not be set back ({error:#}); write {old} to it"
                ));
            }
        }
    }
}

/// Waits until a file reads as it was written. A work item (`cpufreq_notifier_min`) changes
/// cpufreq's limits; a reader that comes earlier would take the changed value for the one to
/// restore.
fn taken(path: &Path, value: &str) -> Result<()> {
    let mut read = || fs::read_to_string(path).unwrap_or_default();
    becomes(&mut read, value, PAUSE)
}

/// Reads until that is `value`, with pauses between.
fn becomes(read: &mut impl FnMut() -> String, value: &str, pause: Duration) -> Result<()> {
    for _ in 0..LOOKS {
        if read().trim() == value {
            return Ok(());
        }
        sleep(pause);
    }
    bail!("{value} was written, and it stays {}", read().trim())
}

#[cfg(test)]
mod tests {
    //! What was changed is put back, and has to have been taken.

    use super::*;
    use crate::measure_tests::machine;

    /// Whether a change can be recorded.
    fn is_root() -> bool {
        let root = nix::unistd::geteuid().is_root();
        if !root {
            println!("SKIP: a record below /run: takes root");
        }
        root
    }

    #[test]
    fn dropping_puts_back() {
        if !is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("scaling_min_freq");
        fs::write(&path, "600000\n").unwrap();
        let mut held = FreqLimits::default();
        held.set(path.clone(), "1800000").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "1800000");
        drop(held);
        assert_eq!(fs::read_to_string(&path).unwrap(), "600000");
    }

    #[test]
    fn schedutil_is_chosen_meanwhile() {
        if !is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("scaling_governor");
        fs::write(&path, "ondemand\n").unwrap();
        let mut machine = machine();
        machine.clusters[1].governor = "ondemand".to_owned();
        machine.clusters[1].cur_freq = dir.path().join("scaling_cur_freq");
        let held = FreqLimits::governors(&machine).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), SCHEDUTIL);
        drop(held);
        assert_eq!(fs::read_to_string(&path).unwrap(), "ondemand");
    }

    #[test]
    fn a_value_has_to_be_taken() {
        // The work item runs after the third look.
        let mut looks = 0;
        let mut read = || {
            looks += 1;
            if looks > 3 { "600000\n" } else { "1800000\n" }.to_owned()
        };
        becomes(&mut read, "600000", Duration::ZERO).unwrap();
        let error = becomes(&mut read, "1800000", Duration::ZERO).unwrap_err();
        assert_eq!(
            error.to_string(),
            "1800000 was written, and it stays 600000"
        );
        assert_eq!(looks, 4 + LOOKS + 1);
    }
}
