// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether the guest of a VMM that runs has booted a device tree, by the VMM's command line: another
//! guest uses the RAM in which the registers are to be.

use std::{
    ffi::{OsStr, OsString},
    fs,
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

use anyhow::{Context, bail, ensure};
use vcpufreq_dt::registers_in_ram;

use crate::{
    config::topology::read_tree,
    qemu_command::{Described, QemuCommand},
};

/// Checks that the guest of process `pid` has booted `tree`.
///
/// # Errors
/// When it has not, or that can't be known, in one line.
pub fn check(pid: u32, tree: &Path) -> anyhow::Result<()> {
    let words = fs::read(format!("/proc/{pid}/cmdline")).context("it has ended")?;
    let words = words.split(|byte| *byte == 0);
    let words: Vec<_> = words
        .map(|word| OsString::from_vec(word.to_vec()))
        .collect();
    match is_crosvm(&words) {
        true => check_crosvm(pid, &words, tree),
        false => check_qemu(pid, &words, tree),
    }
}

fn check_qemu(pid: u32, words: &[OsString], tree: &Path) -> anyhow::Result<()> {
    let command = QemuCommand::of_process(words)?;
    ensure!(
        !command.has_config_file(),
        "what its -readconfig reads isn't known; give QEMU -kernel and -dtb on its command line"
    );
    ensure!(
        command.kernel().is_some() && !command.has_firmware(),
        "its guest starts with firmware, which uses the RAM that the registers are in; give QEMU -kernel"
    );
    let Described::ByFile(its_tree) = command.described() else {
        bail!(
            "its guest has another device tree; give QEMU -dtb {}",
            tree.display()
        )
    };
    let id_of = |path: &Path| fs::metadata(path).map(|file| (file.dev(), file.ino()));
    let its_id = id_of(&file_of(pid, &its_tree)).with_context(|| {
        let shown = its_tree.display();
        format!("can't look at its -dtb {shown}; give QEMU an absolute path")
    });
    ensure!(
        its_id? == id_of(tree)?,
        "its guest has the device tree {}; give QEMU -dtb {}",
        its_tree.display(),
        tree.display()
    );
    Ok(())
}

fn is_crosvm(words: &[OsString]) -> bool {
    let program = words.first().map(Path::new).and_then(Path::file_name);
    program == Some(OsStr::new("crosvm"))
}

/// crosvm makes its guest's tree itself, and takes an overlay: that has the registers of `tree`.
fn check_crosvm(pid: u32, words: &[OsString], tree: &Path) -> anyhow::Result<()> {
    let has = |begin: &str| {
        let mut words = words.iter();
        words.any(|word| word.as_bytes().starts_with(begin.as_bytes()))
    };
    ensure!(
        !has("--bios"),
        "its guest starts with firmware, which uses the RAM that the registers are in; give crosvm a \
         kernel"
    );
    ensure!(
        !has("--protected-vm"),
        "a protected guest's RAM is its own; have crosvm's device instead: --virt-cpufreq-upstream"
    );
    let place = values(words, "--fdt-position").pop();
    ensure!(
        place.is_some_and(|place| place != "end"),
        "its guest's tree is in the RAM that the registers are in; give crosvm --fdt-position \
         after-payload"
    );
    let registers = registers_in_ram(&read_tree(tree)?)?;
    for overlay in overlays(words) {
        let shown = overlay.display();
        let found = read_tree(&file_of(pid, &overlay)).with_context(|| {
            format!("can't read its --device-tree-overlay {shown}; give crosvm an absolute path")
        });
        if registers.is_some() && registers_in_ram(&found?)? == registers {
            return Ok(());
        }
    }
    bail!(
        "its guest has no registers of {}; give crosvm the --device-tree-overlay that vcpufreq dt \
         makes of the same tree by --format dtbo, by its path alone",
        tree.display()
    )
}

/// The files of `--device-tree-overlay`, as crosvm takes it, but those with more than a path: `,filter`
/// and `,select-symbols` leave out what they don't name, the registers too.
fn overlays(words: &[OsString]) -> Vec<PathBuf> {
    let values = values(words, "--device-tree-overlay").into_iter();
    let whole = values
        .map(OsStr::as_bytes)
        .filter(|value| !value.contains(&b','));
    let files = whole.map(|path| {
        let path = path.strip_prefix(b"path=").unwrap_or(path);
        PathBuf::from(OsStr::from_bytes(path))
    });
    files.collect()
}

/// The values of an option, in order: behind it, or behind its `=`.
fn values<'a>(words: &'a [OsString], option: &str) -> Vec<&'a OsStr> {
    let mut words = words.iter();
    let mut found = Vec::new();
    while let Some(word) = words.next() {
        let value = match word.as_bytes().strip_prefix(option.as_bytes()) {
            Some(b"") => words.next().map(OsString::as_os_str),
            Some(rest) => rest.strip_prefix(b"=").map(OsStr::from_bytes),
            None => None,
        };
        found.extend(value);
    }
    found
}

