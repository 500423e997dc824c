// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What procfs tells of x86 CPUs.

use super::HostRoot;

/// Whether the kernel measures what `scaling_cur_freq` shows, by APERF and MPERF: arch_freq_get_on_cpu()
/// of x86. Elsewhere it is what the driver has set.
#[must_use]
pub fn measures_frequency(root: &HostRoot) -> bool {
    has_flag(root, "aperfmperf")
}

/// Whether the first CPU has this flag.
pub(super) fn has_flag(root: &HostRoot, flag: &str) -> bool {
    let text = root.text("proc/cpuinfo").unwrap_or_default();
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let flags = lines.find(|(name, _)| name.trim_end() == "flags");
    flags.is_some_and(|(_, all)| all.split_whitespace().any(|one| one == flag))
}

#[cfg(test)]
mod tests {
    //! Promise: a flag is a whole word of the line `flags`.
    use super::*;
    use crate::fakes::FakeHost;

    #[test]
    fn a_flag_is_a_whole_word() {
        let host = FakeHost::empty();
        assert!(!measures_frequency(&host.root()));
        for (line, has) in [
            ("flags\t\t: fpu aperfmperf cppc\n", true),
            ("flags\t\t: fpu not_aperfmperf\n", false),
            ("bugs\t\t: aperfmperf\n", false),
        ] {
            host.write("proc/cpuinfo", format!("processor\t: 0\n{line}"));
            assert_eq!(measures_frequency(&host.root()), has, "{line}");
        }
    }
}
