// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What boards and their kernels are known to get wrong, as data: the doctor's findings and the
//! table in `docs/boards.md` are made from it.

use vcpufreq_device::Headroom;
use vcpufreq_host::{CpufreqPolicy, NEEDS_UCLAMP};

use super::finding::{DoctorFinding, Level};
use super::floor;
use super::policies::{numbers, per_policy};
use crate::doctor::facts::DoctorFacts;
use vcpufreq_vm::gic::Gic;

/// One thing that a board can get wrong.
#[derive(Clone, Copy, Debug)]
pub struct Trap {
    /// The finding's subject.
    pub name: &'static str,
    /// What is wrong.
    pub cause: &'static str,
    /// What follows from that.
    pub effect: &'static str,
    /// The command that changes it, with `{}` for the place; what else to do, if there is none.
    pub change: &'static str,
    /// A place, for the documentation.
    pub place: &'static str,
    /// The kernel's version or configuration that has to do with it.
    pub kernel: &'static str,
    /// How much it matters.
    pub level: Level,
    /// Whether this host has it.
    pub found: fn(&DoctorFacts) -> Option<FoundTrap>,
}

/// A trap that a host has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundTrap {
    /// What is so on this host.
    pub what: String,
    /// Where to change it.
    pub place: String,
}

impl FoundTrap {
    fn new(what: impl Into<String>, place: impl Into<String>) -> Self {
        let (what, place) = (what.into(), place.into());
        Self { what, place }
    }
}

impl Trap {
    /// The finding, where this host has the trap.
    pub fn look(&self, facts: &DoctorFacts) -> Option<DoctorFinding> {
        let FoundTrap { what, place } = (self.found)(facts)?;
        let finding = match self.level {
            Level::Limit | Level::Blocker => {
                let change = self.change.replace("{}", &place);
                DoctorFinding::limit(self.name, what, self.effect).change(change)
            }
            Level::Good | Level::Absent => DoctorFinding::good(self.name, what, self.effect),
        };
        Some(finding)
    }
}

/// The table of the documentation.
pub fn table() -> String {
    let mut text =
        "| `doctor` names | cause | effect | change | kernel |\n|---|---|---|---|---|\n".to_owned();
    for trap in ALL {
        let change = trap.change.replace("{}", trap.place);
        let Trap {
            name,
            cause,
            effect,
            kernel,
            ..
        } = trap;
        text += &format!("| {name} | {cause} | {effect} | {change} | {kernel} |\n");
    }
    text
}

/// All of them.
pub const ALL: [Trap; 19] = [
    UCLAMP,
    SCHEDUTIL,
    GOVERNOR,
    FIRMWARE,
    GUIDED,
    EVENTS,
    AUTONOMOUS,
    HINT,
    BOOST,
    CAP,
    CAPACITY,
    CGROUP_V1,
    SLICE,
    LOCKDOWN,
    BTF,
    PROTECTED,
    GIC,
    FAIR_SERVER,
    HEADROOM,
];

const NO_PLACE: &str = "";

/// A trap without a place; the others override it.
const TRAP: Trap = Trap {
    name: "",
    cause: "",
    effect: "",
    change: "",
    place: NO_PLACE,
    kernel: "",
    level: Level::Limit,
    found: |_| None,
};

pub(super) const UCLAMP: Trap = Trap {
    name: "uclamp",
    cause: "the kernel has no uclamp",
    effect: "run needs --no-bridge, or --actuator none: then a guest reads what it gets, and its \
             requests are counted as not applicable",
    change: NEEDS_UCLAMP,
    kernel: "5.3; groups 5.4",
    found: |facts| {
        let error = facts.live.uclamp.as_ref().err()?;
        Some(FoundTrap::new(format!("not available: {error}"), NO_PLACE))
    },
    ..TRAP
};

pub(super) const SCHEDUTIL: Trap = Trap {
    name: "schedutil",
    cause: "schedutil is not among the governors",
    effect: "no governor follows uclamp",
    change: "use a kernel with CONFIG_CPU_FREQ_GOV_SCHEDUTIL",
    kernel: "4.7",
    found: |facts| {
        let lacks = |policy: &CpufreqPolicy| {
            !chooses_itself(policy) && facts.board.no_schedutil.contains(&policy.id)
        };
        Some(FoundTrap::new(
            format!("not available: {}", drivers(facts, lacks)?),
            NO_PLACE,
        ))
    },
    ..TRAP
};

