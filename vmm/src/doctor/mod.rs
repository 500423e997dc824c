// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a host can do for the bridge and what it can't, why, and what to change:
//! a pure function from facts to findings. The facts are read elsewhere
//! (`doctor_facts`).

pub mod board;
pub mod domain;
pub mod facts;
pub mod features;
mod finding;
mod floor;
mod policies;
pub mod traps;

use std::collections::BTreeSet;

use serde_json::{Value, json};
use vcpufreq_device::Headroom;
use vcpufreq_host::CpuList;

pub use finding::{DoctorFinding, Level, exit_code, text};

use crate::{
    doctor::facts::{CAP_BPF, CAP_PERFMON, CAP_SYS_ADMIN, DoctorFacts, EnergyModel},
    path::{self, Needs, Offer, Path, PathChoice},
};
use policies::per_policy;
use vcpufreq_vm::probe::KvmFacts;

/// All findings of a host. CPUs and policies that are alike have one together.
pub fn findings(facts: &DoctorFacts) -> Vec<DoctorFinding> {
    let mut found = vec![architecture(facts), kvm(facts), protected_vms(facts)];
    found.extend(paths(facts));
    found.extend([uclamp(facts), uclamp_limit(facts), cgroup(facts)]);
    found.push(drivers(facts));
    found.extend(governors(facts));
    found.extend(facts.floors.iter().map(floor::finding));
    found.extend([capacities(facts), energy_model(facts), headroom(facts)]);
    found.extend([btf(facts), bpf(facts), realtime(facts)]);
    found.extend(features::finding(&facts.kernel_release));
    found.extend(traps::findings(facts));
    finding::grouped(found)
}

/// The findings for programs.
#[must_use]
pub fn json(facts: &DoctorFacts, findings: &[DoctorFinding]) -> Value {
    json!({
        "kernel_release": facts.kernel_release,
        "arch": facts.arch,
        "kvm": facts.live.kvm.as_ref().ok(),
        "floors": facts.floors,
        "findings": findings,
        "exit_code": exit_code(findings),
    })
}

fn architecture(facts: &DoctorFacts) -> DoctorFinding {
    let arch = &facts.arch;
    if arch == "aarch64" {
        return DoctorFinding::good("architecture", arch, "arm64 Linux guests run here");
    }
    let why = "run's guests need arm64; those of demo, bench and report are QEMU's here, and guests of \
               QEMU and libvirt work by qemu and serve";
    DoctorFinding::limit("architecture", arch, why)
        .change("for run use an arm64 host, or the emulated one (make lab-shell)")
}

fn kvm(facts: &DoctorFacts) -> DoctorFinding {
    let kvm = match &facts.live.kvm {
        Ok(kvm) => kvm,
        Err(error) => {
            return DoctorFinding::blocker("kvm", format!("/dev/kvm: {error}"), "guests need KVM")
                .change(
                    "load the kernel's KVM, turn virtualization on in the firmware, \
                 and join the group that owns /dev/kvm",
                );
        }
    };
    if kvm.api_version != KvmFacts::API_VERSION {
        let what = format!("API version {}", kvm.api_version);
        return DoctorFinding::blocker("kvm", what, "the only stable version is 12")
            .change("use Linux 2.6.22 or later");
    }
    let mut what = format!(
        "API version {}, up to {} vCPUs",
        kvm.api_version, kvm.max_vcpus
    );
    if let Some(bits) = kvm.address_bits {
        what += &format!(", guest addresses of {bits} bits, mode {}", kvm.mode);
    }
    if let Some(gic) = kvm.gic {
        what += &format!(", {gic}");
    }
    let missing: Vec<_> = [
        (kvm.stolen_time, "stolen time"),
        (kvm.readonly_slots, "read-only memory slots"),
        (kvm.ioeventfd, "ioeventfd"),
    ]
    .into_iter()
    .filter_map(|(there, name)| (!there).then_some(name))
    .collect();
    if missing.is_empty() || facts.arch != "aarch64" {
        return DoctorFinding::good("kvm", what, "guests can run");
    }
    let needed = features::STOLEN_TIME.needs();
    DoctorFinding::limit("kvm", what, format!("without {}", missing.join(", ")))
        .change(format!("use a newer kernel: stolen time needs {needed}"))
}

