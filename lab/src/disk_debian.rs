// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A clean Debian system on a disk, with systemd and the kernel that the lab boots, and a second disk
//! with the packages that apt finds there: what a host has before this project's packages are
//! installed.
//!
//! This machine can't run the packages' scripts for arm64, and isn't what those for amd64 expect. So
//! the packages are unpacked here, the emulated host configures them, once, and the cache keeps the
//! disk.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::arch::Arch;
use crate::artifacts::busybox;
use crate::boot::{DEFAULT_CPU, DEFAULT_GIC};
use crate::cache::{Cache, key};
use crate::child_output;
use crate::emulator::{Board, Disk, EmulatorOutcome};
use crate::initramfs::Initramfs;
use crate::kernel::{Flavor, Kernel};
use crate::packages;
use crate::progress::Step;
use crate::root::Root;
use crate::topology::Topology;

/// What a small Debian system is, and what its kernel's packages want. Release and headers of the
/// kernel come beside these.
const SYSTEM: [&str; 3] = [
    "?essential",
    "?priority(required)",
    "apt,systemd-sysv,udev,dbus,kmod",
];
/// Two CPUs of each kind with a clock for both. On a clock of one CPU schedutil holds what another
/// task has raised the frequency to, while the vCPU is busy.
const TOPOLOGY: &str = "2+2";
/// This checkout's part.
const FOLDER: &str = "lab/debian";
/// For a root file system on a disk, of the kernel's own.
const MODULES: [&str; 5] = [
    "drivers/block/virtio_blk",
    "fs/ext4/ext4",
    "fs/jbd2/jbd2",
    "fs/mbcache",
    "lib/crc/crc16",
];
/// Real time that configuring may take.
const AT_MOST: Duration = Duration::from_secs(3600);
/// Measured, in MiB: packages and tree 950, disks 1,030, and a run's copy of one.
const NEEDED_MIB: u64 = 3_000;
/// All else that the disks are made by.
const RECIPE: &str = "1";

/// The system, and where it boots.
#[derive(Debug)]
pub struct DiskDebian<'a> {
    cache: &'a Cache,
    root: &'a Root,
    repo: &'a Path,
    kernel: Kernel,
    /// The folder of the two disks.
    disks: PathBuf,
}

/// What a host has beside its disks.
#[derive(Debug, Clone, Copy)]
pub struct Start<'a> {
    /// Its first program, by its path on the disk or below `/lab`.
    pub program: &'a str,
    /// Files below `/lab`: name and content.
    pub files: &'a [(String, Vec<u8>)],
}

impl<'a> DiskDebian<'a> {
    /// The system in the cache; fetches and makes it when it isn't there.
    pub fn prepare(
        (cache, root): (&'a Cache, &'a Root),
        repo: &'a Path,
        arch: Arch,
    ) -> Result<Self> {
        let kernel = match arch {
            Arch::Arm64 => Kernel::find(root, Flavor::Standard)?,
            Arch::X86_64 => Kernel::find_x86(cache, root, Flavor::Standard)?,
        };
        let mut system = Self {
            cache,
            root,
            repo,
            kernel,
            disks: PathBuf::new(),
        };
        let id = root.id();
        let list = SYSTEM.join(" ");
        let offered = offered(arch);
        let parts = [&*list, &offered, &id].map(str::as_bytes);
        let name = format!("debian-{}", arch.debian());
        let fetched = cache.entry(&format!("{name}-packages"), &key(parts), |to| {
            system.fetch(to)
        })?;
        let mut parts = vec![
            RECIPE.into(),
            fetched.display().to_string().into_bytes(),
            settings(arch).into_bytes(),
        ];
        for name in ["init", "make", "second-stage"] {
            parts.push(system.own(name)?);
        }
        let key = key(parts.iter().map(Vec::as_slice));
        system.disks = cache.entry(&name, &key, |to| system.make(&fetched, to))?;
        Ok(system)
    }

    /// The kernel that it boots.
    pub fn kernel(&self) -> &Kernel {
        &self.kernel
    }

    /// Its CPUs.
    pub fn topology(&self) -> Result<Topology> {
        Topology::named(TOPOLOGY, &self.repo.join("lab/topologies"))
    }

    /// A copy of the system's disk, in a folder of the cache.
    pub fn copy(&self, to: &Path) -> Result<PathBuf> {
        let disk = to.join("system");
        // Most of it is holes.
        let mut command = Command::new("cp");
        command.arg("--sparse=always");
        command.arg(self.disks.join("system")).arg(&disk);
        child_output::quietly(&mut command, "copying a Debian system's disk")?;
        Ok(disk)
    }

    /// Boots a disk; `dir` is for the files of this boot.
    pub fn boot(
        &self,
        (disk, dir): (&Path, &Path),
        start: Start<'_>,
        limit: Duration,
        step: &Step,
    ) -> Result<EmulatorOutcome> {
        self.boot_with((disk, &self.disks.join("archive"), dir), start, limit, step)
    }