pub(super) const GOVERNOR: Trap = Trap {
    name: "governor",
    cause: "another governor is chosen",
    effect: "only schedutil follows uclamp",
    change: "echo schedutil > /sys/devices/system/cpu/cpufreq/policyN/scaling_governor, N = {}",
    place: "0,4",
    kernel: "CONFIG_CPU_FREQ_DEFAULT_GOV_SCHEDUTIL",
    found: |facts| {
        let policies = facts.cpus.policies.iter();
        let wrong = policies.filter(|policy| {
            policy.governor != "schedutil"
                && !chooses_itself(policy)
                && !facts.board.no_schedutil.contains(&policy.id)
        });
        let ids = numbers(wrong.map(|policy| policy.id))?;
        let what = per_policy(&facts.cpus.policies, |policy| &policy.governor);
        Some(FoundTrap::new(what, ids))
    },
    ..TRAP
};

pub(super) const FIRMWARE: Trap = Trap {
    name: "firmware",
    cause: "intel_pstate or amd-pstate is active",
    effect: "the CPU chooses its frequency, and no clamp reaches it",
    change: "boot with {}, then choose schedutil",
    place: "intel_pstate=passive or amd_pstate=passive",
    kernel: "amd_pstate 5.17",
    found: |facts| {
        let policies = facts.cpus.policies.iter();
        let word = policies.filter_map(CpufreqPolicy::passive_by).next()?;
        Some(FoundTrap::new(drivers(facts, chooses_itself)?, word))
    },
    ..TRAP
};

const GUIDED: Trap = Trap {
    name: "guided",
    cause: "amd_pstate is guided",
    effect: "a request is the lowest frequency alone: the CPU may run faster",
    change: "echo passive > /sys/devices/system/cpu/amd_pstate/status, then choose schedutil",
    kernel: "amd_pstate=guided 6.4",
    found: |facts| {
        let guided = facts.board.guided;
        guided.then(|| FoundTrap::new("amd_pstate is guided", NO_PLACE))
    },
    ..TRAP
};

const EVENTS: Trap = Trap {
    name: "frequency events",
    cause: "amd-pstate, or intel_cpufreq with HWP, sets frequencies without the event cpu_frequency",
    effect: "bench can't measure, trace has no frequencies, and a guest reads its own 4 ms late",
    change: "none, or boot with amd_pstate=disable or intel_pstate=no_hwp",
    kernel: "5.11; amd-pstate 5.17",
    level: Level::Good,
    found: |facts| {
        let silent = |policy: &CpufreqPolicy| policy.events_by().is_some();
        let what = format!("none by {}", drivers(facts, silent)?);
        Some(FoundTrap::new(what, NO_PLACE))
    },
    ..TRAP
};

const AUTONOMOUS: Trap = Trap {
    name: "cppc",
    cause: "CPPC selects autonomously",
    effect: "firmware chooses the frequency, and no clamp reaches it",
    change: "echo 0 > /sys/devices/system/cpu/cpufreq/policyN/auto_select, N = {}",
    place: "0,4",
    kernel: "CONFIG_ACPI_CPPC_CPUFREQ",
    found: |facts| {
        let ids = numbers(facts.board.auto_select.iter().copied())?;
        Some(FoundTrap::new("auto_select is 1", ids))
    },
    ..TRAP
};

const HINT: Trap = Trap {
    name: "firmware hint",
    cause: "cppc_cpufreq or scmi drives the frequency",
    effect: "firmware may run another frequency than schedutil chooses",
    change: "compare OPPs and frequencies in vcpufreq top; without OPPs give run a --table (demo makes \
             its own)",
    kernel: "CONFIG_ACPI_CPPC_CPUFREQ, CONFIG_ARM_SCMI_CPUFREQ",
    found: |facts| {
        let hinted =
            |policy: &CpufreqPolicy| matches!(policy.driver.as_str(), "cppc_cpufreq" | "scmi");
        let without = |policy: &CpufreqPolicy| hinted(policy) && policy.opps.is_empty();
        let what = drivers(facts, hinted)?;
        let opps = match drivers(facts, without) {
            Some(_) => "without OPPs",
            None => "with OPPs",
        };
        Some(FoundTrap::new(format!("{what}, {opps}"), NO_PLACE))
    },
    ..TRAP
};

