// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device in a VMM on KVM: the paths of accesses, and the threads that they need.
//!
//! ```text
//! Bridge ─▶ backend, path ioeventfd or exit ─▶ KvmOffload ─▶ KvmVm: a memory slot, ioeventfds
//!   └─▶ maintenance thread: requests over the limit, hotplug, governors, pinnings, caps
//! ```
//!
//! A VMM implements [`KvmVm`] (with the feature `kvm`, `KvmSlot` is one) and [`Embedder`],
//! calls [`Bridge::builder`], and puts [`Bridge::mmio`] on its bus. It reports its threads, resets
//! and end to a [`BridgeHandle`].
//!
//! [`BridgeHandle::attach`] takes the virtual machine, because a reset may make a new one. When
//! [`Attachment::lost`] is readable, the VMM calls [`Attachment::fall_back`] on the thread that
//! also resets the guest: a reset and a fallback never run at once.

#![deny(clippy::missing_errors_doc)]

mod bridge;
pub mod budget;
mod builder;
mod cap_watch;
mod embedder;
mod error;
mod event_stats;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod guest_pages;
mod host_watch;
mod hotplug;
pub mod ioeventfd;
#[cfg(feature = "kvm")]
mod kvm_slot;
mod maintenance;
mod mmio_device;
mod offload;
mod page_mapping;
mod pcpu_load;
mod policy_attribute;
pub mod shm;
mod sync;
pub mod syscalls;
mod tune;

pub use bridge::{
    AccessPath, Backend, Bridge, BridgeConfig, BridgeDevice, BridgeHandle, BridgeSnapshot,
    GuestFacts, IoeventfdPlan, Offered, RunningBackend, Totals, VcpuSnapshot,
};
pub use builder::{BridgeBuilder, StartError};
pub use embedder::{BridgeThread, BridgeWork, Embedder, Silent};
pub use error::{BackendError, PathError};
pub use event_stats::{EventSink, EventStats, HostEvent};
pub use guest_pages::GuestPages;
#[cfg(feature = "kvm")]
pub use kvm_slot::KvmSlot;
pub use maintenance::TURNS;
pub use mmio_device::{MmioDevice, accesses_are_of};
pub use offload::{
    Attachment, DetachError, Doorbell, InstalledOffload, IoEventFd, KvmOffload, KvmVm, MemorySlot,
    NextOffload, OffloadState, RefusalHandler, SlotMemory,
};
pub use page_mapping::PageMapping;
pub use pcpu_load::{PcpuLoad, PcpuTarget};
pub use tune::{
    TUNED_AT_MOST, TUNINGS_AT_MOST, TuneClient, TuneEnd, TuneError, TuneRequest, Tuning,
};
pub use vcpufreq_device::VcpuId;
pub use vcpufreq_host::{HostRoot, MirrorError, mirror};

/// Its example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
