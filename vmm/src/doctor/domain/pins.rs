// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which CPUs a domain's threads run on, and whether the host has set those of its real-time vCPUs
//! apart.

use std::collections::BTreeMap;

use vcpufreq_host::CpuList;

use super::{around::HOST_FILE, checked::CheckedDomain};
use crate::doctor::DoctorFinding;
use crate::rt_guest::Record;

const PIN: &str = "vcpupin";
const APART: &str = "set apart";

pub(super) fn findings(of: &CheckedDomain<'_>) -> Vec<DoctorFinding> {
    let mut found = vcpus(of);
    found.push(emulator(of));
    found.extend(iothreads(of));
    found.extend(apart(of));
    found
}

fn pin_line(vcpu: u32, cpus: &CpuList) -> String {
    format!("<vcpupin vcpu='{vcpu}' cpuset='{cpus}'/>")
}

fn vcpus(of: &CheckedDomain<'_>) -> Vec<DoctorFinding> {
    let mut found: Vec<_> = [may_share_rt_cpus(of), unpinned(of), not_online(of)]
        .into_iter()
        .flatten()
        .collect();
    let on = by_cpu(of);
    found.extend(of.real_time.iter().flat_map(|vcpu| alone(of, vcpu, &on)));
    found.extend(of.vcpus().filter_map(|vcpu| differs(of, vcpu)));
    if found.is_empty() {
        let what = match of.real_time.is_empty() {
            true => "each vCPU is pinned",
            false => "each vCPU is pinned, real-time ones alone on a CPU",
        };
        found.push(DoctorFinding::good(PIN, what, "none waits for another"));
    }
    found
}

/// Ordinary vCPUs that neither libvirt nor the server pins, beside real-time ones of the server's.
fn unpinned_anywhere(of: &CheckedDomain<'_>) -> CpuList {
    let is_pinned = |vcpu| of.xml.pin(vcpu).is_some() || of.server_pin(vcpu).is_some();
    let is_bare = |vcpu: &u32| !of.real_time.contains(*vcpu) && !is_pinned(*vcpu);
    let vcpus = of.vcpus().filter(|_| of.is_served_real_time());
    vcpus.filter(is_bare).collect()
}

/// Whether libvirt alone has to keep a vCPU off real-time CPUs.
fn may_share_rt_cpus(of: &CheckedDomain<'_>) -> Option<DoctorFinding> {
    let vcpus = unpinned_anywhere(of);
    let (first, cpus) = (vcpus.iter().next()?, &of.real_time_cpus);
    let what = format!(
        "vCPU {vcpus} has none, here and in {}",
        of.around.options_file
    );
    let finding = match cpus.without(&of.around.isolated).is_empty() {
        // Newer versions of libvirt leave out isolated CPUs.
        true => {
            let why =
                format!("the server refuses it where libvirt lets it run on isolated CPU {cpus}");
            DoctorFinding::limit(PIN, what, why)
        }
        false => {
            let why = format!("libvirt lets it run on CPU {cpus}, and the server refuses that");
            DoctorFinding::blocker(PIN, what, why)
        }
    };
    Some(finding.change(format!(
        "<vcpupin vcpu='{first}' cpuset='{}'/>",
        of.housekeeping()
    )))
}

fn unpinned(of: &CheckedDomain<'_>) -> Option<DoctorFinding> {
    let vcpus = of.vcpus().filter(|vcpu| of.xml.pin(*vcpu).is_none());
    let vcpus = vcpus.collect::<CpuList>().without(&unpinned_anywhere(of));
    let real_time = vcpus.and(&of.real_time);
    let first = real_time.iter().chain(vcpus.iter()).next()?;
    let pins = of.vcpus().filter_map(|vcpu| of.xml.pin(vcpu));
    let taken: CpuList = pins.flat_map(CpuList::iter).collect();
    let mut free = of.around.online.iter().rev();
    let free = free.find(|cpu| !taken.contains(*cpu));
    let cpus = of.server_pin(first).cloned();
    let cpus = cpus.unwrap_or_else(|| free.into_iter().collect());
    let what = format!("vCPU {vcpus} has none");
    let why = "the scheduler moves it, beside other tasks";
    let finding = match real_time.is_empty() {
        true => DoctorFinding::absent(PIN, what, why),
        false => DoctorFinding::limit(PIN, what, why),
    };
    Some(finding.change(match cpus.is_empty() {
        true => "give the domain fewer vCPUs: each CPU has one".to_owned(),
        false => pin_line(first, &cpus),
    }))
}

fn not_online(of: &CheckedDomain<'_>) -> Option<DoctorFinding> {
    let online = &of.around.online;
    let mut vcpus = of
        .vcpus()
        .filter_map(|vcpu| Some((vcpu, of.xml.pin(vcpu)?)));
    let (vcpu, cpus) = vcpus.find(|(_, cpus)| !cpus.without(online).is_empty())?;
    let what = format!("CPU {} of vCPU {vcpu} is not online", cpus.without(online));
    let finding = DoctorFinding::blocker(PIN, what, "libvirt can't start the domain");
    Some(finding.change(format!("take some of CPU {online}")))
}

