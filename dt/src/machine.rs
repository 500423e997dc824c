// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A machine after its facts were checked.

use crate::capacity;
use crate::checks;
use crate::error::FactsError;
use crate::facts::MachineFacts;

/// A machine whose facts were checked: what all nodes are made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    facts: MachineFacts,
    dmips_mhz: Vec<u32>,
    guest_capacities: Vec<u16>,
}

impl Machine {
    /// The facts as they were given.
    pub fn facts(&self) -> &MachineFacts {
        &self.facts
    }

    /// The same machine without the node of its registers, for a guest that
    /// finds them by other means.
    #[must_use]
    pub fn without_cpufreq(mut self) -> Self {
        self.facts.cpufreq = None;
        self
    }

    /// `capacity-dmips-mhz` of every CPU, in the order of the CPUs.
    pub fn capacity_dmips_mhz(&self) -> &[u32] {
        &self.dmips_mhz
    }

    /// The `cpu_capacity` that Linux in the guest will report for each CPU
    /// once its cpufreq driver is there.
    ///
    /// Equal to [`CpuFacts::capacity`](crate::CpuFacts::capacity) within 1 when one CPU has 1024;
    /// otherwise that times 1024 / the largest, rounded down, within 1.
    pub fn guest_capacities(&self) -> &[u16] {
        &self.guest_capacities
    }
}

impl TryFrom<MachineFacts> for Machine {
    type Error = FactsError;

    fn try_from(facts: MachineFacts) -> Result<Self, FactsError> {
        checks::check(&facts)?;
        let scaled = capacity::scale(&facts.cpus)?;
        Ok(Self {
            facts,
            dmips_mhz: scaled.dmips_mhz,
            guest_capacities: scaled.guest,
        })
    }
}
