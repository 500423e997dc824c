// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a cgroup limits that a process in it would leave by a move elsewhere: values of its
//! controllers, and BPF programs that are attached to it. Weights and protections aren't limits.

#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::path::Path;

use super::cgroup_error::CgroupError;
use super::cgroup_fs::read;
use super::sys::{attached_programs, is_cgroup};

/// `enum bpf_attach_type` of those that filter or change what a group's processes do, by
/// bpftool's names.
const ATTACH_TYPES: [(u32, &str); 20] = [
    (6, "cgroup_device"),
    (0, "cgroup_inet_ingress"),
    (1, "cgroup_inet_egress"),
    (2, "cgroup_inet_sock_create"),
    (3, "cgroup_sock_ops"),
    (8, "cgroup_inet4_bind"),
    (9, "cgroup_inet6_bind"),
    (10, "cgroup_inet4_connect"),
    (11, "cgroup_inet6_connect"),
    (12, "cgroup_inet4_post_bind"),
    (13, "cgroup_inet6_post_bind"),
    (14, "cgroup_udp4_sendmsg"),
    (15, "cgroup_udp6_sendmsg"),
    (18, "cgroup_sysctl"),
    (19, "cgroup_udp4_recvmsg"),
    (20, "cgroup_udp6_recvmsg"),
    (21, "cgroup_getsockopt"),
    (22, "cgroup_setsockopt"),
    (34, "cgroup_inet_sock_release"),
    (49, "cgroup_unix_connect"),
];

/// Whether a process of group `origin` stays in all groups with a limit when it moves to `to`.
///
/// # Errors
/// [`CgroupError::LeavesLimit`] with the first one that ends, [`CgroupError::UnknownLimits`] when
/// a group's programs can't be listed.
pub(super) fn check_kept(mount: &Path, origin: &Path, to: &Path) -> Result<(), CgroupError> {
    let left = origin.ancestors();
    for group in left.take_while(|group| *group != mount && !to.starts_with(group)) {
        let limit = match value(group)? {
            Some(value) => Some(value),
            None => program(group).map_err(|error| CgroupError::UnknownLimits {
                group: group.to_path_buf(),
                error,
            })?,
        };
        if let Some(limit) = limit {
            return Err(CgroupError::LeavesLimit {
                group: group.to_path_buf(),
                limit,
                to: to.to_path_buf(),
            });
        }
    }
    Ok(())
}

/// A controller's limit that is set on `group`, as `memory.max 1073741824`.
fn value(group: &Path) -> Result<Option<String>, CgroupError> {
    let failed = |error| CgroupError::File {
        path: group.to_path_buf(),
        error,
    };
    let mut names = Vec::new();
    for entry in fs::read_dir(group).map_err(failed)? {
        names.extend(entry.map_err(failed)?.file_name().into_string().ok());
    }
    names.sort();
    for name in names.iter().filter(|name| is_limit(name)) {
        let text = read(&group.join(name))?;
        if is_set(name, &text) {
            return Ok(Some(format!("{name} {}", text.trim().replace('\n', ", "))));
        }
    }
    Ok(None)
}

fn is_limit(name: &str) -> bool {
    let others = [
        "memory.high",
        "memory.swap.high",
        "cpuset.cpus",
        "cpuset.mems",
    ];
    name.ends_with(".max") || others.contains(&name)
}

/// Without a limit, a file has no number but cpu.max's period, and cpuset's are empty.
fn is_set(name: &str, text: &str) -> bool {
    let mut words = text.split_whitespace();
    match name {
        "cpu.max" => words.next().is_some_and(|quota| quota != "max"),
        "cpuset.cpus" | "cpuset.mems" => words.next().is_some(),
        _ => words.any(|word| {
            let value = word.rsplit('=').next().unwrap_or(word);
            value.parse::<f64>().is_ok()
        }),
    }
}

/// A type of program that is attached to `group`, as `programs cgroup_device`.
fn program(group: &Path) -> io::Result<Option<String>> {
    let dir = File::open(group)?;
    if !is_cgroup(&dir)? {
        return Ok(None);
    }
    for (number, name) in ATTACH_TYPES {
        match attached_programs(&dir, number) {
            Ok(0) => {}
            Ok(_) => return Ok(Some(format!("BPF programs {name}"))),
            Err(error) if can_have_none(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// A kernel without such programs, or without BPF.
fn can_have_none(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP)
    )
}

#[cfg(test)]
mod tests {
    //! What each file holds without a limit isn't one; what it holds with one is.

    use super::{is_limit, is_set};

    #[test]
    fn a_value_that_limits_is_told_from_one_that_does_not() {
        let rows = [
            ("memory.max", "max\n", "1073741824\n"),
            ("memory.high", "max\n", "4096\n"),
            ("memory.swap.max", "max\n", "0\n"),
            ("pids.max", "max\n", "64\n"),
            ("cpu.max", "max 100000\n", "50000 100000\n"),
            ("cpu.uclamp.max", "max\n", "50.00\n"),
            ("cpuset.cpus", "\n", "0-3\n"),
            ("cpuset.mems", "\n", "0\n"),
            (
                "io.max",
                "",
                "8:16 rbps=2097152 wbps=max riops=max wiops=max\n",
            ),
            ("hugetlb.2MB.max", "max\n", "0\n"),
            ("misc.max", "sev max\n", "sev 10\n"),
        ];
        for (name, without, with) in rows {
            assert!(is_limit(name), "{name}");
            assert!(!is_set(name, without), "{name}");
            assert!(is_set(name, with), "{name}");
        }
        for name in ["cpu.weight", "memory.min", "memory.low", "cpu.max.burst"] {
            assert!(!is_limit(name), "{name}");
        }
    }
}
