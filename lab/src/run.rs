// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One boot of the lab: which host, which guest, which scenarios.

use std::fs;
use std::io::{self, Read as _};
use std::iter;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use vcpufreq_tests::ScenarioReport;

use crate::arch::{Arch, PC};
use crate::artifacts::{Artifacts, HostContents};
use crate::boot::{DEFAULT_CPU, DEFAULT_GIC, Driver, HostPart};
use crate::boots;
use crate::emulator::{Board, Disk};
use crate::kernel::{Flavor, Kernel};
use crate::out;
use crate::own_kernel;
use crate::progress::{Step, above};
use crate::qemu::GuestVmm;
use crate::result_port::{self, Far};
use crate::shell;
use crate::tools;
use crate::topology::Topology;

/// What to boot and what to do there.
#[derive(Debug, Clone, clap::Args)]
pub struct Options {
    /// Scenarios, in turn, on one host
    pub scenarios: Vec<String>,
    /// Architecture of host and guests; those of an x86-64 host are QEMU's
    #[arg(long, value_enum, default_value = "arm64")]
    pub arch: Arch,
    /// Topology: a name in lab/topologies, a file, or drawn:SEED; of an x86-64 host pc unless given
    #[arg(long, default_value = "2+2", default_value_if("arch", "x86-64", PC))]
    pub topology: String,
    /// Kernel of the host
    #[arg(long, value_enum, default_value = "standard")]
    pub host: Flavor,
    /// Kernel of the guest
    #[arg(long, value_enum, default_value = "standard")]
    pub guest: Flavor,
    /// The guest's cpufreq driver: this project's, or the kernel's own
    #[arg(long, value_enum, default_value = "ours")]
    pub driver: Driver,
    /// How the guest's accesses go, as --path of vcpufreq run
    #[arg(long)]
    pub path: Option<String>,
    /// What runs the guests
    #[arg(
        long,
        value_enum,
        default_value = "vcpufreq",
        default_value_if("arch", "x86-64", "qemu")
    )]
    pub vmm: GuestVmm,
    /// Emulated CPU: neoverse-v1 has FEAT_S2FWB, cortex-a76 hasn't
    #[arg(long, default_value = DEFAULT_CPU)]
    pub cpu: String,
    /// Version of the emulated interrupt controller: guests of a host with version 2 have it too
    #[arg(long, default_value_t = DEFAULT_GIC, value_parser = clap::value_parser!(u8).range(2..=3))]
    pub gic: u8,
    /// Boot the host with protected KVM; its guests are protected, and share memory with --guest
    /// protected
    #[arg(long)]
    pub protected: bool,
    /// Run the emulated CPUs at once, in real time: no run repeats, and no time holds
    #[arg(long)]
    pub parallel: bool,
    /// Pause for so long before each scenario, in us of virtual time: another draw of what
    /// depends on chance, since a run repeats exactly
    #[arg(long, default_value_t = 0)]
    pub later_us: u64,
    /// What the host has, if not what [`boots::parts`] has for the scenarios.
    #[arg(skip)]
    pub parts: Option<&'static [HostPart]>,
    /// A crosvm for arm64, linked statically, for the scenario peer; without it that measures
    /// vcpufreq alone
    #[arg(long, value_name = "FILE", value_parser = arm64_program)]
    pub crosvm: Option<PathBuf>,
    /// The host has the program and the units of the package in out/packages, which `make packages`
    /// makes, in place of the build's
    #[arg(long)]
    pub packaged: bool,
    /// CPU time that the emulator may take, in seconds
    #[arg(long, default_value_t = 1800)]
    pub limit_s: u64,
    /// Real time that it takes on two CPUs, about, where that is known
    #[arg(skip)]
    pub about_s: Option<u64>,
    /// Results that hold are kept, for the next run of the same machine
    #[arg(skip)]
    pub keeps: bool,
}

