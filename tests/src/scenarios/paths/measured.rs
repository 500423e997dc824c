// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest whose accesses are measured.

use anyhow::{Context, Result};

use crate::harness::plan::{Plan, first_cpus, registers, set_governor};
use crate::harness::policy::Policy;
use crate::harness::vm::{Setup, Vm};

/// A guest whose last vCPU makes the accesses.
pub struct Measured {
    /// The guest.
    pub vm: Vm,
    /// How its accesses go.
    pub path: &'static str,
    /// The vCPU.
    pub vcpu: usize,
    /// Where the vCPU's registers are.
    pub page: u64,
    /// What it asks for in turn.
    pub opps: String,
}

impl Measured {
    /// Boots it by a path.
    pub fn boot(plan: &Plan, policies: &[Policy], path: &'static str) -> Result<Self> {
        let setup = Setup {
            silent: true,
            ..Setup::mirroring(&first_cpus(policies))
        };
        let setup = setup.with(&["--path", path, "--rate-limit", "0"]);
        let mut vm = plan.guest(&setup)?;
        for vcpu in 0..policies.len() {
            set_governor(&mut vm, vcpu, "userspace")?;
        }
        let vcpu = policies.len() - 1;
        let opps = &policies.last().context("no policy")?.opps;
        let opps: Vec<_> = opps.iter().map(u32::to_string).collect();
        let page = registers(&mut vm)? + 0x1000 * u64::try_from(vcpu)?;
        Ok(Self {
            vm,
            path,
            vcpu,
            page,
            opps: opps.join(" "),
        })
    }
}
