// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What every scenario of a run shares, and how most of them drive a guest.

use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::harness::policy::Policy;
use crate::harness::sysfs;
use crate::harness::vm::{Setup, Vm};

/// What every scenario of a run shares.
#[derive(Debug)]
pub struct Plan {
    /// The guest's cpufreq driver: a module of `/lab/modules`.
    pub driver: String,
    /// How the guest's accesses go, as `--path` takes it; the VMM chooses
    /// without.
    pub path: Option<String>,
}

impl Plan {
    /// vCPUs pinned to these pCPUs, mirroring them, by the plan's path.
    pub fn mirroring(&self, pcpus: &[u32]) -> Setup {
        self.by_path(Setup::mirroring(pcpus))
    }

    /// By the plan's path, if it has one.
    pub fn by_path(&self, setup: Setup) -> Setup {
        match &self.path {
            Some(path) => setup.with(&["--path", path]),
            None => setup,
        }
    }

    /// Boots a guest and loads its driver.
    pub fn guest(&self, setup: &Setup) -> Result<Vm> {
        let mut vm = Vm::boot(setup)?;
        self.load_driver(&mut vm)?;
        Ok(vm)
    }

    /// Loads the driver, and the governor that scenarios ask through.
    pub fn load_driver(&self, vm: &mut Vm) -> Result<()> {
        vm.ask("insmod cpufreq_userspace")?;
        vm.ask(format!("insmod {}", self.driver))?;
        Ok(())
    }
}

/// The first CPU of each policy: where a guest with one vCPU a policy runs.
pub fn first_cpus(policies: &[Policy]) -> Vec<u32> {
    policies.iter().map(Policy::cpu).collect()
}

/// The vCPU of such a guest that is on the last policy, and that.
pub fn last_of(policies: &[Policy]) -> Result<(usize, &Policy)> {
    policies.iter().enumerate().next_back().context("no policy")
}

/// Lets load tracking decay: PELT halves each 32 ms.
pub fn let_load_decay() {
    std::thread::sleep(Duration::from_millis(1000));
}

/// The guest's folder of the policy of a vCPU with a domain of its own.
pub fn guest_policy(vcpu: usize) -> String {
    format!("{}/policy{vcpu}", sysfs::CPUFREQ)
}

/// Sets a guest policy's governor.
pub fn set_governor(vm: &mut Vm, vcpu: usize, governor: &str) -> Result<()> {
    vm.ask(format!(
        "write {}/scaling_governor {governor}",
        guest_policy(vcpu)
    ))?;
    Ok(())
}

/// Asks for a frequency, through the guest's userspace governor.
pub fn ask_for(vm: &mut Vm, vcpu: usize, khz: u32) -> Result<()> {
    vm.ask(format!(
        "write {}/scaling_setspeed {khz}",
        guest_policy(vcpu)
    ))?;
    Ok(())
}

/// What the vCPU's register cur_perf reads, on that vCPU.
pub fn cur_perf(vm: &mut Vm, base: u64, vcpu: usize) -> Result<u32> {
    let offset = u64::try_from(vcpu)? * 0x1000;
    Ok(u32::try_from(
        vm.number(format!("peek {vcpu} {:#x}", base + offset))?,
    )?)
}

/// Where the guest finds the device.
pub fn registers(vm: &mut Vm) -> Result<u64> {
    let base = vm.ask("registers")?;
    Ok(u64::from_str_radix(base.trim_start_matches("0x"), 16)?)
}
