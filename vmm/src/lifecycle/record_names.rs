// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The names of the files beside a record: `PID.json`, while it is written `PID.json.new`, the socket
//! `PID.sock`, those for `vcpufreq tune` and `policy` `PID.tune` and `PID.policy`, and QEMU's device tree.

use std::path::{Path, PathBuf};

/// The last part of a path; nothing of one that isn't text.
pub fn name_of(path: &Path) -> &str {
    path.file_name()
        .and_then(|name| name.to_str())
        .unwrap_or_default()
}

/// The socket of the VMM whose record is at `path`.
pub fn socket_of(path: &Path) -> PathBuf {
    path.with_extension("sock")
}

/// The socket for `vcpufreq tune` of the same VMM.
pub fn tune_socket_of(path: &Path) -> PathBuf {
    path.with_extension("tune")
}

/// The socket for `vcpufreq policy` of its guardian.
pub fn policy_socket_of(path: &Path) -> PathBuf {
    path.with_extension("policy")
}

/// The process of a file of the directory, by its name, and whether it is an unfinished file.
fn parse_name(path: &Path) -> Option<(u32, bool)> {
    let (pid, kind) = path.file_name()?.to_str()?.split_once('.')?;
    let unfinished = match kind {
        "json" => false,
        "json.new" | "dtb.new" => true,
        beside if beside.starts_with("dtb.new.") => true,
        _ => return None,
    };
    Some((pid.parse().ok()?, unfinished))
}

/// Whether a file is a record or a device tree whose writer was killed, or is at it.
pub fn is_unfinished(path: &Path) -> bool {
    parse_name(path).is_some_and(|(_, unfinished)| unfinished)
}

/// The process that a record is of, by its name; also of an unfinished one.
pub fn pid_of(path: &Path) -> Option<u32> {
    parse_name(path).map(|(pid, _)| pid)
}
