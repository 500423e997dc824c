// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest whose accesses are measured.

use anyhow::{Context, Result};

use crate::harness::plan::{GuestDevice, Plan, first_cpus, set_governor};
use crate::harness::policy::Policy;
use crate::harness::vm::{Setup, Vm};
use crate::harness::vmm::Vmm;

/// The path of a guest of QEMU's, by `vcpufreq qemu`, without a PMU, as guests of `run`.
pub const QEMU: &str = "qemu";
/// The same with a PMU, as QEMU's guests have by default: KVM switches it at each exit.
pub const QEMU_PMU: &str = "qemu-pmu";

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
    /// Its register set_perf, as the guest's commands that write take it.
    pub set_perf: String,
    /// What traps when it writes that.
    pub trap: u64,
    /// What it asks for in turn.
    pub opps: String,
}

impl Measured {
    /// Boots it by a path; that of [`QEMU`] and [`QEMU_PMU`] is a guest of QEMU.
    pub fn boot(plan: &Plan, policies: &[Policy], path: &'static str) -> Result<Self> {
        Self::boot_with(plan, policies, path, &[])
    }

    /// The same with more options of `vcpufreq run`.
    pub fn boot_with(
        plan: &Plan,
        policies: &[Policy],
        path: &'static str,
        options: &[&str],
    ) -> Result<Self> {
        let of_qemu = [QEMU, QEMU_PMU].contains(&path);
        let setup = Setup {
            silent: true,
            no_pmu: path != QEMU_PMU,
            vmm: if of_qemu { Vmm::Qemu } else { Vmm::Vcpufreq },
            ..Setup::mirroring(&first_cpus(policies)).with(&["--rate-limit", "0"])
        };
        let setup = match of_qemu {
            true => setup,
            false => setup.with(&["--path", path]).with(options),
        };
        let mut vm = plan.guest(&setup)?;
        for vcpu in 0..policies.len() {
            set_governor(&mut vm, vcpu, "userspace")?;
        }
        let vcpu = policies.len() - 1;
        let opps = &policies.last().context("no policy")?.opps;
        let opps: Vec<_> = opps.iter().map(u32::to_string).collect();
        let device = GuestDevice::of(&mut vm)?;
        let page = device.cur_perf(vcpu);
        Ok(Self {
            vm,
            path,
            vcpu,
            page,
            set_perf: device.set_perf(vcpu),
            trap: device.bell.map_or(page + 4, |(bell, _)| bell),
            opps: opps.join(" "),
        })
    }
}
