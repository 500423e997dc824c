// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernels, and modules built for them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::arch::Arch;
use crate::cache::{Cache, key};
use crate::choice::{RootPart, x86_modules, x86_rt};
use crate::kernel_source;
use crate::known::KnownVersions;
use crate::packages;
use crate::progress::Step;
use crate::root::Root;

/// Which kernel: one of Debian's, or of the lab's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Flavor {
    /// `linux-image-arm64`.
    Standard,
    /// `linux-image-rt-arm64` or `-amd64`, with PREEMPT_RT.
    Rt,
    /// Debian stable's own, which has no uclamp; the others are from backports.
    Old,
    /// The lab's own, with KASAN, kmemleak, UBSAN and lockdep.
    Checked,
    /// The lab's own, with KCSAN.
    Kcsan,
    /// The lab's own, small, for protected guests.
    Protected,
}

impl Flavor {
    /// The part of the root that has it, if the root may be without.
    pub fn part(self, arch: Arch) -> Option<RootPart> {
        match self {
            Self::Rt if arch == Arch::X86_64 => Some(RootPart::X86Rt),
            Self::Rt => Some(RootPart::RtKernel),
            Self::Old => Some(RootPart::OldKernel),
            Self::Standard | Self::Checked | Self::Kcsan | Self::Protected => None,
        }
    }
}

/// A kernel.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// As `uname -r` prints it.
    pub release: String,
    /// The boot image, as seen from outside the root.
    pub image: PathBuf,
    /// Of what it is for.
    pub arch: Arch,
    /// What modules are built against, as seen from inside the root.
    pub headers: String,
    /// The folder of its own modules, packed.
    pub packed: PathBuf,
    /// Its own modules, where they aren't packed ones in the root.
    pub unpacked: Option<PathBuf>,
}

impl Kernel {
    /// Finds Debian's kernel of this flavor.
    pub fn find(root: &Root, flavor: Flavor) -> Result<Self> {
        if let Some(why) = flavor.part(Arch::Arm64).and_then(|part| root.lacks(part)) {
            bail!("no {flavor:?} kernel: {why}");
        }
        let release = match flavor {
            Flavor::Standard => Some(format!("{}-arm64", root.kernel())),
            Flavor::Rt => Some(format!("{}-rt-arm64", root.kernel())),
            Flavor::Old => root.old_kernel().map(|release| format!("{release}-arm64")),
            Flavor::Checked | Flavor::Kcsan | Flavor::Protected => None,
        };
        let release = release.with_context(|| format!("no {flavor:?} kernel in the root"))?;
        let image = root.dir().join(format!("boot/vmlinuz-{release}"));
        let headers = format!("/usr/src/linux-headers-{release}");
        Ok(Self {
            packed: packed(root.dir(), &release),
            arch: Arch::Arm64,
            release,
            image,
            headers,
            unpacked: None,
        })
    }

    /// Debian's kernel for x86-64, with PREEMPT_RT or without. What the toolchain root lacks of it
    /// is fetched now: its modules, and all of the one with PREEMPT_RT.
    pub fn find_x86(cache: &Cache, root: &Root, flavor: Flavor) -> Result<Self> {
        let (parts, name, packages) = match flavor {
            Flavor::Standard => (
                vec![RootPart::X86Guest, RootPart::X86Host],
                "modules-amd64",
                x86_modules(root.kernel()),
            ),
            Flavor::Rt => (
                vec![RootPart::X86Rt],
                "kernel-rt-amd64",
                x86_rt(root.kernel()),
            ),
            _ => {
                bail!("the lab has no {flavor:?} kernel for x86-64: leave --host and --guest out")
            }
        };
        if let Some(why) = parts.into_iter().find_map(|part| root.lacks(part)) {
            bail!("no kernel for x86-64: {why}");
        }
        let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
        let tree = packages::unpacked(cache, root, (Arch::X86_64, name), &packages)?;
        let rt = flavor == Flavor::Rt;
        let release = format!("{}{}-amd64", root.kernel(), if rt { "-rt" } else { "" });
        let headers = format!("/usr/src/linux-headers-{release}");
        Ok(Self {
            packed: packed(&tree, &release),
            arch: Arch::X86_64,
            image: match rt {
                true => tree.join(format!("usr/lib/modules/{release}/vmlinuz")),
                false => root.dir().join(format!("opt/amd64/vmlinuz-{release}")),
            },
            headers: match rt {
                true => root.inside(&tree)? + &headers,
                false => headers,
            },
            release,
            unpacked: None,
        })
    }

    /// Builds the out-of-tree modules in `source` (below this checkout)
    /// against this kernel; gives the folder with the `.ko` files.
    pub fn modules(
        &self,
        cache: &Cache,
        root: &Root,
        repo: &Path,
        source: &ModuleSource,
    ) -> Result<PathBuf> {
        let mut parts = vec![self.headers.clone().into_bytes(), root.id().into_bytes()];
        parts.extend(source.content(repo)?);
        let name = format!("{}-{}", source.name, self.release);
        cache
            .entry(&name, &key(parts.iter().map(Vec::as_slice)), |to| {
                let step = Step::start(format!("modules {} for {}", source.name, self.release));
                source.copy(repo, to)?;
                let main = source
                    .folders
                    .first()
                    .context("a module needs a source folder")?;
                let strict = strict(&KnownVersions::read(repo)?, &self.release);
                self.make(root, &to.join(main), strict)?;
                step.done();
                Ok(())
            })
            .map(|dir| dir.join(source.folders.first().unwrap_or(&"")))
    }

