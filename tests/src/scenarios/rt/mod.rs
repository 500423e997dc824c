// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Real-time hosts and guests.

pub mod changes;
pub mod exec;
pub mod guest;
pub mod impostors;
pub mod inventory;
pub mod io;
pub mod kills;
pub mod latency;
pub mod order;
pub mod pages;
pub mod periodic_loop;
pub mod served;
pub mod settings;
pub mod standard;
