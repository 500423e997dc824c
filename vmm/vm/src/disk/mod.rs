// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's disk: a virtio block device over MMIO (virtio 1.3), whose sectors are a file's.
//!
//! ```text
//! guest: descriptors, QUEUE_NOTIFY ─▶ ioeventfd ─▶ DiskThread ─▶ request ─▶ DiskImage ─▶ irqfd
//! ```
//! A thread of its own carries requests out: no vCPU waits for the file. What the guest writes is
//! checked where it is used, and what is wrong gets a status or stops the queue. A protected guest
//! shares the memory that the device accesses (`restricted-dma-pool`). Data goes between file and guest in
//! the kernel, which refuses what is not shared. Of rings and headers that are not, the load of this
//! process is a SIGSEGV, with which that guest ends its own VMM.

mod device;
mod image;
mod registers;
mod request;
mod thread;

pub use device::VirtioDisk;
pub use image::DiskImage;
pub use thread::{DiskThread, PoweredDisk};
