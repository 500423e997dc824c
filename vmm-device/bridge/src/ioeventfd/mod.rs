// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The path `ioeventfd`: reads of the vcpufreq registers from memory, writes of
//! set_perf finished by KVM, and one worker that does the rest.
//!
//! ```text
//! guest write ─▶ KVM: eventfd of (vCPU, value) ─▶ DomainWrites of the domain ─▶ Worker ─▶ device
//! guest write of another value ─▶ exit ─▶ IoeventfdRegion: DomainWrites first, then the device
//! guest read  ◀─ page ◀─ device ◀─ Worker: at a period, and after a change
//! ```
//!
//! Not here: KVM's side of it, which is `offload`.

mod domain_writes;
#[cfg(test)]
pub(crate) mod fake_device;
mod mmio_trace;
mod pending_writes;
mod perf;
mod perf_watch;
mod refresh_timer;
mod region;
mod run_watch;
mod worker;

pub use domain_writes::{DomainWrites, EntryBell, SignalledWrite};
#[cfg(feature = "fuzzing")]
pub use mmio_trace::FakeTrace;
pub use mmio_trace::{LastWrite, MmioTrace, TraceProgress, Unknown, WriteOrder};
pub use pending_writes::PendingWrites;
pub use perf_watch::{PerfWatch, frequency_event, freshness};
pub use region::IoeventfdRegion;
pub use run_watch::RunWatch;
pub use worker::{RequestQueue, Worker, WorkerParts};