fn protected_vms(facts: &DoctorFacts) -> DoctorFinding {
    const NAME: &str = "protected VMs";
    match &facts.live.protected {
        Ok(()) => DoctorFinding::good(NAME, "yes", "run --protected works"),
        Err(why) => match why.split_once("; ") {
            Some((why, step)) => DoctorFinding::absent(NAME, "no", why).change(step),
            None => DoctorFinding::absent(NAME, "no", why),
        },
    }
}

/// For a guest that mirrors this host: a vCPU for each CPU, with its table.
fn paths(facts: &DoctorFacts) -> Vec<DoctorFinding> {
    if facts.arch != "aarch64" {
        return vec![shared_memory(facts)];
    }
    let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    let tables = facts.cpus.policies.iter();
    let needs = Needs {
        vcpus: count(facts.cpus.cpus.len()),
        entries: tables.map(|p| count(p.opps.len() * p.cpus.len())).sum(),
        domains: count(facts.cpus.policies.len()),
        pcpus: count(facts.cpus.cpus.len()),
    };
    let offers = |bpf| path::offers(bpf, &facts.live.paths, &needs, facts.open_files);
    let offered = offers(facts.live.bpf.clone());
    let used = path::choose(PathChoice::Auto, &offered).unwrap_or_default();
    let with_bpf = path::choose(PathChoice::Auto, &offers(Ok(String::new())));
    let finding = |Offer { path, possible }| match possible {
        Ok(how) if path == used => Some(DoctorFinding::good("path", used.to_string(), how)),
        Err(why) if path > used => Some(match path {
            Path::Bpf if !facts.bpf_built => {
                let allowed = facts.btf && bpf_permitted(facts) && with_bpf == Ok(Path::Bpf);
                bpf_not_built(allowed)
            }
            _ => better_path(facts, path, used, &why),
        }),
        _ => None,
    };
    // Only a guest that is made for it takes shared memory.
    let offered = offered
        .into_iter()
        .filter(|offer| !path::is_by_name_only(offer.path));
    offered.filter_map(finding).collect()
}

/// The path of QEMU's guests, whose doorbells are ioeventfds.
fn shared_memory(facts: &DoctorFacts) -> DoctorFinding {
    let what = Path::Shm.to_string();
    match facts.live.paths.as_ref().map(|paths| &paths.ioeventfds) {
        Ok(Ok(())) => {
            let how = "guests of QEMU share memory, and ring a doorbell for a request";
            DoctorFinding::good("path", what, how)
        }
        Ok(Err(why)) => DoctorFinding::limit(
            "path",
            what,
            format!("{why}: each request of a guest of QEMU leaves the kernel"),
        )
        .change("use a kernel with CONFIG_EVENTFD"),
        Err(why) => DoctorFinding::absent("path", "no", why),
    }
}

/// A path that would be better than the one in use.
fn better_path(facts: &DoctorFacts, path: Path, used: Path, why: &str) -> DoctorFinding {
    let subject = match path {
        Path::Bpf => "path bpf",
        Path::Exit | Path::Ioeventfd | Path::Shm | Path::Ram => "path ioeventfd",
    };
    let (cause, step) = match why.rsplit_once("; ") {
        Some((cause, step)) => (cause, step.to_owned()),
        None => (
            why,
            format!("remove this cause; until then guests use {used}"),
        ),
    };
    match &facts.live.paths {
        // No setting of the host makes its CPUs coherent.
        Ok(paths) if path == Path::Bpf && !paths.coherent => {
            DoctorFinding::absent(subject, "not for these CPUs", cause)
        }
        _ => DoctorFinding::limit(subject, "not possible", cause).change(step),
    }
}

