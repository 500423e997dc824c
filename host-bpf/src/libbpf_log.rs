// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What libbpf prints when it or the kernel's verifier refuses something: kept off stderr, and
//! its cause put into the error.

#![forbid(unsafe_code)]
// Without the loader, nothing is printed.
#![cfg_attr(not(feature = "load"), allow(dead_code))]

#[cfg(feature = "load")]
pub(crate) use capture::explained;
#[cfg(feature = "load")]
pub use capture::verify;

/// The verifier's last word, or libbpf's: what is neither a frame, a program's instruction nor a
/// count.
pub(crate) fn reason(lines: &[String]) -> Option<String> {
    let noise = |line: &str| {
        line.trim().is_empty()
            || line.starts_with("processed ")
            || line.starts_with("cur state:")
            || line.starts_with("old state:")
            || line.contains("END PROG LOAD LOG")
            || line.contains("failed to load")
            || line.contains("BPF program load failed")
    };
    let line = lines.iter().rev().find(|line| !noise(line))?;
    Some(line.trim().trim_start_matches("libbpf: ").to_owned())
}

#[cfg(feature = "load")]
/// Turns an error of libbpf's into one of this crate's.
pub(crate) fn refused(what: &'static str) -> impl FnOnce(libbpf_rs::Error) -> crate::BpfError {
    move |error| crate::BpfError::Refused {
        what,
        why: format!("{error:#}"),
    }
}

#[cfg(feature = "load")]
mod capture {
    use std::sync::Mutex;

    use libbpf_rs::{PrintLevel, set_print};

    use crate::error::BpfError;
    use crate::libbpf_log::reason;
    use crate::sync::unpoisoned;
    use crate::{hooks, objects};

    /// One at a time: libbpf's way to print is the process's.
    static LOADING: Mutex<()> = Mutex::new(());
    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
    /// A verifier's log can be long; its end tells.
    const KEPT: usize = 64;

    /// Does what may be refused; the error has the reason in it, on one line.
    pub(crate) fn explained<T>(
        what: &'static str,
        work: impl FnOnce() -> libbpf_rs::Result<T>,
    ) -> Result<T, BpfError> {
        let _one = unpoisoned(LOADING.lock());
        lines().clear();
        let before = set_print(Some((PrintLevel::Warn, keep)));
        let result = work();
        set_print(before);
        result.map_err(|error| BpfError::Refused {
            what,
            why: match reason(&lines()) {
                Some(reason) => format!("{error:#}: {reason}"),
                None => format!("{error:#}"),
            },
        })
    }

    /// Whether this crate and the running kernel take the programs of an object; none of them is
    /// attached.
    ///
    /// # Errors
    /// [`BpfError::Refused`] with the verifier's reason when libbpf or the kernel refuses the
    /// object; [`BpfError::Hook`] when a program there would hang the host.
    pub fn verify(object: &[u8]) -> Result<(), BpfError> {
        let open = objects::open(object)?;
        let loaded = explained("loading the BPF programs", || open.load())?;
        hooks::check(&loaded)
    }

    fn lines() -> std::sync::MutexGuard<'static, Vec<String>> {
        unpoisoned(LINES.lock())
    }

    fn keep(_level: PrintLevel, text: String) {
        let mut kept = lines();
        kept.extend(text.lines().map(str::to_owned));
        let over = kept.len().saturating_sub(KEPT);
        kept.drain(..over);
    }
}

#[cfg(test)]
mod tests {
    //! Promise: the cause is found in all that libbpf prints.
    use super::*;

    #[test]
    fn the_verifiers_last_word() {
        let log = "libbpf: prog 'caller': BPF program load failed: -EACCES\n\
                   libbpf: prog 'caller': -- BEGIN PROG LOAD LOG --\n\
                   0: (b7) r1 = 0\n\
                   calling kernel function x is not allowed\n\
                   processed 5 insns (limit 1000000)\n\
                   -- END PROG LOAD LOG --\n\
                   libbpf: prog 'caller': failed to load: -EACCES\n";
        let lines: Vec<String> = log.lines().map(str::to_owned).collect();
        let told = reason(&lines).unwrap();
        assert_eq!(told, "calling kernel function x is not allowed");
        assert_eq!(reason(&[]), None);
        let looped = "infinite loop detected at insn 9\ncur state: R0=1\nold state: R0=1\n";
        let lines: Vec<String> = looped.lines().map(str::to_owned).collect();
        assert_eq!(reason(&lines).unwrap(), "infinite loop detected at insn 9");
    }
}
