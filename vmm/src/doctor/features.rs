// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What parts of the program need of a kernel, as data: a table in `docs/boards.md` is made from it,
//! and the doctor's list of the parts that the running kernel is too old for. Its versions are those
//! of the mainline kernel; distributions have some parts in older ones.

use vcpufreq_host::version_of;

use super::finding::DoctorFinding;

/// What begins the name of a part that the guest's kernel has.
const OF_GUEST: &str = "guest: ";

/// One part, and the kernel that has it.
#[derive(Clone, Copy, Debug)]
pub struct Feature {
    /// What works.
    pub name: &'static str,
    /// The first version of Linux.
    pub linux: &'static str,
    /// Its options.
    pub options: &'static [&'static str],
}

impl Feature {
    /// `Linux 5.10 with CONFIG_SCHED_INFO`
    pub fn needs(&self) -> String {
        format!("Linux {} with {}", self.linux, self.options())
    }

    /// Whether a kernel of this version is too old for it.
    fn is_after(&self, version: (u32, u32)) -> bool {
        version_of(self.linux).is_some_and(|first| first > version)
    }

    fn options(&self) -> String {
        let options = self.options.iter().map(|name| format!("CONFIG_{name}"));
        options.collect::<Vec<_>>().join(", ")
    }
}

pub(super) const STOLEN_TIME: Feature =
    feature("the guest sees stolen time", "5.10", &["SCHED_INFO"]);

/// All of them.
pub const ALL: [Feature; 16] = [
    feature("clamps of threads", "5.3", &["UCLAMP_TASK"]),
    feature("clamps of cgroups", "5.4", &["UCLAMP_TASK_GROUP"]),
    feature("`ioeventfd`", "4.1", &["EVENTFD"]),
    feature("`bpf`", "6.12", &["BPF_SYSCALL", "DEBUG_INFO_BTF"]),
    feature("`vcpufreq_host`", "6.12", &["MODULES", "DEBUG_INFO_BTF"]),
    feature("`scx`", "7.0", &["SCHED_CLASS_EXT"]),
    feature("sandbox: system calls", "4.14", &["SECCOMP_FILTER"]),
    feature("sandbox: files", "5.13", &["SECURITY_LANDLOCK"]),
    feature("sandbox: network", "6.7", &["SECURITY_LANDLOCK"]),
    feature("sandbox: sockets", "6.12", &["SECURITY_LANDLOCK"]),
    feature("sandbox: signals", "6.15", &["SECURITY_LANDLOCK"]),
    feature("guest: `vcpufreq_guest`", "6.12", &["CPU_FREQ", "MODULES"]),
    feature("guest: the kernel's driver", "6.13", &["CPUFREQ_VIRT"]),
    STOLEN_TIME,
    feature("`serve`, `qemu`", "5.8", &["EVENTFD"]),
    feature("real-time partition", "6.7", &["CPUSETS"]),
];

const fn feature(
    name: &'static str,
    linux: &'static str,
    options: &'static [&'static str],
) -> Feature {
    Feature {
        name,
        linux,
        options,
    }
}

/// The parts that a kernel of this release is too old for; `None` where the release has no version.
pub(super) fn finding(release: &str) -> Option<DoctorFinding> {
    const NAME: &str = "kernel parts";
    let version = version_of(release)?;
    let of_host = ALL.iter().filter(|part| !part.name.starts_with(OF_GUEST));
    let later = of_host.filter(|part| part.is_after(version));
    let later: Vec<_> = later
        .map(|part| format!("{} ({})", part.name.replace('`', ""), part.linux))
        .collect();
    if later.is_empty() {
        let why = "this kernel's version has each part that the program uses";
        return Some(DoctorFinding::good(NAME, "all", why));
    }
    let what = format!("Linux {release} lacks: {}", later.join(", "));
    let why = "mainline has them from these versions on, and distributions may have them earlier";
    Some(DoctorFinding::absent(NAME, what, why))
}

/// The table of the documentation.
pub fn table() -> String {
    let mut text = "| part | Linux | options |\n|---|---|---|\n".to_owned();
    for feature in ALL {
        let Feature { name, linux, .. } = feature;
        text += &format!("| {name} | {linux} | {} |\n", feature.options());
    }
    text
}
