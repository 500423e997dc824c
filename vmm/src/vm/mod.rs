// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The virtual machine: from a checked configuration to a guest that has ended.
//!
//! ```text
//! KernelImage, BootPlacement, fdt ─▶ arch (KVM, memory slots, GIC, registers) ─▶ VcpuThreads ─▶ Bus ─▶ devices
//! ```
//!
//! Everything that can be wrong with the input is found before KVM is opened.
//! A reset of the guest makes all KVM state anew and keeps the threads.
//! Not here: the frequency device and what it does to the host; it comes in as
//! an [`MmioDevice`], and hears of threads and resets through [`Hooks`].

#[cfg_attr(target_arch = "aarch64", path = "arch/aarch64/mod.rs")]
#[cfg_attr(target_arch = "x86_64", path = "arch/x86_64/mod.rs")]
pub mod arch;
mod backoff;
mod banner;
pub mod bus;
pub mod console;
pub mod console_output;
#[cfg(any(test, target_arch = "aarch64"))]
mod exit;
pub mod fdt;
pub mod gic;
pub mod image;
pub mod image_header;
pub mod layout;
pub mod machine;
pub mod memory;
pub mod packed;
pub mod probe;
mod supervise;
pub(crate) mod sys;
pub mod vcpu;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use kvm_ioctls::Kvm;
use vcpufreq_device::VcpuId;
use vcpufreq_device::host::Tid;
use vcpufreq_device::kvm::KvmOffload;
use vcpufreq_dt::Machine;

use bus::{Bus, MmioDevice};
use console_output::ConsoleEnd;
use gic::Gic;
use image::{BootPlacement, Initrd, KernelImage};
use memory::PageSize;
use probe::KvmFacts;
pub use supervise::supervise;
use vcpu::VcpuThreads;
pub use vcpu::kick_signal;

/// What the rest of the program does at certain moments of a virtual machine. No method has a
/// default: hooks that wrap others would lose what they don't forward.
pub trait Hooks: Send + Sync {
    /// Called once on each vCPU's thread, before it is pinned: here it may be
    /// moved to where it is allowed to be.
    ///
    /// # Errors
    /// Any; the virtual machine isn't started then.
    fn on_vcpu_thread_start(&self, vcpu: VcpuId, tid: Tid) -> anyhow::Result<()>;

    /// Called once on each vCPU's thread, which is pinned already and hasn't
    /// run guest code; `tid` is its id in the kernel. The thread stays the
    /// same over resets of the guest.
    ///
    /// # Errors
    /// Any; the virtual machine isn't started then.
    fn on_vcpu_thread(&self, vcpu: VcpuId, tid: Tid) -> anyhow::Result<()>;

    /// Called once on the thread that runs the virtual machine, when the vCPUs' threads are there
    /// and what the guest needs of files is open. No guest code has run.
    ///
    /// # Errors
    /// Any; the virtual machine isn't started then.
    fn on_set_up(&self) -> anyhow::Result<()>;

    /// Called on a vCPU's thread, before it runs guest code on another pCPU than
    /// before.
    fn on_vcpu_moved(&self, vcpu: VcpuId);

    /// Called when the guest resets, before it boots again; no vCPU runs.
    fn on_reset(&self);

    /// Called when no thread answers the doorbells of a [`KvmOffload`] any more, after KVM's part
    /// of it was removed. The device gets all accesses from now on. Writes that were signalled
    /// before are still unanswered. What KVM shall do instead, if anything.
    fn on_path_lost(&self) -> Option<Arc<KvmOffload>>;

    /// Called when the guest has ended, before the vCPU threads end.
    fn on_end(&self);

    /// Something that the user should know and that doesn't end anything: the
    /// cause and the next step, in one line.
    fn on_warning(&self, text: &str);
}

/// What the virtual machine gets from the rest of the program.
pub struct VmEnvironment {
    /// What happens at which moment.
    pub hooks: Arc<dyn Hooks>,
    /// The vcpufreq registers, if the guest gets them.
    pub cpufreq: Option<Cpufreq>,
    /// What is at the other end of the guest's console.
    pub console: ConsoleEnd,
}

/// The vcpufreq registers, or what is in their place, at [`layout::CPUFREQ_BASE`].
pub struct Cpufreq {
    /// What answers an access that exits.
    pub device: Arc<dyn MmioDevice>,
    /// Bytes of the region.
    pub size: u64,
    /// What KVM answers itself; all exits without it.
    pub offload: Option<Arc<KvmOffload>>,
}

/// Why a virtual machine has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExitReason {
    /// The guest has turned itself off, or all its vCPUs have halted for good.
    PowerOff,
    /// Ctrl-A x.
    Quit,
    /// This signal asked the program to end.
    Signal(i32),
    /// The guest reports its own crash.
    Crashed,
    /// KVM can't go on with this vCPU.
    Failed {
        /// Which one.
        vcpu: usize,
        /// KVM's report.
        what: String,
    },
}

/// How a virtual machine went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunReport {
    /// Why it has ended.
    pub reason: ExitReason,
    /// How many times the guest has started again.
    pub resets: u64,
    /// Accesses of the guest that no device claimed.
    pub unclaimed: u64,
    /// Bytes of the console's output that its file had no room for.
    pub console_dropped: u64,
}

