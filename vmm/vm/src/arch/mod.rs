// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is different on each architecture: how a Linux guest boots, and what KVM has for it.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub use aarch64::{check_memory, device_loads_see_caches, gic, handle_exit};
#[cfg(target_arch = "x86_64")]
pub use x86_64::{check_memory, device_loads_see_caches, gic, handle_exit};
