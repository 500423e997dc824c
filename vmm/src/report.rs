// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq report`: what this host is, what doctor finds on it, the demo and the bench, as one
//! page for people and one file for programs.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use vcpufreq_bench::{BenchArgs, Findings, GuestArgs, ReportPart, board, report_page};
use vcpufreq_host::{HostCpus, HostOpp, HostRoot, Pcpu};

use crate::doctor::{
    self,
    facts::{DoctorFacts, EnergyModel},
};
use crate::host_guest::HostGuest;
use vcpufreq_vm::layout::CPUFREQ_BASE;

const PAGE: &str = "vcpufreq-report.html";
const FILE: &str = "vcpufreq-report.json";
const CGROUPS: &str = "/sys/fs/cgroup";
/// In the place of a cgroup, which a unit, a container or a user's session has named.
const CGROUP: &str = "CGROUP";

/// Makes both, in the files of `--html` and `--out`, and names them on stderr. What fails is in the
/// report: a board on which a guest can't run has one, too. Returns the exit code: 0, or 1 when a
/// part failed or has findings. A signal before the end leaves neither file.
///
/// # Errors
/// When a file can't be written.
pub fn report(args: &mut BenchArgs, root: &HostRoot, facts: &DoctorFacts) -> anyhow::Result<u8> {
    let findings = doctor::findings(facts);
    let host = host(root, facts.energy_model);
    let private = private(root, args);
    let _guest = HostGuest::complete(root, &mut args.guest, args.qemu.as_deref());
    let doctor = Findings {
        json: doctor::json(facts, &findings),
        text: doctor::text(&findings),
        exit_code: doctor::exit_code(&findings),
    };
    let demo = part(vcpufreq_bench::try_opps(&args.guest, CPUFREQ_BASE));
    let bench = part(vcpufreq_bench::measure(args, CPUFREQ_BASE));
    let parts = [doctor, demo, bench].map(|part| without(part, &private));
    let codes = parts.each_ref().map(|part| part.exit_code);
    let (json, page) = files(&host, parts);
    let (html, out) = (args.html.as_deref(), args.out.as_deref());
    let (html, out) = (
        html.unwrap_or(Path::new(PAGE)),
        out.unwrap_or(Path::new(FILE)),
    );
    vcpufreq_bench::write([(html, page), (out, format!("{json:#}\n"))])?;
    eprintln!(
        "vcpufreq: {} and {} have the kernel, the board, its CPUs, and what was found and measured; look at them before you send them",
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
    let measured = bench.json["results"].is_array();
    let mut parts: Vec<ReportPart<'_>> = [("doctor", &doctor), ("demo", &demo), ("bench", &bench)]
        .map(|(title, part)| (title, &*part.text, part.exit_code > 0))
        .into();
    if measured {
        parts.pop();
    }
    parts.push(("host", &host, false));
    let page = report_page(&parts, measured.then_some(&bench.json));
    (json, page)
}

/// What may name a person or a project, as the errors of a part do, and what a report has instead:
/// the folders of files that were named, of this program, and the user's own; the cgroups that this
/// process is below, and that of `--cgroup-parent`. The longest first.
fn private(root: &HostRoot, args: &BenchArgs) -> Vec<(String, &'static str)> {
    let GuestArgs {
        kernel,
        initrd,
        guest_module,
        cgroup_parent,
        ..
    } = &args.guest;
    let files = [kernel, initrd, &args.qemu, &args.out, &args.html];
    let files = files.into_iter().flatten().cloned();
    let files = files.chain(std::env::current_exe());
    // Options are behind the path.
    let modules = guest_module.iter().filter_map(|one| one.split(' ').next());
    let files = files.chain(modules.map(PathBuf::from));
    let folders = files.filter_map(|file| Some(file.parent()?.to_owned()));
    let own = std::env::var_os("HOME").map(PathBuf::from);
    let folders = folders.chain(own).chain(std::env::current_dir());
    // Neither the root nor the folder of a bare name.
    let folders = folders.filter(|folder| folder.file_name().is_some());
    let folders = folders.map(|folder| (format!("{}/", folder.display()), ""));
    let text = root.text("proc/self/cgroup").unwrap_or_default();
    let own = text.lines().filter_map(|line| line.strip_prefix("0::/"));
    let own = own.map(|group| Path::new(CGROUPS).join(group));
    let groups: Vec<PathBuf> = own.chain(cgroup_parent.clone()).collect();
    let groups = groups.iter().flat_map(|group| group.ancestors());
    let groups = groups.filter(|group| *group != Path::new(CGROUPS) && group.starts_with(CGROUPS));
    let groups = groups.map(|group| (group.display().to_string(), CGROUP));
    let mut private: Vec<_> = folders.chain(groups).collect();
    private.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
    private
}

/// The same, with the names of these files alone, and without these cgroups.
fn without(part: Findings, private: &[(String, &str)]) -> Findings {
    let Findings {
        mut json,
        text,
        exit_code,
    } = part;
    let short = |text: &str| {
        let each = private.iter();
        each.fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
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

/// The kernel and its energy model, the board, its CPUs with what the device tree has of them, and
/// their policies.
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
        let node = |name: &str| format!("sys/devices/system/cpu/cpu{}/of_node/{name}", cpu.id);
        let cell = |name: &str| {
            let bytes = std::fs::read(root.path(node(name))).ok()?;
            Some(u32::from_be_bytes(bytes.try_into().ok()?))
        };
        json!({
            "cpu": cpu.id, "online": cpu.online, "capacity": cpu.capacity, "midr": text(&midr),
            "compatible": text(&node("compatible")),
            "capacity_dmips_mhz": cell("capacity-dmips-mhz"),
            "dynamic_power_coefficient": cell("dynamic-power-coefficient"),
        })
    };
    let policies = cpus.policies.iter().map(|policy| {
        let opp = |opp: &HostOpp| json!({ "khz": opp.khz, "boost": opp.boost, "uv": opp.uv, "uw": opp.uw });
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
    //! folder or a cgroup that could name a person.
    use std::ffi::OsString;

    use vcpufreq_host::fakes::FakeHost;

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
    fn no_file_has_a_folder_or_a_cgroup_that_could_name_a_person() {
        let line = ["vcpufreq", "report", "--kernel", "/srv/Jo Doe/Image"];
        let more = [
            "--initrd",
            "/srv/Jo Doe/acme/initrd",
            "--html",
            "/srv/Doe/x",
            "--out",
            "file",
        ];
        let module = ["--guest-module", "/Doe/acme.d/a.ko debug=1"];
        let cgroup = ["--cgroup-parent", "/sys/fs/cgroup/Doe/acme.slice"];
        let words = [&line[..], &more, &module, &cgroup].concat();
        let words = words.into_iter().map(OsString::from);
        let Command::Report(args) = Cli::read(words.collect()).unwrap().command else {
            unreachable!("the command above")
        };
        let host = FakeHost::two_plus_two();
        let own = "0::/user.slice/user-1000.slice/Doe.scope\n";
        host.write("proc/self/cgroup", own);
        let private = private(&host.root(), &args);
        for own in [std::env::current_dir(), std::env::current_exe()] {
            let own = own.as_ref().unwrap().display().to_string() + "/";
            assert!(private.iter().any(|(folder, _)| own.starts_with(folder)));
        }
        for other in ["", "/", CGROUPS] {
            assert!(private.iter().all(|(text, _)| text != other), "{other}");
        }
        let why = "can't read /srv/Jo Doe/acme/initrd and /srv/Jo Doe/Image, load /Doe/acme.d/a.ko, \
                   open /srv/Doe/x, make /sys/fs/cgroup/Doe/acme.slice/x in /sys/fs/cgroup/Doe/acme.slice, group in \
                   /sys/fs/cgroup/user.slice/user-1000.slice/Doe.scope, below \
                   /sys/fs/cgroup/user.slice/cpu.uclamp.min and /sys/fs/cgroup/vcpufreq.slice";
        let short = "can't read initrd and Image, load a.ko, open x, make CGROUP/x in CGROUP, group in CGROUP, \
                     below CGROUP/cpu.uclamp.min and /sys/fs/cgroup/vcpufreq.slice";
        let [doctor, demo] = [1, 2].map(|_| failed(&anyhow::anyhow!(why)));
        let bench = Findings {
            json: json!({ "results": [], "failures": [{ "error": why }] }),
            ..failed(&anyhow::anyhow!(why))
        };
        let parts = [doctor, demo, bench].map(|part| without(part, &private));
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
        for serial in [
            "proc/device-tree/serial-number",
            "sys/class/dmi/id/product_serial",
        ] {
            fake.write(serial, "secret");
        }
        fake.write("sys/class/dmi/id/sys_vendor", "Maker\n");
        fake.write("sys/class/dmi/id/product_name", "Server\n");
        fake.opp_node(0, &[(600_000, 650_000, 45_000)]);
        let node = "sys/devices/system/cpu/cpu0/of_node";
        fake.write(&format!("{node}/compatible"), "arm,cortex-a55\0");
        fake.write(&format!("{node}/capacity-dmips-mhz"), 512_u32.to_be_bytes());
        let little = "sys/devices/system/cpu/cpufreq/policy0/scaling_available_frequencies";
        fake.write(little, "600000");
        let facts = |fake: &FakeHost| host(&fake.root(), EnergyModel::Domains(2));
        let host = facts(&fake);
        assert_eq!(host["model"], "A Board");
        let opp = json!({ "khz": 600_000, "boost": false, "uv": 650_000, "uw": 45_000 });
        assert_eq!(host["policies"][0]["opps"], json!([opp]));
        assert_eq!(host["policies"][0]["cpus"], json!([0, 1]));
        assert_eq!(host["energy_model"], json!({ "domains": 2 }));
        let little = &host["cpus"][0];
        assert_eq!(little["compatible"], "arm,cortex-a55");
        assert_eq!(little["capacity_dmips_mhz"], 512);
        assert!(little["dynamic_power_coefficient"].is_null());
        assert_eq!(host["policies"].as_array().map(Vec::len), Some(2));
        assert_eq!(host["cpus"].as_array().map(Vec::len), Some(4));
        assert!(!host.to_string().contains("secret"));
        fake.remove("proc/device-tree/model");
        assert_eq!(facts(&fake)["model"], "Maker Server");
    }
}