/// The vCPUs that may run on each CPU.
fn by_cpu(of: &CheckedDomain<'_>) -> BTreeMap<u32, Vec<u32>> {
    let mut on: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for vcpu in of.vcpus() {
        let cpus = of.xml.pin(vcpu).into_iter().flat_map(CpuList::iter);
        cpus.for_each(|cpu| on.entry(cpu).or_default().push(vcpu));
    }
    on
}

/// Whether a real-time vCPU has one CPU, which no other has.
fn alone(of: &CheckedDomain<'_>, vcpu: u32, on: &BTreeMap<u32, Vec<u32>>) -> Vec<DoctorFinding> {
    let Some(cpus) = of.xml.pin(vcpu) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    if let [first, _, ..] = cpus.as_slice() {
        let what = format!("real-time vCPU {vcpu} may run on CPU {cpus}");
        let finding = DoctorFinding::limit(PIN, what, "the scheduler moves it between them");
        let one = || [*first].into_iter().collect();
        let pin = of.server_pin(vcpu).cloned().unwrap_or_else(one);
        found.push(finding.change(pin_line(vcpu, &pin)));
    }
    let other = |cpu: u32| {
        let mut others = on.get(&cpu).into_iter().flatten();
        Some((cpu, others.find(|other| **other != vcpu)?))
    };
    if let Some((cpu, other)) = cpus.iter().find_map(other) {
        let what = format!("real-time vCPU {vcpu} shares CPU {cpu} with vCPU {other}");
        let finding = of.refuses(PIN, what, "one of them waits while the other runs");
        found.push(finding.change("give each a CPU of its own, here and in the server's options"));
    }
    found
}

fn differs(of: &CheckedDomain<'_>, vcpu: u32) -> Option<DoctorFinding> {
    let (cpus, pin) = (of.xml.pin(vcpu)?, of.server_pin(vcpu)?);
    if cpus == pin {
        return None;
    }
    let what = format!(
        "vCPU {vcpu}: CPU {cpus} here, and {pin} in {}",
        of.around.options_file
    );
    let is_elsewhere = cpus.and(pin).is_empty() && !unpinned_cpus(of).contains(cpus);
    let finding = match of.server_policy(vcpu).is_some() && is_elsewhere {
        true => DoctorFinding::blocker(PIN, what, "the server refuses the domain"),
        false => DoctorFinding::limit(PIN, what, "libvirt and the server move it to and fro"),
    };
    Some(finding.change(pin_line(vcpu, pin)))
}

/// What the server takes for the CPUs of unpinned threads: the main thread's, and those
/// that are not set apart.
fn unpinned_cpus(of: &CheckedDomain<'_>) -> [CpuList; 2] {
    let around = of.around;
    let record = around.applied.as_ref().ok().and_then(Option::as_ref);
    let given = record
        .map(|record| record.partition.rt())
        .unwrap_or_default();
    let main = of.xml.emulator.as_ref().or(of.xml.cpuset.as_ref());
    let main = main.unwrap_or(&around.online).clone();
    [main, around.online.without(&around.isolated.or(&given))]
}

fn emulator(of: &CheckedDomain<'_>) -> DoctorFinding {
    let line = format!("<emulatorpin cpuset='{}'/>", of.housekeeping());
    let own = of.xml.emulator.as_ref().or(of.xml.cpuset.as_ref());
    others(of, "emulatorpin", ("QEMU's other threads", own), line)
}

fn iothreads(of: &CheckedDomain<'_>) -> Vec<DoctorFinding> {
    let threads = of.xml.iothreads.iter();
    let found = threads.map(|(thread, own)| {
        let name = format!("iothread {thread}");
        let line = format!(
            "<iothreadpin iothread='{thread}' cpuset='{}'/>",
            of.housekeeping()
        );
        let own = own.as_ref().or(of.xml.cpuset.as_ref());
        others(of, "iothreadpin", (&name, own), line)
    });
    found.collect()
}

/// Whether threads that run no vCPU keep off real-time CPUs.
fn others(
    of: &CheckedDomain<'_>,
    subject: &'static str,
    (threads, own): (&str, Option<&CpuList>),
    line: String,
) -> DoctorFinding {
    let real_time = &of.real_time_cpus;
    let Some(own) = own else {
        let what = format!("{threads} may run on each CPU");
        let finding = of.delays(subject, what, "they run on those of vCPUs too");
        return finding.change(line);
    };
    let both = own.and(real_time);
    if both.is_empty() {
        let what = format!("{threads}: on CPU {own} alone");
        return DoctorFinding::good(subject, what, "no real-time vCPU waits for them");
    }
    let what = format!("{threads} may run on real-time CPU {both}");
    let finding = match own.without(real_time).is_empty() {
        true => of.refuses(
            subject,
            what,
            "they have no other, and starve or delay a vCPU",
        ),
        false => DoctorFinding::limit(subject, what, "a vCPU and they wait for each other"),
    };
    finding.change(line)
}

