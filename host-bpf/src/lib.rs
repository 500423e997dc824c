// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM's cpufreq device, answered in the host's kernel by BPF.
//!
//! ```text
//! guest reads cur_perf  ◀─ page ◀─ programs on sched_switch and cpu_frequency
//! guest writes set_perf ─▶ program on kvm_mmio ─▶ kernel module ─▶ cgroup's uclamp
//!                                              └▶ event ─▶ the VMM's worker
//! ```
//!
//! The programs are in `bpf/` and under the GPL; the build compiles them, and this crate carries
//! them. The VMs of a host share the programs on the kernel's hooks, which call those of the VM that
//! an event is of. Everything is bound to the processes that have it open, and nothing is pinned.
//!
//! `HostBpf` is the loader: its pages and a [`BpfEvent`] for each request. `BpfBackend` is the path
//! `bpf` of a bridge (`vcpufreq_bridge::Bridge`), made of that.
//!
//! Without the feature `load`, only the layout, the policy, the events and the errors are here.

#![cfg_attr(not(feature = "load"), forbid(unsafe_code))]
#![deny(clippy::missing_errors_doc)]

#[cfg(feature = "load")]
mod backend;
#[cfg(feature = "load")]
mod dispatch;
mod error;
mod event;
mod hooks;
#[cfg(feature = "load")]
mod host;
mod layout;
mod libbpf_log;
#[cfg(any(test, feature = "load"))]
mod loss_detector;
#[cfg(feature = "load")]
mod mapped;
#[cfg(feature = "load")]
mod module;
#[cfg(feature = "load")]
mod object;
#[cfg(feature = "load")]
mod objects;
mod operator;
#[cfg(feature = "load")]
mod pins;
mod policy;
mod probe;
#[cfg(feature = "load")]
mod scx;
#[cfg(feature = "load")]
mod sync;
#[cfg(feature = "load")]
mod worker;

#[cfg(feature = "load")]
pub use backend::{BpfBackend, give_back_freed, offer, summed::SummedBackend};
pub use error::BpfError;
pub use event::{BpfEvent, HandledRequest, RequestOutcome, WorkerRequest, parse};
#[cfg(feature = "load")]
pub use host::{
    ApplyOutcome, BpfPages, HostBpf, LatestRequest, Pages, PcpuFacts, VmConfig, WarningSink, sweep,
};
pub use layout::{BUCKETS, BpfCounters, PINS};
#[cfg(feature = "load")]
pub use module::{DEVICE, HostModule, ModuleDomainStats};
#[cfg(feature = "load")]
pub use operator::OperatorVm;
pub use policy::{ActuateBy, VcpuPolicy};
pub use probe::probe;
#[cfg(feature = "load")]
pub use scx::{ScxError, ScxPins, ScxService};
#[cfg(feature = "load")]
pub use worker::WorkerEvents;

#[cfg(feature = "load")]
pub use libbpf_log::verify;

/// Its example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
