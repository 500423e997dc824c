// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What this host's KVM has, and what it can take over of the vcpufreq registers: the latter is
//! tried on a virtual machine that is thrown away.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{anyhow, bail};
use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, IoEventAddress, Kvm, VmFd};
use serde::Serialize;
use vcpufreq_bridge::{PageMapping, SlotMemory};
use vcpufreq_device::REGION_ALIGN;
use vmm_sys_util::eventfd::EventFd;

use super::gic::Gic;
use super::layout::CPUFREQ_BASE;
use super::{arch, protected, sys};

/// `KVM_CAP_STEAL_TIME` of `linux/kvm.h`, which kvm-ioctls has no name for.
const KVM_CAP_STEAL_TIME: std::ffi::c_ulong = 187;
/// `KVM_CAP_ARM_VM_IPA_SIZE`, likewise on other architectures; 0 there.
const KVM_CAP_ARM_VM_IPA_SIZE: std::ffi::c_ulong = 165;

/// The facts of a KVM device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct KvmFacts {
    /// `KVM_GET_API_VERSION`.
    pub api_version: i32,
    /// `KVM_CAP_MAX_VCPUS`.
    pub max_vcpus: usize,
    /// `KVM_CAP_ARM_VM_IPA_SIZE`, on arm64 only.
    pub address_bits: Option<i32>,
    /// `KVM_CAP_STEAL_TIME`: the guest can read its stolen time.
    pub stolen_time: bool,
    /// `KVM_CAP_READONLY_MEM`: reads without an exit are possible.
    pub readonly_slots: bool,
    /// `KVM_CAP_IOEVENTFD`: writes without an exit to the VMM are possible.
    pub ioeventfd: bool,
    /// The interrupt controller of guests, on arm64 only.
    pub gic: Option<Gic>,
    /// `kvm-arm.mode` of the kernel command line; `default` is VHE where the
    /// CPU has it.
    pub mode: String,
}

impl KvmFacts {
    /// The version since Linux 2.6.22; the others are obsolete.
    pub const API_VERSION: i32 = 12;

    /// Asks the device at `path`.
    ///
    /// # Errors
    /// As open(2): `ENOENT` without KVM, `EACCES`. Kind `Other` when it isn't a KVM device.
    pub fn ask(path: &Path) -> io::Result<Self> {
        let kvm = open(path)?;
        // Any file can be opened, but only KVM answers.
        let api_version = kvm.get_api_version();
        if api_version < 0 {
            return Err(io::Error::other("not a KVM device"));
        }
        let address_bits = kvm.check_extension_raw(KVM_CAP_ARM_VM_IPA_SIZE);
        Ok(Self {
            api_version,
            max_vcpus: kvm.get_max_vcpus(),
            address_bits: Some(address_bits).filter(|bits| *bits > 0),
            stolen_time: kvm.check_extension_raw(KVM_CAP_STEAL_TIME) > 0,
            readonly_slots: kvm.check_extension(Cap::ReadonlyMem),
            ioeventfd: kvm.check_extension(Cap::Ioeventfd),
            gic: kvm.create_vm().ok().and_then(|vm| Gic::probe(&vm)),
            mode: "default".to_owned(),
        })
    }
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
    open(path).map_err(|source| {
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

/// Opens the KVM device at `path`, which any file may be.
fn open(path: &Path) -> io::Result<Kvm> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    Kvm::new_with_path(&name).map_err(|error| io::Error::from_raw_os_error(error.errno()))
}

/// What KVM takes over, or why not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PathFacts {
    /// Memory that a guest can only read.
    pub readonly_slots: Result<(), String>,
    /// Writes that signal an eventfd.
    pub ioeventfds: Result<(), String>,
    /// A guest's loads from device memory see what is in the host's caches:
    /// FEAT_S2FWB on arm64, always on x86-64.
    pub coherent: bool,
    /// Whether all this is of protected guests.
    pub protected: bool,
}

impl PathFacts {
    /// Tries it with the KVM device at `path`, for protected guests or others.
    ///
    /// # Errors
    /// When not even an empty virtual machine can be made.
    pub fn ask(path: &Path, protected: bool) -> Result<Self, String> {
        let kvm = open_kvm(path).map_err(|error| error.to_string())?;
        Self::probe(&kvm, protected).map_err(|error| format!("KVM can't create a VM: {error}"))
    }

    fn probe(kvm: &Kvm, protected: bool) -> Result<Self, kvm_ioctls::Error> {
        let vm = match protected {
            true => protected::create(kvm)?,
            false => kvm.create_vm()?,
        };
        Ok(Self {
            readonly_slots: readonly_slot(&vm),
            ioeventfds: ioeventfd(&vm),
            // What a protected guest shares is memory on both sides.
            coherent: protected || arch::device_loads_see_caches(&vm),
            protected,
        })
    }
}

fn readonly_slot(vm: &VmFd) -> Result<(), String> {
    let pages = PageMapping::new(REGION_ALIGN, false).map_err(|error| error.to_string())?;
    let mut slot = kvm_userspace_memory_region {
        slot: 0,
        flags: KVM_MEM_READONLY,
        guest_phys_addr: CPUFREQ_BASE,
        memory_size: pages.size(),
        userspace_addr: pages.address(),
    };
    let refused = |error| format!("KVM refuses read-only memory slots ({error})");
    sys::set_slot(vm, slot).map_err(refused)?;
    slot.memory_size = 0;
    // The pages go when this returns: so does the slot.
    sys::set_slot(vm, slot).map_err(refused)
}

fn ioeventfd(vm: &VmFd) -> Result<(), String> {
    let event = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
    let event = event.map_err(|error| format!("no eventfd can be made ({error})"))?;
    vm.register_ioevent(&event, &IoEventAddress::Mmio(CPUFREQ_BASE + 4), 1_u32)
        .map_err(|error| format!("KVM refuses ioeventfds ({error})"))
}
