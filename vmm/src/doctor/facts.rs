// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the doctor looks at. Everything that is a file is read below a root;
//! what only the running kernel can answer (KVM, uclamp, cgroups) is [`Live`].

use std::{io, path::Path};

use serde::Serialize;
use vcpufreq_device::Headroom;
use vcpufreq_host::{CgroupError, HostRoot};

use crate::{doctor::board::BoardFacts, kernel_version::headroom_of, path, sys};
use vcpufreq_host::undo::KernelHost;
use vcpufreq_host::{CpuList, ENERGY_MODEL_DIR, HostCpus, PolicyFloor, floors};
use vcpufreq_rt::{FrequencyCap, frequency_caps};
use vcpufreq_vm::{
    probe::{KvmFacts, PathFacts, open_kvm},
    protected::{self, kvm_mode},
};

/// Numbers of capabilities(7).
pub const CAP_SYS_ADMIN: u32 = 21;
/// See [`CAP_SYS_ADMIN`].
pub const CAP_PERFMON: u32 = 38;
/// See [`CAP_SYS_ADMIN`].
pub const CAP_BPF: u32 = 39;

/// What debugfs shows of the energy model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EnergyModel {
    /// This many performance domains.
    Domains(usize),
    /// debugfs is not readable.
    Hidden,
}

/// What only the running kernel can answer.
#[derive(Clone, Debug)]
pub struct Live {
    /// KVM, or why not.
    pub kvm: Result<KvmFacts, String>,
    /// Whether KVM makes protected VMs, or why not.
    pub protected: Result<(), String>,
    /// What KVM takes over of the vcpufreq registers, or why nothing is known.
    pub paths: Result<PathFacts, String>,
    /// How BPF would work here, or why it doesn't.
    pub bpf: Result<String, String>,
    /// Whether a thread can be clamped, or why not.
    pub uclamp: Result<(), String>,
    /// The cgroup that a VM's would be in, or why there is none.
    pub cgroup: Result<String, String>,
    /// The file of a group above that caps its clamps, and what it holds.
    pub capped: Option<(String, String)>,
}

/// Whether KVM makes protected virtual machines.
fn protected_vms(kvm_device: &Path) -> Result<(), String> {
    let kvm = open_kvm(kvm_device).map_err(|error| error.to_string())?;
    protected::offer(&kvm, &HostRoot::default())
}

impl Live {
    /// Asks the running kernel. Starts and ends a thread; changes nothing.
    pub fn ask(kvm_device: &Path) -> Self {
        let offer = vcpufreq_host::ActuatorFacts::probe(&vcpufreq_host::HostRoot::default(), None);
        let capped = match &offer.cgroup {
            Err(CgroupError::Capped { path, value }) => {
                Some((path.display().to_string(), value.clone()))
            }
            _ => None,
        };
        Self {
            capped,
            kvm: KvmFacts::ask(kvm_device).map_err(|error| error.to_string()),
            protected: protected_vms(kvm_device),
            paths: PathFacts::ask(kvm_device, false),
            bpf: path::offer_bpf(),
            uclamp: offer.uclamp.map_err(|error| error.to_string()),
            cgroup: offer
                .cgroup
                .map(|place| place.parent.display().to_string())
                .map_err(|error| error.to_string()),
        }
    }
}

