// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The Linux side of the ports: where frequencies are read and clamps are written.
//!
//! - [`SysfsSource`]: cpufreq's files in sysfs, and the place of a thread in procfs.
//! - [`CgroupActuator`]: one threaded cgroup v2 per domain, `cpu.uclamp.min` and `.max`.
//! - [`ThreadActuator`]: `sched_setattr` on each thread of a domain.
//! - [`choose`]: selects one of the two, with the reason. [`HostActuator`] is either.
//! - [`HostCpus`]: online CPUs, capacities, policies and operating points.
//! - [`floors()`]: the frequencies below which no clamp brings a busy CPU.
//! - [`CpuList`], [`SchedAttr`], [`Tid`]: the kernel's lists of CPUs, scheduling attributes and
//!   threads.
//!
//! Everything is found below a [`HostRoot`], `/` on a host and a temporary directory in tests.

mod adopted_groups;
mod borrowed_thread;
mod cgroup;
mod cgroup_actuator;
mod cgroup_error;
mod cgroup_fs;
mod choice;
mod cpu_list;
mod energy_model;
mod floors;
mod host_cpus;
#[cfg(test)]
mod kernel_tests;
mod limits;
mod opp_node;
mod partition;
mod placement;
mod proc_text;
mod raised_groups;
mod source;
mod sys;
mod text;
mod thread_actuator;
mod topology;

use std::path::{Path, PathBuf};
use std::str::FromStr;

pub use adopted_groups::AdoptedGroups;
pub use borrowed_thread::BorrowedThread;
pub use cgroup::{
    CgroupTree, DOMAIN_PREFIX, GROUP_PREFIX, GroupRecord, KernelTree, Leftover, REST_NAME,
    leftovers, remove,
};
pub use cgroup_actuator::CgroupActuator;
pub use cgroup_error::CgroupError;
pub use choice::{
    ActuatorChoice, ActuatorFacts, ActuatorKind, ChoiceError, Chosen, HostActuator, choose,
};
pub use cpu_list::{CpuList, CpuListError};
pub use energy_model::ENERGY_MODEL_DIR;
pub use floors::{Floor, PolicyFloor, Reserved, SCHED_DEBUG, floors, version_of};
pub use host_cpus::{CAPACITY_SCALE, CpufreqPolicy, HostCpus, Pcpu};
pub use opp_node::HostOpp;
pub use partition::PartitionGroups;
pub use placement::Placement;
pub use proc_text::{effective_clamp, ignored_signals, proc_field, stat_field};
pub use raised_groups::RaisedGroups;
pub use source::{PcpuTop, SourceSetupError, SysfsSource};
pub use sys::{
    SchedAttr, Tid, is_within, memory_file, monotonic_ns, pin, stay_off, thread_cpu_time,
};
pub use thread_actuator::{
    NEEDS_UCLAMP, ThreadActuator, clamp_current_thread_to_zero, uclamp_available,
};
pub(crate) use topology::CPUS;
pub use topology::{policies, possible_pcpus, present_pcpus};

/// A directory tree that has the host's `/sys` and `/proc`: `/` on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostRoot(PathBuf);

impl HostRoot {
    /// A directory that stands for `/`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self(root.into())
    }

    /// The directory of all pCPUs.
    pub(crate) fn cpus(&self) -> PathBuf {
        self.0.join(CPUS)
    }

    /// The directory of the calling process in procfs.
    pub(crate) fn own_process(&self) -> PathBuf {
        self.0.join("proc/self")
    }

    /// `path` below the root; a leading slash is ignored.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The trimmed text of a file; `None` if it can't be read.
    pub fn text(&self, path: impl AsRef<Path>) -> Option<String> {
        let text = std::fs::read_to_string(self.path(path)).ok()?;
        Some(text.trim().to_owned())
    }

    /// The number or list in a file; `None` if it can't be read or is no such thing.
    pub fn number<T: FromStr>(&self, path: impl AsRef<Path>) -> Option<T> {
        self.text(path)?.parse().ok()
    }
}

impl Default for HostRoot {
    fn default() -> Self {
        Self(PathBuf::from("/"))
    }
}
