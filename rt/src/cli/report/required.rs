// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a report needs of a shell before its first test.

use anyhow::ensure;

use std::net::IpAddr;

use super::shell::Shell;
use crate::measure::TestLoad;

/// What the tests do where a shell runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequiredTests<'a> {
    /// They measure there.
    pub(super) measured: bool,
    /// They load it so.
    pub(super) loads: &'a [TestLoad],
    /// Where the flood goes.
    pub(super) net_to: Option<IpAddr>,
}

/// What a script needs that isn't part of every system.
fn programs(tests: &RequiredTests) -> Vec<&'static str> {
    let mut programs = Vec::new();
    if tests.measured {
        programs.push("cyclictest");
    }
    for load in tests.loads {
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
    pub(super) fn require(&self, tests: &RequiredTests) -> anyhow::Result<()> {
        let programs = programs(tests).join(" ");
        let script =
            format!("for p in {programs}; do command -v $p > /dev/null || echo $p; done\n");
        let missing = self.run(&script)?;
        let missing: Vec<&str> = missing.split_whitespace().collect();
        ensure!(
            missing.is_empty(),
            "there is no {}; install rt-tests, stress-ng and iputils-ping, or leave out loads",
            missing.join(", ")
        );
        let Some(address) = tests
            .net_to
            .filter(|_| tests.loads.contains(&TestLoad::Net))
        else {
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
