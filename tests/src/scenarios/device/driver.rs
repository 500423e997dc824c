// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest driver's life: loaded, CPUs off and on, suspended, removed,
//! loaded again; the guest is as before each time.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use crate::harness::frequency::host_runs_at;
use crate::harness::frequency::let_ticks_pass;
use crate::harness::plan::{Plan, ask_for, first_cpus, set_governor};
use crate::harness::policy::Policy;
use crate::harness::sysfs::CPUFREQ;
use crate::harness::vm::Vm;

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let setup = plan
        .mirroring(&first_cpus(&policies))
        .with(&["--clamp", "exact"]);
    let mut vm = Vm::boot(&setup)?;
    let mut story = Vec::new();
    let mut tell = |what: &str, right: bool| {
        story.push(json!({ "what": what, "right": right }));
    };
    plan.load_driver(&mut vm)?;
    tell("loaded: every OPP reachable", follows(&mut vm, &policies)?);
    let models = energy_models(&mut vm, policies.len());
    tell(
        "energy model for each CPU",
        models || plan.driver != "vcpufreq_guest",
    );
    for vcpu in 0..policies.len() {
        let online = format!("/sys/devices/system/cpu/cpu{vcpu}/online");
        vm.ask(format!("write {online} 0"))?;
        vm.ask(format!("write {online} 1"))?;
    }
    tell(
        "each CPU off and on: every OPP reachable",
        follows(&mut vm, &policies)?,
    );
    // The kernel's own test of suspend: to the devices, and back after 5 s.
    vm.ask("write /sys/power/pm_test devices")?;
    vm.ask("write /sys/power/state freeze")?;
    tell(
        "suspended to idle and resumed",
        follows(&mut vm, &policies)?,
    );
    let module = plan.driver.replace('-', "_");
    for round in ["removed", "removed again"] {
        vm.ask(format!("rmmod {module}"))?;
        tell(
            &format!("{round}: no policy left"),
            vm.ask(format!("read {CPUFREQ}/policy0/scaling_driver"))
                .is_err(),
        );
        vm.ask(format!("insmod {}", plan.driver))?;
        tell(
            "loaded again: every OPP reachable",
            follows(&mut vm, &policies)?,
        );
    }
    let complaints = vm.ask("dmesg BUG:")? + &vm.ask("dmesg WARNING:")?;
    tell("no complaint of the guest's kernel", complaints.is_empty());
    vm.quit()?;
    let figures = json!({ "story": story, "complaints": complaints });
    Ok(LabVerdict::with_figures(figures).check_rows("each step", &story))
}

/// Whether the host follows each vCPU to its maximum and its minimum; where
/// it doesn't, an error that tells.
pub fn follows(vm: &mut Vm, policies: &[Policy]) -> Result<bool> {
    for (vcpu, policy) in policies.iter().enumerate() {
        set_governor(vm, vcpu, "userspace")?;
        vm.ask(format!("start busy busy {vcpu}"))?;
        for khz in [policy.max(), policy.min()] {
            ask_for(vm, vcpu, khz)?;
            let_ticks_pass();
            let host = host_runs_at(policy, vm, khz)?;
            ensure!(
                host == khz,
                "vCPU {vcpu} asks for {khz} kHz, clamp {:?}, host at {host}",
                vm.clamp(vcpu)?
            );
        }
        vm.ask("stop busy").context("the load")?;
    }
    Ok(true)
}

fn energy_models(vm: &mut Vm, vcpus: usize) -> bool {
    (0..vcpus).all(|vcpu| {
        vm.ask(format!(
            "read /sys/kernel/debug/energy_model/cpu{vcpu}/cpus"
        ))
        .is_ok()
    })
}