/// What isn't in this program is no fault of the host.
fn bpf_not_built(allowed: bool) -> DoctorFinding {
    let why = match allowed {
        true => "this host allows it, and it is the best",
        false => "this host doesn't allow it either",
    };
    let finding = DoctorFinding::absent("path bpf", "not in this program", why);
    match allowed {
        true => finding.change("cargo build --release -p vcpufreq"),
        false => finding,
    }
}

fn uclamp(facts: &DoctorFacts) -> DoctorFinding {
    traps::UCLAMP.look(facts).unwrap_or_else(|| {
        let why = "a guest's request can be put into force";
        DoctorFinding::good("uclamp", "available", why)
    })
}

fn uclamp_limit(facts: &DoctorFacts) -> DoctorFinding {
    const NAME: &str = "uclamp ceilings";
    let limits = (facts.uclamp_sysctl_min, facts.uclamp_sysctl_max);
    match limits {
        (Some(min), Some(max)) if min.min(max) < 1024 => DoctorFinding::limit(
            NAME,
            format!("kernel.sched_util_clamp_min is {min}, sched_util_clamp_max {max}"),
            "higher requests are cut to these",
        )
        .change("sysctl kernel.sched_util_clamp_min=1024 kernel.sched_util_clamp_max=1024"),
        (Some(_), Some(_)) => DoctorFinding::good(NAME, "none", "requests up to 1024 have effect"),
        _ => DoctorFinding::absent(NAME, "not there", "they come with uclamp"),
    }
}

fn cgroup(facts: &DoctorFacts) -> DoctorFinding {
    match &facts.live.cgroup {
        Ok(parent) => DoctorFinding::good(
            "cgroup",
            format!("vCPU threads can be grouped in {parent}"),
            "the clamp of a group changes without a dip of the frequency",
        ),
        Err(error) => DoctorFinding::limit(
            "cgroup",
            error.clone(),
            "requests go to the thread (--actuator thread), which dips the frequency at each change",
        )
        .change(
            "start the VMM by a systemd unit with Delegate=cpu (vcpufreq@.service), or with \
             --cgroup-parent",
        ),
    }
}

fn drivers(facts: &DoctorFacts) -> DoctorFinding {
    const NAME: &str = "cpufreq driver";
    let policies = &facts.cpus.policies;
    let online = facts.cpus.online().into_iter();
    let uncovered: CpuList = online
        .filter(|cpu| facts.cpus.policy_of(*cpu).is_none())
        .collect();
    if policies.is_empty() {
        return DoctorFinding::limit(
            NAME,
            "none",
            "this host's frequency can't be read or driven",
        )
        .change("load the cpufreq driver of this machine; in a VM, its host has it");
    }
    let what = per_policy(policies, |policy| &policy.driver);
    if !uncovered.is_empty() {
        let why = format!("CPUs {uncovered} have no policy: vCPUs there read no frequency");
        return DoctorFinding::limit(NAME, what, why)
            .change("pin vCPUs to CPUs that have a policy");
    }
    DoctorFinding::good(NAME, what, "frequencies can be read and driven")
}

fn governors(facts: &DoctorFacts) -> Vec<DoctorFinding> {
    const NAME: &str = "governor";
    let policies = &facts.cpus.policies;
    if policies.is_empty() {
        let none = DoctorFinding::limit(NAME, "none", "there is no cpufreq policy");
        return vec![none.change("load the cpufreq driver first")];
    }
    let traps = [traps::FIRMWARE, traps::SCHEDUTIL, traps::GOVERNOR];
    let wrong: Vec<_> = traps.iter().filter_map(|trap| trap.look(facts)).collect();
    if !wrong.is_empty() {
        return wrong;
    }
    let what = per_policy(policies, |policy| &policy.governor);
    vec![DoctorFinding::good(NAME, what, "schedutil follows uclamp")]
}