const BOOST: Trap = Trap {
    name: "boost",
    cause: "boost frequencies are on",
    effect: "the highest OPPs depend on heat; unlisted ones are above the guest's",
    change: "echo 0 > {}",
    place: "/sys/devices/system/cpu/cpufreq/boost",
    kernel: "driver-dependent",
    found: |facts| {
        let place = facts.board.boosting.as_ref()?;
        Some(FoundTrap::new(format!("{place} is 1"), place))
    },
    ..TRAP
};

const CAP: Trap = Trap {
    name: "frequency cap",
    cause: "scaling_max_freq is below cpuinfo_max_freq",
    effect: "no request gets more",
    change: "cool the board, or raise scaling_max_freq",
    kernel: "any",
    // Its findings are those of the policies, one for those that are alike.
    found: |facts| {
        let cap = facts.caps.first()?;
        Some(FoundTrap::new(cap.to_string(), NO_PLACE))
    },
    ..TRAP
};

/// Of each policy that has one.
fn caps(facts: &DoctorFacts) -> impl Iterator<Item = DoctorFinding> {
    let caps = facts.caps.iter();
    caps.map(|cap| {
        DoctorFinding::limit(CAP.name, cap.alike(), CAP.effect)
            .on_cpus(cap.cpus.clone())
            .change(CAP.change)
    })
}

pub(super) const CAPACITY: Trap = Trap {
    name: "cpu capacity",
    cause: "cpu_capacity is missing or 1024 everywhere, and maximum frequencies differ",
    effect: "the guest takes its slow vCPUs for as fast as the others",
    change: "give --capacity VCPUS=N, or capacity-dmips-mhz in the host's device tree",
    kernel: "device tree; ACPI 5.18 with CPPC",
    found: |facts| {
        let cpus = facts.cpus.cpus.iter();
        let mut references = cpus.filter_map(|cpu| cpu.reference_khz);
        let first = references.next()?;
        let equal = facts
            .cpus
            .cpus
            .iter()
            .all(|cpu| cpu.capacity_or_full() == 1024);
        let other = references.find(|khz| *khz != first).filter(|_| equal)?;
        let what = format!("not reported, and policies end at {first} and {other} kHz");
        Some(FoundTrap::new(what, NO_PLACE))
    },
    ..TRAP
};

const CGROUP_V1: Trap = Trap {
    name: "cgroup v1",
    cause: "the cpu controller is cgroup v1's",
    effect: "requests go to the thread, which dips the frequency at each change",
    change: "boot with cgroup_no_v1=all, and systemd.unified_cgroup_hierarchy=1 where systemd is \
             older than 256",
    kernel: "v2's cpu.uclamp.min 5.4",
    found: |facts| {
        let mount = facts.board.cgroup_v1.as_ref()?;
        Some(FoundTrap::new(
            format!("{mount} has the cpu controller"),
            NO_PLACE,
        ))
    },
    ..TRAP
};

pub(super) const SLICE: Trap = Trap {
    name: "slice",
    cause: "a slice's cpu.uclamp.min is not max",
    effect: "it caps every request of the guests below it",
    change: "echo max > {}",
    place: "/sys/fs/cgroup/vcpufreq.slice/cpu.uclamp.min",
    kernel: "CONFIG_UCLAMP_TASK_GROUP",
    found: |facts| {
        let (file, value) = facts.live.capped.as_ref().or(facts.board.capped.as_ref())?;
        Some(FoundTrap::new(format!("{file} is {value}"), file))
    },
    ..TRAP
};

const LOCKDOWN: Trap = Trap {
    name: "lockdown",
    cause: "the kernel is locked down, as with Secure Boot",
    effect: "it refuses unsigned modules and writable files of debugfs: fair servers stay as they are; in \
             mode confidentiality the path bpf too",
    change: "sign the modules (mokutil), or turn Secure Boot and lockdown= off",
    kernel: "5.4, CONFIG_SECURITY_LOCKDOWN_LSM",
    found: |facts| {
        let mode = facts.board.lockdown.as_ref()?;
        Some(FoundTrap::new(format!("mode {mode}"), NO_PLACE))
    },
    ..TRAP
};

