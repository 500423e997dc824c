// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What parts of the program need of a kernel, as data: a table in `docs/boards.md` is made from it.
//! Its versions are those of the mainline kernel; distributions have some parts in older ones.

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

    fn options(&self) -> String {
        let options = self.options.iter().map(|name| format!("CONFIG_{name}"));
        options.collect::<Vec<_>>().join(", ")
    }
}

pub(super) const STOLEN_TIME: Feature = of("the guest sees stolen time", "5.10", &["SCHED_INFO"]);

/// All of them.
pub const ALL: [Feature; 16] = [
    of("clamps of threads", "5.3", &["UCLAMP_TASK"]),
    of("clamps of cgroups", "5.4", &["UCLAMP_TASK_GROUP"]),
    of("`ioeventfd`", "4.1", &["EVENTFD"]),
    of("`bpf`", "6.12", &["BPF_SYSCALL", "DEBUG_INFO_BTF"]),
    of("`vcpufreq_host`", "6.12", &["MODULES", "DEBUG_INFO_BTF"]),
    of("`scx`", "7.0", &["SCHED_CLASS_EXT"]),
    of("sandbox: system calls", "4.14", &["SECCOMP_FILTER"]),
    of("sandbox: files", "5.13", &["SECURITY_LANDLOCK"]),
    of("sandbox: network", "6.7", &["SECURITY_LANDLOCK"]),
    of("sandbox: sockets", "6.12", &["SECURITY_LANDLOCK"]),
    of("sandbox: signals", "6.15", &["SECURITY_LANDLOCK"]),
    of("guest: `vcpufreq_guest`", "6.12", &["CPU_FREQ", "MODULES"]),
    of("guest: the kernel's driver", "6.13", &["CPUFREQ_VIRT"]),
    STOLEN_TIME,
    of("`serve`, `qemu`", "5.8", &["EVENTFD"]),
    of("real-time partition", "6.7", &["CPUSETS"]),
];

const fn of(name: &'static str, linux: &'static str, options: &'static [&'static str]) -> Feature {
    Feature {
        name,
        linux,
        options,
    }
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