    fn boot_with(
        &self,
        (disk, archive, dir): (&Path, &Path, &Path),
        start: Start<'_>,
        limit: Duration,
        step: &Step,
    ) -> Result<EmulatorOutcome> {
        let topology = self.topology()?;
        let board = Board {
            root: self.root,
            cache: self.cache,
            topology: &topology,
            kernel: &self.kernel,
            cpu: DEFAULT_CPU,
            gic: DEFAULT_GIC,
            protected: false,
            disks: vec![
                Disk {
                    image: disk.to_owned(),
                    writable: true,
                },
                Disk {
                    image: archive.to_owned(),
                    writable: false,
                },
            ],
            parallel: false,
            gib_page: false,
            isolated: None,
        };
        let initrd = dir.join("initramfs");
        fs::write(&initrd, self.initrd(start)?)?;
        board.run(&initrd, dir, limit, |far| {
            if let Some(part) = far.part {
                step.note(&part.what);
            }
        })
    }

    fn initrd(&self, start: Start<'_>) -> Result<Vec<u8>> {
        let mut archive = Initramfs::new()?;
        archive.program("init", &self.repo.join(FOLDER).join("init"))?;
        let busybox = self.root.dir().join(busybox(self.kernel.arch));
        archive.program("bin/busybox", &busybox)?;
        archive.link("bin/sh", "busybox")?;
        for path in MODULES {
            let module = self.kernel.own_module(self.cache, self.root, path)?;
            let name = path.rsplit('/').next().unwrap_or(path);
            archive.file(&format!("drivers/{name}.ko"), &module)?;
        }
        archive.file("lab/start", start.program.as_bytes())?;
        let settings = settings(self.kernel.arch);
        archive.file("lab/settings", settings.as_bytes())?;
        for (name, bytes) in start.files {
            archive.file(&format!("lab/{name}"), bytes)?;
        }
        archive.finish()
    }

    /// A file of the checkout's folder.
    pub fn own(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.repo.join(FOLDER).join(name);
        fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    /// Makes disks of the packages in `fetched`, and has the system configured.
    fn make(&self, fetched: &Path, to: &Path) -> Result<()> {
        let script = format!("/src/{FOLDER}/make");
        let (packages, folder) = (self.root.inside(fetched)?, self.root.inside(to)?);
        let args = [script.as_str(), &packages, &folder];
        self.root
            .run("making a Debian system's disks", "sh", &args)?;
        let step = Step::start(format!("Debian for {}", self.kernel.arch.debian()));
        step.tell("configured in the emulated host, 2 to 5 minutes");
        let files = [("second-stage".to_owned(), self.own("second-stage")?)];
        let start = Start {
            program: "/lab/second-stage",
            files: &files,
        };
        let disks = (to.join("system"), to.join("archive"));
        let outcome = self.boot_with((&disks.0, &disks.1, to), start, AT_MOST, &step)?;
        ensure!(
            outcome.results.contains("\"held\":true"),
            "Debian was not installed: {}",
            fs::read_to_string(outcome.console).unwrap_or_default()
        );
        step.done();
        Ok(())
    }

    /// The packages of the system, unpacked into `tree`, their names in `base`; these and the
    /// offered ones in `archives`.
    fn fetch(&self, to: &Path) -> Result<()> {
        self.cache.require_free(NEEDED_MIB)?;
        fs::create_dir(to.join("archives"))?;
        let Kernel { release, arch, .. } = &self.kernel;
        let arch = *arch;
        let kernel = format!("linux-image-{release},linux-headers-{release}");
        let names = "cp $1/var/cache/apt/archives/*.deb $1/../archives";
        let base = "cd $1/../archives && ls *.deb | sed 's/_.*//' | sort -u > ../base";
        let offered = format!(
            r#"set -e; export APT_CONFIG=$MMDEBSTRAP_APT_CONFIG; cd $1/../archives
               apt-get -o Dir::State::status=/dev/null -o APT::Sandbox::User=root -s install {} |
                   sed -n 's/^Inst \([^ ]*\) .*/\1/p' |
                   xargs apt-get -o APT::Sandbox::User=root download"#,
            offered(arch)
        );
        let what = format!(
            "packages of Debian for {} (about 250 MB to fetch)",
            arch.debian()
        );
        let wanted = [&SYSTEM[..], &[&*kernel]].concat();
        packages::unpack(
            self.root,
            to,
            (arch, &what),
            &wanted,
            &[names, base, &offered],
        )
    }
}

/// What the project's packages depend on, and VMMs for `serve`: apt takes of these what it needs.
fn offered(arch: Arch) -> String {
    format!("dkms pahole gcc make {}", vmms(arch))
}

/// Debian's QEMU, and what its guests need beside it.
fn vmms(arch: Arch) -> &'static str {
    match arch {
        Arch::Arm64 => "qemu-system-arm device-tree-compiler",
        Arch::X86_64 => "qemu-system-x86",
    }
}

/// What scripts on the host take, beside what they find there.
fn settings(arch: Arch) -> String {
    let (console, port, machine, path, doctor) = match arch {
        Arch::Arm64 => ("ttyAMA0", "ttyAMA1", "virt", "ioeventfd|exit", "0 level=ok"),
        // Its first line names run as what it lacks.
        Arch::X86_64 => ("ttyS0", "ttyS1", "q35", "shm", "1 level=limit"),
    };
    format!(
        "export debian={} machine={} console={console} port=/dev/{port} vmms='{}'\n\
         export qemu='{} -machine {machine}' path='{path}' doctor={doctor}\n",
        arch.debian(),
        arch.machine(),
        vmms(arch),
        arch.qemu(),
    )
}
