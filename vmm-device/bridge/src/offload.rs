// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What of the vcpufreq registers KVM answers itself: reads from a memory slot,
//! which is read-only but for shared memory, and requests by ioeventfds.
//!
//! All of it belongs to the virtual machine in KVM, which a reset of the guest
//! makes anew; pages and eventfds outlive it. Whatever KVM refuses takes the
//! exit to the device on the bus instead, and so does everything once this is
//! detached: no access is lost.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::thread::{Builder, JoinHandle};

use vcpufreq_device::{REG_SET_PERF, REGION_STRIDE, VcpuId};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

/// `KVM_MEM_READONLY` of `linux/kvm.h`.
const MEM_READONLY: u32 = 1 << 1;

/// A virtual machine in KVM: what a VMM implements.
pub trait KvmVm: Send + Sync {
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

    /// Has it do so no longer. KVM finds an eventfd by address, length and value: without the same
    /// value (`KVM_IOEVENTFD_FLAG_DATAMATCH`) it removes none.
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
    /// Readable when the thread that answers the doorbells has ended, or the bridge.
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
pub struct InstalledOffload {
    vm: Arc<dyn KvmVm>,
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
    pub fn attach(self: &Arc<Self>, vm: &Arc<dyn KvmVm>, warn: &dyn Fn(&str)) -> InstalledOffload {
        let mut attached = InstalledOffload {
            vm: vm.clone(),
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

impl InstalledOffload {
    /// Hands all accesses over to the device on the bus. The thread that answers the doorbells
    /// carries out writes that were signalled before.
    ///
    /// # Errors
    /// [`DetachError`], when all was tried: KVM still has the rest.
    pub fn detach(&mut self) -> Result<(), DetachError> {
        let doorbells = self.disconnect();
        let slot = self.offload.slot().filter(|_| self.shown);
        let unmapped = slot.map_or(Ok(()), |slot| self.vm.unmap(slot));
        self.shown &= unmapped.is_err();
        self.publish_state();
        match (doorbells, unmapped) {
            (0, Ok(())) => Ok(()),
            (0, Err(error)) => Err(DetachError::Memory { error }),
            (doorbells, _) => Err(DetachError::Doorbells { doorbells }),
        }
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
        let refused = self.connect_all().err()?;
        if self.offload.all_or_nothing {
            // A full counter is readable too.
            let _ = self.offload.lost.write(1);
        }
        Some(refused)
    }

    fn connect_all(&mut self) -> Result<(), String> {
        let bells = &self.offload.doorbells;
        if bells.is_empty() {
            return Ok(());
        }
        self.removal_works()?;
        let add = |bell| self.vm.add_ioeventfd(self.offload.ioeventfd(bell));
        let refused = bells.iter().position(|bell| add(bell).is_err());
        self.connected = refused.unwrap_or(bells.len());
        let (Some(at), all) = (refused, bells.len()) else {
            return Ok(());
        };
        self.disconnect();
        Err(format!(
            "KVM refused ioeventfd {at} of {all}: each request exits to the VMM; see vcpufreq \
             doctor"
        ))
    }

    /// Tries whether the VMM removes what it adds: requests that signal an eventfd that is left are
    /// lost when nothing reads it any more. The first register is read only, and this value of it no
    /// guest writes.
    fn removal_works(&self) -> Result<(), String> {
        let event = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
        let event = event.map_err(|error| format!("can't make an eventfd ({error})"))?;
        let unused = IoEventFd {
            address: self.offload.base,
            // As the doorbells, of a value or of any.
            value: self.offload.doorbells[0].value.map(|_| u32::MAX),
            event: &event,
        };
        let keeps = |error| {
            format!(
                "KVM keeps ioeventfds ({error}): each request exits to the VMM; \
                 KvmVm::remove_ioeventfd must pass the value that was added"
            )
        };
        self.vm.add_ioeventfd(unused).map_err(|error| {
            format!("KVM refused an ioeventfd ({error}): each request exits to the VMM")
        })?;
        self.vm.remove_ioeventfd(unused).map_err(keeps)?;
        // KVM refuses the second one if the first one is left.
        self.vm.add_ioeventfd(unused).map_err(keeps)?;
        self.vm.remove_ioeventfd(unused).map_err(keeps)
    }

    fn publish_state(&self) {
        let OffloadState { reads, writes, .. } = &*self.offload.state;
        reads.store(self.shown, Relaxed);
        writes.store(self.connected > 0, Relaxed);
    }

    /// How many of the doorbells stay connected.
    fn disconnect(&mut self) -> usize {
        let bells = self.offload.doorbells[..self.connected].iter();
        let removed = bells.map(|bell| self.vm.remove_ioeventfd(self.offload.ioeventfd(bell)));
        let kept = removed.filter(Result::is_err).count();
        self.connected = 0;
        kept
    }
}

impl Drop for InstalledOffload {
    fn drop(&mut self) {
        let slot = self.offload.slot().filter(|_| self.shown);
        if slot.is_some_and(|slot| self.vm.unmap(slot).is_err()) {
            // The guest still reads there.
            std::mem::forget(self.offload.clone());
        }
    }
}

/// What KVM did not give back.
#[derive(Debug, thiserror::Error)]
pub enum DetachError {
    /// Eventfds: writes that signal them don't reach the device on the bus.
    #[error(
        "KVM kept {doorbells} ioeventfds: KvmVm::remove_ioeventfd must pass the value that they were \
         added with"
    )]
    Doorbells {
        /// How many.
        doorbells: usize,
    },
    /// The memory slot: reads see what it last had.
    #[error("KVM kept the memory slot of the vcpufreq registers ({error})")]
    Memory {
        /// KVM's error.
        error: io::Error,
    },
}

/// Ends the path that was lost, with what KVM did not give back of it. Returns what replaces it, if
/// anything.
pub type NextOffload =
    Box<dyn Fn(&Arc<KvmOffload>, Result<(), DetachError>) -> Option<Arc<KvmOffload>> + Send>;
/// Receives what KVM refuses.
pub type RefusalHandler = Box<dyn Fn(&str) + Send>;

/// What KVM handles of one virtual machine, over all paths that it takes. It keeps the virtual
/// machine. What KVM does not do any more for it, it does for none after it.
pub struct Attachment {
    attached: Option<InstalledOffload>,
    vm: Arc<dyn KvmVm>,
    next: NextOffload,
    warn: RefusalHandler,
}

impl Attachment {
    /// Makes `vm` handle `offload`, if there is any; `next` replaces it later.
    pub fn new(
        vm: Arc<dyn KvmVm>,
        offload: Option<&Arc<KvmOffload>>,
        next: NextOffload,
        warn: RefusalHandler,
    ) -> Self {
        let attached = offload.map(|offload| offload.attach(&vm, &*warn));
        Self {
            attached,
            vm,
            next,
            warn,
        }
    }

