// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest of QEMU's behind `vcpufreq qemu --sum`: the programs look at what else runs on a vCPU's
//! pCPU, and the server adds it to the request. It is added when a neighbour comes, and gone soon
//! after that has gone. The programs end with the guest.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use super::sum::set_governors;
use crate::harness::leftovers::{bpf_objects, left_soon};
use crate::harness::load::Load;
use crate::harness::plan::{Plan, ask_for, first_cpus, largest_of, set_governor};
use crate::harness::policy::Policy;
use crate::harness::stats;
use crate::harness::vm::{Setup, Vm};
use crate::harness::vmm::Vmm;
use crate::harness::wait::{SOON, settled};

const PERIOD: Duration = Duration::from_millis(10);
/// Of the neighbour.
const PERCENT: u32 = 50;
/// Load tracking forgets half of what was in 32 ms.
const SETTLED: Duration = Duration::from_millis(400);
/// How far a look within the neighbour's period is from its share, with the quarter that is added.
const WITHIN: u32 = 150;
/// Less than this is not added anew: 48, and the vCPU's own ticks beside it.
const STEP: u32 = 64;

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let setup = Setup {
        vmm: Vmm::Qemu,
        ..plan.mirroring(&first_cpus(&Policy::all()?))
    };
    let mut vm = plan.guest(&setup.with(&["--sum"]))?;
    // At one frequency: otherwise the neighbour's share differs with that.
    set_governors("performance")?;
    let seen = beside_neighbour(&mut vm);
    set_governors("schedutil")?;
    let seen = seen?;
    let said = vm.quit()?;
    let seen = seen.figure("vmm_said", said);
    Ok(seen.check_none("nothing is left", &left_soon()?))
}

fn beside_neighbour(vm: &mut Vm) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let (vcpu, policy) = largest_of(&policies)?;
    set_governor(vm, vcpu, "userspace")?;
    let khz = policy.at_least(policy.max() / 4);
    let asked = policy.util(khz);
    ask_for(vm, vcpu, khz)?;
    // The programs look when the pCPU switches to the vCPU.
    vm.ask(format!("start ticks periodic {vcpu} 20000 200"))?;
    let near = |clamp: &(u32, u32)| clamp.0.abs_diff(asked) <= STEP;
    let alone = settled(SOON, || vm.clamp(vcpu), near)?;
    let load = Load::periodic(policy.cpu(), PERIOD, PERIOD * PERCENT / 100);
    sleep(SETTLED);
    let (with, others) = (vm.clamp(vcpu)?, others_util(vm, vcpu)?);
    let programs = bpf_objects();
    load.stop()?;
    let after = settled(SOON, || vm.clamp(vcpu), near)?;
    let neighbour = policy.capacity * PERCENT / 100 * 5 / 4;
    let sum = (asked + neighbour).min(policy.capacity);
    let figures = json!({
        "asked": asked, "alone": alone, "with": with, "sum": sum, "others_util": others,
        "after": after,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("alone it is the request", near(&alone), alone)
        .check("the sum", with.0.abs_diff(sum) <= WITHIN, (with, sum))
        .check_eq("no ceiling", &with.1, 1024)
        .check(
            "what the programs see is the neighbour",
            others.abs_diff(neighbour) <= WITHIN,
            others,
        )
        .check("it goes with the neighbour", near(&after), after)
        .check("by programs", !programs.is_empty(), &programs))
}

/// What the server's stats have of other load on the vCPU's pCPU.
fn others_util(vm: &Vm, vcpu: usize) -> Result<u32> {
    let stats = stats::of(vm)?;
    let util = stats["vcpus"][vcpu]["others_util"].as_u64();
    Ok(u32::try_from(util.context("no load in the stats")?)?)
}
