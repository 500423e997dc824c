// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest's initial ramdisk, made in memory: nothing is left of it when this process ends.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use cpio::newc::{Builder, ModeFileType, trailer};
use nix::sys::memfd::{MFdFlags, memfd_create};
use vcpufreq_host::HostRoot;

/// How the names of packed modules end, and what the kernel and a program call the packing.
const PACKED: [(&str, &str); 3] = [(".gz", "gzip"), (".xz", "xz"), (".zst", "zstd")];
/// What the kernel itself unpacks; not there without `CONFIG_MODULE_DECOMPRESS`.
const BY_KERNEL: &str = "sys/module/compression";

/// The archive, as far as it is written (Linux `Documentation/driver-api/early-userspace/
/// buffer-format.rst`).
#[derive(Debug)]
pub struct Ramdisk {
    file: File,
    folders: BTreeSet<PathBuf>,
}

impl Ramdisk {
    /// With a console alone.
    ///
    /// # Errors
    /// The kernel's, as all others here.
    pub fn new() -> anyhow::Result<Self> {
        let file = memfd_create("vcpufreq-ramdisk", MFdFlags::MFD_CLOEXEC)
            .context("can't make a ramdisk in memory")?;
        let mut ramdisk = Self {
            file: file.into(),
            folders: BTreeSet::new(),
        };
        ramdisk.folder(Path::new("dev"))?;
        // The kernel opens it for the first process.
        let console = Builder::new("dev/console").rdev_major(5).rdev_minor(1);
        ramdisk.entry(console, (ModeFileType::Char, 0o600), &[])?;
        Ok(ramdisk)
    }

    /// Adds this program, under the load program's name.
    ///
    /// # Errors
    /// When it is linked with libraries, which the guest doesn't have.
    pub fn load_program(&mut self) -> anyhow::Result<()> {
        let maps = fs::read_to_string("/proc/self/maps").context("/proc/self/maps")?;
        ensure!(
            !maps.lines().any(is_library),
            "this program is linked with shared libraries, which a guest doesn't have; use the packages' program"
        );
        let program = Path::new("/proc/self/exe");
        self.copy(&format!("bin/{}", vcpufreq_bench::LOAD), program, 0o755)
    }

    /// Adds modules, packed as the host's kernel takes them; their paths in the guest.
    ///
    /// # Errors
    /// Also when one can't be read.
    pub fn modules(&mut self, root: &HostRoot, files: &[PathBuf]) -> anyhow::Result<Vec<String>> {
        let mut paths = Vec::new();
        for file in files {
            let (name, bytes) = loadable(root, file)?;
            let name = format!("modules/{name}");
            self.file(&name, &bytes, 0o644)?;
            paths.push(format!("/{name}"));
        }
        Ok(paths)
    }

    /// Adds a file's content.
    ///
    /// # Errors
    /// Also when it can't be read.
    pub fn copy(&mut self, name: &str, file: &Path, mode: u32) -> anyhow::Result<()> {
        let bytes = fs::read(file).with_context(|| format!("can't read {}", file.display()))?;
        self.file(name, &bytes, mode)
    }

    fn file(&mut self, name: &str, bytes: &[u8], mode: u32) -> anyhow::Result<()> {
        self.folder(Path::new(name).parent().unwrap_or(Path::new("")))?;
        self.entry(Builder::new(name), (ModeFileType::Regular, mode), bytes)
    }

    /// The whole archive.
    ///
    /// # Errors
    /// The kernel's.
    pub fn finish(self) -> anyhow::Result<File> {
        trailer(&self.file).context("writing a ramdisk")?;
        Ok(self.file)
    }

    fn folder(&mut self, path: &Path) -> anyhow::Result<()> {
        if path.as_os_str().is_empty() || !self.folders.insert(path.to_owned()) {
            return Ok(());
        }
        self.folder(path.parent().unwrap_or(Path::new("")))?;
        let name = path.to_str().context("a folder's name")?;
        self.entry(Builder::new(name), (ModeFileType::Directory, 0o755), &[])
    }

    fn entry(
        &mut self,
        entry: Builder,
        (kind, mode): (ModeFileType, u32),
        bytes: &[u8],
    ) -> anyhow::Result<()> {
        let size = u32::try_from(bytes.len()).context("a file of over 4 GiB")?;
        let entry = entry.mode(mode).set_mode_file_type(kind);
        let mut writer = entry.write(&self.file, size);
        writer.write_all(bytes)?;
        writer.finish().context("writing a ramdisk")?;
        Ok(())
    }
}

