// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the user asks for, before it is checked against host and files: the
//! same options from flags and from TOML, where a flag wins.

use std::{collections::BTreeMap, path::Path, path::PathBuf};

use serde::{Deserialize, Deserializer, de::Error};
use vcpufreq_device::host::CpuList;

use crate::{
    config::ConfigError,
    console_choice::ConsoleChoice,
    parse::{IpcRatio, MemSize, PerVcpu, Rate, Table},
    path::PathChoice,
    rt_options::{PageSize, ResumeLatency, RtPolicy},
};

/// The clamp mode, in the user's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ClampArg {
    /// The host runs at what the guest asks for, or faster.
    Floor,
    /// The host runs at what the guest asks for.
    Exact,
}

impl ClampArg {
    /// Its name on command lines and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Floor => "floor",
            Self::Exact => "exact",
        }
    }
}

/// The actuator, in the user's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Actuator {
    /// A cgroup if possible, else the thread.
    Auto,
    /// A cgroup's cpu.uclamp.min and cpu.uclamp.max.
    Cgroup,
    /// sched_setattr on the vCPU thread.
    Thread,
    /// Nothing is clamped: requests are counted as not applicable.
    None,
}

/// What a read of cur_perf returns, in the user's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum CurPerfArg {
    /// What the vCPU gets, as it is.
    Exact,
    /// The nearest entry of the vCPU's table.
    Table,
    /// What the guest asked for.
    Request,
}

/// What the user says of one vCPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct VcpuOptions {
    /// The pCPUs it may run on.
    pub pin: Option<CpuList>,
    /// Its own performance table.
    pub table: Option<Table>,
    /// Its performance domain.
    pub domain: Option<u32>,
    /// Its work per cycle against the pCPU's.
    pub ipc_ratio: Option<IpcRatio>,
    /// Its capacity, 1..=1024.
    pub capacity: Option<u16>,
    /// How the host schedules it, if it is real-time.
    pub rt: Option<RtPolicy>,
    /// Performance in kHz that its requests can't undercut.
    pub floor: Option<u32>,
}

/// What the user says of the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct RunOptions {
    /// The kernel Image.
    pub kernel: Option<PathBuf>,
    /// The initramfs.
    pub initrd: Option<PathBuf>,
    /// The kernel command line.
    pub cmdline: Option<String>,
    /// How many vCPUs.
    pub cpus: Option<u32>,
    /// Memory.
    pub mem: Option<MemSize>,
    /// Mirror the pCPUs' tables, clusters and domains; as pins allow, unless told.
    pub host_topology: Option<bool>,
    /// Leave the cpufreq device out.
    pub no_bridge: Option<bool>,
    /// Floor or exact.
    pub clamp: Option<ClampArg>,
    /// How requests reach the host's scheduler.
    pub actuator: Option<Actuator>,
    /// Where its cgroups are made.
    pub cgroup_parent: Option<PathBuf>,
    /// How accesses reach the device.
    pub path: Option<PathChoice>,
    /// The programs of the path `bpf`.
    pub bpf_object: Option<PathBuf>,
    /// Say why which path is taken.
    pub explain: Option<bool>,
    /// What a read of cur_perf returns.
    #[serde(alias = "report")]
    pub cur_perf: Option<CurPerfArg>,
    /// How often a vCPU's requests reach the host.
    pub rate_limit: Option<Rate>,
    /// Where the events go.
    pub events: Option<PathBuf>,
    /// Where the device tree goes.
    pub dump_dtb: Option<PathBuf>,
    /// What is at the other end of the console.
    pub console: Option<ConsoleChoice>,
    /// The KVM device.
    pub kvm_device: Option<PathBuf>,
    /// Wake-up latency of the real-time vCPUs' pCPUs.
    pub resume_latency_us: Option<ResumeLatency>,
    /// What guest memory is made of.
    pub hugepages: Option<PageSize>,
    /// Per vCPU. In TOML a key is a list of vCPUs, as `[vcpu.0-3]`.
    #[serde(default, rename = "vcpu", deserialize_with = "by_vcpu")]
    pub vcpus: BTreeMap<u32, VcpuOptions>,
}

