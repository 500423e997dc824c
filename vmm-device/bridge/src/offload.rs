// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What of the vcpufreq registers KVM answers itself: reads from a memory slot,
//! which is read-only but for shared memory, and requests by ioeventfds.
//!
//! All of it belongs to the virtual machine in KVM, which a reset of the guest
//! makes anew; pages and eventfds outlive it. Whatever KVM refuses takes the
//! exit to the device on the bus instead, and so does everything once this is
//! detached: no access is lost.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use vcpufreq_device::{REG_SET_PERF, REGION_STRIDE, VcpuId};
use vmm_sys_util::eventfd::EventFd;

/// `KVM_MEM_READONLY` of `linux/kvm.h`.
const MEM_READONLY: u32 = 1 << 1;

/// A virtual machine in KVM: what a VMM implements.
pub trait KvmVm {
    /// Shows memory to the guest, with the slot's flags.
    ///
    /// # Errors
    /// As `KVM_SET_USER_MEMORY_REGION`: `EEXIST` when another slot has one of these addresses,
    /// `EINVAL` from a KVM without read-only slots, `ENOMEM`. Nothing is mapped then: each read
    /// exits to the VMM.
    fn map(&self, slot: MemorySlot) -> io::Result<()>;

    /// Takes the same memory away again.
    ///
    /// # Errors
    /// `ENOMEM`, or `EINVAL` when it isn't mapped. The slot stays as it was.
    fn unmap(&self, slot: MemorySlot) -> io::Result<()>;

    /// Has KVM signal an eventfd at a guest's write, which doesn't exit then (`KVM_IOEVENTFD`).
    ///
    /// # Errors
    /// As `KVM_IOEVENTFD`: `EEXIST` when writes of such a value signal an eventfd already,
    /// `ENOMEM`. Such writes exit to the VMM then.
    fn add_ioeventfd(&self, ioeventfd: IoEventFd<'_>) -> io::Result<()>;

    /// Has it do so no longer.
    ///
    /// # Errors
    /// `ENOENT` when no such eventfd is connected: nothing changes.
    fn remove_ioeventfd(&self, ioeventfd: IoEventFd<'_>) -> io::Result<()>;
}

/// Memory that a guest is to see. It stays mapped as long as its [`KvmOffload`] lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySlot {
    guest_address: u64,
    host_address: u64,
    size: u64,
    guest_writes: bool,
}

impl MemorySlot {
    /// Where the guest sees it.
    #[must_use]
    pub fn guest_address(self) -> u64 {
        self.guest_address
    }

    /// Where it is in this process.
    #[must_use]
    pub fn host_address(self) -> u64 {
        self.host_address
    }

    /// Its bytes, a multiple of the host's page size.
    #[must_use]
    pub fn size(self) -> u64 {
        self.size
    }

    /// Its flags in KVM: `KVM_MEM_READONLY`, unless the guest may write it.
    #[must_use]
    pub fn flags(self) -> u32 {
        if self.guest_writes { 0 } else { MEM_READONLY }
    }
}

/// Writes of four bytes, and what they signal.
#[derive(Clone, Copy, Debug)]
pub struct IoEventFd<'a> {
    /// Guest-physical address of the four bytes.
    pub address: u64,
    /// The value that signals, in the register's unit (kHz for set_perf); `None`: any.
    pub value: Option<u32>,
    /// What it signals.
    pub event: &'a EventFd,
}

/// An eventfd that a guest's requests signal.
#[derive(Debug)]
pub struct Doorbell {
    /// Bytes from [`KvmOffload::base`] to the register that the guest writes.
    pub offset: u64,
    /// The value that signals, in the register's unit: kHz for set_perf, peer and vector for the
    /// doorbell of shared memory. `None`: any.
    pub value: Option<u32>,
    /// What it signals.
    pub event: Arc<EventFd>,
}

impl Doorbell {
    /// One that writes of `khz` (`None`: any value) to the set_perf of `vcpu` signal.
    #[must_use]
    pub fn of_set_perf(vcpu: VcpuId, khz: Option<u32>, event: Arc<EventFd>) -> Self {
        Self {
            offset: u64::from(vcpu.0) * REGION_STRIDE + REG_SET_PERF,
            value: khz,
            event,
        }
    }
}

/// What KVM shall handle.
pub struct KvmOffload {
    /// Guest-physical address of the registers.
    pub base: u64,
    /// What the guest reads; each read exits without it.
    pub pages: Option<Arc<dyn SlotMemory>>,
    /// What its writes signal; other values exit.
    pub doorbells: Arc<[Doorbell]>,
    /// Readable when the thread that answers the doorbells has ended.
    pub lost: Arc<EventFd>,
    /// The path is of no use without the doorbells: KVM's refusal loses it.
    pub all_or_nothing: bool,
    /// Which of it KVM has taken.
    pub state: Arc<OffloadState>,
}

/// Memory that a slot shows to the guest. Its address doesn't change.
pub trait SlotMemory: Send + Sync {
    /// Where it is in this process, on a page boundary.
    fn address(&self) -> u64;

    /// Its bytes, a multiple of the host's page size.
    fn size(&self) -> u64;

    /// Whether the guest may write it.
    fn guest_writes(&self) -> bool;
}

/// What KVM answers itself now.
#[derive(Debug, Default)]
pub struct OffloadState {
    reads: AtomicBool,
    writes: AtomicBool,
    /// A refusal of the path in use has been reported; it is the same after each reset.
    refusal_reported: AtomicBool,
}

impl OffloadState {
    /// Whether reads come from memory.
    pub fn reads(&self) -> bool {
        self.reads.load(Relaxed)
    }

    /// Whether writes of table entries end in KVM.
    pub fn writes(&self) -> bool {
        self.writes.load(Relaxed)
    }
}

