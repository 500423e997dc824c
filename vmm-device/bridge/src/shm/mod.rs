// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A server for virtual machines of other processes: the registers as shared memory, which a stock
//! VMM carries as QEMU's ivshmem-doorbell. `abi/vcpufreq-shm.h` is the contract with the guest.
//!
//! ```text
//! guest read  ◀─ memory ◀─ device ◀─ Worker
//! guest store ─▶ memory; doorbell ─▶ KVM: eventfd of the vCPU ─▶ Worker ─▶ device
//! ```
//! A server makes a [`SharedMemory`] and an eventfd for each vCPU and [hands](hand_over) both to a
//! VMM that connects. It then finds the VMM's [vCPU threads](vcpu_threads) and passes a
//! [`ShmBackend`] to [`Bridge::start`](super::Bridge::start).
//!
//! A VMM that shares its guest's RAM needs no device: there the pages are RAM of the guest, in the
//! layout of the registers with a table of one entry, and the worker reads the requests.
//!
//! A VMM can offer the same to its own guest: [`ShmBackend::of_own_guest`], whose doorbells are
//! KVM's, and a [`ShmRegion`] on its bus for accesses that exit; or with memory [in the place of the
//! registers](SharedMemory::in_place_of_registers), and the registers on its bus.

mod backend;
mod ivshmem;
mod layout;
mod memory;
mod region;
mod requests;
mod threads;

pub use backend::{RAM, SHM, ShmBackend};
pub use ivshmem::{hand_over, refuse};
pub use layout::{DOORBELL_PAGE, size};
pub use memory::{SharedMemory, sealed_memory};
pub use region::ShmRegion;
pub use requests::AllVcpus;
#[cfg(feature = "fuzzing")]
pub use requests::ShmRequests;
pub use threads::vcpu_threads;
