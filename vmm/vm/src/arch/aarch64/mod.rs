// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! arm64: a Linux guest with GIC, PSCI, arch timer and stolen time, all of
//! them in KVM.

mod coherence;
mod gic_device;
mod pvtime;
mod registers;

use std::sync::Arc;

use anyhow::{Context, bail};
use kvm_bindings::{
    KVM_ARM_VCPU_POWER_OFF, KVM_ARM_VCPU_PSCI_0_2, KVM_ARM_VCPU_PTRAUTH_ADDRESS,
    KVM_ARM_VCPU_PTRAUTH_GENERIC, KVM_CAP_ARM_NISV_TO_USER, KVM_CAP_ARM_PTRAUTH_ADDRESS,
    KVM_CAP_ARM_PTRAUTH_GENERIC, kvm_enable_cap, kvm_vcpu_events, kvm_vcpu_init,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use linux_loader::loader::{KernelLoader, PE};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use crate::bus::Bus;
use crate::exit::is_undecoded;
use crate::gic::Gic;
use crate::guest::{LinuxGuest, VmSpec};
use crate::layout;
use crate::machine::{Bootable, KvmGuest};
use crate::memory::{Memory, Region};
use crate::protected;
use crate::vcpu_end::VcpuEnd;
pub use coherence::device_loads_see_caches;

impl Bootable for LinuxGuest<'_> {
    fn boot(&mut self, kvm: &Kvm, console: &EventFd) -> anyhow::Result<KvmGuest> {
        let vm = match self.spec.protected {
            true => protected::create(kvm),
            false => kvm.create_vm(),
        };
        let vm = vm.context("KVM can't create a VM")?;
        report_bad_accesses(&vm);
        let mut memory = Memory::of_pages(self.spec.pages);
        let ram = Region {
            base: layout::RAM_BASE,
            size: self.spec.place.ram_size,
        };
        memory.add(&vm, ram)?;
        let entry = self.load(&memory)?;
        let count = u16::try_from(self.spec.pins.len()).context("too many vCPUs")?;
        let vcpus = (0..count)
            .map(|vcpu| vm.create_vcpu(u64::from(vcpu)))
            .collect::<Result<Vec<_>, _>>()
            .context("KVM can't create the vCPUs")?;
        self.set_up_pvtime(&vm, &mut memory, &vcpus)?;
        init_vcpus(&vm, &vcpus, self.spec.protected)?;
        gic_device::create(&vm, self.gic, count)?;
        // Needs the GIC: until it is there, KVM has nothing to route to.
        vm.register_irqfd(console, layout::UART_SPI)
            .context("KVM can't connect the console's interrupt")?;
        if let Some(first) = vcpus.first() {
            registers::set_entry(first, entry, self.spec.place.fdt)
                .context("can't set the entry point of vCPU 0")?;
        }
        let vm = Arc::new(vm);
        Ok(KvmGuest { vcpus, vm, memory })
    }
}

/// Whether KVM has addresses for a guest with so much memory.
///
/// # Errors
/// When the memory ends beyond the guest-physical addresses that KVM has.
pub fn check_memory(kvm: &Kvm, mem_mib: u64) -> anyhow::Result<()> {
    // Without the extension, KVM gives every guest 40 bits.
    let bits = match kvm.check_extension(Cap::ArmVmIPASize) {
        true => u32::try_from(kvm.get_host_ipa_limit()).unwrap_or(40),
        false => 40,
    };
    let max_mib = (1u64 << bits.min(63)).saturating_sub(layout::RAM_BASE) >> 20;
    if mem_mib > max_mib {
        bail!(
            "{mem_mib} MiB of memory is more than the {max_mib} MiB that this host's KVM has addresses for; give less with --mem"
        );
    }
    Ok(())
}

/// The newest interrupt controller that KVM has for guests.
///
/// # Errors
/// When KVM has none, or no VM can be made.
pub fn gic(kvm: &Kvm) -> anyhow::Result<Gic> {
    let vm = kvm.create_vm().context("KVM can't create a VM")?;
    Gic::probe(&vm).context("KVM has no GIC for guests; run vcpufreq doctor")
}