/// What KVM handles of one virtual machine.
pub struct InstalledOffload<'vm> {
    vm: &'vm dyn KvmVm,
    shown: bool,
    /// How many of the doorbells are connected.
    connected: usize,
    offload: Arc<KvmOffload>,
}

impl KvmOffload {
    /// This replaces a lost path: what KVM refuses of it has not been reported.
    fn succeed(&self) {
        self.state.refusal_reported.store(false, Relaxed);
    }

    /// Makes `vm` handle all of it. What KVM refuses is a warning, and exits.
    pub fn attach<'vm>(
        self: &Arc<Self>,
        vm: &'vm dyn KvmVm,
        warn: &dyn Fn(&str),
    ) -> InstalledOffload<'vm> {
        let mut attached = InstalledOffload {
            vm,
            shown: false,
            connected: 0,
            offload: self.clone(),
        };
        let refused = [attached.show(), attached.connect()];
        let refusal_reported = self.state.refusal_reported.load(Relaxed);
        for refused in refused.into_iter().flatten() {
            self.state.refusal_reported.store(true, Relaxed);
            if !refusal_reported {
                warn(&refused);
            }
        }
        attached.publish_state();
        attached
    }

    fn slot(&self) -> Option<MemorySlot> {
        let pages = self.pages.as_ref()?;
        Some(MemorySlot {
            guest_address: self.base,
            host_address: pages.address(),
            size: pages.size(),
            guest_writes: pages.guest_writes(),
        })
    }

    fn ioeventfd<'a>(&self, bell: &'a Doorbell) -> IoEventFd<'a> {
        IoEventFd {
            address: self.base + bell.offset,
            value: bell.value,
            event: &bell.event,
        }
    }
}

impl InstalledOffload<'_> {
    /// Hands all accesses over to the device on the bus. The thread that answers the doorbells
    /// carries out writes that were signalled before.
    pub fn detach(&mut self) {
        self.disconnect();
        if let Some(slot) = self.offload.slot().filter(|_| self.shown) {
            // Fails for want of memory only; then the page stays as it is.
            let _ = self.vm.unmap(slot);
        }
        self.shown = false;
        self.publish_state();
    }

    /// Readable when this is to be detached.
    pub fn lost(&self) -> &EventFd {
        &self.offload.lost
    }

    /// Shows the pages, if there are some; returns the warning when KVM doesn't.
    fn show(&mut self) -> Option<String> {
        let shown = self.vm.map(self.offload.slot()?);
        self.shown = shown.is_ok();
        let error = shown.err()?;
        Some(format!(
            "KVM refused a memory slot for the vcpufreq registers ({error}): each read exits \
             to the VMM; see vcpufreq doctor"
        ))
    }

    /// Connects the doorbells, or none of them.
    fn connect(&mut self) -> Option<String> {
        let bells = &self.offload.doorbells;
        let add = |bell| self.vm.add_ioeventfd(self.offload.ioeventfd(bell));
        let refused = bells.iter().position(|bell| add(bell).is_err());
        self.connected = refused.unwrap_or(bells.len());
        let (at, all) = (refused?, bells.len());
        self.disconnect();
        if self.offload.all_or_nothing {
            // A full counter is readable too.
            let _ = self.offload.lost.write(1);
        }
        Some(format!(
            "KVM refused ioeventfd {at} of {all}: each request exits to the VMM; see vcpufreq \
             doctor"
        ))
    }

    fn publish_state(&self) {
        let OffloadState { reads, writes, .. } = &*self.offload.state;
        reads.store(self.shown, Relaxed);
        writes.store(self.connected > 0, Relaxed);
    }

    fn disconnect(&mut self) {
        for bell in &self.offload.doorbells[..self.connected] {
            // What was registered can be taken back.
            let _ = self.vm.remove_ioeventfd(self.offload.ioeventfd(bell));
        }
        self.connected = 0;
    }
}

/// Returns what replaces a lost path, if anything.
pub type NextOffload<'a> = Box<dyn Fn() -> Option<Arc<KvmOffload>> + 'a>;
/// Receives what KVM refuses.
pub type RefusalHandler<'a> = Box<dyn Fn(&str) + 'a>;

/// What KVM handles of one virtual machine, over all paths that it takes.
pub struct Attachment<'a> {
    attached: Option<InstalledOffload<'a>>,
    offload: &'a mut Option<Arc<KvmOffload>>,
    vm: &'a dyn KvmVm,
    next: NextOffload<'a>,
    warn: RefusalHandler<'a>,
}

impl<'a> Attachment<'a> {
    /// Makes `vm` handle `offload`, if there is any; `next` replaces it later.
    pub fn new(
        vm: &'a dyn KvmVm,
        offload: &'a mut Option<Arc<KvmOffload>>,
        next: NextOffload<'a>,
        warn: RefusalHandler<'a>,
    ) -> Self {
        let mut attachment = Self {
            attached: None,
            offload,
            vm,
            next,
            warn,
        };
        attachment.attach();
        attachment
    }

    fn attach(&mut self) {
        let attach = |path: &Arc<KvmOffload>| path.attach(self.vm, &*self.warn);
        self.attached = self.offload.as_ref().map(attach);
    }

    /// Readable when [`Self::fall_back`] is to be called; `None` when all accesses exit.
    #[must_use]
    pub fn lost(&self) -> Option<&EventFd> {
        self.attached.as_ref().map(InstalledOffload::lost)
    }

    /// Detaches the current offload and attaches the next one.
    pub fn fall_back(&mut self) {
        if let Some(mut attached) = self.attached.take() {
            attached.detach();
            *self.offload = (self.next)();
            self.offload.iter().for_each(|next| next.succeed());
            self.attach();
        }
    }
}
