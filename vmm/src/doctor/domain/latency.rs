// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a domain's vCPUs are scheduled, and what of its memory and devices delays them.

use std::collections::BTreeMap;

use vcpufreq_host::CpuList;

use super::checked::CheckedDomain;
use crate::{doctor::DoctorFinding, options::rt_values::RtPolicy};

pub(super) fn findings(of: &CheckedDomain<'_>) -> Vec<DoctorFinding> {
    let mut found = vec![kind(of)];
    found.extend(scheduling(of));
    found.extend([quotas(of), locked(of), hugepages(of), shared_pages(of)]);
    found.extend([balloon(of), cpu(of), pmu(of)]);
    found.extend(timers(of));
    found
}

fn kind(of: &CheckedDomain<'_>) -> DoctorFinding {
    const NAME: &str = "type";
    const KVM: &str = "<domain type='kvm'>";
    match &*of.xml.kind {
        "kvm" => DoctorFinding::good(NAME, "kvm", "vCPUs are threads of QEMU, which KVM runs"),
        "qemu" => {
            DoctorFinding::limit(NAME, "qemu, without KVM", "QEMU emulates each vCPU").change(KVM)
        }
        other => {
            DoctorFinding::blocker(NAME, format!("'{other}'"), "the bridge is for QEMU").change(KVM)
        }
    }
}

/// A line of `<cputune>`.
fn sched_line(vcpus: &CpuList, policy: RtPolicy) -> String {
    match policy.to_string().split_once(':') {
        Some((scheduler @ ("fifo" | "rr"), priority)) => {
            format!("<vcpusched vcpus='{vcpus}' scheduler='{scheduler}' priority='{priority}'/>")
        }
        _ => "no <vcpusched>: libvirt knows no deadline".to_owned(),
    }
}

fn scheduling(of: &CheckedDomain<'_>) -> Vec<DoctorFinding> {
    const NAME: &str = "vcpusched";
    let file = &of.around.options_file;
    if of.real_time.is_empty() {
        let line = sched_line(&of.vcpus().last().into_iter().collect(), RtPolicy::Fifo(1));
        let what = "no vCPU is real-time";
        let found = of.delays(NAME, what, "each task on its CPU may delay a vCPU");
        return vec![found.change(format!("{line}, and in {file} the same as rt = \"fifo:1\""))];
    }
    let mut differ: BTreeMap<(&str, Option<String>), CpuList> = BTreeMap::new();
    for vcpu in of.vcpus().filter(|_| of.server().is_some()) {
        let server = of.server_policy(vcpu).map(|policy| policy.to_string());
        let Some(own) = of.policy(vcpu).filter(|own| server.as_deref() != Some(own)) else {
            continue;
        };
        let vcpus = differ.entry((own, server)).or_default();
        *vcpus = vcpus.or(&[vcpu].into_iter().collect());
    }
    if differ.is_empty() {
        let what = format!("vCPU {} is real-time", of.real_time);
        return vec![DoctorFinding::good(NAME, what, "no normal task delays it")];
    }
    let found = differ
        .into_iter()
        .map(|((own, server), vcpus)| match server {
            Some(server) => {
                let what = format!("vCPU {vcpus} is {own} here, and {server} in {file}");
                let found = DoctorFinding::blocker(NAME, what, "the server refuses the domain");
                let line = server.parse().map(|policy| sched_line(&vcpus, policy));
                found.change(line.unwrap_or_default())
            }
            None => {
                let what = format!("vCPU {vcpus} is {own} here, and has no rt in {file}");
                let why = match of.is_served_real_time() {
                    true => "the server refuses the domain",
                    false => "the kernel holds it at the highest frequency",
                };
                // A TOML key with a comma needs quotes.
                let quote = if vcpus.ranges().count() > 1 { "\"" } else { "" };
                let line = format!("rt = \"{own}\" below [vcpu.{quote}{vcpus}{quote}] in {file}");
                of.refuses(NAME, what, why).change(line)
            }
        });
    found.collect()
}

