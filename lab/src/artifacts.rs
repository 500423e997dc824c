// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What this checkout contributes to the lab: programs for the emulated
//! hosts, and kernel modules for host and guest.

use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result, anyhow};

use crate::arch::Arch;
use crate::boot::{Driver, HostPart};
use crate::cache::{Cache, key};
use crate::cross;
use crate::initramfs::Initramfs;
use crate::kernel::{Flavor, Kernel, ModuleSource};
use crate::known::KnownVersions;
use crate::out;
use crate::progress::Step;
use crate::root::Root;
use crate::tools::RT_APP;
use crate::tree::RootUse;
use crate::unfetched::Unfetched;
use crate::{board, debian, libvirt, monitoring, own_kernel, perfetto, qemu, systemd, tools};

pub const HOST_MODULES: ModuleSource = ModuleSource {
    name: "lab-modules",
    folders: &["lab/modules", "module.mk"],
};
const HOST_MODULE: ModuleSource = ModuleSource {
    name: "host-module",
    folders: &["host-bpf/module", "abi", "module.mk"],
};
const RT_MODULE: ModuleSource = ModuleSource {
    name: "rt-module",
    folders: &["rt/module", "module.mk"],
};
const GUEST_MODULES: ModuleSource = ModuleSource {
    name: "guest-driver",
    folders: &["guest-driver", "abi", "module.mk"],
};

const BPF: ModuleSource = ModuleSource {
    name: "bpf",
    folders: &["host-bpf/bpf", "abi"],
};

/// The root and what was built with it.
#[derive(Debug)]
pub struct Artifacts {
    /// The cache folder.
    pub cache: Cache,
    /// The toolchain root.
    pub root: Root,
    /// What that is for.
    pub for_use: RootUse,
    repo: PathBuf,
    /// Whose programs are built.
    built: Arch,
}

/// What goes into a host's initial file system besides what each has.
#[derive(Debug, Clone, Copy)]
pub struct HostContents<'a> {
    /// The guest's kernel.
    pub flavor: Flavor,
    /// What the host has besides.
    pub parts: &'a [HostPart],
    /// A package's contents, whose program and units the host has in place of the build's.
    pub package: Option<&'a Path>,
    /// A crosvm for arm64, for the scenario `peer`.
    pub crosvm: Option<&'a Path>,
    /// The guests' driver, a module's name.
    pub driver: &'a str,
}

impl Artifacts {
    /// Prepares everything that runs on hosts of this architecture need.
    pub fn prepare(repo: &Path, arch: Arch, for_use: RootUse) -> Result<Self> {
        let cache = Cache::open()?;
        cache.prune_runs()?;
        let root = Root::prepare(&cache, repo, for_use)?;
        KnownVersions::read(repo)?.greet(&root)?;
        out::taken(root.taken()?);
        let artifacts = Self {
            cache,
            root,
            for_use,
            repo: repo.to_path_buf(),
            built: arch,
        };
        // The last crates compile one after the other and leave a CPU free for the modules, which
        // nearly every run needs.
        let (programs, modules) = thread::scope(|scope| {
            let modules = scope.spawn(|| -> Result<()> {
                let kernel = artifacts.kernel(arch, Flavor::Standard)?;
                for source in [HOST_MODULES, HOST_MODULE, GUEST_MODULES] {
                    artifacts.own_modules(&kernel, source)?;
                }
                Ok(())
            });
            let tools = (&artifacts.cache, &artifacts.root);
            let programs = cross::build(tools, repo, arch, for_use);
            (programs, modules.join())
        });
        modules.map_err(|_| anyhow!("building the modules panicked"))??;
        programs?;
        Ok(artifacts)
    }

    /// Builds the programs for this architecture, if they aren't those that all runs need.
    pub fn require(&self, arch: Arch) -> Result<()> {
        if arch == self.built {
            return Ok(());
        }
        cross::build((&self.cache, &self.root), &self.repo, arch, self.for_use)
    }

    /// One of the programs that are built.
    fn program(&self, arch: Arch, name: &str) -> Result<PathBuf> {
        let folder = cross::programs((&self.cache, &self.root), &self.repo, arch, self.for_use)?;
        Ok(folder.join(name))
    }

    /// What checks run with.
    pub fn tools(&self) -> (&Cache, &Root) {
        (&self.cache, &self.root)
    }

