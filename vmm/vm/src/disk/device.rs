// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The block device as its driver sees it: registers, features, and one queue.

use std::io;
use std::sync::atomic::{
    AtomicBool, AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Mutex, MutexGuard};

use virtio_bindings::virtio_blk::{VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_SEG_MAX};
use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
    VIRTIO_F_ACCESS_PLATFORM, VIRTIO_F_VERSION_1,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use virtio_bindings::virtio_mmio::{
    VIRTIO_MMIO_CONFIG, VIRTIO_MMIO_INT_CONFIG, VIRTIO_MMIO_INT_VRING,
};
use virtio_queue::{Error, Queue, QueueOwnedT as _, QueueT as _};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use super::image::DiskImage;
use super::registers::{ReadRegister, WriteRegister};
use super::request::{self, QUEUE_SIZE};
use crate::bus::MmioDevice;

/// Pieces of data in a request: a header and a status are there, too. Without this Linux takes one,
/// and asks for each page by itself.
const SEG_MAX: u32 = 254;
/// The first bytes of the registers: "virt".
const MAGIC: u32 = 0x7472_6976;
/// Of registers without a legacy interface.
const VERSION: u32 = 2;
/// What is offered. With ACCESS_PLATFORM Linux asks its DMA layer for addresses, which knows a
/// protected guest's bounce buffers.
const FEATURES: u64 = (1 << VIRTIO_F_VERSION_1)
    | (1 << VIRTIO_F_ACCESS_PLATFORM)
    | (1 << VIRTIO_BLK_F_FLUSH)
    | (1 << VIRTIO_BLK_F_SEG_MAX);
/// What a driver has to take: the layout of everything here.
const NEEDED: u64 = 1 << VIRTIO_F_VERSION_1;

/// The disk, which stays the same over resets of its guest.
pub struct VirtioDisk {
    sectors: u64,
    /// Readable when the guest has requests, or [`Self::stop`] was called.
    notified: EventFd,
    /// Causes of the interrupt that the driver hasn't taken yet.
    causes: AtomicU32,
    /// Requests are given up.
    is_off: AtomicBool,
    is_stopped: AtomicBool,
    state: Mutex<DriverState>,
}

/// What the driver has set, and what its requests need.
struct DriverState {
    image: DiskImage,
    /// Memory and interrupt of the guest, if one is there.
    guest: Option<(GuestMemoryMmap, EventFd)>,
    queue: Queue,
    status: u32,
    features: u64,
    device_features_word: u32,
    driver_features_word: u32,
    queue_selected: u32,
}

impl VirtioDisk {
    /// A disk that no guest uses yet.
    ///
    /// # Errors
    /// When the process has no more open files.
    pub fn new(image: DiskImage) -> io::Result<Self> {
        Ok(Self {
            sectors: image.sectors(),
            notified: EventFd::new(libc::EFD_CLOEXEC)?,
            causes: AtomicU32::new(0),
            is_off: AtomicBool::new(true),
            is_stopped: AtomicBool::new(false),
            state: Mutex::new(DriverState {
                image,
                guest: None,
                queue: Queue::new(QUEUE_SIZE).map_err(io::Error::other)?,
                status: 0,
                features: 0,
                device_features_word: 0,
                driver_features_word: 0,
                queue_selected: 0,
            }),
        })
    }

    /// What KVM writes to when the guest has requests.
    pub fn notified(&self) -> &EventFd {
        &self.notified
    }

    /// A guest starts, with this memory.
    pub fn power_on(&self, memory: GuestMemoryMmap, interrupt: EventFd) {
        if let Some(mut state) = self.state() {
            self.reset(&mut state);
            state.guest = Some((memory, interrupt));
            self.is_off.store(false, Release);
        }
    }

    /// The guest has ended: its memory isn't used any more when this returns.
    pub fn power_off(&self) {
        // The thread sees it between two requests, and lets the lock go.
        self.is_off.store(true, Release);
        if let Some(mut state) = self.state() {
            self.reset(&mut state);
            state.guest = None;
        }
    }

    /// Has [`Self::serve_until_stopped`] return.
    pub fn stop(&self) {
        self.is_stopped.store(true, Release);
        self.is_off.store(true, Release);
        // Fails when the counter is full only, and then it is readable anyway.
        let _ = self.notified.write(1);
    }

