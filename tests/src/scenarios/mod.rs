// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The scenarios: each is a function from a settled host to a result, an
//! object with `held` and what was counted.

pub mod bench;
#[cfg(feature = "bpf")]
pub mod bpf;
pub mod device;
pub mod models;
pub mod paths;
pub mod rt;

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

pub(crate) use rt::command::succeeded as rt_command;

pub use crate::harness::frequency::let_ticks_pass;
pub use crate::harness::policy::Policy;

use crate::harness::vm::{Setup, Vm};
use crate::harness::{fair_server, sysfs, uclamp};

/// What every scenario of a run shares.
#[derive(Debug)]
pub struct Plan {
    /// The guest's cpufreq driver: a module of `/lab/modules`.
    pub driver: String,
    /// How the guest's accesses go, as `--path` takes it; the VMM chooses
    /// without.
    pub path: Option<String>,
}

/// Carries out a scenario by name.
pub fn run(name: &str, plan: &Plan) -> Result<Value> {
    match fair_server::scenario_without(name) {
        Some(name) => fair_server::without(|| scenario(name, plan)),
        None => scenario(name, plan),
    }
}

fn scenario(name: &str, plan: &Plan) -> Result<Value> {
    #[cfg(feature = "bpf")]
    if name == "fallbacks" {
        return paths::fallbacks::run(plan);
    }
    #[cfg(feature = "bpf")]
    if name == "fallbacks:reset" {
        return paths::fallbacks::reset(plan);
    }
    #[cfg(feature = "bpf")]
    if let Some(result) = bpf::run(name, plan) {
        return result;
    }
    match name {
        "boot" => device::basics::boot(plan),
        "governor" => device::basics::governor(plan),
        "capacity" => device::basics::capacity(plan),
        "opps-exact" => device::opps::exact(plan),
        "opps-floor" => device::opps::floor(plan),
        "no-dip" => device::dips::no_dip(plan),
        "dip-by-actuator" => device::dips::dip_by_actuator(plan),
        "repeat" => device::opps::repeat(plan),
        "thread-actuator" => device::thread_actuator::run(plan),
        "domain" => device::domain::run(plan),
        "domain:both" => device::domain::both(plan),
        "default-run" => device::default_run::run(plan),
        "hotplug" => device::hotplug::run(plan),
        "unpinned" => paths::unpinned::run(plan),
        "unpinned:rt" => paths::unpinned::beside_real_time(plan),
        "driver" => device::driver::run(plan),
        "restart" => device::basics::restart(plan),
        "doctor" => device::basics::doctor(plan),
        "flood" | "flood:worker" | "flood:uart" => device::flood::run(plan, name),
        "memory" => device::memory::run(plan),
        "no-exit" => paths::no_exit::run(plan),
        "no-uclamp" => device::no_uclamp::run(plan),
        "order" => paths::order::run(plan),
        "in-force" => paths::in_force::run(plan),
        "paths" => paths::cost::run(plan),
        "peer" => bench::peer::run(),
        "stats" => device::stats::run(plan),
        "systemd" => device::systemd::run(plan),
        "two-guests" => device::two_guests::run(plan),
        "host-fails" => device::failure::host_fails(plan),
        "pin-offline" => device::bad_input::run(plan),
        "kill" => device::kill::run(plan),
        "uclamp" => clamps(),
        "idle" => models::idle::run(plan),
        "guest-facts" => device::guest_facts::run(plan),
        "ramps" => bench::program::ramps(plan),
        "rt-app" => models::rt_app::run(plan),
        "speed" => models::speed::run(plan),
        "speed-guest" => models::speed::guest(plan),
        "rt-guest" => rt::guest::run(plan),
        "rt-latency" => rt::latency::run(plan),
        "rt-loop" => rt::periodic_loop::run(plan),
        "rt-settings" => rt::settings::run(plan),
        "rt-standard" => rt::standard::run(plan),
        "demo" => device::demo::run(plan),
        _ if name.split(':').next() == Some("bench") => bench::program::run(plan, name),
        _ if name.split(':').next() == Some("many-vcpus") => device::many_vcpus::run(plan, name),
        _ => bail!("no such scenario"),
    }
}

/// Whether clamps take effect on every CPU, after all that was done before.
fn clamps() -> Result<Value> {
    let wrong = uclamp::cpus_that_disobey()?;
    Ok(json!({ "held": wrong.is_empty(), "cpus_that_disobey": wrong }))
}

impl Plan {
    /// vCPUs pinned to these pCPUs, mirroring them, by the plan's path.
    fn mirroring(&self, pcpus: &[u32]) -> Setup {
        self.by_path(Setup::mirroring(pcpus))
    }

    /// By the plan's path, if it has one.
    fn by_path(&self, setup: Setup) -> Setup {
        match &self.path {
            Some(path) => setup.with(&["--path", path]),
            None => setup,
        }
    }

    /// Boots a guest and loads its driver.
    fn guest(&self, setup: &Setup) -> Result<Vm> {
        let mut vm = Vm::boot(setup)?;
        self.load_driver(&mut vm)?;
        Ok(vm)
    }

    /// Loads the driver, and the governor that scenarios ask through.
    fn load_driver(&self, vm: &mut Vm) -> Result<()> {
        vm.ask("insmod cpufreq_userspace")?;
        vm.ask(format!("insmod {}", self.driver))?;
        Ok(())
    }
}

/// The first CPU of each policy: where a guest with one vCPU a policy runs.
fn first_cpus(policies: &[Policy]) -> Vec<u32> {
    policies.iter().map(Policy::cpu).collect()
}

/// The vCPU of such a guest that is on the last policy, and that.
fn last_of(policies: &[Policy]) -> Result<(usize, &Policy)> {
    policies.iter().enumerate().next_back().context("no policy")
}

/// Lets load tracking decay: PELT halves each 32 ms.
fn let_load_decay() {
    std::thread::sleep(Duration::from_millis(1000));
}

/// The guest's folder of the policy of a vCPU with a domain of its own.
fn guest_policy(vcpu: usize) -> String {
    format!("{}/policy{vcpu}", sysfs::CPUFREQ)
}

/// Sets a guest policy's governor.
fn set_governor(vm: &mut Vm, vcpu: usize, governor: &str) -> Result<()> {
    vm.ask(format!(
        "write {}/scaling_governor {governor}",
        guest_policy(vcpu)
    ))?;
    Ok(())
}

/// Asks for a frequency, through the guest's userspace governor.
fn ask_for(vm: &mut Vm, vcpu: usize, khz: u32) -> Result<()> {
    vm.ask(format!(
        "write {}/scaling_setspeed {khz}",
        guest_policy(vcpu)
    ))?;
    Ok(())
}

/// What the vCPU's register cur_perf reads, on that vCPU.
fn cur_perf(vm: &mut Vm, base: u64, vcpu: usize) -> Result<u32> {
    let offset = u64::try_from(vcpu)? * 0x1000;
    Ok(u32::try_from(
        vm.number(format!("peek {vcpu} {:#x}", base + offset))?,
    )?)
}

/// Where the guest finds the device.
fn registers(vm: &mut Vm) -> Result<u64> {
    let base = vm.ask("registers")?;
    Ok(u64::from_str_radix(base.trim_start_matches("0x"), 16)?)
}
