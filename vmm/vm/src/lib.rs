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
//! an [`MmioDevice`](bus::MmioDevice), and hears of threads and resets through [`Hooks`].

pub mod arch;
mod backoff;
mod banner;
pub mod bus;
pub mod console;
pub mod console_output;
pub mod disk;
mod environment;
#[cfg(any(test, target_arch = "aarch64"))]
mod exit;
pub mod fakes;
pub mod fdt;
pub mod gic;
mod guest;
pub mod image;
pub mod image_header;
pub mod layout;
pub mod machine;
pub mod memory;
pub mod packed;
pub mod probe;
pub mod protected;
mod run_report;
mod supervise;
pub mod sys;
pub mod vcpu;
mod vcpu_end;

use anyhow::{Context, bail};
use vcpufreq_dt::Machine;

use disk::DiskThread;
pub use environment::{AttachHandler, Cpufreq, Hooks, VmEnvironment};
use fdt::DiskDma;
use gic::Gic;
pub use guest::{LinuxGuest, VmSpec, not_there_yet};
pub use probe::{check_kvm, open_kvm};
pub use run_report::{ExitReason, RunReport};
pub use supervise::supervise;
use vcpu::VcpuThreads;
pub use vcpu::kick_signal;

/// Boots the guest that `spec` describes, with the CPUs of `machine`, and
/// returns when it has ended: all threads are joined and the terminal is as it
/// was.
///
/// # Errors
/// What the host or a hook refused, with what was being done.
pub fn run(mut spec: VmSpec, machine: &Machine, host: &VmEnvironment) -> anyhow::Result<RunReport> {
    let kvm = open_kvm(&spec.kvm_device)?;
    let gic = arch::gic(&kvm)?;
    gic.check_vcpus(spec.pins.len(), kvm.get_max_vcpus())?;
    let fdt = build_fdt(&spec, machine, gic)?;
    if let Some(path) = &spec.dump_dtb {
        std::fs::write(path, &fdt)
            .with_context(|| format!("can't write the device tree to {}", path.display()))?;
    }
    let pins = spec.pins.clone();
    let disk = spec.disk.take();
    let mut guest = LinuxGuest {
        spec,
        gic,
        fdt: &fdt,
        hooks: &*host.hooks,
        warned: false,
    };
    let threads = VcpuThreads::spawn(&pins, &host.hooks)?;
    let start = |image| DiskThread::start(image, host.hooks.clone());
    let disk = disk.map(start).transpose()?;
    supervise(&mut guest, &kvm, (threads, disk), host)
}

fn build_fdt(spec: &VmSpec, machine: &Machine, gic: Gic) -> anyhow::Result<Vec<u8>> {
    let dma = spec.disk.as_ref().map(|_| match spec.protected {
        true => DiskDma::Bounced,
        false => DiskDma::Direct,
    });
    let fdt = fdt::build(machine, &spec.cmdline, &spec.place, (gic, dma))
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