impl RunOptions {
    /// Reads the TOML of `path`.
    pub fn from_file(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Unreadable {
            path: path.to_owned(),
            source,
        })?;
        Self::from_toml(&text).map_err(|(line, message)| ConfigError::Toml {
            path: path.to_owned(),
            line,
            message,
        })
    }

    /// Parses TOML; an error has its line, counted from 1, and one line of text.
    pub fn from_toml(text: &str) -> Result<Self, (usize, String)> {
        toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            let before = text.as_bytes().iter().take(at);
            let line = 1 + before.filter(|byte| **byte == b'\n').count();
            (line, one_line(error.message()))
        })
    }

    /// Sets one option of some vCPUs; a later flag replaces an earlier one.
    pub fn set<T: Clone>(
        &mut self,
        flags: &[PerVcpu<T>],
        field: impl Fn(&mut VcpuOptions) -> &mut Option<T>,
    ) {
        for flag in flags {
            for vcpu in flag.vcpus.iter() {
                *field(self.vcpu_mut(vcpu)) = Some(flag.value.clone());
            }
        }
    }

    /// Takes from `file` what these options leave open.
    #[must_use]
    pub fn or(mut self, file: Self) -> Self {
        for (vcpu, of_vcpu) in file.vcpus {
            self.vcpu_mut(vcpu).fill_from(of_vcpu);
        }
        Self {
            kernel: self.kernel.or(file.kernel),
            initrd: self.initrd.or(file.initrd),
            cmdline: self.cmdline.or(file.cmdline),
            cpus: self.cpus.or(file.cpus),
            mem: self.mem.or(file.mem),
            host_topology: self.host_topology.or(file.host_topology),
            no_bridge: self.no_bridge.or(file.no_bridge),
            clamp: self.clamp.or(file.clamp),
            actuator: self.actuator.or(file.actuator),
            cgroup_parent: self.cgroup_parent.or(file.cgroup_parent),
            path: self.path.or(file.path),
            bpf_object: self.bpf_object.or(file.bpf_object),
            explain: self.explain.or(file.explain),
            cur_perf: self.cur_perf.or(file.cur_perf),
            rate_limit: self.rate_limit.or(file.rate_limit),
            events: self.events.or(file.events),
            dump_dtb: self.dump_dtb.or(file.dump_dtb),
            console: self.console.or(file.console),
            kvm_device: self.kvm_device.or(file.kvm_device),
            resume_latency_us: self.resume_latency_us.or(file.resume_latency_us),
            hugepages: self.hugepages.or(file.hugepages),
            vcpus: self.vcpus,
        }
    }

    fn vcpu_mut(&mut self, vcpu: u32) -> &mut VcpuOptions {
        self.vcpus.entry(vcpu).or_default()
    }
}

/// One entry a vCPU from one a list; where lists overlap, the first in the order
/// of their text wins.
fn by_vcpu<'de, D: Deserializer<'de>>(input: D) -> Result<BTreeMap<u32, VcpuOptions>, D::Error> {
    let mut vcpus: BTreeMap<u32, VcpuOptions> = BTreeMap::new();
    for (list, options) in BTreeMap::<String, VcpuOptions>::deserialize(input)? {
        let list: CpuList = list
            .parse()
            .map_err(|why| D::Error::custom(format!("[vcpu.{list}]: {why}")))?;
        for vcpu in list {
            vcpus.entry(vcpu).or_default().fill_from(options.clone());
        }
    }
    Ok(vcpus)
}

impl VcpuOptions {
    fn fill_from(&mut self, other: Self) {
        self.pin = self.pin.take().or(other.pin);
        self.table = self.table.take().or(other.table);
        self.domain = self.domain.or(other.domain);
        self.ipc_ratio = self.ipc_ratio.or(other.ipc_ratio);
        self.capacity = self.capacity.or(other.capacity);
        self.rt = self.rt.or(other.rt);
        self.floor = self.floor.or(other.floor);
    }
}

