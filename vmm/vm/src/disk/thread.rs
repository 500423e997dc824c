// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The thread that carries a disk's requests out, over all boots of a guest.

use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use anyhow::Context as _;
use kvm_ioctls::{IoEventAddress, VmFd};
use virtio_bindings::virtio_mmio::VIRTIO_MMIO_QUEUE_NOTIFY;
use vmm_sys_util::eventfd::EventFd;

use super::device::VirtioDisk;
use super::image::DiskImage;
use crate::environment::Hooks;
use crate::layout::{DISK_BASE, DISK_SPI};
use crate::memory::Memory;
use crate::sys::UnsharedMemoryGuard;

/// A disk and its thread.
pub struct DiskThread {
    disk: Arc<VirtioDisk>,
    thread: Option<JoinHandle<()>>,
}

impl DiskThread {
    /// Starts the thread, which may run where the calling one may.
    ///
    /// # Errors
    /// When the process has no more threads or open files.
    pub fn start(image: DiskImage, hooks: Arc<dyn Hooks>) -> anyhow::Result<Self> {
        let disk = VirtioDisk::new(image).context("can't make the disk")?;
        let disk = Arc::new(disk);
        let served = disk.clone();
        let serve = move || {
            hooks.on_disk_thread();
            served.serve_until_stopped();
        };
        let thread = Builder::new().name("disk".to_owned()).spawn(serve);
        let thread = thread.context("can't start the disk's thread")?;
        Ok(Self {
            disk,
            thread: Some(thread),
        })
    }

    /// What answers the guest's accesses.
    #[must_use]
    pub fn device(&self) -> Arc<VirtioDisk> {
        self.disk.clone()
    }

    /// Connects the disk with a guest that hasn't run yet, and takes it off again when the result is
    /// dropped.
    ///
    /// # Errors
    /// What KVM refused.
    pub fn power_on(&self, vm: &VmFd, memory: &Memory) -> anyhow::Result<PoweredDisk<'_>> {
        let interrupt = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
        let interrupt = interrupt.context("can't make an eventfd")?;
        vm.register_irqfd(&interrupt, DISK_SPI)
            .context("KVM can't connect the disk's interrupt")?;
        let notify = IoEventAddress::Mmio(DISK_BASE + u64::from(VIRTIO_MMIO_QUEUE_NOTIFY));
        // The number of the only queue.
        vm.register_ioevent(self.disk.notified(), &notify, 0_u32)
            .context("KVM can't connect the disk's queue")?;
        let guard = UnsharedMemoryGuard::watch(memory.map())
            .context("can't take a signal over for the disk")?;
        self.disk.power_on(memory.map().clone(), interrupt);
        Ok(PoweredDisk {
            disk: &self.disk,
            _guard: guard,
        })
    }
}

impl Drop for DiskThread {
    fn drop(&mut self) {
        self.disk.stop();
        // A panic of that thread was reported when it happened.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// A disk that a guest uses. Dropped when no vCPU runs: then no request is carried out any more, and
/// the guest's memory can be given back.
pub struct PoweredDisk<'a> {
    disk: &'a VirtioDisk,
    _guard: UnsharedMemoryGuard,
}

impl Drop for PoweredDisk<'_> {
    fn drop(&mut self) {
        self.disk.power_off();
    }
}
