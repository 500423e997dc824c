// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest that is ready to run, and what makes one.

use std::sync::Arc;

use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vmm_sys_util::eventfd::EventFd;

use super::memory::Memory;

/// A guest in KVM, ready to run.
pub struct KvmGuest {
    /// Its vCPUs, by number.
    pub vcpus: Vec<VcpuFd>,
    /// The virtual machine in KVM.
    pub vm: Arc<VmFd>,
    /// Its memory; mapped until no vCPU can run any more.
    pub memory: Memory,
}

/// Makes guests.
pub trait Bootable {
    /// Makes the guest from scratch, as it is after power-on. `console` is
    /// written to when the console has an interrupt for it.
    ///
    /// Called again for each reset, when nothing of the machine before is left.
    ///
    /// # Errors
    /// What KVM or the host refused.
    fn boot(&mut self, kvm: &Kvm, console: &EventFd) -> anyhow::Result<KvmGuest>;
}
