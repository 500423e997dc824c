// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How accesses go: which leave the guest, what each costs, when its clamp is in force.

#[cfg(feature = "bpf")]
pub mod attach;
pub mod before_entry;
pub mod cost;
#[cfg(feature = "bpf")]
pub mod fallbacks;
pub mod in_force;
pub mod measured;
pub mod no_exit;
pub mod order;
mod sandbox_share;
pub mod unpinned;
pub mod unpinned_page;
pub mod worker_place;
