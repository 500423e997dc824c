// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Exits of arm64's KVM that stand for an access that it leaves to the VMM.

use kvm_bindings::KVM_EXIT_ARM_NISV;

/// `KVM_EXIT_ARM_LDST64B`, Linux 7.0.
const KVM_EXIT_ARM_LDST64B: u32 = 42;

/// Whether the exit is an access outside the guest's memory that KVM doesn't decode. Its
/// instruction has no syndrome (a load of a pair, for example) or moves 64 bytes (LD64B, ST64B);
/// any guest can execute these on a CPU with FEAT_LS64. No device has registers for either; KVM
/// takes an external abort after both (`Documentation/virt/kvm/api.rst`, KVM_SET_VCPU_EVENTS).
pub fn is_undecoded(reason: u32) -> bool {
    matches!(reason, KVM_EXIT_ARM_NISV | KVM_EXIT_ARM_LDST64B)
}

#[cfg(test)]
mod tests {
    //! Numbers of `include/uapi/linux/kvm.h`.
    use super::*;

    #[test]
    fn accesses_that_kvm_leaves_are_no_end_of_the_guest() {
        for (name, reason, undecoded) in [
            ("KVM_EXIT_MMIO", 6, false),
            ("KVM_EXIT_INTERNAL_ERROR", 17, false),
            ("KVM_EXIT_ARM_NISV", 28, true),
            ("KVM_EXIT_MEMORY_FAULT", 39, false),
            ("KVM_EXIT_ARM_SEA", 41, false),
            ("KVM_EXIT_ARM_LDST64B", 42, true),
        ] {
            assert_eq!(is_undecoded(reason), undecoded, "{name}");
        }
    }
}
