// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq report`: what this host is, what doctor finds on it, the demo and the bench, as one
//! page for people and one file for programs.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use vcpufreq_bench::{BenchArgs, Findings, GuestArgs, board, report_page};
use vcpufreq_device::host::{HostCpus, HostOpp, HostRoot, Pcpu};

use crate::doctor::{
    self,
    facts::{DoctorFacts, EnergyModel},
};
use crate::host_guest::HostGuest;
use crate::vm::layout::CPUFREQ_BASE;

const PAGE: &str = "vcpufreq-report.html";
const FILE: &str = "vcpufreq-report.json";
/// No person's folder, and in commands that doctor names.
const CGROUPS: &str = "/sys/fs/cgroup";

/// Makes both, in the files of `--html` and `--out`, and names them on stderr. What fails is in the
/// report: a board on which a guest can't run has one, too. Returns the exit code: 0, or 1 when a
/// part failed or has findings. A signal before the end leaves neither file.
///
/// # Errors
/// When a file can't be written.
pub fn report(args: &mut BenchArgs, root: &HostRoot, facts: &DoctorFacts) -> anyhow::Result<u8> {
    let findings = doctor::findings(facts);
    let host = host(root, facts.energy_model);
    let folders = private_folders(args);
    let _guest = HostGuest::complete(root, &mut args.guest);
    let doctor = Findings {
        json: doctor::json(facts, &findings),
        text: doctor::text(&findings),
        exit_code: doctor::exit_code(&findings),
    };
    let demo = part(vcpufreq_bench::try_opps(&args.guest, CPUFREQ_BASE));
    let bench = part(vcpufreq_bench::measure(args, CPUFREQ_BASE));
    let parts = [doctor, demo, bench].map(|part| without_folders(part, &folders));
    let codes = parts.each_ref().map(|part| part.exit_code);
    let (json, page) = files(&host, parts);
    let (html, out) = (args.html.as_deref(), args.out.as_deref());
    let (html, out) = (
        html.unwrap_or(Path::new(PAGE)),
        out.unwrap_or(Path::new(FILE)),
    );
    vcpufreq_bench::write([(html, page), (out, format!("{json:#}\n"))])?;
    eprintln!(
        "vcpufreq: {} and {} have the kernel, the board, its CPUs, the VMM's cgroup, and what was found and measured; look at them before you send them",
        html.display(),
        out.display()
    );
    Ok(u8::from(codes.iter().any(|code| *code > 0)))
}

/// Both files' contents.
fn files(host: &Value, [doctor, demo, bench]: [Findings; 3]) -> (Value, String) {
    let json = json!({
        "version": env!("CARGO_PKG_VERSION"), "host": host,
        "doctor": doctor.json, "demo": demo.json, "bench": bench.json,
    });
    let host = format!("{host:#}");
    let mut parts = vec![
        ("host", &*host),
        ("doctor", &*doctor.text),
        ("demo", &*demo.text),
    ];
    let measured = bench.json["results"].is_array();
    if !measured {
        parts.push(("bench", &bench.text));
    }
    let page = report_page(&parts, measured.then_some(&bench.json));
    (json, page)
}

/// Folders that may name a person or a project, as the errors of a part do: of files that were
/// named, of this program, the user's own, and the cgroup. The longest first.
fn private_folders(args: &BenchArgs) -> Vec<PathBuf> {
    let GuestArgs {
        kernel,
        initrd,
        guest_module,
        cgroup_parent,
        ..
    } = &args.guest;
    let files = [kernel, initrd, cgroup_parent];
    let files = files.into_iter().chain([&args.qemu, &args.out, &args.html]);
    let files = files.flatten().cloned().chain(std::env::current_exe());
    // Options are behind the path.
    let modules = guest_module.iter().filter_map(|one| one.split(' ').next());
    let files = files.chain(modules.map(PathBuf::from));
    let files: Vec<_> = files
        .filter_map(|file| Some(file.parent()?.to_owned()))
        .collect();
    let own = std::env::var_os("HOME").map(PathBuf::from);
    let folders = files.into_iter().chain(own).chain(std::env::current_dir());
    let folders = folders.chain(cgroup_parent.clone());
    // Neither the root nor the folder of a bare name.
    let mut folders: Vec<_> = folders
        .filter(|folder| folder.file_name().is_some() && folder != Path::new(CGROUPS))
        .collect();
    folders.sort_by_key(|folder| std::cmp::Reverse(folder.as_os_str().len()));
    folders
}

/// The same, in which files of these folders have their name alone.
fn without_folders(part: Findings, folders: &[PathBuf]) -> Findings {
    let Findings {
        mut json,
        text,
        exit_code,
    } = part;
    let short = |text: &str| {
        folders.iter().fold(text.to_owned(), |text, folder| {
            text.replace(&format!("{}/", folder.display()), "")
        })
    };
    shorten(&mut json, &short);
    let text = short(&text);
    Findings {
        json,
        text,
        exit_code,
    }
}

