// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether a domain has the device or the shared RAM, the server and the device tree by which its
//! guest's requests reach the host.

use std::path::Path;

use super::{checked::CheckedDomain, xml::DomainShmem};
use crate::doctor::DoctorFinding;

const SHMEM: &str = "shmem";
const SERVER: &str = "server";

pub(super) fn findings(of: &CheckedDomain<'_>) -> Vec<DoctorFinding> {
    let in_ram = of.server().and_then(|server| server.listen.dtb.as_deref());
    if let Some(dtb) = in_ram {
        let mut found = vec![memory(of), server_in_ram(of, dtb)];
        found.extend(tree(of));
        return found;
    }
    let Some(shmem) = &of.xml.shmem else {
        // It may be a domain with registers in RAM.
        if let Some(finding) = wrong_options(of) {
            return vec![finding];
        }
        let finding = DoctorFinding::limit(SHMEM, "none named vcpufreq", "the guest has no bridge");
        let line = format!(
            "<shmem name='vcpufreq' role='master'><model type='ivshmem-doorbell'/>{}{}</shmem>",
            server_line(of),
            msi_line(of)
        );
        return vec![finding.change(line)];
    };
    let mut found = device(of, shmem);
    found.push(server(of, shmem));
    found.extend(tree(of));
    found.push(save(of));
    found
}

fn server_line(of: &CheckedDomain<'_>) -> String {
    format!("<server path='{}'/>", unit_socket(of))
}

fn msi_line(of: &CheckedDomain<'_>) -> String {
    format!("<msi vectors='{}' ioeventfd='on'/>", of.xml.vcpus)
}

fn unit_socket(of: &CheckedDomain<'_>) -> String {
    format!("/run/vcpufreq-{}.sock", of.xml.name)
}

fn device(of: &CheckedDomain<'_>, shmem: &DomainShmem) -> Vec<DoctorFinding> {
    let vcpus = of.xml.vcpus;
    let mut found = Vec::new();
    if shmem.model != "ivshmem-doorbell" {
        let what = format!("model '{}'", shmem.model);
        let finding = DoctorFinding::blocker(SHMEM, what, "only a doorbell reaches the server");
        found.push(finding.change("<model type='ivshmem-doorbell'/>"));
    }
    if shmem.vectors != Some(vcpus) {
        let vectors = shmem.vectors.unwrap_or(1);
        let what = format!("vectors {vectors}, and {vcpus} vCPUs");
        let finding = DoctorFinding::limit(SHMEM, what, "each vCPU rings a doorbell of its own");
        found.push(finding.change(msi_line(of)));
    }
    if !shmem.ioeventfd {
        let why = "each request exits to QEMU";
        found.push(DoctorFinding::limit(SHMEM, "without ioeventfd", why).change(msi_line(of)));
    }
    if !shmem.is_master {
        let what = "its role is not master";
        let why = "the domain can't be saved or migrated";
        let line = "<shmem name='vcpufreq' role='master'>";
        found.push(DoctorFinding::absent(SHMEM, what, why).change(line));
    }
    if found.is_empty() {
        let why = "each vCPU has its page and doorbell";
        found.push(DoctorFinding::good(SHMEM, format!("{vcpus} vectors"), why));
    }
    found
}

/// Options by which no server starts.
fn wrong_options(of: &CheckedDomain<'_>) -> Option<DoctorFinding> {
    let why = of.around.server.as_ref().err()?;
    let finding = DoctorFinding::blocker(SERVER, why.clone(), "the server doesn't start");
    Some(finding.change(format!("correct {}", of.around.options_file)))
}

/// The RAM in which its guest has registers.
fn memory(of: &CheckedDomain<'_>) -> DoctorFinding {
    const NAME: &str = "memoryBacking";
    match of.xml.shared {
        true => DoctorFinding::good(NAME, "shared", "the server can map the guest's RAM"),
        false => DoctorFinding::blocker(NAME, "not shared", "the server can't map the guest's RAM")
            .change("<memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>"),
    }
}

