// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Why a vCPU has left its guest, from the text of `kvm:kvm_exit`.

/// The reason's name: of Arm `IRQ`, or the class of the trap, as `DABT_LOW`; of x86 KVM's, as
/// `EPT_VIOLATION`.
pub fn reason_of(tail: &str) -> &str {
    // `TRAP: HSR_EC: 0x0024 (DABT_LOW), PC: 0xffff800080012345`
    if let Some(trap) = tail.strip_prefix("TRAP:") {
        let class = trap
            .split_once('(')
            .and_then(|(_, rest)| rest.split_once(')'));
        return class.map_or("TRAP", |(class, _)| class);
    }
    // `vcpu 0 reason EPT_VIOLATION rip 0xfff`
    if let Some((_, rest)) = tail.split_once("reason ") {
        return rest.split_whitespace().next().unwrap_or("unknown");
    }
    // `IRQ: HSR_EC: 0x0000 (UNKNOWN), PC: 0x...`
    tail.split(':').next().unwrap_or("unknown")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_is_named_as_the_kernel_names_it() {
        for (tail, reason) in [
            (
                "TRAP: HSR_EC: 0x0024 (DABT_LOW), PC: 0xffff80008001",
                "DABT_LOW",
            ),
            ("IRQ: HSR_EC: 0x0000 (UNKNOWN), PC: 0xffff80008001", "IRQ"),
            ("vcpu 0 reason EPT_VIOLATION rip 0xfff", "EPT_VIOLATION"),
            ("reason HLT rip 0xfff info 0 0", "HLT"),
            ("TRAP: what", "TRAP"),
            ("", ""),
        ] {
            assert_eq!(reason_of(tail), reason, "{tail}");
        }
    }
}