/// The cache's entries of machines whose scenarios held, and the file in each.
const HELD: &str = "held";
const RESULTS: &str = "results";

/// What a run reported.
#[derive(Debug)]
pub struct BootReport {
    /// One for each scenario.
    pub results: Vec<ScenarioReport>,
    /// Real time that each of them took, in seconds; the first one's is with the boot.
    pub took_s: Vec<f64>,
    /// Real time of all.
    pub wall: Duration,
    /// Whether all is an earlier run's.
    pub is_kept: bool,
}

impl BootReport {
    /// Whether every scenario that was asked for reported, and held, with the bench's bounds.
    pub fn held(&self) -> bool {
        let held =
            |one: &ScenarioReport| one.verdict.held() && bounds_hold(one.verdict.get("report"));
        self.results.iter().all(held)
    }
}

/// Whether all bounds of a report of the bench hold.
pub fn bounds_hold(report: &Value) -> bool {
    let mut bounds = report["bounds"].as_array().into_iter().flatten();
    bounds.all(|bound| bound["held"] != false)
}

impl Options {
    /// These scenarios, all else as by default.
    pub fn of(scenarios: &[&str]) -> Self {
        Self {
            scenarios: scenarios.iter().map(|&name| name.to_owned()).collect(),
            arch: Arch::Arm64,
            topology: "2+2".to_owned(),
            host: Flavor::Standard,
            guest: Flavor::Standard,
            driver: Driver::Ours,
            path: None,
            vmm: GuestVmm::Vcpufreq,
            cpu: DEFAULT_CPU.to_owned(),
            gic: DEFAULT_GIC,
            protected: false,
            parallel: false,
            later_us: 0,
            parts: None,
            crosvm: None,
            packaged: false,
            limit_s: 1800,
            about_s: None,
            keeps: false,
        }
    }

    /// Runs the scenarios and prints a line of JSON for each. With a crosvm, that of `peer` is also
    /// left in `out/`, for `make figures`.
    pub fn run(&self, artifacts: &Artifacts, repo: &Path) -> Result<bool> {
        ensure!(
            !self.scenarios.is_empty(),
            "no scenario given; their names are in tests/src/scenarios/mod.rs and the lists below it"
        );
        self.check_arch()?;
        let report = self.report(artifacts, repo)?;
        for (result, took_s) in report.results.iter().zip(&report.took_s) {
            println!("{}", result.json());
            let name = &result.scenario;
            for failed in result.verdict.failed() {
                eprintln!("{name} FAILED: {failed}");
            }
            if name == "peer" && self.crosvm.is_some() {
                let file = format!("peer-{}.json", self.topology);
                out::write(repo, &file, result.json())?;
            }
            eprintln!("{took_s:.0} s of real time for {name}");
        }
        eprintln!("{} s of real time", report.wall.as_secs());
        Ok(report.held())
    }

    /// Runs the scenarios.
    pub fn report(&self, artifacts: &Artifacts, repo: &Path) -> Result<BootReport> {
        self.with_run_dir(artifacts, |dir| {
            let (topology, kernel) = self.host(artifacts, repo)?;
            let initrd = self.initrd(artifacts, dir, (&topology, &self.scenarios))?;
            above(|| {
                eprintln!(
                    "host: {}, Linux {}, emulated",
                    topology.description, kernel.release
                );
            });
            let mut board = self.board(artifacts, &topology, &kernel);
            if self.parts().contains(&HostPart::Disk) {
                board.disks.push(Disk {
                    image: artifacts.guest_disk(self.guest)?,
                    writable: false,
                });
            }
            let machine = self.keeps.then(|| board.key(&initrd)).transpose()?;
            if let Some(machine) = &machine {
                let kept = artifacts.cache.found(HELD, machine);
                if let Some(text) = kept.and_then(|dir| fs::read_to_string(dir.join(RESULTS)).ok())
                {
                    return self.kept(&text);
                }
            }
            let limit = Duration::from_secs(self.limit_s);
            let step = Step::start(format!("emulated host {}", self.topology));
            let outcome = board.run(&initrd, dir, limit, self.teller(&step))?;
            step.erase();
            let results = self.results(&outcome.results, &outcome.console)?;
            let before = iter::once(&Duration::ZERO).chain(&outcome.came);
            let took = outcome.came.iter().zip(before);
            let report = BootReport {
                results,
                took_s: took
                    .map(|(end, start)| (*end - *start).as_secs_f64())
                    .collect(),
                wall: outcome.wall,
                is_kept: false,
            };
            if let Some(machine) = machine.filter(|_| report.held()) {
                let write = |to: &Path| Ok(fs::write(to.join(RESULTS), &outcome.results)?);
                artifacts.cache.entry(HELD, &machine, write)?;
            }
            Ok(report)
        })
    }

