// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM's cpufreq device, answered in the host's kernel by BPF.
//!
//! ```text
//! guest reads cur_perf  ◀─ page ◀─ programs on sched_switch and cpu_frequency
//! guest writes set_perf ─▶ program on kvm_mmio ─▶ kernel module ─▶ cgroup's uclamp
//!                                              └▶ event ─▶ the VMM's worker
//! ```
//!
//! The programs are in `bpf/` and under the GPL; this crate loads them from an object file that
//! is built beside it (`make -C host-bpf/bpf`). Everything is bound to the process that loads it:
//! nothing is pinned, so nothing is left when it is killed.
//!
//! `HostBpf` is the loader: its pages and an [`Event`] for each request. `BpfBackend` is the path
//! `bpf` of a bridge (`vcpufreq_device::kvm::Bridge`), made of that.
//!
//! Without the feature `load`, only the layout, the policy, the events and the errors are here.

#![deny(unsafe_code)]

#[cfg(feature = "load")]
mod backend;
mod error;
mod event;
#[cfg(feature = "load")]
mod host;
mod layout;
mod libbpf_log;
#[cfg(feature = "load")]
mod mapped;
#[cfg(feature = "load")]
mod module;
#[cfg(feature = "load")]
mod object;
mod policy;
mod probe;
#[cfg(feature = "load")]
mod worker;

#[cfg(feature = "load")]
pub use backend::{BpfBackend, offer};
pub use error::BpfError;
pub use event::{Event, Outcome, Told, Waiting};
#[cfg(feature = "load")]
pub use host::{BpfPages, HostBpf, Latest, Pages, Pcpu, Settled, VmConfig, Warn};
pub use layout::{BUCKETS, Counters};
#[cfg(feature = "load")]
pub use module::{Applied, DEVICE, HostModule};
pub use policy::{ActuateBy, VcpuPolicy};
pub use probe::{KFUNC, probe};
#[cfg(feature = "load")]
pub use worker::Worker;

#[cfg(feature = "load")]
pub use libbpf_log::verify;