    /// Carries requests out as they come.
    pub fn serve_until_stopped(&self) {
        while !self.is_stopped.load(Acquire) {
            // Fails when a signal comes: one look at the queue too many.
            let _ = self.notified.read();
            self.carry_out();
        }
    }

    /// Carries out what the queue has.
    pub fn carry_out(&self) {
        let Some(mut state) = self.state() else {
            return;
        };
        let DriverState {
            image,
            guest,
            queue,
            status,
            ..
        } = &mut *state;
        let Some((memory, interrupt)) = guest else {
            return;
        };
        let is_driven = *status & (VIRTIO_CONFIG_S_DRIVER_OK | VIRTIO_CONFIG_S_NEEDS_RESET)
            == VIRTIO_CONFIG_S_DRIVER_OK;
        if !is_driven || !queue.ready() {
            return;
        }
        let mut serve = || -> Result<(), Error> {
            if !queue.is_valid(&*memory) {
                return Err(Error::QueueNotReady);
            }
            loop {
                queue.disable_notification(&*memory)?;
                if self.serve_available(queue, memory, image)? {
                    self.interrupt(interrupt, VIRTIO_MMIO_INT_VRING);
                }
                if self.is_off.load(Acquire) || !queue.enable_notification(&*memory)? {
                    return Ok(());
                }
            }
        };
        if serve().is_err() {
            // Its rings make no sense: only a reset helps.
            *status |= VIRTIO_CONFIG_S_NEEDS_RESET;
            self.interrupt(interrupt, VIRTIO_MMIO_INT_CONFIG);
        }
    }

    /// Whether there was a request.
    fn serve_available(
        &self,
        queue: &mut Queue,
        memory: &GuestMemoryMmap,
        image: &DiskImage,
    ) -> Result<bool, Error> {
        let mut served = false;
        // As many as there is room for: a driver that adds more meanwhile has its interrupt first.
        for _ in 0..queue.size() {
            let chain = queue.iter(memory)?.next();
            let Some(chain) = chain.filter(|_| !self.is_off.load(Acquire)) else {
                break;
            };
            let head = chain.head_index();
            let written = request::carry_out(chain, memory, image);
            queue.add_used(memory, head, written)?;
            served = true;
        }
        Ok(served)
    }

    fn interrupt(&self, interrupt: &EventFd, cause: u32) {
        self.causes.fetch_or(cause, Release);
        // Fails when the counter is full only, and then it is readable anyway.
        let _ = interrupt.write(1);
    }

    fn reset(&self, state: &mut DriverState) {
        state.queue.reset();
        state.status = 0;
        state.features = 0;
        state.device_features_word = 0;
        state.driver_features_word = 0;
        state.queue_selected = 0;
        self.causes.store(0, Release);
    }

    /// None if the thread has panicked: there is no disk any more.
    fn state(&self) -> Option<MutexGuard<'_, DriverState>> {
        self.state.lock().ok()
    }

    /// What a register has of the state.
    fn of_state(&self, read: impl FnOnce(&DriverState) -> u32) -> u32 {
        self.state().map_or(0, |state| read(&state))
    }

    fn register(&self, register: ReadRegister) -> u32 {
        match register {
            ReadRegister::Magic => MAGIC,
            ReadRegister::Version => VERSION,
            ReadRegister::DeviceId => VIRTIO_ID_BLOCK,
            ReadRegister::VendorId | ReadRegister::ConfigGeneration => 0,
            // Without the lock, which the thread has while it carries requests out.
            ReadRegister::InterruptStatus => self.causes.load(Acquire),
            ReadRegister::DeviceFeatures => {
                self.of_state(|state| word(FEATURES, state.device_features_word))
            }
            ReadRegister::QueueSizeMax => self.of_state(|state| match state.queue_selected {
                0 => QUEUE_SIZE.into(),
                _ => 0,
            }),
            ReadRegister::QueueReady => {
                self.of_state(|state| u32::from(state.queue_selected == 0 && state.queue.ready()))
            }
            ReadRegister::Status => self.of_state(|state| state.status),
        }
    }

    fn set(&self, register: WriteRegister, value: u32) {
        match register {
            WriteRegister::QueueNotify => {
                let _ = self.notified.write(1);
            }
            WriteRegister::InterruptAck => {
                self.causes.fetch_and(!value, Relaxed);
            }
            register => {
                if let Some(mut state) = self.state() {
                    match (register, value) {
                        (WriteRegister::Status, 0) => self.reset(&mut state),
                        _ => state.set(register, value),
                    }
                }
            }
        }
    }

    /// `struct virtio_blk_config`, as far as its features are offered.
    fn config(&self) -> [u8; 16] {
        let mut config = [0; 16];
        let fields = u128::from(self.sectors) | (u128::from(SEG_MAX) << 96);
        config.copy_from_slice(&fields.to_le_bytes());
        config
    }
}