/// The facts of one host.
#[derive(Clone, Debug)]
pub struct DoctorFacts {
    /// As Rust names it: `aarch64`, `x86_64`.
    pub arch: String,
    /// What only the running kernel can answer.
    pub live: Live,
    /// Whether this program has the path `bpf`.
    pub bpf_built: bool,
    /// Files that this process may have open.
    pub open_files: u64,
    /// `kernel.sched_util_clamp_min`, 0..=1024.
    pub uclamp_sysctl_min: Option<u32>,
    /// `kernel.sched_util_clamp_max`, 0..=1024.
    pub uclamp_sysctl_max: Option<u32>,
    /// What else files tell of the board and its kernel.
    pub board: BoardFacts,
    /// CPUs, and the cpufreq policies in use.
    pub cpus: HostCpus,
    /// What keeps CPUs below their highest frequency now.
    pub caps: Vec<FrequencyCap>,
    /// Below which frequency each policy's busy CPUs don't go.
    pub floors: Vec<PolicyFloor>,
    /// The host's energy model.
    pub energy_model: EnergyModel,
    /// `kernel.sched_energy_aware`; `None` where it is absent.
    pub energy_aware: Option<bool>,
    /// The running kernel's release, as 7.2.12+deb13-arm64.
    pub kernel_release: String,
    /// What its schedutil adds to a clamp, by its version.
    pub headroom: Option<Headroom>,
    /// The kernel's types are there for BPF programs.
    pub btf: bool,
    /// The kernel has the bpf system call.
    pub bpf_syscall: bool,
    /// Effective capabilities of this process, a bit each.
    pub capabilities: u64,
    /// The kernel is PREEMPT_RT.
    pub realtime: bool,
}

impl DoctorFacts {
    /// Reads what is in files below `root`, and takes the rest from `live`.
    pub fn read(root: &HostRoot, arch: &str, live: Live) -> Self {
        let mode = kvm_mode(&root.text("proc/cmdline").unwrap_or_default());
        let kernel_release = root.text("proc/sys/kernel/osrelease").unwrap_or_default();
        let cpus = in_use(HostCpus::read(root));
        Self {
            arch: arch.to_owned(),
            live: Live {
                kvm: live.kvm.map(|kvm| KvmFacts { mode, ..kvm }),
                ..live
            },
            bpf_built: cfg!(feature = "bpf"),
            open_files: sys::open_files_at_most(),
            uclamp_sysctl_min: root.number("proc/sys/kernel/sched_util_clamp_min"),
            uclamp_sysctl_max: root.number("proc/sys/kernel/sched_util_clamp_max"),
            caps: frequency_caps(&KernelHost::from(root), &cpus.online()),
            floors: floors(root, &cpus),
            board: BoardFacts::read(root, &cpus),
            cpus,
            energy_model: performance_domains(root),
            // Empty on a machine that could not schedule energy-aware anyway.
            energy_aware: root
                .number::<u8>("proc/sys/kernel/sched_energy_aware")
                .map(|on| on != 0),
            headroom: headroom_of(&kernel_release),
            kernel_release,
            btf: root.path("sys/kernel/btf/vmlinux").exists(),
            // The switch comes with the system call.
            bpf_syscall: root
                .path("proc/sys/kernel/unprivileged_bpf_disabled")
                .exists(),
            capabilities: effective_capabilities(root).unwrap_or(0),
            // /sys/kernel/realtime was the RT patches'; mainline has none.
            realtime: root
                .text("proc/version")
                .is_some_and(|version| version.contains("PREEMPT_RT")),
        }
    }
}

/// Without the policies whose CPUs are all offline: they have no driver and no governor, and refuse
/// a new one. From Linux 6.0 on their files can't be read, and before, only some of them.
fn in_use(mut cpus: HostCpus) -> HostCpus {
    let online = cpus.online();
    // None is online only where the list can't be read.
    let is_used = |own: &CpuList| online.is_empty() || !own.and(&online).is_empty();
    cpus.policies.retain(|policy| is_used(&policy.cpus));
    cpus
}

fn performance_domains(root: &HostRoot) -> EnergyModel {
    match std::fs::read_dir(root.path(ENERGY_MODEL_DIR)) {
        Ok(entries) => EnergyModel::Domains(
            entries
                .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
                .filter(|name| name.starts_with("cpu"))
                .count(),
        ),
        // debugfs that can be listed shows that there is no model.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            match std::fs::read_dir(root.path("sys/kernel/debug")).map(|mut dir| dir.next()) {
                Ok(Some(_)) => EnergyModel::Domains(0),
                Ok(None) | Err(_) => EnergyModel::Hidden,
            }
        }
        Err(_) => EnergyModel::Hidden,
    }
}

fn effective_capabilities(root: &HostRoot) -> Option<u64> {
    let status = root.text("proc/self/status")?;
    u64::from_str_radix(vcpufreq_host::proc_field(&status, "CapEff")?, 16).ok()
}
