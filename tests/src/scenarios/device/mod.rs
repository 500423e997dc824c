// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest gets of the device, and what the VMM does with it, whatever the path.

pub mod bad_input;
pub mod basics;
pub mod default_run;
pub mod demo;
pub mod dips;
pub mod domain;
pub mod driver;
pub mod failure;
pub mod flood;
pub mod guest_facts;
pub mod hotplug;
pub mod kill;
pub mod many_vcpus;
pub mod memory;
pub mod no_uclamp;
pub mod opps;
#[cfg(target_arch = "aarch64")]
pub mod sandbox;
pub mod stats;
pub mod systemd;
pub mod thread_actuator;
pub mod two_guests;
