// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The settings wanted of a host, whatever its CPUs: a TOML file. What a profile doesn't name is
//! left as it is.

use std::fmt::Display;

use serde::{Deserialize, Deserializer, Serialize};
use thiserror::Error;

use vcpufreq_host::undo::scheduling;

use crate::{policy_frequencies::PolicyFrequencies, published::PublishedMaximum};

/// The shipped profiles: name and text.
pub const SHIPPED: &[(&str, &str)] = &[
    ("kvm-rt", include_str!("../profiles/kvm-rt.toml")),
    ("qcs6490", include_str!("../profiles/qcs6490.toml")),
    ("iq-9075", include_str!("../profiles/iq-9075.toml")),
    ("iq-8275", include_str!("../profiles/iq-8275.toml")),
    ("iq-615", include_str!("../profiles/iq-615.toml")),
    ("xeon-e5", include_str!("../profiles/xeon-e5.toml")),
    (
        "no-fair-server",
        include_str!("../profiles/no-fair-server.toml"),
    ),
];

/// A profile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Profile {
    /// What it is for, in a line.
    pub description: String,
    /// What can be changed while the host runs.
    pub settings: Settings,
    /// Words of the kernel's command line; `{rt}` and `{housekeeping}` stand for CPU lists.
    pub cmdline: Vec<String>,
    /// What the firmware's set-up must have, for people.
    pub firmware: Vec<String>,
    /// Options of the kernel's configuration.
    pub kernel_config: Vec<String>,
    /// Parameters of modules, as `kvm.NAME=VALUE`, that are set when the module is loaded.
    pub module_options: Vec<String>,
    /// What others have measured with these settings.
    pub published: Vec<PublishedMaximum>,
}

/// Which CPUs a setting is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// The real-time CPUs alone.
    #[default]
    Rt,
    /// All of the host's.
    All,
}

/// Where something is moved to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MoveTo {
    /// The housekeeping CPUs.
    Housekeeping,
}

/// Which idle states are switched off.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IdleStates {
    /// Every state.
    All,
    /// Every state but 0, the lightest.
    Deep,
    /// By number.
    #[serde(untagged)]
    Numbers(Vec<u32>),
}

/// How a cpuset is cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CpusetPartition {
    /// No load balancing, and CPUs that no other cgroup has.
    Isolated,
    /// CPUs that no other cgroup has, with load balancing: a root domain of its own, which pinned
    /// SCHED_DEADLINE threads need.
    Root,
}

fn cpuset<'de, D: Deserializer<'de>>(from: D) -> Result<Option<CpusetPartition>, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    enum Written {
        Isolated,
        Root,
        None,
    }
    let written = Option::<Written>::deserialize(from)?;
    Ok(match written {
        Some(Written::Isolated) => Some(CpusetPartition::Isolated),
        Some(Written::Root) => Some(CpusetPartition::Root),
        Some(Written::None) | None => None,
    })
}

