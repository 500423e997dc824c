// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What scenarios are made of: the host's and the guest's first process, guests, loads, traces,
//! and the kernel's files.

pub mod access_cost;
pub mod architecture;
pub mod boost;
#[cfg(feature = "bpf")]
pub mod clock;
pub mod console_commands;
pub mod cur_perf;
pub mod dips;
pub mod fair_server;
#[cfg(feature = "bpf")]
pub mod faults;
pub mod frequency;
pub mod guest;
pub mod guest_shell;
pub mod host;
#[cfg(target_arch = "aarch64")]
pub mod injected_call;
pub mod kernel_log;
pub mod kernel_threads;
pub mod kexec;
pub mod leftovers;
pub mod load;
pub mod machine;
pub mod migration;
pub mod plan;
pub mod policy;
pub mod qmp;
pub mod random;
pub mod registers;
pub mod rt_command;
#[cfg(feature = "scenarios")]
pub mod schema;
pub mod server;
pub mod shared_memory;
pub mod stats;
pub mod sys;
pub mod sysfs;
pub mod systemctl;
pub mod thread_facts;
pub mod trace;
pub mod uclamp;
pub mod vm;
pub mod vmm;
pub mod wait;