/// Joins what a parser says on several lines.
pub fn one_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    //! TOML has the flags' options under their names; a flag wins; an unknown
    //! key is named with its line.

    use super::*;

    const FILE: &str = r#"
kernel = "Image"
cpus = 4
mem = "1G"
no-bridge = true
clamp = "exact"

[vcpu.0-1]
pin = 0
table = [600000, 1000000]

[vcpu.2]
pin = "2-3"
ipc-ratio = 0.75
table = [{ khz = 700000, uv = 600000 }]
capacity = 512

[vcpu.3]
table = "1:2:3"
ipc-ratio = "1.5"
"#;

    #[test]
    fn a_file_says_what_flags_say() {
        let options = RunOptions::from_toml(FILE).unwrap();
        assert_eq!(options.cpus, Some(4));
        assert_eq!(options.mem, Some(MemSize(1024)));
        assert_eq!(
            (options.no_bridge, options.clamp),
            (Some(true), Some(ClampArg::Exact))
        );
        let [zero, one, two, three] = [0, 1, 2, 3].map(|n| options.vcpus[&n].clone());
        assert_eq!(zero, one);
        assert_eq!(zero.pin, Some("0".parse().unwrap()));
        assert_eq!(zero.table, Some("600000,1000000".parse().unwrap()));
        assert_eq!(two.table, Some("700000:600000".parse().unwrap()));
        assert_eq!(
            (two.capacity, two.ipc_ratio),
            (Some(512), Some("0.75".parse().unwrap()))
        );
        assert_eq!(three.table, Some("1:2:3".parse().unwrap()));
    }

    #[test]
    fn the_documented_file_is_taken() {
        let page = include_str!("../../docs/vcpufreq.md");
        let file = page.split("```toml\n").nth(1).unwrap();
        let file = file.split("```").next().unwrap();
        let options = RunOptions::from_toml(file).unwrap();
        assert_eq!(options.mem, Some(MemSize(1024)));
        assert_eq!(options.vcpus.len(), 4);
        assert_eq!(options.vcpus[&3].table.as_ref().unwrap().0.len(), 2);
    }

    #[test]
    fn a_flag_wins() {
        let mut flags = RunOptions {
            cpus: Some(2),
            ..RunOptions::default()
        };
        flags.set(&["0=3".parse().unwrap()], |vcpu| &mut vcpu.pin);
        let both = flags.or(RunOptions::from_toml(FILE).unwrap());
        assert_eq!(both.cpus, Some(2));
        assert_eq!(both.kernel, Some("Image".into()));
        assert_eq!(both.vcpus[&0].pin, Some("3".parse().unwrap()));
        assert_eq!(
            both.vcpus[&0].table,
            Some("600000,1000000".parse().unwrap())
        );
        assert_eq!(both.vcpus[&1].pin, Some("0".parse().unwrap()));
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line() {
        for (text, line, name) in [
            ("cpus = 1\nkernal = 'x'\n", 2, "kernal"),
            ("[vcpu.0]\npins = 1\n", 2, "pins"),
            ("[vcpu.x]\npin = 1\n", 1, "vcpu.x"),
        ] {
            let (at, message) = RunOptions::from_toml(text).unwrap_err();
            assert_eq!(at, line, "{message}");
            assert!(
                message.contains(name) && !message.contains('\n'),
                "{message}"
            );
        }
    }

    #[test]
    fn malformed_text_and_values_are_refused() {
        for text in [
            "cpus =",
            "cpus = -1",
            "mem = 'much'",
            "clamp = 'soft'",
            "[vcpu.0]\npin='x'",
        ] {
            let (_, message) = RunOptions::from_toml(text).unwrap_err();
            assert!(!message.is_empty() && !message.contains('\n'), "{message}");
        }
    }
}