fn shorten(value: &mut Value, short: &impl Fn(&str) -> String) {
    match value {
        Value::String(text) => *text = short(text),
        Value::Array(values) => values.iter_mut().for_each(|one| shorten(one, short)),
        Value::Object(entries) => entries.values_mut().for_each(|one| shorten(one, short)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// A part of the report, whatever came of it.
fn part(done: anyhow::Result<Option<Findings>>) -> Findings {
    match done {
        Ok(Some(findings)) => findings,
        Ok(None) => failed(&anyhow::anyhow!(
            "this host lacks what stderr named; see doctor"
        )),
        Err(error) => failed(&error),
    }
}

fn failed(error: &anyhow::Error) -> Findings {
    let text = crate::message::chain(error);
    Findings {
        json: json!({ "error": text }),
        text,
        exit_code: 1,
    }
}

/// The kernel and its energy model, the board, its CPUs and their policies.
fn host(root: &HostRoot, energy_model: EnergyModel) -> Value {
    let cpus = HostCpus::read(root);
    let text = |path: &str| {
        let text = root.text(path)?;
        Some(text.trim_end_matches('\0').replace('\0', " "))
    };
    let cpu = |cpu: &Pcpu| {
        let midr = format!(
            "sys/devices/system/cpu/cpu{}/regs/identification/midr_el1",
            cpu.id
        );
        json!({
            "cpu": cpu.id, "online": cpu.online, "capacity": cpu.capacity, "midr": text(&midr),
        })
    };
    let policies = cpus.policies.iter().map(|policy| {
        let opp = |opp: &HostOpp| json!({ "khz": opp.khz, "uv": opp.uv, "uw": opp.uw });
        let opps: Vec<_> = policy.opps.iter().map(opp).collect();
        json!({
            "policy": policy.id, "cpus": policy.cpus.as_slice(), "driver": policy.driver,
            "governor": policy.governor, "max_khz": policy.max_khz, "opps": opps,
        })
    });
    json!({
        "kernel": text("proc/sys/kernel/osrelease"), "arch": std::env::consts::ARCH,
        "model": board(root),
        "compatible": text("proc/device-tree/compatible"),
        "energy_model": energy_model,
        "policies": policies.collect::<Vec<_>>(),
        "cpus": cpus.cpus.iter().map(cpu).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    //! Promises: a part that fails is in the report; the host's facts are its own; neither file has a
    //! folder that could name a person.
    use std::ffi::OsString;

    use vcpufreq_device::fakes::FakeHost;

    use super::*;
    use crate::cli::{Cli, Command};

    #[test]
    fn a_part_that_fails_is_in_the_report() {
        let one = part(Err(anyhow::anyhow!("why")));
        assert_eq!(
            (one.json["error"].as_str(), one.exit_code),
            (Some("why"), 1)
        );
        assert!(part(Ok(None)).text.contains("see doctor"));
    }

    #[test]
    fn no_file_has_a_folder_that_could_name_a_person() {
        let line = ["vcpufreq", "report", "--kernel", "/srv/Jo Doe/Image"];
        let more = ["--initrd", "/srv/Jo Doe/acme/initrd", "--qemu", "qemu"];
        let module = ["--guest-module", "/Doe/acme.d/a.ko debug=1"];
        let cgroup = ["--cgroup-parent", "/sys/fs/cgroup/Doe/acme.slice"];
        let words = [&line[..], &more, &module, &cgroup].concat();
        let words = words.into_iter().map(OsString::from);
        let Command::Report(args) = Cli::read(words.collect()).unwrap().command else {
            unreachable!("the command above")
        };
        let folders = private_folders(&args);
        for own in [std::env::current_dir(), std::env::current_exe()] {
            assert!(
                folders
                    .iter()
                    .any(|folder| own.as_ref().unwrap().starts_with(folder))
            );
        }
        for other in ["", "/", CGROUPS] {
            assert!(!folders.contains(&other.into()), "{other}");
        }
        let why = "can't read /srv/Jo Doe/acme/initrd and /srv/Jo Doe/Image, load /Doe/acme.d/a.ko, \
                   make /sys/fs/cgroup/Doe/acme.slice/x in /sys/fs/cgroup/Doe/acme.slice";
        let short = "can't read initrd and Image, load a.ko, make x in acme.slice";
        let [doctor, demo] = [1, 2].map(|_| failed(&anyhow::anyhow!(why)));
        let bench = Findings {
            json: json!({ "results": [], "failures": [{ "error": why }] }),
            ..failed(&anyhow::anyhow!(why))
        };
        let parts = [doctor, demo, bench].map(|part| without_folders(part, &folders));
        let (json, page) = files(&json!({}), parts);
        for text in [json.to_string(), page] {
            assert_eq!(text.matches(short).count(), 3, "{text}");
            assert!(!text.contains("Doe"), "{text}");
        }
    }

    #[test]
    fn the_hosts_facts_are_its_own() {
        let fake = FakeHost::two_plus_two();
        fake.write("proc/device-tree/model", "A Board\0");
        fake.write("proc/sys/kernel/hostname", "secret");
        fake.write("sys/class/dmi/id/sys_vendor", "Maker\n");
        fake.write("sys/class/dmi/id/product_name", "Server\n");
        fake.opp_node(0, &[(600_000, 650_000, 45_000)]);
        let little = "sys/devices/system/cpu/cpufreq/policy0/scaling_available_frequencies";
        fake.write(little, "600000");
        let facts = |fake: &FakeHost| host(&fake.root(), EnergyModel::Domains(2));
        let host = facts(&fake);
        assert_eq!(host["model"], "A Board");
        let opp = json!({ "khz": 600_000, "uv": 650_000, "uw": 45_000 });
        assert_eq!(host["policies"][0]["opps"], json!([opp]));
        assert_eq!(host["policies"][0]["cpus"], json!([0, 1]));
        assert_eq!(host["energy_model"], json!({ "domains": 2 }));
        assert_eq!(host["policies"].as_array().map(Vec::len), Some(2));
        assert_eq!(host["cpus"].as_array().map(Vec::len), Some(4));
        assert!(!host.to_string().contains("secret"));
        fake.remove("proc/device-tree/model");
        assert_eq!(facts(&fake)["model"], "Maker Server");
    }
}