impl LinuxGuest<'_> {
    /// Puts kernel, device tree and initrd into `memory`; returns the entry point.
    fn load(&mut self, memory: &Memory) -> anyhow::Result<u64> {
        let VmSpec {
            kernel,
            initrd,
            place,
            ..
        } = &mut self.spec;
        let map = memory.map();
        let path = kernel.file.path().display().to_string();
        let kernel = kernel.file.rewound();
        let kernel = kernel.with_context(|| format!("can't read kernel {path}"))?;
        let loaded = PE::load(map, Some(GuestAddress(place.kernel_block)), kernel, None)
            .with_context(|| format!("can't load kernel {path}"))?;
        map.write_slice(self.fdt, GuestAddress(place.fdt))
            .context("can't put the device tree into the guest's memory")?;
        if let (Some(initrd), Some((start, len))) = (initrd, place.initrd) {
            let path = initrd.file.path().display().to_string();
            let context = || format!("can't load initrd {path}");
            let file = initrd.file.rewound().with_context(context)?;
            map.read_exact_volatile_from(GuestAddress(start), file, usize::try_from(len)?)
                .with_context(context)?;
        }
        Ok(loaded.kernel_load.0)
    }

    fn set_up_pvtime(
        &mut self,
        vm: &VmFd,
        memory: &mut Memory,
        vcpus: &[VcpuFd],
    ) -> anyhow::Result<()> {
        // KVM can't write to a page that a protected guest has used, and offers it all the same.
        if !self.spec.protected && vcpus.iter().all(pvtime::is_supported) {
            return pvtime::set_up(vm, memory, vcpus);
        }
        if !std::mem::replace(&mut self.warned, true) {
            self.hooks.on_warning(match self.spec.protected {
                true => {
                    "a protected guest has no stolen time: it takes time that the host gave to \
                     others for its own"
                }
                false => {
                    "this host's KVM has no stolen time: the guest takes time that the host gave \
                     to others for its own; use a kernel with CONFIG_SCHED_INFO"
                }
            });
        }
        Ok(())
    }
}

/// What a vCPU has of pointer authentication.
const PTRAUTH: u32 = (1 << KVM_ARM_VCPU_PTRAUTH_ADDRESS) | (1 << KVM_ARM_VCPU_PTRAUTH_GENERIC);

fn init_vcpus(vm: &VmFd, vcpus: &[VcpuFd], protected: bool) -> anyhow::Result<()> {
    let mut init = kvm_vcpu_init::default();
    vm.get_preferred_target(&mut init)
        .context("KVM doesn't report which kind of CPU it can offer")?;
    init.features[0] |= 1 << KVM_ARM_VCPU_PSCI_0_2;
    // KVM shows it to a protected guest that hasn't got it, and Linux dies of its first use.
    let offered = [KVM_CAP_ARM_PTRAUTH_ADDRESS, KVM_CAP_ARM_PTRAUTH_GENERIC];
    if protected
        && offered
            .iter()
            .all(|cap| vm.check_extension_raw((*cap).into()) > 0)
    {
        init.features[0] |= PTRAUTH;
    }
    for (index, vcpu) in vcpus.iter().enumerate() {
        vcpu.vcpu_init(&init)
            .with_context(|| format!("KVM can't initialise vCPU {index}"))?;
        // The first boots; the others wait for its CPU_ON.
        init.features[0] |= 1 << KVM_ARM_VCPU_POWER_OFF;
    }
    Ok(())
}

/// Makes KVM hand over accesses that it can't decode (a load pair from a
/// device, say), instead of giving up on the guest.
fn report_bad_accesses(vm: &VmFd) {
    let cap = kvm_enable_cap {
        cap: KVM_CAP_ARM_NISV_TO_USER,
        ..Default::default()
    };
    // Kernels before 5.5 don't have it; there such an access ends the guest.
    let _ = vm.enable_cap(&cap);
}

/// What to do on an exit that only this architecture has.
pub fn handle_exit(vcpu: &VcpuFd, reason: u32, bus: &Bus) -> Option<VcpuEnd> {
    if !is_undecoded(reason) {
        return Some(VcpuEnd::Failed(format!(
            "KVM exits for a reason that isn't handled: {reason}"
        )));
    }
    bus.count_unclaimed();
    // As a bus does that can't carry out an access: an external abort.
    let mut events = kvm_vcpu_events::default();
    events.exception.ext_dabt_pending = 1;
    match vcpu.set_vcpu_events(&events) {
        Ok(()) => None,
        Err(error) => Some(VcpuEnd::Failed(format!(
            "the guest made an access that KVM doesn't carry out, and KVM refused an abort: {error}"
        ))),
    }
}