/// Whether nothing else runs on the CPUs of real-time vCPUs.
fn apart(of: &CheckedDomain<'_>) -> Option<DoctorFinding> {
    let cpus = &of.real_time_cpus;
    if cpus.is_empty() {
        return None;
    }
    let record = match &of.around.applied {
        Ok(record) => record.as_ref(),
        Err(why) => {
            let finding =
                DoctorFinding::absent(APART, format!("unknown: {why}"), "root can see it");
            return Some(finding.change("run doctor as root"));
        }
    };
    let not_isolated = cpus.without(&of.around.isolated);
    if !not_isolated.is_empty() {
        let what = format!("CPU {not_isolated} is not isolated");
        let finding = of.refuses(APART, what, "other tasks run there");
        return Some(finding.change(format!("boot with isolcpus={cpus}")));
    }
    Some(match record {
        Some(record) => by_record(of, record, cpus),
        None => by_hook(of, cpus),
    })
}

/// What the hook is going to apply, if it does.
fn by_hook(of: &CheckedDomain<'_>, cpus: &CpuList) -> DoctorFinding {
    let wanted = match &of.around.hook {
        Ok(wanted) => wanted.as_ref(),
        Err(why) => {
            let stops = "the hook can't apply that, and stops the domain's start";
            let finding = DoctorFinding::blocker(APART, why.clone(), stops);
            return finding.change(format!("correct {HOST_FILE}"));
        }
    };
    let given = wanted.map(|wanted| wanted.partition.rt());
    let left = cpus.without(&given.clone().unwrap_or_default());
    let (Some(wanted), Some(given), true) = (wanted, given, left.is_empty()) else {
        let what = format!("CPU {left}: by isolcpus alone");
        let finding = of.refuses(APART, what, "interrupts and kernel threads run there");
        return finding.change(apply_line(&of.xml.name, cpus));
    };
    let cpuset = wanted.profile.settings.cpuset;
    let made = format!("profile {} makes a cpuset", wanted.profile_name);
    let found = conflict(of, &given, cpuset.map(|_| made));
    found.unwrap_or_else(|| {
        let what = format!("CPU {cpus}: by the hook, with {HOST_FILE}");
        DoctorFinding::good(APART, what, "before the domain starts")
    })
}

fn apply_line(guest: &str, cpus: &CpuList) -> String {
    format!(
        "[guest] {guest} = \"{cpus}\" and [settings] cpuset = \"none\" in {HOST_FILE}, and the hook; or \
         vcpufreq rt apply --config {HOST_FILE}"
    )
}

fn by_record(of: &CheckedDomain<'_>, record: &Record, cpus: &CpuList) -> DoctorFinding {
    let given = record.partition.rt();
    let left = cpus.without(&given);
    if !left.is_empty() {
        let what = format!("vcpufreq rt apply has given guests CPU {given}, and not {left}");
        let finding = of.refuses(APART, what, "interrupts and kernel threads run there");
        return finding.change(apply_line(&of.xml.name, cpus));
    }
    let cpuset = record.profile.settings.cpuset;
    let made = format!("profile {} has made a cpuset", record.profile_name);
    let found = conflict(of, &given, cpuset.map(|_| made));
    found.unwrap_or_else(|| {
        DoctorFinding::good(APART, format!("CPU {cpus}"), "nothing else runs there")
    })
}

/// What in a domain conflicts with settings that give these CPUs to real-time guests; `cpuset` says how
/// they come to a cpuset, if they do.
fn conflict(
    of: &CheckedDomain<'_>,
    given: &CpuList,
    cpuset: Option<String>,
) -> Option<DoctorFinding> {
    if let Some(what) = cpuset {
        let why = "libvirt can't put vCPUs into it: the domain doesn't start";
        let finding = DoctorFinding::blocker(APART, what, why);
        return Some(finding.change(apply_line(&of.xml.name, &of.real_time_cpus)));
    }
    let is_normal = |vcpu: &u32| !of.real_time.contains(*vcpu);
    let pins = of.vcpus().filter(is_normal);
    let mut pins = pins.filter_map(|vcpu| Some((vcpu, of.xml.pin(vcpu)?)));
    let (vcpu, pin) = pins.find(|(_, pin)| !pin.and(given).is_empty())?;
    let what = format!(
        "vCPU {vcpu} is not real-time, and may run on CPU {}",
        pin.and(given)
    );
    let finding = of.refuses(APART, what, "real-time guests have that alone");
    Some(finding.change(pin_line(vcpu, &of.around.online.without(given))))
}
