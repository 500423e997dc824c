// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What every scenario of a run shares, and how most of them drive a guest.

use std::{ops::Range, time::Duration};

use anyhow::{Context as _, Result, bail};
use vcpufreq_host::CpuList;

use crate::harness::policy::Policy;
use crate::harness::registers::PAGE;
use crate::harness::sysfs;
use crate::harness::vm::{Setup, Vm};
use crate::harness::vmm::Vmm;

/// Linux' driver of such a device.
const KERNELS_DRIVER: &str = "virtual-cpufreq";

/// What every scenario of a run shares.
#[derive(Debug)]
pub struct Plan {
    /// The guest's cpufreq driver: a module of `/lab/modules`.
    pub driver: String,
    /// How the guest's accesses go, as `--path` takes it; the VMM chooses
    /// without.
    pub path: Option<String>,
    /// What runs the guests.
    pub vmm: Vmm,
    /// Whether the guests are protected.
    pub protected: bool,
}

impl Plan {
    /// vCPUs pinned to these pCPUs, mirroring them, by the plan's path.
    pub fn mirroring(&self, pcpus: &[u32]) -> Setup {
        self.by_path(Setup {
            vmm: self.vmm,
            ..Setup::mirroring(pcpus)
        })
    }

    /// The same for a guest with real-time vCPUs. QEMU locks its memory, and gives the guest no PMU,
    /// as `vcpufreq run`: KVM saves and restores it at each exit.
    pub fn real_time(&self, pcpus: &[u32]) -> Setup {
        let qemu = self.vmm == Vmm::Qemu;
        Setup {
            locks_memory: qemu,
            no_pmu: qemu,
            ..self.mirroring(pcpus)
        }
    }

    /// By the plan's path, if it has one, and protected if guests are.
    pub fn by_path(&self, setup: Setup) -> Setup {
        let setup = match self.protected {
            true => setup.with(&["--protected"]),
            false => setup,
        };
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

    /// Whether guests have Linux' own driver.
    pub fn has_kernels_driver(&self) -> bool {
        self.driver == KERNELS_DRIVER
    }

    /// Loads the driver, and the governor that scenarios ask through.
    pub fn load_driver(&self, vm: &mut Vm) -> Result<()> {
        vm.ask("insmod cpufreq_userspace")?;
        vm.ask(format!("insmod {}", self.driver))?;
        if self.has_kernels_driver() {
            first_requests(vm)?;
        }
        Ok(())
    }
}

/// Has each policy make a request, by `performance`. Before its first one the kernel's own driver has
/// no current frequency, and `userspace` is a BUG (contrib/upstream/virtual-cpufreq-policy-cur.txt).
fn first_requests(vm: &mut Vm) -> Result<()> {
    let cpus: CpuList = vm.ask("read /sys/devices/system/cpu/possible")?.parse()?;
    for cpu in cpus {
        let cpu = usize::try_from(cpu)?;
        // A policy has its first CPU's number; the domain's other CPUs have none.
        let governor = vm.ask(format!("read {}/scaling_governor", guest_policy(cpu)));
        if let Ok(governor) = governor {
            set_governor(vm, cpu, "performance")?;
            set_governor(vm, cpu, &governor)?;
        }
    }
    Ok(())
}

/// The first CPU of each policy: where a guest with one vCPU a policy runs.
pub fn first_cpus(policies: &[Policy]) -> Vec<u32> {
    policies.iter().map(Policy::cpu).collect()
}

/// The vCPU of such a guest that is on the last policy, and that.
pub fn last_of(policies: &[Policy]) -> Result<(usize, &Policy)> {
    policies.iter().enumerate().next_back().context("no policy")
}

/// The same of the largest CPUs: on a PC of two kinds these are the first ones.
pub fn largest_of(policies: &[Policy]) -> Result<(usize, &Policy)> {
    let largest = policies.iter().enumerate();
    let largest = largest.max_by_key(|(_, policy)| policy.capacity);
    largest.context("no policy")
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
    Ok(GuestDevice::of(vm)?.base)
}

/// The device as the guest finds it.
#[derive(Debug)]
pub struct GuestDevice {
    /// Of the first vCPU's registers; the next one's are a page behind.
    pub base: u64,
    /// Of shared memory: the doorbell, and what rings it for the first vCPU.
    pub bell: Option<(u64, u64)>,
}

impl GuestDevice {
    pub fn of(vm: &mut Vm) -> Result<Self> {
        let answer = vm.ask("registers")?;
        let number = |part: &str| u64::from_str_radix(part.trim_start_matches("0x"), 16);
        let parts: Vec<u64> = answer.split(',').map(number).collect::<Result<_, _>>()?;
        match parts[..] {
            [base] => Ok(Self { base, bell: None }),
            [base, bell, ring] => Ok(Self {
                base,
                bell: Some((bell, ring)),
            }),
            _ => bail!("the guest's device is at '{answer}'"),
        }
    }

    /// The addresses at which KVM sees accesses by these vCPUs: of shared memory, the doorbell alone,
    /// which all vCPUs have.
    pub fn trapping(&self, vcpus: Range<usize>) -> Range<u64> {
        match self.bell {
            Some((bell, _)) => bell..bell + 4,
            None => self.cur_perf(vcpus.start)..self.cur_perf(vcpus.end),
        }
    }

    /// The write that tells KVM of a vCPU's request: its address, and the value if that doesn't tell
    /// the request itself.
    pub fn told_by(&self, vcpu: usize) -> (u64, Option<u64>) {
        match self.bell {
            Some((bell, ring)) => (bell, Some(ring + vcpu as u64)),
            None => (self.cur_perf(vcpu) + 4, None),
        }
    }

    /// Where a vCPU's register cur_perf is.
    pub fn cur_perf(&self, vcpu: usize) -> u64 {
        self.base + PAGE * vcpu as u64
    }

    /// A vCPU's register set_perf, as the guest's commands that write take it.
    pub fn set_perf(&self, vcpu: usize) -> String {
        let register = self.cur_perf(vcpu) + 4;
        match self.bell {
            Some((bell, ring)) => format!("{register:#x},{bell:#x},{:#x}", ring + vcpu as u64),
            None => format!("{register:#x}"),
        }
    }
}