/// A module's file name and content, unpacked where its kernel can't do that.
fn loadable(root: &HostRoot, file: &Path) -> anyhow::Result<(String, Vec<u8>)> {
    let name = file.file_name().context("a module without a name")?;
    let name = name.to_string_lossy();
    let known = PACKED
        .iter()
        .find_map(|(end, by)| Some((name.strip_suffix(end)?, by)));
    let by_kernel = root.text(BY_KERNEL);
    let Some((plain, by)) = known.filter(|(_, by)| by_kernel.as_deref() != Some(by)) else {
        let bytes = fs::read(file).with_context(|| format!("can't read {}", file.display()))?;
        return Ok((name.into_owned(), bytes));
    };
    let unpacked = Command::new(by).arg("-dc").arg(file).output();
    let bytes = unpacked.ok().filter(|output| output.status.success());
    let bytes = bytes.with_context(|| {
        let file = file.display();
        format!(
            "this kernel can't unpack {file}, for it lacks CONFIG_MODULE_DECOMPRESS; install {by}"
        )
    })?;
    Ok((plain.to_owned(), bytes.stdout))
}

/// Whether a line of `/proc/self/maps` is of a shared library.
fn is_library(line: &str) -> bool {
    let name = line.rsplit('/').next().filter(|_| line.contains('/'));
    name.is_some_and(|name| name.ends_with(".so") || name.contains(".so."))
}

#[cfg(test)]
mod tests {
    //! Promises: a file is behind the folders that it is in, and has its content; a program of
    //! shared libraries is known as such; a module is packed only where its kernel unpacks it.
    use std::io::{Read as _, Seek as _};

    use vcpufreq_host::fakes::FakeHost;

    use super::*;

    /// `gzip -n` of `module`.
    const MODULE_GZ: &[u8] =
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xcb\xcdO)\xcdI\x05\x00(&$\x0c\x06\x00\x00\x00";

    #[test]
    fn a_module_is_unpacked_where_its_kernel_cannot() {
        let host = FakeHost::two_plus_two();
        host.write("a.ko.gz", MODULE_GZ);
        host.write("b.ko.gz", "damaged");
        let of = |name: &str| loadable(&host.root(), &host.root().path(name));
        let unpacked = of("a.ko.gz").unwrap();
        assert_eq!(unpacked, ("a.ko".to_owned(), b"module".to_vec()));
        let error = of("b.ko.gz").unwrap_err().to_string();
        assert!(
            error.ends_with("CONFIG_MODULE_DECOMPRESS; install gzip"),
            "{error}"
        );
        for (by_kernel, name) in [("xz", "a.ko"), ("gzip", "a.ko.gz")] {
            host.write(BY_KERNEL, by_kernel);
            assert_eq!(of("a.ko.gz").unwrap().0, name);
        }
    }

    #[test]
    fn a_library_is_told_from_a_folder() {
        for name in ["/lib/ld-linux-aarch64.so.1", "/usr/lib/libc.so"] {
            assert!(is_library(&format!("ffff-ffff r-xp 0 fe:00 1 {name}")));
        }
        for name in ["/opt/my.so.d/vcpufreq", "[vdso]", ""] {
            assert!(!is_library(&format!("ffff-ffff r-xp 0 fe:00 1 {name}")));
        }
    }

    #[test]
    fn a_file_is_in_its_folders() {
        let mut ramdisk = Ramdisk::new().unwrap();
        let from = tempfile::NamedTempFile::new().unwrap();
        fs::write(from.path(), "content").unwrap();
        ramdisk.copy("a/b/file", from.path(), 0o644).unwrap();
        ramdisk.copy("a/other", from.path(), 0o755).unwrap();
        let mut file = ramdisk.finish().unwrap();
        file.rewind().unwrap();
        let mut names = Vec::new();
        loop {
            let mut reader = cpio::newc::Reader::new(file).unwrap();
            if reader.entry().is_trailer() {
                break;
            }
            let mut content = String::new();
            reader.read_to_string(&mut content).unwrap();
            names.push((reader.entry().name().to_owned(), content));
            file = reader.finish().unwrap();
        }
        let names: Vec<_> = names
            .iter()
            .map(|(name, text)| (&**name, &**text))
            .collect();
        let expected = [("dev", ""), ("dev/console", ""), ("a", ""), ("a/b", "")];
        let files = [("a/b/file", "content"), ("a/other", "content")];
        assert_eq!(names, [&expected[..], &files].concat());
    }
}