/// One of two words: the lower has number 0.
fn word(bits: u64, number: u32) -> u32 {
    let shifted = number
        .checked_mul(u32::BITS)
        .and_then(|by| bits.checked_shr(by));
    u32::try_from(shifted.unwrap_or(0) & u64::from(u32::MAX)).unwrap_or(0)
}

impl DriverState {
    fn set(&mut self, register: WriteRegister, value: u32) {
        match register {
            WriteRegister::DeviceFeaturesSelect => self.device_features_word = value,
            WriteRegister::DriverFeaturesSelect => self.driver_features_word = value,
            WriteRegister::DriverFeatures if !self.has(VIRTIO_CONFIG_S_FEATURES_OK) => {
                self.set_features(value);
            }
            WriteRegister::QueueSelect => self.queue_selected = value,
            WriteRegister::Status => self.set_status(value),
            register if self.queue_selected == 0 => self.set_queue(register, value),
            _ => {}
        }
    }

    fn has(&self, status: u32) -> bool {
        self.status & status != 0
    }

    fn set_features(&mut self, value: u32) {
        let Some(shift) = self.driver_features_word.checked_mul(u32::BITS) else {
            return;
        };
        let mask = u64::from(u32::MAX).checked_shl(shift).unwrap_or(0);
        let bits = u64::from(value).checked_shl(shift).unwrap_or(0);
        self.features = self.features & !mask | bits;
    }

    fn set_status(&mut self, value: u32) {
        let taken = self.features & NEEDED == NEEDED && self.features & !FEATURES == 0;
        let allowed = match taken {
            true => value,
            false => value & !(VIRTIO_CONFIG_S_FEATURES_OK | VIRTIO_CONFIG_S_DRIVER_OK),
        };
        self.status = allowed | self.status & VIRTIO_CONFIG_S_NEEDS_RESET;
    }

    /// A queue that is ready stays as it is.
    fn set_queue(&mut self, register: WriteRegister, value: u32) {
        let queue = &mut self.queue;
        if register == WriteRegister::QueueReady {
            return queue.set_ready(value == 1);
        }
        if queue.ready() {
            return;
        }
        match register {
            // A size that is none is refused when the queue is used.
            WriteRegister::QueueSize => queue.set_size(u16::try_from(value).unwrap_or(0)),
            WriteRegister::DescTableLow => queue.set_desc_table_address(Some(value), None),
            WriteRegister::DescTableHigh => queue.set_desc_table_address(None, Some(value)),
            WriteRegister::AvailRingLow => queue.set_avail_ring_address(Some(value), None),
            WriteRegister::AvailRingHigh => queue.set_avail_ring_address(None, Some(value)),
            WriteRegister::UsedRingLow => queue.set_used_ring_address(Some(value), None),
            WriteRegister::UsedRingHigh => queue.set_used_ring_address(None, Some(value)),
            _ => {}
        }
    }
}

impl MmioDevice for VirtioDisk {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(at) = offset.checked_sub(VIRTIO_MMIO_CONFIG.into()) {
            let config = self.config();
            let skipped = usize::try_from(at).unwrap_or(usize::MAX);
            let bytes = config.iter().skip(skipped);
            data.iter_mut()
                .zip(bytes)
                .for_each(|(to, byte)| *to = *byte);
            return;
        }
        if let (Some(register), Ok(word)) =
            (ReadRegister::decode(offset), <&mut [u8; 4]>::try_from(data))
        {
            *word = self.register(register).to_le_bytes();
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let (Some(register), Ok(word)) =
            (WriteRegister::decode(offset), <[u8; 4]>::try_from(data))
        {
            self.set(register, u32::from_le_bytes(word));
        }
    }
}

#[cfg(test)]
#[path = "device_tests.rs"]
mod tests;