    /// The host's initial file system, with the guest's kernel and initial
    /// file system in it, and `plan` as `/lab/plan.json`.
    pub fn host_initramfs(
        &self,
        (arch, host): (Arch, Flavor),
        guest: HostContents<'_>,
        plan: &str,
    ) -> Result<Vec<u8>> {
        let kernel = self.kernel(arch, host)?;
        let guest_kernel = self.kernel(arch, guest.flavor)?;
        let has = |part| guest.parts.contains(&part);
        for part in guest.parts {
            self.root.require(part.needs(arch))?;
        }
        let mut programs = Vec::new();
        if has(HostPart::Systemd) {
            programs.extend(systemd::PROGRAMS);
        }
        if has(HostPart::Qemu) {
            programs.extend(qemu::programs(arch));
        }
        let mut archive = self.base(&kernel, guest.parts, &programs)?;
        if has(HostPart::Qemu) {
            qemu::add_roms(&mut archive, &self.root, arch)?;
        }
        for path in host_modules(arch) {
            self.add_own_module(&mut archive, &kernel, path)?;
        }
        if has(HostPart::Firmware) {
            qemu::add_firmware(&mut archive, &self.cache, &self.root)?;
        }
        if has(HostPart::Libvirt) {
            libvirt::add(&mut archive, &self.cache, &self.root)?;
        }
        if has(HostPart::Monitoring) {
            monitoring::add(&mut archive, self.tools(), &self.repo)?;
        }
        if has(HostPart::Perfetto) {
            perfetto::add(&mut archive, self.tools(), &self.repo)?;
        }
        let program = match guest.package {
            Some(package) => package.join("usr/bin/vcpufreq"),
            None => self.program(arch, "vcpufreq")?,
        };
        archive.program("bin/vcpufreq", &program)?;
        if let Some(crosvm) = guest.crosvm {
            archive.program("bin/crosvm", crosvm)?;
        }
        if self.for_use == RootUse::Tests {
            for object in bpf_objects(&self.cache, &self.root, &self.repo)? {
                let name = object.file_name().and_then(|name| name.to_str());
                let name = name.context("object name")?;
                archive.file(&format!("lab/bpf/{name}"), &std::fs::read(&object)?)?;
            }
        }
        for source in [HOST_MODULES, HOST_MODULE] {
            add_modules(&mut archive, &self.own_modules(&kernel, source)?)?;
        }
        if has(HostPart::Systemd) {
            let units = match guest.package {
                Some(package) => package.join("usr").join(systemd::UNITS),
                None => self.repo.join("docs"),
            };
            systemd::add(&mut archive, self.root.dir(), &units)?;
        }
        if has(HostPart::Board) {
            let mut folders = vec![self.guest_driver(&kernel)?];
            folders.extend(self.mainline_driver(&kernel, guest.driver)?);
            let mut files = folders
                .into_iter()
                .map(|folder| folder.join(format!("{}.ko", guest.driver)));
            let file = files
                .find(|file| file.exists())
                .context(guest.driver.to_owned())?;
            board::add(&mut archive, &kernel, &file)?;
        }
        archive.file("lab/plan.json", plan.as_bytes())?;
        archive.program("lab/guest-kernel", &guest_kernel.image)?;
        if has(HostPart::Disk) {
            self.add_disk_initramfs(&mut archive, &kernel, &guest_kernel)?;
        }
        archive.file(
            "lab/guest-initramfs",
            &self.guest_initramfs((&guest_kernel, guest.flavor), guest)?,
        )?;
        archive.finish()
    }

    fn guest_initramfs(
        &self,
        (kernel, flavor): (&Kernel, Flavor),
        contents: HostContents<'_>,
    ) -> Result<Vec<u8>> {
        let mut archive = self.base(kernel, contents.parts, &[])?;
        // The kernel for protected guests has them built in.
        if contents.parts.contains(&HostPart::DiskModules) && flavor != Flavor::Protected {
            for path in tools::DISK_MODULES {
                self.add_own_module(&mut archive, kernel, path)?;
            }
        }
        add_modules(&mut archive, &self.guest_driver(kernel)?)?;
        if self.for_use == RootUse::Tests {
            if let Some(mainline) = self.mainline_driver(kernel, contents.driver)? {
                add_modules(&mut archive, &mainline)?;
            }
        }
        archive.finish()
    }

    /// The folder of the kernel's own driver's module, which guests for x86-64 lack: it takes its
    /// registers from a device tree. Without the kernel's source, guests with another driver go
    /// without.
    fn mainline_driver(&self, kernel: &Kernel, driver: &str) -> Result<Option<PathBuf>> {
        if kernel.arch == Arch::X86_64 {
            return Ok(None);
        }
        match kernel.mainline_driver(&self.cache, &self.root) {
            Err(error) if error.is::<Unfetched>() && driver != Driver::Mainline.module() => {
                Ok(None)
            }
            folder => folder.map(Some),
        }
    }