    /// The kernel's own driver for the same device, which Debian's kernels
    /// don't have: built from their source, unchanged; gives the folder with
    /// the `.ko` file.
    pub fn mainline_driver(&self, cache: &Cache, root: &Root) -> Result<PathBuf> {
        let source =
            kernel_source::unpacked(cache, root)?.join("drivers/cpufreq/virtual-cpufreq.c");
        let key = key([self.headers.as_bytes(), root.id().as_bytes()]);
        cache.entry(&format!("mainline-driver-{}", self.release), &key, |to| {
            fs::copy(&source, to.join("virtual-cpufreq.c"))?;
            fs::write(to.join("Kbuild"), "obj-m := virtual-cpufreq.o\n")?;
            self.make(root, to, &[])
        })
    }

    /// Builds the modules in a folder of the cache.
    fn make(&self, root: &Root, folder: &Path, options: &[&str]) -> Result<()> {
        let modules = format!("M={}", root.inside(folder)?);
        let mut args = vec!["-C", &self.headers, &modules];
        // Debian's name the place that they are installed at, and may be unpacked elsewhere.
        let place = format!("KBUILD_OUTPUT={}", self.headers);
        if self.unpacked.is_none() {
            args.push(&place);
        }
        args.extend(self.arch.make_variables());
        args.extend(options);
        args.push("modules");
        root.run("building kernel modules", "make", &args)?;
        Ok(())
    }

    /// A module of the kernel's own, decompressed.
    pub fn own_module(&self, cache: &Cache, root: &Root, path: &str) -> Result<Vec<u8>> {
        if let Some(modules) = &self.unpacked {
            let file = modules.join(format!("{path}.ko"));
            return fs::read(&file).with_context(|| file.display().to_string());
        }
        let packed = root.inside(&self.packed.join(format!("{path}.ko.xz")))?;
        let name = path.rsplit('/').next().unwrap_or(path);
        let key = key([packed.as_bytes(), root.id().as_bytes()]);
        let dir = cache.entry(&format!("module-{name}"), &key, |to| {
            let script = format!("xz -dc {packed} > {}/module.ko", root.inside(to)?);
            root.run("unpacking a kernel module", "sh", &["-ec", &script])?;
            Ok(())
        })?;
        let module = fs::read(dir.join("module.ko"))?;
        ensure!(!module.is_empty(), "module {path} is empty");
        Ok(module)
    }
}

/// What makes warnings of modules for this kernel errors, if the lab has run it.
fn strict(known: &KnownVersions, release: &str) -> &'static [&'static str] {
    match known.has_kernel(release) {
        true => &["W=1", "KCFLAGS=-Werror"],
        false => &[],
    }
}

/// The folder of a kernel's own modules below the tree at `root`.
fn packed(root: &Path, release: &str) -> PathBuf {
    root.join(format!("usr/lib/modules/{release}/kernel"))
}

/// A part of the checkout. Of modules, the first folder has the Kbuild file,
/// the others are what it includes from.
#[derive(Debug, Clone, Copy)]
pub struct ModuleSource {
    /// Name of the cache entry.
    pub name: &'static str,
    /// Folders below the checkout, or files.
    pub folders: &'static [&'static str],
}

impl ModuleSource {
    /// Path and content of each file, in turn: what a key is made of.
    pub fn content(&self, repo: &Path) -> Result<Vec<Vec<u8>>> {
        let mut content = Vec::new();
        for path in self.files(repo)? {
            content.push(path.display().to_string().into_bytes());
            content.push(fs::read(repo.join(path))?);
        }
        Ok(content)
    }

    /// Copies the files to where they are below `to`.
    pub fn copy(&self, repo: &Path, to: &Path) -> Result<()> {
        for path in self.files(repo)? {
            let target = to.join(&path);
            if let Some(folder) = target.parent() {
                fs::create_dir_all(folder)?;
            }
            fs::copy(repo.join(&path), &target)
                .with_context(|| format!("cannot copy {}", path.display()))?;
        }
        Ok(())
    }

    /// The files, relative to the checkout, without what a build in there
    /// left: Kbuild refuses a tree with products of another build.
    fn files(&self, repo: &Path) -> Result<Vec<PathBuf>> {
        const PRODUCTS: &[&str] = &[".o", ".ko", ".mod", ".mod.c", ".cmd", ".order", ".symvers"];
        let mut files = Vec::new();
        for folder in self.folders {
            let place = repo.join(folder);
            let found = if place.is_file() {
                vec![place]
            } else {
                files_below(&place)?
            };
            for file in found {
                let path = file.strip_prefix(repo)?;
                let name = path.to_string_lossy();
                if !PRODUCTS.iter().any(|end| name.ends_with(end)) {
                    files.push(path.to_path_buf());
                }
            }
        }
        Ok(files)
    }
}

/// All files below a folder, sorted, so that a key doesn't depend on the
/// order of the directory.
pub fn files_below(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![dir.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))?;
        for entry in entries {
            // A link to a folder is one too.
            let path = entry?.path();
            match path.is_dir() {
                true => folders.push(path),
                false => files.push(path),
            }
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    //! Promise: a module's warnings are errors with the kernels alone that the lab has run.
    use super::*;

    #[test]
    fn an_unknown_kernels_warnings_are_no_errors() {
        let repo = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let known = KnownVersions::read(&repo).unwrap();
        let release = format!("{}+deb13-arm64", known.linux[0]);
        assert_eq!(strict(&known, &release), ["W=1", "KCFLAGS=-Werror"]);
        assert_eq!(strict(&known, "99.1+deb13-arm64"), [""; 0]);
    }
}
