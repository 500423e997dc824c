// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A server for virtual machines of other processes: the registers as shared memory, which a stock
//! VMM carries as QEMU's ivshmem-doorbell. `abi/vcpufreq-shm.h` is the contract with the guest.
//!
//! ```text
//! guest read  ◀─ memory ◀─ device ◀─ Worker
//! guest store ─▶ memory; doorbell ─▶ KVM: eventfd of the vCPU ─▶ Worker ─▶ device
//! ```
//! A server makes a [`SharedMemory`] and an eventfd for each vCPU, [hands](hand_over) both to the
//! VMM that connects, finds its [threads](vcpu_threads), and offers a [`ShmBackend`] to
//! [`Bridge::start`](super::Bridge::start).
//!
//! A VMM offers the same to its own guest: a [`ShmBackend::of_own_guest`], whose doorbells are
//! KVM's, and a [`ShmRegion`] on its bus for what exits.

mod backend;
mod ivshmem;
mod layout;
mod memory;
mod region;
mod requests;
mod threads;

pub use backend::{SHM, ShmBackend};
pub use ivshmem::{hand_over, refuse};
pub use layout::{DOORBELL_PAGE, size};
pub use memory::SharedMemory;
pub use region::ShmRegion;
pub use threads::vcpu_threads;
