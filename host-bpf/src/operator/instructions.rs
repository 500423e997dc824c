// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a policy may do. It runs where a run queue is locked, and at each request: the verifier alone
//! would let it wait for locks there, and loop for minutes.

#![forbid(unsafe_code)]
// Without the loader, nothing is checked.
#![cfg_attr(not(feature = "load"), allow(dead_code))]

/// Helpers, by the kernel's number and name.
const HELPERS: [(i32, &str); 11] = [
    (1, "map_lookup_elem"),
    (2, "map_update_elem"),
    (3, "map_delete_elem"),
    (5, "ktime_get_ns"),
    (7, "get_prandom_u32"),
    (8, "get_smp_processor_id"),
    (118, "jiffies64"),
    (125, "ktime_get_boot_ns"),
    (160, "ktime_get_coarse_ns"),
    (195, "map_lookup_percpu_elem"),
    (208, "ktime_get_tai_ns"),
];
/// `BPF_JMP | BPF_CALL`.
const CALL: u8 = 0x85;
/// `BPF_JMP | BPF_JCOND`: a loop that the kernel ends after 8 million rounds.
const MAY_GOTO: u8 = 0xe5;
/// `BPF_PSEUDO_CALL`, in the source register: of a function of the program.
const OWN: u8 = 1;
/// `BPF_PSEUDO_KFUNC_CALL`.
const KERNEL_FUNCTION: u8 = 2;

/// Why a program is no policy, by an instruction's code, source register and number.
pub(super) fn refusal((code, source, number): (u8, u8, i32)) -> Option<String> {
    match (code, source) {
        (MAY_GOTO, _) => Some("it loops without an end that the verifier sees".to_owned()),
        (CALL, OWN) => None,
        (CALL, KERNEL_FUNCTION) => Some("it calls a function of the kernel's".to_owned()),
        (CALL, _) if !HELPERS.iter().any(|(known, _)| *known == number) => {
            let names: Vec<_> = HELPERS.iter().map(|(_, name)| *name).collect();
            let names = names.join(", ");
            Some(format!(
                "it calls the kernel's helper {number}; a policy has {names}"
            ))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    //! Promise: a policy calls the listed helpers and its own functions alone.
    use super::*;

    #[test]
    fn what_may_wait_or_loop_is_refused() {
        for (instruction, said) in [
            ((CALL, 0, 181), "helper 181"),
            ((CALL, 0, 12), "helper 12"),
            ((CALL, KERNEL_FUNCTION, 1), "function of the kernel's"),
            ((MAY_GOTO, 0, 0), "without an end"),
        ] {
            let why = refusal(instruction).unwrap();
            assert!(why.contains(said) && !why.contains('\n'), "{why}");
        }
    }

    #[test]
    fn arithmetic_maps_and_clocks_are_not() {
        for instruction in [
            (0xb7, 0, 181),
            (CALL, 0, 1),
            (CALL, 0, 208),
            (CALL, OWN, 99),
        ] {
            assert_eq!(refusal(instruction), None, "{instruction:?}");
        }
    }
}