    /// Readable when [`Self::fall_back`] is to be called, behind which there is another one; `None`
    /// when all accesses exit.
    #[must_use]
    pub fn lost(&self) -> Option<&EventFd> {
        self.attached.as_ref().map(InstalledOffload::lost)
    }

    /// Detaches the current offload and attaches the next one.
    pub fn fall_back(&mut self) {
        if let Some(mut attached) = self.attached.take() {
            let detached = attached.detach();
            let next = (self.next)(&attached.offload, detached);
            self.attached = next.map(|next| {
                next.succeed();
                next.attach(&self.vm, &*self.warn)
            });
        }
    }

    /// Has a thread of its own call [`Self::fall_back`] whenever it is to be called, until all accesses
    /// exit or the bridge has ended: for a VMM that has one virtual machine as long as the bridge, which
    /// it keeps open until then. It also falls back if it can't wait.
    ///
    /// # Errors
    /// As pthread_create(3): `EAGAIN`. All accesses exit then.
    pub fn watch(mut self) -> io::Result<JoinHandle<()>> {
        let (give, take) = mpsc::channel::<Self>();
        let watch = move || {
            if let Ok(attachment) = take.recv() {
                attachment.until_all_exit();
            }
        };
        match Builder::new().name("watch".to_owned()).spawn(watch) {
            Ok(thread) => {
                // The thread waits for it.
                let _ = give.send(self);
                Ok(thread)
            }
            Err(error) => {
                self.give_up();
                Err(error)
            }
        }
    }

    fn until_all_exit(mut self) {
        while let Some(lost) = self.lost() {
            match wait_until_readable(lost) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => self.fall_back(),
            }
        }
    }

    /// Has all accesses exit from now on, since nothing looks at what is lost.
    fn give_up(&mut self) {
        while self.lost().is_some() {
            self.fall_back();
        }
    }

    /// Takes it back from a virtual machine that goes on without it. One that ends needs no call.
    ///
    /// # Errors
    /// [`DetachError`], when all was tried: KVM still has the rest.
    pub fn detach(mut self) -> Result<(), DetachError> {
        let attached = self.attached.as_mut();
        attached.map_or(Ok(()), InstalledOffload::detach)
    }
}

fn wait_until_readable(event: &EventFd) -> io::Result<usize> {
    let epoll = Epoll::new()?;
    let readable = EpollEvent::new(EventSet::IN, 0);
    epoll.ctl(ControlOperation::Add, event.as_raw_fd(), readable)?;
    epoll.wait(-1, &mut [EpollEvent::default()])
}

#[cfg(test)]
#[path = "offload_tests.rs"]
mod tests;
