// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The Linux side of the ports: where frequencies are read and clamps are written.
//!
//! - [`SysfsSource`]: cpufreq's files in sysfs, and the place of a thread in procfs.
//! - [`CgroupActuator`]: one threaded cgroup v2 per domain, `cpu.uclamp.min` and `.max`.
//! - [`ThreadActuator`]: `sched_setattr` on each thread of a domain.
//! - [`choose`]: selects one of the two, with the reason. [`HostActuator`] is either.
//! - [`HostCpus`]: online CPUs, capacities, policies and operating points.
//! - [`mirror()`]: vCPUs as the pCPUs that they are pinned to.
//! - [`ReferenceRule`]: the frequency that a capacity refers to.
//! - [`measures_frequency()`]: whether `scaling_cur_freq` is measured, or what the driver has set.
//! - [`floors()`]: the frequencies below which no clamp brings a busy CPU.
//! - `undo`, with the feature of that name: records of host changes, by which any process undoes them.
//! - [`CpuList`], [`SchedAttr`], [`Tid`]: the kernel's lists of CPUs, scheduling attributes and
//!   threads.
//!
//! Everything is found below a [`HostRoot`], `/` on a host and a temporary directory in tests.

#![deny(clippy::missing_errors_doc)]

mod adopted_groups;
mod cgroup;
mod cgroup_actuator;
mod cgroup_error;
mod cgroup_fs;
mod choice;
mod cpu_flags;
mod cpu_list;
mod energy_model;
pub mod fakes;
mod floors;
mod host_cpus;
mod host_thread;
#[cfg(test)]
mod kernel_tests;
mod limits;
mod mirror;
mod opp_node;
mod partition;
mod placement;
mod proc_text;
mod raised_groups;
mod reference;
mod root;
mod saved_thread;
mod source;
mod sync;
mod sys;
mod text;
mod thread_actuator;
mod topology;
#[cfg(feature = "undo")]
pub mod undo;

pub use adopted_groups::AdoptedGroups;
pub use cgroup::{
    CgroupTree, DOMAIN_PREFIX, GROUP_PREFIX, GroupRecord, KernelTree, Leftover, leftovers, remove,
};
pub use cgroup_actuator::CgroupActuator;
pub use cgroup_error::CgroupError;
pub use choice::{
    ActuatorChoice, ActuatorFacts, ActuatorKind, ChoiceError, Chosen, HostActuator, choose,
};
pub use cpu_flags::measures_frequency;
pub use cpu_list::{CpuList, CpuListError};
pub use energy_model::ENERGY_MODEL_DIR;
pub use floors::{Floor, PolicyFloor, Reserved, SCHED_DEBUG, floors};
pub use host_cpus::{CAPACITY_SCALE, CpufreqPolicy, HostCpus, Pcpu};
pub use host_thread::HostThread;
pub use mirror::{MirrorError, mirror};
pub use opp_node::HostOpp;
pub use partition::PartitionGroups;
pub use placement::Placement;
pub use proc_text::{effective_clamp, ignored_signals, proc_field, stat_field};
pub use raised_groups::RaisedGroups;
pub use reference::ReferenceRule;
pub use root::{CPUS, HostRoot, version_of};
pub use saved_thread::{PolicyBefore, SavedThread};
pub use source::{PcpuCapacity, SourceSetupError, SysfsSource};
pub use sys::{
    SchedAttr, Tid, affinity_of, current_cpu, is_within, memory_file, monotonic_ns, pin, stay_off,
    thread_cpu_time,
};
pub use thread_actuator::{
    NEEDS_UCLAMP, ThreadActuator, clamp_current_thread_to_zero, uclamp_available,
};
pub use topology::{policies, possible_pcpus, present_pcpus};

/// Its example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