fn capacities(facts: &DoctorFacts) -> DoctorFinding {
    const NAME: &str = "cpu capacity";
    if let Some(finding) = traps::CAPACITY.look(facts) {
        return match facts.arch == "aarch64" {
            true => finding,
            // There is neither a device tree nor a guest that takes capacities.
            false => finding.change("pin each vCPU to CPUs that are equal"),
        };
    }
    let told = facts.cpus.cpus.iter().filter_map(|cpu| cpu.capacity);
    let values: BTreeSet<_> = told.collect();
    if values.is_empty() {
        let why = "all CPUs count as 1024, as on symmetric machines";
        return DoctorFinding::absent(NAME, "not reported", why);
    }
    let values: Vec<_> = values.iter().map(u16::to_string).collect();
    DoctorFinding::good(NAME, values.join(", "), "requests are scaled to these")
}

fn energy_model(facts: &DoctorFacts) -> DoctorFinding {
    const NAME: &str = "energy model";
    match facts.energy_model {
        EnergyModel::Domains(0) if facts.arch != "aarch64" => DoctorFinding::absent(
            NAME,
            "none",
            "there is one on hybrid CPUs alone; the host places vCPU threads without regard to energy",
        ),
        EnergyModel::Domains(0) => DoctorFinding::limit(
            NAME,
            "none",
            "no power for the guest's OPP tables, and no energy-aware scheduling",
        )
        .change("add opp-microwatt or dynamic-power-coefficient to the host's device tree, or give power in --table"),
        EnergyModel::Domains(count) => match facts.energy_aware {
            Some(false) => DoctorFinding::limit(
                NAME,
                format!("{count} performance domains, but energy-aware scheduling is off"),
                "the host places vCPU threads without regard to energy",
            )
            .change("sysctl kernel.sched_energy_aware=1"),
            Some(true) | None => DoctorFinding::good(
                NAME,
                format!("{count} performance domains"),
                "the guest's OPP tables get the power",
            ),
        },
        EnergyModel::Hidden => DoctorFinding::absent(
            NAME,
            "can't be seen",
            "debugfs is not readable; as root the guest's OPP tables get the power",
        ),
    }
}

fn headroom(facts: &DoctorFacts) -> DoctorFinding {
    let what = format!("Linux {}", facts.kernel_release);
    let why = match facts.headroom {
        Some(Headroom::None) => {
            "schedutil adds nothing to uclamp.min (since 6.8): requests go as they are"
        }
        Some(Headroom::Quarter) => {
            "schedutil adds 25 % to uclamp.min (before 6.8): requests are scaled by 4/5"
        }
        None => {
            return DoctorFinding::limit("headroom", what, "the version can't be read from this")
                .change("check the frequencies with --clamp exact; 6.8 and later is assumed");
        }
    };
    DoctorFinding::good("headroom", what, why)
}

fn btf(facts: &DoctorFacts) -> DoctorFinding {
    traps::BTF.look(facts).unwrap_or_else(|| {
        let file = "/sys/kernel/btf/vmlinux";
        DoctorFinding::good("btf", file, "BPF programs fit this kernel")
    })
}

/// To this user, by a kernel that has it.
fn bpf_permitted(facts: &DoctorFacts) -> bool {
    let has = |bit: u32| (facts.capabilities >> bit) & 1 == 1;
    facts.bpf_syscall && (has(CAP_SYS_ADMIN) || has(CAP_BPF) && has(CAP_PERFMON))
}

fn bpf(facts: &DoctorFacts) -> DoctorFinding {
    let why = "the path bpf is not available";
    match (facts.bpf_syscall, bpf_permitted(facts)) {
        (false, _) => DoctorFinding::limit("bpf", "not in this kernel", why)
            .change("use a kernel with CONFIG_BPF_SYSCALL"),
        (true, false) => DoctorFinding::limit("bpf", "not permitted to this user", why)
            .change("run with CAP_BPF and CAP_PERFMON"),
        (true, true) => DoctorFinding::good("bpf", "permitted", "tracing programs can be loaded"),
    }
}

fn realtime(facts: &DoctorFacts) -> DoctorFinding {
    if facts.realtime {
        return DoctorFinding::good("rt kernel", "yes", "PREEMPT_RT: fit for real-time guests");
    }
    DoctorFinding::absent("rt kernel", "no", "fine unless the guest is real-time")
}

#[cfg(test)]
mod tests;
