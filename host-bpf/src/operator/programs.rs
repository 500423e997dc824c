// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The programs and maps of a running VM, by what its VMM's process has open. The kernel tells which
//! that are: a guest that has taken its VMM over can't add to them, for a confined VMM makes none.

#![forbid(unsafe_code)]

use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};

use libbpf_rs::{MapCore as _, MapHandle, Program};

use crate::error::BpfError;
use crate::mapped::program_name;

/// The programs that ask a policy, as the kernel cuts their names.
const ASKING: [&str; 3] = ["vcpufreq_switch", "vcpufreq_write", "vcpufreq_decide"];
/// `BPF_MAP_TYPE_ARRAY`. Of other types one is not opened and closed: see `dispatch_set` in
/// `bpf/dispatch.bpf.c`.
const ARRAY: &str = "2";

/// What a VM's policy needs of it.
#[derive(Debug)]
pub(super) struct VmPrograms {
    pub asking: [OwnedFd; 3],
    pub calls: MapHandle,
    pub policies: MapHandle,
    pub vm: MapHandle,
    pub vcpus: MapHandle,
}

impl VmPrograms {
    /// Those of the VMM's process `pid`.
    pub(super) fn find(pid: u32) -> Result<Self, BpfError> {
        let files = open_files(pid);
        let program = |name: &'static str| {
            let mut programs = files.iter().filter_map(|file| file.number("prog_id"));
            programs.find_map(|id| {
                let program = Program::fd_from_id(id).ok()?;
                (program_name(program.as_fd()).ok()?.as_bytes() == name.as_bytes())
                    .then_some(program)
            })
        };
        let map = |name: &'static str| {
            let maps = files.iter();
            let mut maps = maps.filter(|file| file.value("map_type") == Some(ARRAY));
            maps.find_map(|file| {
                let map = MapHandle::from_map_id(file.number("map_id")?).ok()?;
                (map.name() == name).then_some(map)
            })
        };
        let none = || BpfError::NoPrograms(pid);
        let [switch, write, decide] = ASKING.map(program);
        Ok(Self {
            asking: [
                switch.ok_or_else(none)?,
                write.ok_or_else(none)?,
                decide.ok_or_else(none)?,
            ],
            calls: map("policy_calls").ok_or_else(none)?,
            policies: map("policies").ok_or_else(none)?,
            vm: map("vm").ok_or_else(none)?,
            vcpus: map("vcpus").ok_or_else(none)?,
        })
    }
}

/// What procfs tells of an open file.
struct OpenFile(String);

impl OpenFile {
    fn value(&self, key: &str) -> Option<&str> {
        let mut lines = self.0.lines();
        lines.find_map(|line| Some(line.strip_prefix(key)?.strip_prefix(':')?.trim()))
    }

    fn number(&self, key: &str) -> Option<u32> {
        self.value(key)?.parse().ok()
    }
}

/// A file that is closed meanwhile is none.
fn open_files(pid: u32) -> Vec<OpenFile> {
    let entries = fs::read_dir(format!("/proc/{pid}/fdinfo"))
        .into_iter()
        .flatten();
    let texts = entries.filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok());
    texts.map(OpenFile).collect()
}

#[cfg(test)]
mod tests {
    //! Promise: numbers of programs and maps are read as the kernel writes them.
    use super::*;

    #[test]
    fn a_file_tells_what_it_is() {
        let file = OpenFile("pos:\t0\nmap_type:\t2\nkey_size:\t4\nmap_id:\t17\n".to_owned());
        assert_eq!(file.value("map_type"), Some(ARRAY));
        assert_eq!(file.number("map_id"), Some(17));
        assert_eq!(file.number("prog_id"), None);
        assert_eq!(file.number("map"), None);
    }
}
