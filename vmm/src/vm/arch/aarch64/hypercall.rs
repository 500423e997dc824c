// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Hypercalls that KVM forwards: its SMCCC filter (Linux 6.4,
//! `Documentation/virt/kvm/devices/vm.rst`), and the registers of a call.

use anyhow::Context;
use kvm_bindings::{
    KVM_ARM_VM_SMCCC_CTRL, KVM_ARM_VM_SMCCC_FILTER, kvm_device_attr, kvm_smccc_filter,
    kvm_smccc_filter_action_KVM_SMCCC_FILTER_FWD_TO_USER,
};
use kvm_ioctls::{Error, VcpuFd, VmFd};
use vcpufreq_device::VcpuId;

use super::registers;
use crate::vm::bus::Bus;
use crate::vm::hypercall::{Hypercalls, carry_out};
use crate::vm::vcpu::VcpuEnd;

/// Makes KVM forward the guest's calls. Before the first vCPU runs.
pub fn set_up(vm: &VmFd, calls: Hypercalls) -> anyhow::Result<()> {
    for &base in calls.forwarded() {
        forward(vm, base).context(
            "KVM doesn't forward hypercalls (Linux 6.4 and later do); leave out --hypercalls",
        )?;
    }
    Ok(())
}

fn forward(vm: &VmFd, base: u32) -> anyhow::Result<()> {
    let filter = kvm_smccc_filter {
        base,
        nr_functions: 1,
        action: u8::try_from(kvm_smccc_filter_action_KVM_SMCCC_FILTER_FWD_TO_USER)?,
        pad: [0; 15],
    };
    vm.set_device_attr(&kvm_device_attr {
        group: KVM_ARM_VM_SMCCC_CTRL,
        attr: u64::from(KVM_ARM_VM_SMCCC_FILTER),
        addr: std::ptr::from_ref(&filter).expose_provenance() as u64,
        ..Default::default()
    })?;
    Ok(())
}

/// Answers a call; KVM has moved the guest past it already.
pub fn answer(vcpu: &VcpuFd, function: u64, bus: &Bus, caller: VcpuId) -> Option<VcpuEnd> {
    let argument = || {
        let x1 = registers::argument(vcpu).ok()?;
        // W1: the upper half is anything (SMCCC, 3.1).
        u32::try_from(x1 & u64::from(u32::MAX)).ok()
    };
    let result = carry_out(function, argument, bus, caller);
    let set: Result<(), Error> = registers::set_result(vcpu, result.cast_unsigned());
    set.err()
        .map(|error| VcpuEnd::Failed(format!("KVM refused the result of a hypercall: {error}")))
}
