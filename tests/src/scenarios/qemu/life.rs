// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest of QEMU that reboots, restarts its kernel by kexec, is reset, suspends, and switches
//! CPUs off. This project's driver withdraws its requests meanwhile. After a reset, which the driver
//! doesn't see, they stay until it is loaded again. Afterwards the bridge works again.

use std::fs;
use std::thread::sleep;

use anyhow::Result;
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use crate::harness::kexec;
use crate::harness::leftovers::left_soon;
use crate::harness::plan::{Plan, first_cpus};
use crate::harness::policy::Policy;
use crate::harness::qmp::{self, QmpClient};
use crate::harness::vm::{BOOT, Vm};
use crate::harness::vmm::{INITRD, KERNEL, Vmm};
use crate::harness::wait::SOON;
use crate::scenarios::device::driver::follows;

const QMP: &str = "/run/life.qmp";
/// The guest's first file system with what it restarts.
const INITRAMFS: &str = "/run/initramfs";
/// Both are in its memory three times then.
const MEM_MIB: u32 = 640;
/// How long the guest sleeps, s.
const ASLEEP: u64 = 4;
/// The clamp of a vCPU that requests nothing.
const FREE: (u32, u32) = (0, 1024);

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let mut setup = plan
        .mirroring(&first_cpus(&policies))
        .with(&["--clamp", "exact"]);
    (setup.vmm, setup.silent) = (Vmm::Qemu, true);
    setup.mem_mib = Some(MEM_MIB);
    kexec::pack(INITRAMFS, KERNEL, INITRD)?;
    let mut vm = Vm::boot_prepared(&setup, |command| {
        qmp::listen(command, QMP);
        // The last one counts.
        command.args(["-initrd", INITRAMFS]);
    })?;
    fs::remove_file(INITRAMFS)?;
    let mut life = GuestLife {
        plan,
        policies: &policies,
        story: Vec::new(),
    };
    plan.load_driver(&mut vm)?;
    life.tell("loaded", &mut vm, Vec::new())?;
    for vcpu in 0..policies.len() {
        let online = format!("/sys/devices/system/cpu/cpu{vcpu}/online");
        vm.ask(format!("write {online} 0"))?;
        sleep(SOON);
        let clamp = vm.clamp(vcpu)?;
        vm.ask(format!("write {online} 1"))?;
        life.tell(&format!("CPU {vcpu} off and on"), &mut vm, vec![clamp])?;
    }
    life.suspends(&mut vm)?;
    for (verb, what) in [("restart", "reboot"), ("kexec", "kexec")] {
        vm.tell(verb)?;
        life.boots(what, &mut vm)?;
    }
    let before = life.clamps(&vm)?;
    let mut qmp = QmpClient::connect(QMP)?;
    // An error, as long as the machine can't plug CPUs.
    let pluggable = qmp.ask("query-hotpluggable-cpus", json!({}));
    qmp.ask("system_reset", json!({}))?;
    vm.expect("@ready", BOOT)?;
    let after_reset = life.clamps(&vm)?;
    plan.load_driver(&mut vm)?;
    life.tell("system_reset", &mut vm, Vec::new())?;
    let said = vm.quit()?;
    let left = left_soon()?;
    let stayed = after_reset == before && !before.contains(&FREE);
    let figures = json!({
        "left": left, "said": said,
        "pluggable_cpus": pluggable.unwrap_or_else(|why| format!("{why:#}").into()),
        "clamps_before_reset": before, "clamps_after_reset": after_reset,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_none("nothing is left", &left)
        .check("clamps stay over a reset", stayed, (&before, &after_reset))
        .parts("story", life.story))
}

/// What has happened so far.
struct GuestLife<'a> {
    plan: &'a Plan,
    policies: &'a [Policy],
    story: Vec<LabVerdict>,
}

impl GuestLife<'_> {
    /// The host follows each vCPU after `what`; `meanwhile` are clamps of vCPUs that were to request
    /// nothing.
    fn tell(&mut self, what: &str, vm: &mut Vm, meanwhile: Vec<(u32, u32)>) -> Result<()> {
        let follows = follows(vm, self.policies);
        let free = meanwhile.iter().all(|clamp| *clamp == FREE);
        let wrong = follows.as_ref().err().map(|error| format!("{error:#}"));
        let figures = json!({ "what": what, "clamps_meanwhile": meanwhile, "wrong": wrong });
        let step = LabVerdict::with_figures(figures).check(
            "the host follows",
            follows.is_ok(),
            (what, wrong),
        );
        // The kernel's own driver withdraws nothing.
        let step = match self.plan.has_kernels_driver() {
            true => step,
            false => step.check("no clamp meanwhile", free, (what, meanwhile)),
        };
        self.story.push(step);
        Ok(())
    }

    fn clamps(&self, vm: &Vm) -> Result<Vec<(u32, u32)>> {
        (0..self.policies.len())
            .map(|vcpu| vm.clamp(vcpu))
            .collect()
    }

    /// To idle, until its clock wakes it.
    fn suspends(&mut self, vm: &mut Vm) -> Result<()> {
        let states = vm.ask("read /sys/power/mem_sleep")?;
        vm.ask(format!("write /sys/class/rtc/rtc0/wakealarm +{ASLEEP}"))?;
        vm.tell("write /sys/power/state freeze")?;
        sleep(2 * SOON);
        let meanwhile = self.clamps(vm)?;
        vm.expect("@ok", BOOT)?;
        self.tell(&format!("suspended ({states})"), vm, meanwhile)
    }

    /// Waits for the guest's next boot, and loads its driver.
    fn boots(&mut self, what: &str, vm: &mut Vm) -> Result<()> {
        vm.expect("@ready", BOOT)?;
        let meanwhile = self.clamps(vm)?;
        self.plan.load_driver(vm)?;
        self.tell(what, vm, meanwhile)
    }
}