/// What the server of such a domain looks for.
fn server_in_ram(of: &CheckedDomain<'_>, dtb: &Path) -> DoctorFinding {
    let file = &of.around.options_file;
    let blocker = |what: String, why: &str, line: String| {
        DoctorFinding::blocker(SERVER, what, why).change(format!("{line} in {file}"))
    };
    let device = of.xml.shmem.as_ref();
    let device = device.map(|_| "a <shmem> named vcpufreq, and a key dtb");
    let firmware = (!of.xml.has_kernel).then_some("no <kernel>, or a <loader>");
    let tree = match &of.xml.dtb {
        Some(path) => (Path::new(path) != dtb).then_some("another <dtb>"),
        None => Some("no <dtb>"),
    };
    for (what, why, line) in [
        (
            device,
            "QEMU waits for a server at a socket",
            format!("take one out, here or in {file}"),
        ),
        (
            firmware,
            "firmware uses the RAM that the registers are in",
            "<kernel> in <os>, without <loader> and firmware='efi'".to_owned(),
        ),
        (
            tree,
            "the server looks for the registers of its dtb",
            format!("name one path in <dtb> and as dtb in {file}"),
        ),
    ] {
        if let Some(what) = what {
            let finding = DoctorFinding::blocker(SERVER, what, why);
            return finding.change(line);
        }
    }
    let wanted = format!("/run/libvirt/qemu/{}.pid", of.xml.name);
    let listen = of.server().map(|server| &server.listen);
    let pid_file = listen.and_then(|listen| listen.pid_file.as_deref());
    if pid_file != Some(Path::new(&wanted)) {
        let what = pid_file.map_or("no pid-file".to_owned(), |file| file.display().to_string());
        let line = format!("pid-file = \"{wanted}\"");
        return blocker(what, "libvirt writes no other file", line);
    }
    fits(of).unwrap_or_else(|| {
        DoctorFinding::good(SERVER, wanted, format!("its options in {file} fit"))
    })
}

/// What of the server's options doesn't fit.
fn fits(of: &CheckedDomain<'_>) -> Option<DoctorFinding> {
    let file = &of.around.options_file;
    let cpus = of.server()?.served.vcpus.cpus.unwrap_or(1);
    let (vcpus, at_start) = (of.xml.vcpus, of.xml.at_start);
    if at_start < vcpus {
        let what = format!("the domain starts with {at_start} of its {vcpus} vCPUs");
        let finding = match cpus == at_start {
            true => DoctorFinding::limit(SERVER, what, "one that is plugged in is not served"),
            false => DoctorFinding::blocker(SERVER, what, "the server refuses the domain"),
        };
        let line = format!("<vcpu>{vcpus}</vcpu>, and no enabled='no' in <vcpus>");
        return Some(finding.change(line));
    }
    (cpus != of.xml.vcpus).then(|| {
        let what = format!("{file} has {cpus} vCPUs, and the domain {}", of.xml.vcpus);
        let finding = DoctorFinding::blocker(SERVER, what, "the server refuses the domain");
        finding.change(format!("cpus = {} in {file}", of.xml.vcpus))
    })
}

fn server(of: &CheckedDomain<'_>, shmem: &DomainShmem) -> DoctorFinding {
    let file = &of.around.options_file;
    let Some(path) = &shmem.server else {
        let why = "QEMU would make its memory itself";
        return DoctorFinding::blocker(SERVER, "none", why).change(server_line(of));
    };
    if *path != unit_socket(of) {
        let why = "the hook and vcpufreq-serve@.socket don't serve it";
        return DoctorFinding::limit(SERVER, path.clone(), why).change(server_line(of));
    }
    if let Some(finding) = wrong_options(of) {
        return finding;
    }
    if of.server().is_none() {
        let why = "vcpufreq-serve@.socket doesn't start without";
        let finding = DoctorFinding::blocker(SERVER, format!("there is no {file}"), why);
        return finding.change("make it of /usr/share/doc/vcpufreq/examples/serve.toml");
    }
    let good = || DoctorFinding::good(SERVER, path.clone(), format!("its options in {file} fit"));
    fits(of).unwrap_or_else(good)
}

/// An arm64 guest has capacities, OPPs and energy by its device tree alone.
fn tree(of: &CheckedDomain<'_>) -> Option<DoctorFinding> {
    const NAME: &str = "dtb";
    let arch = of.xml.arch.as_ref().unwrap_or(&of.around.arch);
    if arch != "aarch64" {
        return None;
    }
    let Some(path) = &of.xml.dtb else {
        let why = "the guest has no energy model, and migrates no misfit task";
        let finding = DoctorFinding::limit(NAME, "none", why);
        return Some(
            finding.change(
                "<dtb>/var/lib/libvirt/guest.dtb</dtb> in <os>, made by vcpufreq dt --merge",
            ),
        );
    };
    if !of.around.has_tree {
        let what = format!("there is no {path}, and no {path}.base");
        let finding = DoctorFinding::blocker(NAME, what, "QEMU doesn't start");
        return Some(finding.change("make it by vcpufreq dt --merge"));
    }
    let why = "the guest has capacities, OPPs and energy";
    Some(DoctorFinding::good(NAME, path.clone(), why))
}

fn save(of: &CheckedDomain<'_>) -> DoctorFinding {
    const NAME: &str = "save";
    if of.xml.has_master {
        return DoctorFinding::good(NAME, "master=on", "the domain can be saved and migrated");
    }
    let what = "no <qemu:override> with master=on";
    DoctorFinding::absent(NAME, what, "the domain can't be saved or migrated")
        .change("<qemu:property name='master' type='string' value='on'/> for device shmem0")
}
