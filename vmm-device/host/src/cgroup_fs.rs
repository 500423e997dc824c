// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The cgroup v2 file system: where it is mounted, and its control files.

#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::fs;
use std::io::Write as _;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use super::HostRoot;
use super::cgroup_error::CgroupError;

pub(super) fn children(dir: &Path) -> Result<Vec<PathBuf>, CgroupError> {
    let failed = |error| CgroupError::File {
        path: dir.to_path_buf(),
        error,
    };
    let mut groups = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_type().map_err(failed)?.is_dir() {
            groups.push(entry.path());
        }
    }
    groups.sort();
    Ok(groups)
}

pub(super) fn has_cpu(controllers: &str) -> bool {
    controllers.split_whitespace().any(|name| name == "cpu")
}

pub(super) fn read(path: &Path) -> Result<String, CgroupError> {
    fs::read_to_string(path).map_err(|error| CgroupError::File {
        path: path.to_path_buf(),
        error,
    })
}

/// Writes to a control file, which must be there: a file of that name is never made.
pub(super) fn write(path: &Path, text: &str) -> Result<(), CgroupError> {
    let file = fs::OpenOptions::new().write(true).truncate(true).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| CgroupError::File {
        path: path.to_path_buf(),
        error,
    })
}

/// Where cgroup v2 is mounted, by proc_pid_mountinfo(5).
pub(super) fn mount_point(root: &HostRoot) -> Result<PathBuf, CgroupError> {
    let table = read(&root.own_process().join("mountinfo"))?;
    let mut points = table.lines().filter_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let kind = kind.split(' ').next()?;
        let point = mount.split(' ').nth(4)?;
        (kind == "cgroup2").then(|| unescape(point))
    });
    let point = points.next().ok_or(CgroupError::NotMounted)?;
    Ok(root.path(&point))
}

/// The group of the process of this directory in procfs, by cgroups(7): the line `0::/path`.
pub(super) fn group_of(process: &Path, mount: &Path) -> Result<PathBuf, CgroupError> {
    let groups = read(&process.join("cgroup"))?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"));
    match own {
        None => Err(CgroupError::NotMounted),
        // A process can be in a group outside its cgroup namespace.
        Some(own) if own.split('/').any(|part| part == "..") => {
            Err(CgroupError::OutsideNamespace { group: own.into() })
        }
        Some("") => Ok(mount.to_path_buf()),
        Some(own) => Ok(mount.join(own)),
    }
}

/// Undoes the kernel's octal escapes of blanks and backslashes (`\040`).
fn unescape(text: &str) -> PathBuf {
    let bytes = text.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let digits = bytes.get(at + 1..at + 4);
        let octal = digits
            .filter(|_| bytes[at] == b'\\')
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        plain.push(octal.unwrap_or(bytes[at]));
        at += if octal.is_some() { 4 } else { 1 };
    }
    PathBuf::from(OsString::from_vec(plain))
}

/// For callers that look for what other processes left.
pub(super) fn cgroup_mount(root: &HostRoot) -> Result<PathBuf, CgroupError> {
    let mount = mount_point(root)?;
    match fs::metadata(&mount) {
        Ok(_) => Ok(mount),
        Err(error) => Err(CgroupError::File { path: mount, error }),
    }
}
