// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the virtual machine gets from the rest of the program.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use vcpufreq_bridge::{Attachment, GuestPages, KvmSlot};
use vcpufreq_device::VcpuId;
use vcpufreq_host::Tid;

use super::bus::{Bus, MmioDevice};
use super::console_output::ConsoleEnd;
use super::layout::CPUFREQ_BASE;

/// What the rest of the program does at certain moments of a virtual machine. No method has a
/// default: hooks that wrap others would lose what they don't forward.
pub trait Hooks: Send + Sync {
    /// Called once on each vCPU's thread, before it is pinned: here it may be
    /// moved to where it is allowed to be.
    ///
    /// # Errors
    /// Any; the virtual machine isn't started then.
    fn on_vcpu_thread_start(&self, vcpu: VcpuId, tid: Tid) -> anyhow::Result<()>;

    /// Called once on each vCPU's thread, which is pinned already and hasn't
    /// run guest code; `tid` is its id in the kernel. The thread stays the
    /// same over resets of the guest.
    ///
    /// # Errors
    /// Any; the virtual machine isn't started then.
    fn on_vcpu_thread(&self, vcpu: VcpuId, tid: Tid) -> anyhow::Result<()>;

    /// Called once on the thread that carries a disk's requests out, before the first one. It ends
    /// the process if that must not go on.
    fn on_disk_thread(&self);

    /// Called once on the thread that runs the virtual machine, when the vCPUs' threads are there
    /// and what the guest needs of files is open. No guest code has run.
    ///
    /// # Errors
    /// Any; the virtual machine isn't started then.
    fn on_set_up(&self) -> anyhow::Result<()>;

    /// Called on a vCPU's thread before each KVM_RUN.
    fn before_run(&self);

    /// Called when the guest resets, before it boots again; no vCPU runs.
    fn on_reset(&self);

    /// Called when the guest has ended, before the vCPU threads end.
    fn on_end(&self);

    /// A file that is readable when [`Self::on_helper_end`] is to be called, until then.
    fn helper_end(&self) -> Option<BorrowedFd<'_>>;

    /// Called when a process that the program relies on has ended.
    fn on_helper_end(&self);

    /// Something that the user should know and that doesn't end anything: the
    /// cause and the next step, in one line.
    fn on_warning(&self, text: &str);
}

/// What the virtual machine gets from the rest of the program.
pub struct VmEnvironment {
    /// What happens at which moment.
    pub hooks: Arc<dyn Hooks>,
    /// The vcpufreq registers, if the guest gets them.
    pub cpufreq: Option<Cpufreq>,
    /// What is at the other end of the guest's console.
    pub console: ConsoleEnd,
}

/// Makes a virtual machine in KVM answer what it can, as
/// [`BridgeHandle::attach`](vcpufreq_bridge::BridgeHandle::attach).
pub type AttachHandler = Arc<dyn Fn(KvmSlot) -> Attachment + Send + Sync>;

/// The vcpufreq registers, or what is in their place, at [`CPUFREQ_BASE`].
pub struct Cpufreq {
    /// What answers an access that exits.
    pub device: Arc<dyn MmioDevice>,
    /// Bytes of the region.
    pub size: u64,
    /// Has KVM answer what it can.
    pub attach: AttachHandler,
    /// Where a protected guest may share pages for its reads.
    pub guest_pages: Option<Arc<GuestPages>>,
}

/// Puts the devices that every guest has on a bus.
pub fn attach_cpufreq(bus: &mut Bus, host: &VmEnvironment) -> anyhow::Result<()> {
    match &host.cpufreq {
        Some(Cpufreq { device, size, .. }) => bus.insert(CPUFREQ_BASE, *size, device.clone()),
        None => Ok(()),
    }
}
