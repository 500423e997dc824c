// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VMM makes on its host: on record before it is there, and removed however the VMM ends.

mod born_threads;
pub mod cleanup;
pub mod guard;
pub mod guardian;
pub mod host_changes;
pub mod policies;
pub mod raised;
pub mod record;
pub mod record_names;
pub mod served_vms;
pub mod state;