    /// What an earlier run of the same machine reported: another one would report the same.
    fn kept(&self, text: &str) -> Result<BootReport> {
        let results = self.results(text, Path::new("the cache"))?;
        Ok(BootReport {
            took_s: vec![0.0; results.len()],
            results,
            wall: Duration::ZERO,
            is_kept: true,
        })
    }

    /// What an x86-64 host can't be.
    fn check_arch(&self) -> Result<()> {
        let arm = [
            (self.vmm == GuestVmm::Vcpufreq, "--vmm vcpufreq"),
            (self.driver == Driver::Mainline, "--driver mainline"),
            (self.cpu != DEFAULT_CPU, "--cpu"),
            (self.gic != DEFAULT_GIC, "--gic 2"),
            (self.crosvm.is_some(), "--crosvm"),
        ];
        let given = arm.into_iter().find(|(given, _)| *given);
        match given.filter(|_| self.arch == Arch::X86_64) {
            Some((_, option)) => bail!("{option} is for arm64 hosts alone: leave it out"),
            None => Ok(()),
        }
    }

    /// Shows how far a host is, each time that it has gone on, and about how long it still takes.
    fn teller(&self, step: &Step) -> impl FnMut(Far) {
        let started = Instant::now();
        if let Some(s) = self.about_s {
            step.expect(Duration::from_secs(s));
        }
        let mut last = None;
        move |far| {
            if last.as_ref() == Some(&far) {
                return;
            }
            step.note(&self.stage(&far));
            let share = far.share(self.scenarios.len());
            // The first part alone has the boot in it.
            if share > 0.1 || (share > 0.0 && self.about_s.is_none()) {
                step.expect(started.elapsed().mul_f64((1.0 - share) / share));
            }
            last = Some(far);
        }
    }

    /// What is under way.
    fn stage(&self, far: &Far) -> String {
        let name = self.scenarios.get(far.ended);
        let name = name.map_or("ending", String::as_str);
        // A bench's has all of its options.
        let name = match name.split_once(':') {
            Some(("bench", _)) => "bench",
            _ => name,
        };
        let of = self.scenarios.len();
        let scenarios = match of {
            1 => name.to_owned(),
            _ => format!("{name}, {} of {of} done", far.ended),
        };
        match &far.part {
            Some(part) => format!(
                "{scenarios}: {} ({} of {} done)",
                part.what, part.done, part.of
            ),
            None => scenarios,
        }
    }

    /// Boots with a shell on this terminal, and what the scenarios named need.
    pub fn shell(&self, artifacts: &Artifacts, repo: &Path) -> Result<()> {
        self.with_run_dir(artifacts, |dir| {
            let (topology, kernel) = self.host(artifacts, repo)?;
            let initrd = self.initrd(artifacts, dir, (&topology, &[tools::SHELL.to_owned()]))?;
            self.board(artifacts, &topology, &kernel).shell(&initrd)
        })
    }

