// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Exits of arm64's KVM that stand for an access that it leaves to the VMM.

use kvm_bindings::KVM_EXIT_ARM_NISV;

/// `KVM_EXIT_ARM_LDST64B`, Linux 7.0.
const KVM_EXIT_ARM_LDST64B: u32 = 42;

/// Whether the guest made an access outside of its memory that KVM doesn't describe as
/// `KVM_EXIT_MMIO` does: one without a syndrome (a pair, say), or of 64 bytes by LD64B or ST64B,
/// which any guest may try on a CPU with FEAT_LS64. No device has registers for either; KVM takes
/// an external abort after both (`Documentation/virt/kvm/api.rst`, KVM_SET_VCPU_EVENTS).
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
