// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The cause in what libbpf prints when it or the kernel's verifier refuses something.

#![forbid(unsafe_code)]
// Without the loader, nothing is printed.
#![cfg_attr(not(feature = "load"), allow(dead_code))]

/// The verifier's last word, or libbpf's: what is neither a frame, a program's instruction nor a
/// count.
pub(crate) fn reason(lines: &[String]) -> Option<String> {
    let noise = |line: &str| {
        line.trim().is_empty()
            || line.starts_with("processed ")
            || line.contains("END PROG LOAD LOG")
            || line.contains("failed to load")
            || line.contains("BPF program load failed")
    };
    let line = lines.iter().rev().find(|line| !noise(line))?;
    Some(line.trim().trim_start_matches("libbpf: ").to_owned())
}

#[cfg(test)]
mod tests {
    //! Promise: of all that is printed, the cause is told.
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
    }
}
