// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The actuator `scx`: requests as targets of an empty sched_ext scheduler, which add up with what
//! a CPU's tasks use.
//!
//! A service of the host's loads the scheduler ([`ScxService`]) and pins its maps. The programs of a
//! VM take these maps in the place of their own ([`ScxPins`]).
//!
//! ```text
//! guest writes ─▶ VM's program on kvm_mmio ─▶ pinned maps ◀─ service's programs (switch, wake, tick)
//!                         └──────── scx_bpf_cpuperf_set ────────┘
//! ```
//!
//! When the kernel ends the scheduler, for whatever reason, its last call switches `state` in the
//! pinned map: a VM's requests go to its worker from then on.

#![forbid(unsafe_code)]

mod error;
mod pins;
mod service;

pub use error::ScxError;
pub use pins::ScxPins;
pub use service::ScxService;