    /// The same, with a pipe where a person would be: types `line`, leaves, and
    /// gives what the console has shown.
    pub fn typed(&self, artifacts: &Artifacts, repo: &Path, line: &str) -> Result<String> {
        self.with_run_dir(artifacts, |dir| {
            let (topology, kernel) = self.host(artifacts, repo)?;
            let initrd = self.initrd(artifacts, dir, (&topology, &[tools::SHELL.to_owned()]))?;
            let emulator = self
                .board(artifacts, &topology, &kernel)
                .on_stdio(&initrd)?;
            shell::typed(emulator, line, Duration::from_secs(self.limit_s))
        })
    }

    fn host(&self, artifacts: &Artifacts, repo: &Path) -> Result<(Topology, Kernel)> {
        artifacts.require(self.arch)?;
        Ok((
            Topology::named(&self.topology, &repo.join("lab/topologies"))?,
            artifacts.kernel(self.arch, self.host)?,
        ))
    }

    fn parts(&self) -> Vec<HostPart> {
        let parts = self.parts.map(<[_]>::to_vec);
        let mut parts = parts.unwrap_or_else(|| boots::parts(&self.scenarios));
        parts.extend((self.vmm == GuestVmm::Qemu).then_some(HostPart::Qemu));
        parts
    }

    fn board<'a>(
        &'a self,
        artifacts: &'a Artifacts,
        topology: &'a Topology,
        kernel: &'a Kernel,
    ) -> Board<'a> {
        let parts = self.parts();
        Board {
            root: &artifacts.root,
            cache: &artifacts.cache,
            topology,
            kernel,
            cpu: &self.cpu,
            gic: self.gic,
            protected: self.protected,
            parallel: self.parallel,
            disks: Vec::new(),
            gib_page: parts.contains(&HostPart::GibPage),
            isolated: parts.contains(&HostPart::Isolated).then_some("3"),
        }
    }

    fn initrd(
        &self,
        artifacts: &Artifacts,
        dir: &Path,
        (topology, scenarios): (&Topology, &[String]),
    ) -> Result<PathBuf> {
        // A PC has no device tree to have it in.
        let clocks = (self.arch == Arch::X86_64).then(|| topology.parameter());
        let plan = json!({
            "scenarios": scenarios, "driver": self.driver.module(), "path": self.path,
            "vmm": self.vmm.name(),
            "protected": self.protected,
            "later_us": self.later_us,
            "clocks": clocks,
            "watch": own_kernel::has_checks(self.host),
            "watch_guests": own_kernel::has_checks(self.guest),
        });
        let package = self
            .packaged
            .then(|| unpacked(artifacts, dir, self.arch))
            .transpose()?;
        let parts = self.parts();
        let guest = HostContents {
            package: package.as_deref(),
            flavor: self.guest,
            parts: &parts,
            crosvm: self.crosvm.as_deref(),
            driver: self.driver.module(),
        };
        let initrd = dir.join("initramfs");
        fs::write(
            &initrd,
            artifacts.host_initramfs((self.arch, self.host), guest, &plan.to_string())?,
        )?;
        Ok(initrd)
    }

    /// A folder of this run's own; kept when the run fails, for its logs.
    fn with_run_dir<T>(
        &self,
        artifacts: &Artifacts,
        work: impl FnOnce(&Path) -> Result<T>,
    ) -> Result<T> {
        static RUNS: AtomicU32 = AtomicU32::new(0);
        let number = RUNS.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{number}", std::process::id());
        let dir = artifacts.cache.dir().join("runs").join(name);
        crate::cache::remove_tree(&dir)?;
        fs::create_dir_all(&dir)?;
        let result = work(&dir);
        if result.is_ok() && std::env::var_os("LAB_KEEP").is_none() {
            crate::cache::remove_tree(&dir)?;
        }
        result
    }

    fn results(&self, text: &str, console: &Path) -> Result<Vec<ScenarioReport>> {
        let results: Vec<ScenarioReport> = result_port::results(text)
            .map(|line| {
                serde_json::from_str(line.trim()).with_context(|| format!("result line '{line}'"))
            })
            .collect::<Result<_>>()?;
        if let Some(host) = results.iter().find(|result| result.scenario == "host") {
            bail!("the host failed: {}", host.verdict.failed().join("; "));
        }
        for name in &self.scenarios {
            ensure!(
                results.iter().any(|result| result.scenario == *name),
                "the host ended without a result for '{name}'; its console is in {}",
                console.display()
            );
        }
        Ok(results)
    }
}

