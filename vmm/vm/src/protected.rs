// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Protected virtual machines (pKVM, `Documentation/virt/kvm/arm/pkvm.rst`): the hypervisor keeps
//! their memory from the host, but for pages that the guest shares. KVM pins each page that the guest
//! uses, and has no read-only slots for it.

use kvm_ioctls::{Error, Kvm, VmFd};
use vcpufreq_host::{HostRoot, version_of};

/// `KVM_VM_TYPE_ARM_PROTECTED` of `linux/kvm.h`.
const PROTECTED: u64 = 1 << 31;
/// `KVM_CAP_ARM_VM_IPA_SIZE`: bits of a guest's addresses at most, 0 where they are 40.
const ADDRESS_BITS: std::ffi::c_ulong = 165;
/// The first Linux with them.
const FIRST_LINUX: (u32, u32) = (7, 1);

/// Makes a protected virtual machine, with as many addresses as KVM has.
///
/// # Errors
/// As `KVM_CREATE_VM`: `EINVAL` where KVM isn't in protected mode, or is older than these.
pub fn create(kvm: &Kvm) -> Result<VmFd, Error> {
    let bits = kvm.check_extension_raw(ADDRESS_BITS);
    kvm.create_vm_with_type(PROTECTED | u64::try_from(bits).unwrap_or(0))
}

/// Whether KVM makes protected virtual machines; tried.
///
/// # Errors
/// Why not, and what to do about it after a semicolon, if anything.
pub fn offer(kvm: &Kvm, host: &HostRoot) -> Result<(), String> {
    let Err(error) = create(kvm) else {
        return Ok(());
    };
    let release = host.text("proc/sys/kernel/osrelease").unwrap_or_default();
    let cmdline = host.text("proc/cmdline").unwrap_or_default();
    Err(refusal(
        std::env::consts::ARCH,
        &release,
        &kvm_mode(&cmdline),
        error,
    ))
}

/// `kvm-arm.mode` of a kernel's command line; `default` is VHE where the CPU has it.
pub fn kvm_mode(cmdline: &str) -> String {
    let mut words = cmdline.split_whitespace().rev();
    let mode = words.find_map(|word| word.strip_prefix("kvm-arm.mode="));
    mode.unwrap_or("default").to_owned()
}

fn refusal(arch: &str, release: &str, mode: &str, error: Error) -> String {
    if arch != "aarch64" {
        return format!("{arch} has no protected VMs; use an arm64 host");
    }
    let (major, minor) = FIRST_LINUX;
    if version_of(release).is_some_and(|version| version < FIRST_LINUX) {
        return format!(
            "Linux {release} has no protected VMs; use {major}.{minor} or later, and write \
             kvm-arm.mode=protected on the kernel's command line"
        );
    }
    if mode != "protected" {
        return "this host's KVM isn't in protected mode; write kvm-arm.mode=protected on the \
                kernel's command line, and reboot"
            .to_owned();
    }
    format!(
        "KVM refuses a protected VM ({error}); see the kernel's log for why KVM is not protected"
    )
}

#[cfg(test)]
mod tests {
    //! Promises: the last mode of a command line counts; each host without protected VMs has one
    //! line, with the cause and the next step.
    use super::*;

    #[test]
    fn the_last_mode_counts() {
        for (cmdline, mode) in [
            ("quiet", "default"),
            ("kvm-arm.mode=protected", "protected"),
            ("kvm-arm.mode=protected quiet kvm-arm.mode=nvhe", "nvhe"),
        ] {
            assert_eq!(kvm_mode(cmdline), mode);
        }
    }

    #[test]
    fn each_refusal_has_its_cause() {
        let refusal = |arch, release, mode| refusal(arch, release, mode, Error::new(libc::EINVAL));
        for (arch, release, mode, wanted) in [
            ("x86_64", "7.3.4", "default", "use an arm64 host"),
            ("aarch64", "6.12.3", "protected", "use 7.1 or later"),
            ("aarch64", "7.3.4", "default", "isn't in protected mode"),
            ("aarch64", "7.3.4", "protected", "refuses a protected VM"),
        ] {
            let line = refusal(arch, release, mode);
            assert!(line.contains(wanted) && line.contains("; "), "{line}");
            assert_eq!(line.lines().count(), 1, "{line}");
        }
    }
}
