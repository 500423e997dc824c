// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a report needs of a shell before its first test.

use anyhow::ensure;

use super::{args::ReportArgs, shell::Shell};
use crate::measure::TestLoad;

/// What a script needs that isn't part of every system.
fn programs(loads: &[TestLoad]) -> Vec<&'static str> {
    let mut programs = vec!["cyclictest"];
    for load in loads {
        programs.extend(match load {
            TestLoad::Idle => [].as_slice(),
            TestLoad::Stress => ["stress-ng"].as_slice(),
            TestLoad::Hackbench => ["hackbench", "setsid", "taskset"].as_slice(),
            TestLoad::Net => ["ping", "taskset"].as_slice(),
        });
    }
    programs
}

impl Shell {
    /// Whether the programs of the loads are there, and the flood's address answers.
    ///
    /// # Errors
    /// What is missing.
    pub(super) fn require(&self, args: &ReportArgs) -> anyhow::Result<()> {
        let programs = programs(&args.loads).join(" ");
        let script =
            format!("for p in {programs}; do command -v $p > /dev/null || echo $p; done\n");
        let missing = self.run(&script)?;
        let missing: Vec<&str> = missing.split_whitespace().collect();
        ensure!(
            missing.is_empty(),
            "there is no {}; install rt-tests, stress-ng and iputils-ping, or leave out loads",
            missing.join(", ")
        );
        let Some(address) = args.net_to.filter(|_| args.loads.contains(&TestLoad::Net)) else {
            return Ok(());
        };
        let script = format!("ping -q -c 1 -W 2 {address} > /dev/null 2>&1 || echo silent\n");
        ensure!(
            self.run(&script)?.is_empty(),
            "{address} does not answer; name an address that does with --net-to"
        );
        Ok(())
    }
}