/// Where this process finds a file that process `pid` has named.
fn file_of(pid: u32, path: &Path) -> PathBuf {
    let root = match path.is_absolute() {
        true => format!("/proc/{pid}/root"),
        false => format!("/proc/{pid}/cwd"),
    };
    Path::new(&root).join(path.strip_prefix("/").unwrap_or(path))
}

#[cfg(test)]
mod tests {
    //! A guest of crosvm has booted the registers that an overlay on its command line has.
    use vcpufreq_dt::{CpufreqRegion, RESERVED, RegionKind, overlay};

    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn overlays_are_found_in_each_form() {
        for (line, found) in [
            ("crosvm run --device-tree-overlay /a Image", &["/a"][..]),
            ("crosvm run --device-tree-overlay=/a,filter", &[]),
            (
                "crosvm run --device-tree-overlay path=a --device-tree-overlay b,filter=true",
                &["a"],
            ),
            ("crosvm run --device-tree-overlay", &[]),
            ("crosvm run --device-tree-overlays=/a", &[]),
        ] {
            let found: Vec<_> = found.iter().map(PathBuf::from).collect();
            assert_eq!(overlays(&words(line)), found, "{line}");
        }
        assert!(is_crosvm(&words("/usr/bin/crosvm run")));
        assert!(!is_crosvm(&words("qemu-system-aarch64 crosvm")) && !is_crosvm(&[]));
    }

    #[test]
    fn an_overlay_has_the_registers_of_the_tree() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, base| {
            let region = CpufreqRegion {
                base,
                size: 0x1_0000,
                kind: RegionKind::GuestRam,
            };
            let path = dir.path().join(name);
            fs::write(&path, overlay(region).unwrap()).unwrap();
            path
        };
        let [same, other] = [("same", 0x4fe0_0000), ("other", 0x4fe0_0000 - RESERVED)]
            .map(|(name, base)| file(name, base));
        // A tree has them as an overlay does, but in its root.
        let checked = |options: &str| {
            let line = format!("crosvm run --fdt-position=after-payload {options}");
            check_crosvm(std::process::id(), &words(&line), &same)
        };
        let of = |path: &Path| format!("--device-tree-overlay={}", path.display());
        assert!(checked(&of(&same)).is_ok());
        assert!(checked(&format!("{} {}", of(&other), of(&same))).is_ok());
        for (options, line) in [
            (of(&other), "its guest has no registers of"),
            ("Image".to_owned(), "--format dtbo"),
            (of(Path::new("/nowhere")), "can't read its"),
            (
                format!("{} --fdt-position end", of(&same)),
                "--fdt-position after-payload",
            ),
            (format!("{} --bios EFI", of(&same)), "give crosvm a kernel"),
            (
                format!("{} --protected-vm-without-firmware", of(&same)),
                "a protected guest's RAM",
            ),
        ] {
            let error = checked(&options).unwrap_err().to_string();
            assert!(error.contains(line), "{error}");
        }
    }
}