    /// What host and guest have, and these of Debian's programs. The demo runs none of those.
    fn base(&self, kernel: &Kernel, parts: &[HostPart], programs: &[&str]) -> Result<Initramfs> {
        let mut archive = Initramfs::new()?;
        let arch = kernel.arch;
        archive.program("init", &self.agent(arch)?)?;
        archive.program("bin/vcpufreq-load", &self.program(arch, "vcpufreq-load")?)?;
        self.add_shell(&mut archive, arch)?;
        for path in [
            "drivers/cpufreq/cpufreq_userspace",
            "drivers/cpufreq/cpufreq_powersave",
            "fs/configfs/configfs",
            "drivers/block/null_blk/null_blk",
        ] {
            self.add_own_module(&mut archive, kernel, path)?;
        }
        if self.for_use == RootUse::Demo {
            return Ok(archive);
        }
        let mut programs = programs.to_vec();
        // The toolchain root has it for arm64 alone.
        if arch == Arch::Arm64 && self.root.require(&[RT_APP]).is_ok() {
            programs.push("bin/rt-app");
        }
        let fio = match parts.contains(&HostPart::Fio) {
            true => Some(tools::fio(&self.cache, &self.root)?),
            false => None,
        };
        programs.extend(fio.as_ref().map(|_| tools::FIO));
        if parts.contains(&HostPart::Tools) {
            programs.extend(tools::PROGRAMS);
            tools::add_applets(&mut archive)?;
            for path in tools::MODULES {
                self.add_own_module(&mut archive, kernel, path)?;
            }
            add_modules(&mut archive, &self.own_modules(kernel, RT_MODULE)?)?;
        }
        debian::add(&mut archive, &self.root, (arch, fio.as_deref()), &programs)?;
        Ok(archive)
    }

    /// The kernel of this flavor; builds one of the lab's own when it isn't there yet.
    pub fn kernel(&self, arch: Arch, flavor: Flavor) -> Result<Kernel> {
        match (arch, own_kernel::name(flavor)) {
            (Arch::X86_64, _) => Kernel::find_x86(&self.cache, &self.root, flavor),
            (_, Some(name)) => own_kernel::built(&self.cache, &self.root, &self.repo, name),
            (_, None) => Kernel::find(&self.root, flavor),
        }
    }

    /// The checkout.
    pub fn repo(&self) -> &Path {
        &self.repo
    }

    /// What carries scenarios out, on the host and in the guest.
    pub fn agent(&self, arch: Arch) -> Result<PathBuf> {
        self.program(arch, "vcpufreq-tests")
    }

    /// The folder of the guest driver's module.
    pub fn guest_driver(&self, kernel: &Kernel) -> Result<PathBuf> {
        self.own_modules(kernel, GUEST_MODULES)
    }

    /// Adds a shell.
    pub fn add_shell(&self, archive: &mut Initramfs, arch: Arch) -> Result<()> {
        archive.program("bin/busybox", &self.root.dir().join(busybox(arch)))?;
        archive.link("bin/sh", "busybox")
    }

    /// Adds a module of the kernel's own.
    pub fn add_own_module(
        &self,
        archive: &mut Initramfs,
        kernel: &Kernel,
        path: &str,
    ) -> Result<()> {
        let module = kernel.own_module(&self.cache, &self.root, path)?;
        let name = path.rsplit('/').next().unwrap_or(path);
        archive.file(&format!("lab/modules/{name}.ko"), &module)
    }

    fn own_modules(&self, kernel: &Kernel, source: ModuleSource) -> Result<PathBuf> {
        kernel.modules(&self.cache, &self.root, &self.repo, &source)
    }
}

/// busybox, linked statically, by its path in the toolchain root.
pub fn busybox(arch: Arch) -> &'static str {
    match arch {
        Arch::Arm64 => "usr/bin/busybox",
        Arch::X86_64 => "opt/amd64/busybox",
    }
}

/// Modules of the kernel's own that a host needs for its guests.
fn host_modules(arch: Arch) -> &'static [&'static str] {
    match arch {
        // Its kernel has KVM built in.
        Arch::Arm64 => &[],
        Arch::X86_64 => &[
            "virt/lib/irqbypass",
            "drivers/crypto/ccp/ccp",
            "arch/x86/kvm/kvm",
            "arch/x86/kvm/kvm-amd",
        ],
    }
}

/// Adds every module in a folder.
fn add_modules(archive: &mut Initramfs, dir: &Path) -> Result<()> {
    for file in crate::kernel::files_below(dir)? {
        if file.extension().is_some_and(|end| end == "ko") {
            let name = file
                .file_name()
                .and_then(|name| name.to_str())
                .context("module name")?;
            archive.file(&format!("lab/modules/{name}"), &std::fs::read(&file)?)?;
        }
    }
    Ok(())
}

/// The BPF objects of the tests, by the root's clang.
fn bpf_objects(cache: &Cache, root: &Root, repo: &Path) -> Result<Vec<PathBuf>> {
    let mut parts = BPF.content(repo)?;
    parts.push(root.id().into_bytes());
    let dir = cache.entry("bpf", &key(parts.iter().map(Vec::as_slice)), |to| {
        let step = Step::start("BPF objects of the tests");
        BPF.copy(repo, to)?;
        let folder = format!("{}/host-bpf/bpf", root.inside(to)?);
        let args = ["-C", &folder, "tests"];
        root.run("building the BPF objects", "make", &args)?;
        step.done();
        Ok(())
    })?;
    let mut objects = crate::kernel::files_below(&dir)?;
    objects.retain(|file| file.to_string_lossy().ends_with(".bpf.o"));
    Ok(objects)
}