impl ExitReason {
    /// The program's exit status: 0 when guest or user ended it, 2 otherwise.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::PowerOff | Self::Quit => 0,
            Self::Signal(_) | Self::Crashed | Self::Failed { .. } => 2,
        }
    }

    /// One line for the user, when there is a cause.
    pub fn message(&self) -> Option<String> {
        match self {
            Self::PowerOff | Self::Quit => None,
            Self::Signal(signal) => Some(format!("ended by signal {signal}")),
            Self::Crashed => Some("the guest reports a crash; see its console".to_owned()),
            Self::Failed { vcpu, what } => Some(format!("vCPU {vcpu} can't go on: {what}")),
        }
    }
}

/// What a virtual machine is made of: checked, and nothing of it in KVM.
#[derive(Debug)]
pub struct VmSpec {
    /// The kernel.
    pub kernel: KernelImage,
    /// The initrd, if there is one.
    pub initrd: Option<Initrd>,
    /// Where they go.
    pub place: BootPlacement,
    /// The kernel command line.
    pub cmdline: String,
    /// The pCPUs that each vCPU's thread may run on; all if empty.
    pub pins: Vec<Vec<u32>>,
    /// What its memory is made of.
    pub pages: PageSize,
    /// The KVM device.
    pub kvm_device: PathBuf,
    /// Where to write the device tree, as a dtb.
    pub dump_dtb: Option<PathBuf>,
}

/// A Linux guest to boot; how is [`arch`]'s.
pub struct LinuxGuest<'a> {
    /// What it is made of.
    pub spec: VmSpec,
    /// Its interrupt controller.
    pub gic: Gic,
    /// The device tree.
    pub fdt: &'a [u8],
    /// Where warnings go.
    pub hooks: &'a dyn Hooks,
    /// Whether the user knows what this host's KVM lacks.
    pub warned: bool,
}

/// Boots the guest that `spec` describes, with the CPUs of `machine`, and
/// returns when it has ended: all threads are joined and the terminal is as it
/// was.
///
/// # Errors
/// What the host or a hook refused, with what was being done.
pub fn run(spec: VmSpec, machine: &Machine, host: &VmEnvironment) -> anyhow::Result<RunReport> {
    let kvm = open_kvm(&spec.kvm_device)?;
    let gic = arch::gic(&kvm)?;
    gic.check_vcpus(spec.pins.len(), kvm.get_max_vcpus())?;
    let fdt = build_fdt(&spec, machine, gic)?;
    if let Some(path) = &spec.dump_dtb {
        std::fs::write(path, &fdt)
            .with_context(|| format!("can't write the device tree to {}", path.display()))?;
    }
    let pins = spec.pins.clone();
    let mut guest = LinuxGuest {
        spec,
        gic,
        fdt: &fdt,
        hooks: &*host.hooks,
        warned: false,
    };
    let threads = VcpuThreads::spawn(&pins, &host.hooks)?;
    supervise(&mut guest, &kvm, threads, host)
}

fn build_fdt(spec: &VmSpec, machine: &Machine, gic: Gic) -> anyhow::Result<Vec<u8>> {
    let fdt = fdt::build(machine, &spec.cmdline, &spec.place, gic)
        .context("can't describe the guest in a device tree")?;
    let len = fdt.len();
    let max = image::FDT_MAX;
    if u64::try_from(len).is_ok_and(|len| len <= max) {
        return Ok(fdt);
    }
    bail!(
        "the guest's device tree has {len} bytes, more than the {max} that Linux takes; give fewer vCPUs, or vCPUs that share OPP tables"
    );
}

/// Checks that the KVM device at `path` can have a guest with so much memory; the guest's is opened
/// when all else is there.
///
/// # Errors
/// What is wrong with the device or the memory.
pub fn check_kvm(path: &Path, mem_mib: u64) -> anyhow::Result<()> {
    let kvm = open_kvm(path)?;
    let version = kvm.get_api_version();
    if version != KvmFacts::API_VERSION {
        bail!(
            "{} is no usable KVM device (API version {version}, not {}); give one with --kvm-device, usually /dev/kvm",
            path.display(),
            KvmFacts::API_VERSION
        );
    }
    arch::check_memory(&kvm, mem_mib)
}

/// Opens the KVM device at `path`.
pub fn open_kvm(path: &Path) -> anyhow::Result<Kvm> {
    probe::open(path).map_err(|source| {
        let next = match source.kind() {
            io::ErrorKind::NotFound => {
                "this host has no KVM: load its module or turn virtualization on in its firmware"
            }
            io::ErrorKind::PermissionDenied => "join the group that owns it, usually kvm",
            _ => "run vcpufreq doctor",
        };
        anyhow!("can't open {}: {source}; {next}", path.display())
    })
}

/// Why a Linux guest can't be booted on this architecture.
pub fn not_there_yet() -> anyhow::Error {
    anyhow!(
        "running a Linux guest on {} isn't there yet; use an arm64 host, or the emulated one (make lab-shell)",
        std::env::consts::ARCH
    )
}

/// Puts the devices that every guest has on a bus.
fn attach_cpufreq(bus: &mut Bus, host: &VmEnvironment) -> anyhow::Result<()> {
    match &host.cpufreq {
        Some(Cpufreq { device, size, .. }) => {
            bus.insert(layout::CPUFREQ_BASE, *size, device.clone())
        }
        None => Ok(()),
    }
}