fn quotas(of: &CheckedDomain<'_>) -> DoctorFinding {
    const NAME: &str = "quota";
    match of.xml.quotas.first() {
        None => DoctorFinding::good(NAME, "none", "no thread waits for its next period"),
        Some(first) => {
            let what = format!("<{}>", of.xml.quotas.join(">, <"));
            let why = "a thread that has used it up stops until the next period";
            DoctorFinding::limit(NAME, what, why).change(format!("<{first}>-1</{first}>"))
        }
    }
}

fn locked(of: &CheckedDomain<'_>) -> DoctorFinding {
    const NAME: &str = "locked";
    if of.xml.locked {
        return DoctorFinding::good(NAME, "yes", "no page of the domain is fetched from disk");
    }
    let why = match of.is_served_real_time() {
        true => "the server refuses a real-time guest with such memory",
        false => "a vCPU waits for a page that isn't there",
    };
    of.refuses(NAME, "the memory isn't", why)
        .change("<memoryBacking><locked/></memoryBacking>")
}

fn hugepages(of: &CheckedDomain<'_>) -> DoctorFinding {
    const NAME: &str = "hugepages";
    if of.xml.hugepages {
        return DoctorFinding::good(NAME, "yes", "few misses of the TLB");
    }
    of.delays(
        NAME,
        "none",
        "more misses of the TLB, each a walk of two page tables",
    )
    .change("<memoryBacking><hugepages/></memoryBacking>")
}

fn shared_pages(of: &CheckedDomain<'_>) -> DoctorFinding {
    const NAME: &str = "nosharepages";
    if of.xml.nosharepages || of.xml.hugepages {
        return DoctorFinding::good(NAME, "pages aren't merged", "no write waits for a copy");
    }
    of.delays(
        NAME,
        "ksm may merge pages",
        "a write to a merged page waits for its copy",
    )
    .change("<memoryBacking><nosharepages/></memoryBacking>")
}

fn balloon(of: &CheckedDomain<'_>) -> DoctorFinding {
    const NAME: &str = "memballoon";
    let what = match of.xml.balloon.as_deref() {
        Some("none") => return DoctorFinding::good(NAME, "none", "the guest keeps its memory"),
        Some(model) => format!("model {model}"),
        None => "libvirt adds one".to_owned(),
    };
    of.delays(
        NAME,
        what,
        "it takes pages from the guest, which waits to have them again",
    )
    .change("<memballoon model='none'/>")
}

fn cpu(of: &CheckedDomain<'_>) -> DoctorFinding {
    const NAME: &str = "cpu mode";
    let what = match of.xml.cpu_mode.as_deref() {
        Some("host-passthrough") => {
            let why = "the guest has each feature of its CPU";
            return DoctorFinding::good(NAME, "host-passthrough", why);
        }
        Some("") | None => "libvirt's default",
        Some(mode) => mode,
    };
    of.delays(
        NAME,
        what,
        "features that save exits, as x86's TSC deadline, may be missing",
    )
    .change("<cpu mode='host-passthrough'/>")
}

fn pmu(of: &CheckedDomain<'_>) -> DoctorFinding {
    const NAME: &str = "pmu";
    if of.xml.pmu_off {
        return DoctorFinding::good(NAME, "off", "no counters to save at each entry");
    }
    of.delays(
        NAME,
        "on",
        "KVM loads and saves its counters, and its overflows interrupt the vCPU",
    )
    .change("<features><pmu state='off'/></features>")
}

/// An arm64 guest's timer is the CPU's.
fn timers(of: &CheckedDomain<'_>) -> Vec<DoctorFinding> {
    const NAME: &str = "timer";
    let mut found = Vec::new();
    for timer in of.xml.timers.iter().filter(|timer| !timer.is_off) {
        let name = &timer.name;
        match (&**name, &*timer.tickpolicy) {
            ("hpet", _) => {
                let found_hpet = of.delays(NAME, "hpet", "each access exits to QEMU");
                found.push(found_hpet.change("<timer name='hpet' present='no'/>"));
            }
            ("rtc" | "pit", "catchup") => {
                let what = format!("{name} makes up for lost ticks");
                let found_ticks = of.delays(NAME, what, "they come in bursts, without a pause");
                let change = format!("<timer name='{name}' tickpolicy='delay'/>");
                found.push(found_ticks.change(change));
            }
            _ => {}
        }
    }
    found
}
