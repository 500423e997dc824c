// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What can be known before trying: one plain reason each, in the order in which an administrator
//! would put them right. What else a kernel may refuse shows when the programs are loaded.

#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;

use crate::error::BpfError;

/// `CAP_PERFMON` and `CAP_BPF`; `CAP_SYS_ADMIN` stands for both.
const CAPS: [(u32, &str); 2] = [(38, "CAP_PERFMON"), (39, "CAP_BPF")];
const CAP_SYS_ADMIN: u32 = 21;

/// Looks at the host below `root` (`/`) for what the programs need.
///
/// # Errors
/// The first thing that is missing: [`BpfError::NoBtf`], [`BpfError::NotPermitted`] or
/// [`BpfError::Lockdown`].
pub fn probe(root: &Path) -> Result<(), BpfError> {
    let btf = root.join("sys/kernel/btf/vmlinux");
    if !btf.exists() {
        return Err(BpfError::NoBtf(btf));
    }
    let status = fs::read_to_string(root.join("proc/self/status")).unwrap_or_default();
    if let Some(missing) = missing_cap(&status) {
        return Err(BpfError::NotPermitted(missing));
    }
    // No file: a kernel without lockdown.
    let lockdown = fs::read_to_string(root.join("sys/kernel/security/lockdown"));
    if lockdown.is_ok_and(|text| text.contains("[confidentiality]")) {
        return Err(BpfError::Lockdown("confidentiality".into()));
    }
    Ok(())
}

/// The first capability that is not in effect in `/proc/self/status`.
fn missing_cap(status: &str) -> Option<&'static str> {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = line.and_then(|text| u64::from_str_radix(text.trim(), 16).ok())?;
    let has = |cap: u32| bits & (1 << cap) != 0;
    if has(CAP_SYS_ADMIN) {
        return None;
    }
    let lacking = CAPS.iter().find(|(cap, _)| !has(*cap));
    lacking.map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    //! Promises: each thing that is missing is named; nothing missing is no error.
    use super::*;

    fn host(caps: &str, lockdown: Option<&str>) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("sys/kernel/btf/vmlinux", "");
        write("proc/self/status", &format!("Name:\tx\nCapEff:\t{caps}\n"));
        if let Some(text) = lockdown {
            write("sys/kernel/security/lockdown", text);
        }
        dir
    }

    #[test]
    fn a_host_with_everything() {
        for caps in ["000001ffffffffff", "0000000000200000", "000000c000000000"] {
            let dir = host(caps, Some("[none] integrity confidentiality\n"));
            probe(dir.path()).unwrap();
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        for (caps, lockdown, expected) in [
            ("0000000000000000", None, "CAP_PERFMON"),
            ("0000004000000000", None, "CAP_BPF"),
            (
                "000001ffffffffff",
                Some("none integrity [confidentiality]\n"),
                "lockdown",
            ),
        ] {
            let said = probe(host(caps, lockdown).path()).unwrap_err().to_string();
            assert!(said.contains(expected), "{said}");
            assert_eq!(said.lines().count(), 1);
        }
    }

    #[test]
    fn no_btf() {
        let dir = tempfile::tempdir().unwrap();
        let said = probe(dir.path()).unwrap_err().to_string();
        assert!(said.contains("CONFIG_DEBUG_INFO_BTF"), "{said}");
    }
}
