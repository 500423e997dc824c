// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What QEMU's guest sees, by how it boots: the rows of docs/qemu.md's table. A direct kernel, and
//! one of EDK2 without ACPI, have the host's capacities by device tree, and can schedule by energy.
//! One with ACPI has equal CPUs until the driver sets their capacities. Each has the host's OPPs and
//! power, and the host follows its requests.

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use crate::harness::host::begins;
use crate::harness::leftovers::left_soon;
use crate::harness::plan::{Plan, first_cpus, guest_policy};
use crate::harness::policy::Policy;
use crate::harness::sysfs;
use crate::harness::vm::{Setup, Vm};
use crate::harness::vmm::Vmm;
use crate::scenarios::device::driver::follows;

const FIRMWARE: &str = "/lab/firmware";
/// EDK2 has the kernel packed and unpacked at once.
const MEM_MIB: u32 = 512;
/// The capacity of a CPU where none is known.
const EQUAL: u32 = 1024;
const DOMAINS: &str = "/sys/kernel/debug/sched";
const MODELS: &str = "/sys/kernel/debug/energy_model";

/// A row of the table.
struct BootWay {
    name: &'static str,
    options: &'static [&'static str],
    seen: Seen,
}

/// What the guest has found of its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    efi: bool,
    acpi: bool,
    /// Its scheduler knows that CPUs differ: misfit migration,
    asymmetric: bool,
    /// and by the kernel's own word energy-aware scheduling, is possible.
    energy_aware: bool,
}

const BOOT_WAYS: [BootWay; 3] = [
    BootWay {
        name: "direct kernel",
        options: &[],
        seen: Seen {
            efi: false,
            acpi: false,
            asymmetric: true,
            energy_aware: true,
        },
    },
    BootWay {
        name: "EDK2, acpi=off",
        options: &["-bios", FIRMWARE, "-machine", "acpi=off"],
        seen: Seen {
            efi: true,
            acpi: false,
            asymmetric: true,
            energy_aware: true,
        },
    },
    BootWay {
        name: "EDK2, ACPI",
        options: &["-bios", FIRMWARE],
        seen: Seen {
            efi: true,
            acpi: true,
            asymmetric: false,
            energy_aware: false,
        },
    },
];

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let differ = policies
        .iter()
        .any(|one| one.capacity != policies[0].capacity);
    ensure!(differ, "this host's CPUs are equal: take another topology");
    let setup = Setup {
        vmm: Vmm::Qemu,
        silent: true,
        mem_mib: Some(MEM_MIB),
        ..plan.mirroring(&first_cpus(&policies))
    };
    let setup = setup.with(&["--clamp", "exact"]);
    let mut rows = Vec::new();
    for (part, boot) in (0..).zip(BOOT_WAYS) {
        begins(part, u32::try_from(BOOT_WAYS.len())?, boot.name);
        rows.push(boot.row(plan, &setup, &policies).context(boot.name)?);
    }
    let left = left_soon()?;
    Ok(LabVerdict::default()
        .check_none("nothing is left", &left)
        .parts("boots", rows)
        .figure("left", left))
}

impl BootWay {
    fn row(&self, plan: &Plan, setup: &Setup, policies: &[Policy]) -> Result<LabVerdict> {
        let mut vm = Vm::boot_prepared(setup, |qemu| {
            qemu.args(self.options);
        })?;
        let before = capacities(&mut vm, policies)?;
        plan.load_driver(&mut vm)?;
        let after = capacities(&mut vm, policies)?;
        let seen = Seen::by(&mut vm)?;
        let wrong = wrong_levels(&mut vm, policies)?;
        let follows = follows(&mut vm, policies).map_err(|error| format!("{error:#}"));
        let said = vm.quit()?;
        // Until the driver is there, the tree's are without the highest frequencies.
        let equal = before.iter().all(|capacity| *capacity == EQUAL);
        let own = policies.iter().map(|policy| policy.capacity);
        let close = own
            .zip(&after)
            .all(|(own, guest)| own.abs_diff(*guest) <= 1);
        let tree = said.contains("capacities, OPPs and energy in its device tree");
        let figures = json!({
            "boot": self.name, "seen": format!("{seen:?}"), "capacities": after,
            "capacities_before_the_driver": before, "wrong_levels": wrong, "follows": follows.as_ref().err(),
            "said": said,
        });
        Ok(LabVerdict::with_figures(figures)
            .check(
                "by ACPI all are equal before the driver",
                equal == self.seen.acpi,
                &before,
            )
            .check(
                "a device tree is told of, or ACPI",
                tree != self.seen.acpi,
                &said,
            )
            .check("capacities are the host's", close, &after)
            .check(
                "it boots as it was to",
                seen == self.seen,
                format!("{seen:?}"),
            )
            .check_none("levels are right", &wrong)
            .check("the host follows", follows.is_ok(), follows.err()))
    }
}

impl Seen {
    /// Under the governor that the guest has by default.
    fn by(vm: &mut Vm) -> Result<Self> {
        let efi = vm.ask("read /sys/firmware/efi/fw_platform_size").is_ok();
        let acpi = vm.ask("read /sys/firmware/acpi/pm_profile").is_ok();
        vm.ask(format!("write {DOMAINS}/verbose Y"))?;
        let flags = vm.ask(format!("read {DOMAINS}/domains/cpu0/domain0/flags"))?;
        let possible = vm.ask("read /proc/sys/kernel/sched_energy_aware")?;
        Ok(Self {
            efi,
            acpi,
            asymmetric: flags.contains("SD_ASYM_CPUCAPACITY"),
            // The file is empty where it is not possible.
            energy_aware: possible == "1",
        })
    }
}

fn capacities(vm: &mut Vm, policies: &[Policy]) -> Result<Vec<u32>> {
    let path = |vcpu| format!("read /sys/devices/system/cpu/cpu{vcpu}/cpu_capacity");
    let capacities = (0..policies.len()).map(|vcpu| Ok(u32::try_from(vm.number(path(vcpu))?)?));
    capacities.collect()
}

/// Levels of the host's that a vCPU lacks, and those whose power in its energy model is another.
fn wrong_levels(vm: &mut Vm, policies: &[Policy]) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    for (vcpu, policy) in policies.iter().enumerate() {
        let file = format!("{}/scaling_available_frequencies", guest_policy(vcpu));
        let text = vm.ask(format!("read {file}"))?;
        let mut opps: Vec<u32> = text
            .split_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        opps.sort_unstable();
        if opps != policy.opps {
            wrong.push(format!("vCPU {vcpu} has the levels {opps:?}"));
        }
        for khz in &policy.opps {
            let host: u64 = sysfs::number(format!("{MODELS}/cpu{}/ps:{khz}/power", policy.cpu()))?;
            let guest = vm.number(format!("read {MODELS}/cpu{vcpu}/ps:{khz}/power"));
            if !matches!(guest, Ok(guest) if guest == host) {
                wrong.push(format!(
                    "vCPU {vcpu} at {khz} kHz: {guest:?}, host {host} uW"
                ));
            }
        }
    }
    Ok(wrong)
}
