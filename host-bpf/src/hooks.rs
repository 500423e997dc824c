// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where a program may call a function of the kernel's.
//!
//! `scx_bpf_cpuperf_set` takes a run queue's lock. On a hook that holds it already, as sched_switch
//! does, the verifier lets such a program pass, and its first call hangs the host.

#![forbid(unsafe_code)]
// Without the loader, nothing is checked.
#![cfg_attr(not(feature = "load"), allow(dead_code))]

/// Hooks that hold no run queue's lock. sched_waking holds the woken thread's own, which the kernel
/// takes first too.
const ALLOWED: [&str; 8] = [
    "tp_btf/kvm_mmio",
    "tp_btf/sched_waking",
    "tp_btf/sched_exit_tp",
    "tp_btf/hrtimer_expire_exit",
    "syscall",
    "struct_ops.s/init",
    "struct_ops.s/cpu_online",
    "struct_ops.s/cpu_offline",
];

/// `BPF_JMP | BPF_CALL`.
const CALL: u8 = 0x85;
/// `BPF_PSEUDO_KFUNC_CALL`, in the source register.
const KERNEL_FUNCTION: u8 = 2;

/// Whether a program of this section may have these instructions, each by its code and source
/// register, after libbpf has put its subprograms behind it.
pub(crate) fn allowed(section: &str, instructions: impl IntoIterator<Item = (u8, u8)>) -> bool {
    ALLOWED.contains(&section)
        || !instructions
            .into_iter()
            .any(|instruction| instruction == (CALL, KERNEL_FUNCTION))
}

/// Refuses an object of which a program would call the kernel where a run queue is locked.
#[cfg(feature = "load")]
pub(crate) fn check(object: &libbpf_rs::Object) -> Result<(), crate::BpfError> {
    for program in object.progs() {
        let hook = program.section().to_string_lossy();
        let instructions = program.insns().iter();
        let instructions = instructions.map(|one| (one.code, one.src_reg()));
        if !allowed(&hook, instructions) {
            return Err(crate::BpfError::Hook {
                program: program.name().to_string_lossy().into_owned(),
                hook: hook.into_owned(),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    //! Promise: a call of the kernel's functions passes on the listed hooks alone.
    use super::*;

    const EXIT: (u8, u8) = (0x95, 0);
    const HELPER: (u8, u8) = (CALL, 0);
    const FUNCTION: (u8, u8) = (CALL, KERNEL_FUNCTION);

    #[test]
    fn a_locked_hook_calls_helpers_alone() {
        for section in ["tp_btf/sched_switch", "tp_btf/sched_wakeup", "fentry/x", ""] {
            assert!(allowed(section, [HELPER, EXIT]), "{section}");
            assert!(!allowed(section, [HELPER, EXIT, FUNCTION]), "{section}");
        }
    }

    #[test]
    fn a_listed_hook_calls_what_it_likes() {
        for section in ALLOWED {
            assert!(allowed(section, [FUNCTION, EXIT]), "{section}");
        }
    }
}
