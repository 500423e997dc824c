// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VMM on KVM runs around the device: how accesses get to it, and the threads that it needs.
//!
//! ```text
//! Bridge ─▶ backend, path ioeventfd or exit ─▶ KvmOffload ─▶ KvmVm: a memory slot, ioeventfds
//!   └─▶ maintenance thread: requests over the limit, hotplug, governors, pinnings
//! ```
//!
//! A VMM implements [`KvmVm`] (with the feature `kvm-ioctls` it is `FreeSlot`) and [`Diagnostics`], calls [`Bridge::start`], puts [`Bridge::mmio`]
//! on its bus and tells a [`BridgeHandle`] of its threads, resets and end.
//!
//! The virtual machine comes with [`BridgeHandle::attach`] and not with the start, for a reset may
//! make a new one. The VMM calls [`Attachment::fall_back`] when [`Attachment::lost`] is readable,
//! on the thread that resets the guest too: a reset and a fallback never meet.

mod bridge;
pub mod budget;
mod diagnostics;
mod error;
mod event_stats;
#[cfg(feature = "kvm-ioctls")]
mod free_slot;
mod host_watch;
mod hotplug;
pub mod ioeventfd;
mod maintenance;
mod mmio_device;
mod offload;
mod page_mapping;
pub mod shm;

pub use bridge::{
    AccessPath, Backend, Bridge, BridgeConfig, BridgeDevice, BridgeHandle, BridgeSnapshot, Guest,
    IoeventfdPlan, Offered, PcpuLoad, PcpuTarget, RunningBackend, Totals, VcpuSnapshot,
};
pub use diagnostics::Diagnostics;
pub use error::{BackendError, PathError};
pub use event_stats::{EventSink, EventStats, HostChange};
#[cfg(feature = "kvm-ioctls")]
pub use free_slot::FreeSlot;
pub use maintenance::TURNS;
pub use mmio_device::{MmioDevice, accesses_are_of};
pub use offload::{
    Attachment, Doorbell, InstalledOffload, IoEventFd, KvmOffload, KvmVm, MemorySlot, Next,
    OffloadState, SlotMemory, Warn,
};
pub use page_mapping::PageMapping;
