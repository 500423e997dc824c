// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `host-bpf/` on a real kernel.
//!
//! Most need no guest: a thread of this program stands for a vCPU's, as the programs see threads.
//! Where the guest's accesses matter, a VM of a few instructions makes them ([`tiny_vm`]).

mod arith;
mod calls;
mod ceilings;
mod ext_server;
mod flood;
mod group;
mod light;
mod limits;
mod lock_hold;
mod many;
mod meddling;
mod operator;
mod others;
mod page;
mod programs;
mod refused;
mod requests;
mod scx;
mod served;
mod settled;
mod shared;
mod sum;
mod tiny_vm;
mod vcpu;
mod waiting;

use anyhow::Result;
use vcpufreq_tests::LabVerdict;

use crate::harness::plan::Plan;

pub use calls::process as calls;
pub use flood::guest as flood_guest;
pub use others::{switches, vmm, vms};

/// Carries out a scenario by name, when it is one of these.
pub fn run(name: &str, plan: &Plan) -> Option<Result<LabVerdict>> {
    match name {
        "bpf-arithmetic" => Some(arith::run()),
        "bpf-two-vms" => Some(others::two()),
        "bpf-kill" => Some(others::kill()),
        "bpf-ends" => Some(others::ends(plan)),
        "bpf-limits" => Some(limits::run()),
        "bpf-meddling" => Some(meddling::run()),
        "bpf-switch-cost" => Some(others::switch_cost()),
        "bpf-policy" => Some(operator::run()),
        "bpf-page" => Some(page::run()),
        "bpf-flood" => Some(flood::run()),
        "bpf-calls" => Some(calls::run()),
        "bpf-kfunc-refused" => Some(refused::run()),
        "bpf-requests" => Some(requests::run()),
        "bpf-served" => Some(served::run(plan)),
        "bpf-shared" => Some(shared::run()),
        "bpf-sum" => Some(sum::run()),
        "bpf-many" => Some(many::run()),
        "bpf-dip" => Some(light::run()),
        "ext-server" => Some(ext_server::run()),
        _ => scx::run(name, plan),
    }
}