/// What can be changed while the host runs, each with the kernel's own unit and range.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Settings {
    /// `kernel.timer_migration`, 0 or 1.
    pub timer_migration: Option<u8>,
    /// `kernel.sched_rt_runtime_us`: µs in each `kernel.sched_rt_period_us`, -1 for no limit.
    pub rt_runtime_us: Option<i64>,
    /// Runtime of the fair and ext servers, in ns per their period; 0 is none.
    pub fair_server_runtime_ns: Option<u64>,
    /// Of which CPUs.
    pub fair_server_cpus: Scope,
    /// Where unbound kernel work runs.
    pub workqueues: Option<MoveTo>,
    /// Where interrupts go that can be moved, new ones too.
    pub interrupts: Option<MoveTo>,
    /// The cpufreq governor.
    pub governor: Option<String>,
    /// Of which CPUs' policies governor and frequencies are set.
    pub frequency_cpus: Scope,
    /// `scaling_min_freq`: kHz, or an end of the CPU's range.
    pub min_freq: Option<PolicyFrequencies>,
    /// `scaling_max_freq`: kHz, or an end of the CPU's range.
    pub max_freq: Option<PolicyFrequencies>,
    /// schedutil's `rate_limit_us`: µs between two changes of frequency, at least.
    pub schedutil_rate_limit_us: Option<u32>,
    /// `kernel.sched_util_clamp_min`, 0 to 1024.
    pub util_clamp_min: Option<u32>,
    /// `kernel.sched_util_clamp_max`, 0 to 1024.
    pub util_clamp_max: Option<u32>,
    /// `kernel.sched_util_clamp_min_rt_default`, 0 to 1024.
    pub util_clamp_min_rt_default: Option<u32>,
    /// Idle states that are switched off.
    pub idle_states_off: Option<IdleStates>,
    /// Of which CPUs.
    pub idle_cpus: Scope,
    /// `pm_qos_resume_latency_us` of each RT CPU: µs, or `n/a` for none at all.
    pub resume_latency_us: Option<String>,
    /// A cpuset partition for each guest; text `none` is none, as in the place of a profile's.
    #[serde(deserialize_with = "cpuset")]
    pub cpuset: Option<CpusetPartition>,
    /// Which CPUs the lockup watchdogs watch.
    pub watchdog: Option<MoveTo>,
    /// `kernel.nmi_watchdog`, 0 or 1.
    pub nmi_watchdog: Option<u8>,
    /// `tracing_on`, 0 or 1.
    pub tracing: Option<u8>,
    /// Kernel samepage merging, 0 to 2.
    pub ksm: Option<u8>,
    /// Transparent huge pages: always, madvise or never.
    pub transparent_hugepages: Option<String>,
    /// `vm.swappiness`, 0 to 200.
    pub swappiness: Option<u8>,
    /// `vm.compaction_proactiveness`, 0 to 100.
    pub compaction_proactiveness: Option<u8>,
    /// `vm.min_free_kbytes`: memory that the kernel keeps free.
    pub min_free_kbytes: Option<u32>,
    /// `vm.watermark_scale_factor`: how much more is free when kswapd stops, in 1/10,000 of memory,
    /// 1 to 3000.
    pub watermark_scale_factor: Option<u32>,
    /// `vm.watermark_boost_factor`: how much more is freed after fragmentation, in 1/10,000; 0 is
    /// none.
    pub watermark_boost_factor: Option<u32>,
    /// `vm.stat_interval`: seconds between two updates of the memory's counters.
    pub stat_interval: Option<u32>,
    /// `kernel.numa_balancing`, 0 to 3.
    pub numa_balancing: Option<u8>,
    /// `/sys/kernel/rcu_expedited`, 0 or 1.
    pub rcu_expedited: Option<u8>,
    /// Scheduling of `ktimers/N` of each RT CPU, as `fifo:2`.
    pub ktimers: Option<String>,
    /// Of `rcuc/N`.
    pub rcuc: Option<String>,
    /// Of `rcub/N`, all of them: N is no CPU.
    pub rcub: Option<String>,
    /// Of `ksoftirqd/N`.
    pub ksoftirqd: Option<String>,
    /// KVM's polling before a vCPU sleeps, in ns.
    pub halt_poll_ns: Option<u32>,
}

/// Why there is no profile: the cause, then what to do.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct ProfileError(String);

impl ProfileError {
    /// The text named `name` isn't a profile: the parser's error.
    fn wrong(name: &str, error: &impl Display) -> Self {
        let why = one_line(error);
        Self(format!("{name}: {why}; see docs/rt.md for the keys"))
    }
}

/// The text of the shipped profile with this name.
///
/// # Errors
/// [`ProfileError`] with the names that there are, when none has this one.
pub(crate) fn shipped_text(name: &str) -> Result<&'static str, ProfileError> {
    let found = SHIPPED.iter().find(|(of, _)| *of == name);
    found.map(|(_, text)| *text).ok_or_else(|| {
        let names: Vec<&str> = SHIPPED.iter().map(|(name, _)| *name).collect();
        let names = names.join(", ");
        ProfileError(format!(
            "no profile is called '{name}'; there are {names}, or give a file's path"
        ))
    })
}

/// Module, parameter and value of `kvm.NAME=VALUE`.
pub(crate) fn module_option(text: &str) -> Option<(&str, &str, &str)> {
    let (name, value) = text.split_once('=')?;
    let (module, name) = name.split_once('.')?;
    let is_word = |word: &str| {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        !word.is_empty() && word.bytes().all(known)
    };
    [module, name, value]
        .into_iter()
        .all(is_word)
        .then_some((module, name, value))
}