pub(super) const BTF: Trap = Trap {
    name: "btf",
    cause: "the kernel has no BTF",
    effect: "the path bpf is not available",
    change: "use a kernel with CONFIG_DEBUG_INFO_BTF",
    kernel: "5.4",
    found: |facts| (!facts.btf).then(|| FoundTrap::new("none", NO_PLACE)),
    ..TRAP
};

const PROTECTED: Trap = Trap {
    name: "kvm mode",
    cause: "KVM is in protected mode",
    effect: "run --protected can have protected guests; others are as ever, with each path",
    change: "none",
    kernel: "5.12, kvm-arm.mode=protected",
    level: Level::Good,
    found: |facts| {
        let kvm = facts.live.kvm.as_ref().ok()?;
        (kvm.mode == "protected").then(|| FoundTrap::new("protected", NO_PLACE))
    },
    ..TRAP
};

const GIC: Trap = Trap {
    name: "gic",
    cause: "the host has a GICv2",
    effect: "a guest has at most 8 vCPUs",
    change: "none",
    kernel: "any",
    level: Level::Good,
    found: |facts| {
        let kvm = facts.live.kvm.as_ref().ok()?;
        (kvm.gic == Some(Gic::V2)).then(|| FoundTrap::new("GICv2", NO_PLACE))
    },
    ..TRAP
};

const FAIR_SERVER: Trap = Trap {
    name: floor::NAME,
    cause: "the fair server reserves more than the lowest OPPs give",
    effect: "while busy, CPUs don't go below that",
    change: floor::REMOVE,
    kernel: "6.12",
    // Its findings are the floors', one for policies that are alike.
    found: |facts| {
        let floors = facts.floors.iter();
        let above = floors.filter(|of| !of.floor.opps_below_khz.is_empty());
        above
            .map(|of| FoundTrap::new(of.cpus.to_string(), NO_PLACE))
            .next()
    },
    ..TRAP
};

const HEADROOM: Trap = Trap {
    name: "headroom",
    cause: "the kernel is older than 6.8",
    effect: "schedutil adds 25 % to a clamp, and requests are scaled by 4/5",
    change: "none",
    kernel: "6.8",
    level: Level::Good,
    // Its finding is the headroom's, good or not.
    found: |facts| {
        let adds = facts.headroom == Some(Headroom::Quarter);
        adds.then(|| FoundTrap::new(facts.kernel_release.as_str(), NO_PLACE))
    },
    ..TRAP
};

/// The policies whose only cap is that boost is off.
fn boost_off(facts: &DoctorFacts) -> impl Iterator<Item = DoctorFinding> {
    let is_capped = |policy: &CpufreqPolicy| {
        let mut caps = facts.caps.iter();
        caps.any(|cap| !cap.cpus.and(&policy.cpus).is_empty())
    };
    let policies = facts.cpus.policies.iter();
    let policies = policies.filter(move |policy| !is_capped(policy));
    policies.filter_map(|policy| {
        let (max, top) = (policy.max_khz?, policy.top_khz()?);
        let what = format!("at most {max} of {top} kHz, as boost is off");
        let finding = DoctorFinding::good(CAP.name, what, CAP.effect);
        (max < top).then(|| finding.on_cpus(policy.cpus.and(&facts.cpus.online())))
    })
}

/// Findings that only a host with the trap has; other functions of the doctor have the rest.
pub(super) fn findings(facts: &DoctorFacts) -> impl Iterator<Item = DoctorFinding> {
    let traps = [
        GUIDED, EVENTS, AUTONOMOUS, HINT, BOOST, CGROUP_V1, SLICE, LOCKDOWN, PROTECTED, GIC,
    ];
    let found = traps.into_iter().filter_map(|trap| trap.look(facts));
    caps(facts).chain(boost_off(facts)).chain(found)
}

/// Whether the driver has no governors of cpufreq's.
fn chooses_itself(policy: &CpufreqPolicy) -> bool {
    policy.passive_by().is_some()
}

/// The drivers of these policies, with their CPUs; `None` without any.
fn drivers(facts: &DoctorFacts, of: impl Fn(&CpufreqPolicy) -> bool) -> Option<String> {
    let policies = facts.cpus.policies.iter();
    let found: Vec<_> = policies.filter(|policy| of(policy)).cloned().collect();
    (!found.is_empty()).then(|| per_policy(&found, |policy| &policy.driver))
}
