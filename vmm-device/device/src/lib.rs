// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtual cpufreq device (`qemu,virtual-cpufreq`) as a library for VMMs.
//!
//! A guest requests a frequency by a register write. The device turns the request into a
//! utilization clamp on the vCPU thread. A register read returns the frequency of the vCPU's pCPU:
//!
//! ```text
//! write ─▶ mmio ─▶ regs ─▶ device ─▶ policy ─▶ Actuator ─▶ uclamp of the vCPU's thread
//! read  ◀─ mmio ◀─ regs ◀─ device ◀─ policy ◀─ Source   ◀─ frequency of its pCPU
//! ```
//!
//! The device makes no KVM or host call itself: [`Actuator`], [`Source`] and [`Events`] are its
//! interfaces, with fakes in [`fakes`]. `vcpufreq-host` has their Linux implementations,
//! `vcpufreq-bridge` the paths and threads of a VMM on KVM.
//!
//! ```
//! use std::sync::Arc;
//! use vcpufreq_device::{fakes, *};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let vcpu = VcpuSpec {
//!     table: PerfTable::try_from(vec![Khz(600_000), Khz(1_800_000)])?,
//!     capacity: Util::saturating(329),
//!     domain: DomainId(0),
//! };
//! let config = DeviceConfig {
//!     headroom: Headroom::for_kernel(7, 2),
//!     ..DeviceConfig::new(vec![vcpu])
//! };
//! let actuator = Arc::new(fakes::RecordingActuator::default());
//! let source = fakes::FixedSource::default();
//! let device = Device::new(config, Arc::clone(&actuator), source, NoEvents)?;
//! let region = MmioRegion::new(Arc::new(device));
//!
//! // On the thread of vCPU 0, which the limit charges.
//! let by = Some(VcpuId(0));
//! region.write_by(by, REG_SET_PERF, &900_000u32.to_le_bytes());
//! assert_eq!(actuator.applied()[0].1.min.get(), 164);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]
#![deny(clippy::missing_errors_doc)]

mod capacity;
mod config;
mod counters;
mod device;
mod domain;
pub mod fakes;
mod histogram;
mod limit;
mod mmio;
mod pages;
mod policy;
mod ports;
mod regs;
mod sample_order;
mod state;
mod sync;
mod table;
mod units;

pub use capacity::{RatedCapacity, guest_capacities};
pub use config::{ClampMode, ConfigError, CurPerfVisibility, DeviceConfig, Headroom, VcpuSpec};
pub use counters::{Accesses, CounterSnapshot};
pub use device::{Device, counts::DomainStatus};
pub use domain::MAX_HOST_CALLS;
pub use histogram::{HISTOGRAM_BUCKETS, Histogram, HistogramSnapshot};
pub use limit::{Clock, Monotonic, Pace, RateLimit, VM_DOMAINS};
pub use mmio::MmioRegion;
pub use pages::{PageMemory, PagesError, RegisterPages};
pub use policy::{Clamp, Decision, PcpuPerf, cap, clamp, entry_within, nearest_entry, performance};
pub use ports::{ActuateError, Actuator, Event, Events, NoEvents, Source, SourceError};
pub use regs::*;
pub use state::{CheckedState, DeviceState, RequestState, StateError, VcpuState};
pub use table::{PerfTable, TableError};
pub use units::{DomainId, Khz, Util, VcpuId};

/// Its example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