/// An error of several lines in one.
pub(crate) fn one_line(error: &impl Display) -> String {
    let text = error.to_string();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

impl Profile {
    /// The shipped profile with this name.
    ///
    /// # Errors
    /// As [`Self::parse`]; [`ProfileError`] with the names that there are, when none has this one.
    pub fn shipped(name: &str) -> Result<Self, ProfileError> {
        Self::parse(name, shipped_text(name)?)
    }

    /// A profile's text; `name` is for errors.
    ///
    /// # Errors
    /// [`ProfileError`], in one line: no TOML, an unknown key, or a value of the wrong type or out
    /// of range.
    pub fn parse(name: &str, text: &str) -> Result<Self, ProfileError> {
        let profile: Self =
            toml::from_str(text).map_err(|error| ProfileError::wrong(name, &error))?;
        profile.settings.check(name)?;
        let wrong = profile
            .module_options
            .iter()
            .find(|option| module_option(option).is_none());
        match wrong {
            None => Ok(profile),
            Some(option) => Err(ProfileError(format!(
                "{name}: '{option}' is no module's parameter; write it as kvm.NAME=VALUE"
            ))),
        }
    }

    /// With these settings in place of its own: a table as that of a profile's `[settings]`.
    ///
    /// # Errors
    /// [`ProfileError`], in one line: an unknown key, or a value of the wrong type or out of range;
    /// `name` is where they are from.
    pub fn with(mut self, name: &str, settings: toml::Table) -> Result<Self, ProfileError> {
        let own = toml::Table::try_from(&self.settings);
        let mut all = own.map_err(|error| ProfileError::wrong(name, &error))?;
        all.extend(settings);
        let all = all.try_into();
        self.settings = all.map_err(|error| ProfileError::wrong(name, &error))?;
        self.settings.check(name)?;
        Ok(self)
    }
}

impl Settings {
    /// What takes the limit off real-time tasks, if anything does.
    #[must_use]
    pub fn unthrottled(&self) -> Option<&'static str> {
        match (self.rt_runtime_us, self.fair_server_runtime_ns) {
            (Some(-1), _) => Some("rt-runtime-us = -1"),
            (_, Some(0)) => Some("fair-server-runtime-ns = 0"),
            _ => None,
        }
    }

    /// Whether they are of use without a real-time guest: they are about the servers of all CPUs,
    /// and nothing else.
    #[must_use]
    pub fn need_no_guest(&self) -> bool {
        let servers = Self {
            fair_server_runtime_ns: self.fair_server_runtime_ns,
            fair_server_cpus: Scope::All,
            ..Self::default()
        };
        *self == servers
    }

    fn check(&self, name: &str) -> Result<(), ProfileError> {
        let checks = [
            Self::wrong_clamp,
            Self::wrong_thread,
            Self::wrong_latency,
            Self::wrong_policy,
            Self::wrong_watermark,
        ];
        match checks.into_iter().find_map(|check| check(self)) {
            None => Ok(()),
            Some((key, value, range)) => Err(ProfileError(format!(
                "{name}: {key} = '{value}' is out of range; {range}"
            ))),
        }
    }

    fn wrong_clamp(&self) -> Option<WrongValue> {
        let clamps = [
            ("util-clamp-min", self.util_clamp_min),
            ("util-clamp-max", self.util_clamp_max),
            ("util-clamp-min-rt-default", self.util_clamp_min_rt_default),
        ];
        clamps.into_iter().find_map(|(key, value)| {
            let value = value.filter(|value| *value > 1024)?;
            Some((key, value.to_string(), "0 to 1024"))
        })
    }

    fn wrong_thread(&self) -> Option<WrongValue> {
        let threads = [
            ("ktimers", &self.ktimers),
            ("rcuc", &self.rcuc),
            ("rcub", &self.rcub),
            ("ksoftirqd", &self.ksoftirqd),
        ];
        threads.into_iter().find_map(|(key, text)| {
            let text = text.clone().filter(|text| scheduling(text).is_none())?;
            Some((key, text, "fifo:1 to fifo:99, rr:1 to rr:99, other:0"))
        })
    }

    fn wrong_latency(&self) -> Option<WrongValue> {
        let range = "1 µs or more, or n/a for none";
        // The kernel takes 0 for no limit.
        let is_latency = |text: &str| text == "n/a" || text.parse().is_ok_and(|us: i32| us > 0);
        let wrong = self.resume_latency_us.clone();
        let wrong = wrong.filter(|text| !is_latency(text))?;
        Some(("resume-latency-us", wrong, range))
    }

    fn wrong_policy(&self) -> Option<WrongValue> {
        let range = "policies are policy0, policy4 and so on";
        let limits = [("min-freq", &self.min_freq), ("max-freq", &self.max_freq)];
        limits.into_iter().find_map(|(key, limit)| {
            let name = limit.as_ref()?.wrong_name()?;
            Some((key, name.to_owned(), range))
        })
    }

    fn wrong_watermark(&self) -> Option<WrongValue> {
        let scale = self.watermark_scale_factor;
        let wrong = scale.filter(|scale| !(1..=3000).contains(scale))?;
        Some(("watermark-scale-factor", wrong.to_string(), "1 to 3000"))
    }
}

/// A key, its value, and which values it takes.
type WrongValue = (&'static str, String, &'static str);