/// A file that the emulated host can run.
fn arm64_program(name: &str) -> Result<PathBuf, String> {
    // The start of an ELF file: magic number, 64 bits, little endian; its machine.
    const ELF: &[u8] = b"\x7fELF\x02\x01";
    const AARCH64: [u8; 2] = 183_u16.to_le_bytes();
    let start = fs::File::open(name).and_then(|mut file| {
        let mut start = [0; 20];
        file.read_exact(&mut start).map(|()| start)
    });
    match start {
        Ok(start) if start.starts_with(ELF) && start.ends_with(&AARCH64) => Ok(name.into()),
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => Err(error.to_string()),
        _ => Err("not a program for arm64; name one that was built for aarch64 Linux".to_owned()),
    }
}

/// The contents of the package for this architecture, unpacked below `dir`.
fn unpacked(artifacts: &Artifacts, dir: &Path, arch: Arch) -> Result<PathBuf> {
    let name = format!(
        "vcpufreq_{}_{}.deb",
        env!("CARGO_PKG_VERSION"),
        arch.debian()
    );
    let made = artifacts.repo().join("out/packages").join(&name);
    // Where the root sees it.
    let archive = dir.join(&name);
    fs::copy(&made, &archive)
        .with_context(|| format!("cannot copy {}: run make packages first", made.display()))?;
    let root = &artifacts.root;
    let to = dir.join("package");
    let args = ["-x", &root.inside(&archive)?, &root.inside(&to)?];
    root.run("unpacking the package", "dpkg-deb", &args)?;
    Ok(to)
}

#[cfg(test)]
mod tests {
    //! A program that the emulated host can't run is refused before it boots. A bound of the bench that
    //! doesn't hold is a failure.
    use serde_json::json;
    use vcpufreq_tests::LabVerdict;

    use super::*;

    #[test]
    fn a_bound_that_does_not_hold_is_a_failure() {
        for (held, wanted) in [
            (json!(true), true),
            (json!(null), true),
            (json!(false), false),
        ] {
            let figures = json!({ "report": { "bounds": [{ "held": held }] } });
            let report = BootReport {
                results: vec![ScenarioReport {
                    scenario: "bench".to_owned(),
                    verdict: LabVerdict::with_figures(figures).check("one", true, ()),
                }],
                took_s: Vec::new(),
                wall: Duration::ZERO,
                is_kept: false,
            };
            assert_eq!(report.held(), wanted, "{held}");
        }
    }

    #[test]
    fn programs_for_another_machine_are_refused() {
        let own = std::env::temp_dir().join(format!("vcpufreq-lab-elf-{}", std::process::id()));
        let refused = |bytes: &[u8]| {
            fs::write(&own, bytes).unwrap();
            let said = arm64_program(own.to_str().unwrap());
            fs::remove_file(&own).unwrap();
            said.err()
        };
        let of = |machine: u8| {
            [
                b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0",
                &[machine, 0][..],
            ]
            .concat()
        };
        assert_eq!(refused(&of(183)), None);
        for bytes in [&of(62)[..], b"", b"#!/bin/sh\n", &of(183)[..19]] {
            assert!(refused(bytes).unwrap().contains("not a program for arm64"));
        }
        let missing = arm64_program("/nonexistent").unwrap_err();
        assert!(missing.contains("No such file"), "{missing}");
    }
}
