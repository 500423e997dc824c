// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is looked at of a QEMU command line. QEMU takes each option with one dash or two.

use std::{
    ffi::{OsStr, OsString},
    path::PathBuf,
};

use anyhow::{Context, bail};

/// A QEMU command line.
pub struct QemuCommand<'a> {
    program: &'a OsStr,
    arguments: &'a [OsString],
}

/// What the guest learns of its machine from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Described {
    /// QEMU's device tree.
    ByTree,
    /// A device tree of the user's.
    ByFile(PathBuf),
    /// ACPI, or what this machine type has.
    Otherwise,
}

impl<'a> QemuCommand<'a> {
    /// Of a program and its arguments.
    ///
    /// # Errors
    /// When there is no program.
    pub fn read(words: &'a [OsString]) -> anyhow::Result<Self> {
        let (program, arguments) = words.split_first().context("no QEMU is named")?;
        Ok(Self { program, arguments })
    }

    pub fn program(&self) -> &OsStr {
        self.program
    }

    pub fn arguments(&self) -> &[OsString] {
        self.arguments
    }

    /// The values of an option, in order.
    fn values(&self, name: &str) -> impl Iterator<Item = &OsStr> {
        let pairs = self.arguments.iter().zip(self.arguments.iter().skip(1));
        pairs.filter_map(move |(option, value)| {
            let option = option.to_str()?.strip_prefix('-')?;
            let option = option.strip_prefix('-').unwrap_or(option);
            (option == name).then_some(value.as_os_str())
        })
    }

    fn texts(&self, name: &str) -> impl Iterator<Item = &str> {
        self.values(name).filter_map(OsStr::to_str)
    }

    /// The vCPUs that the guest starts with: `-smp 4`, `-smp cpus=4,...`; without, 1.
    ///
    /// # Errors
    /// When -smp has a topology without `cpus`.
    pub fn cpus(&self) -> anyhow::Result<u32> {
        let Some(smp) = self.texts("smp").last() else {
            return Ok(1);
        };
        let mut parts = smp.split(',');
        let cpus = parts.clone().find_map(|part| part.strip_prefix("cpus="));
        let bare = parts.next().filter(|part| !part.contains('='));
        match cpus.or(bare).map(str::parse) {
            Some(Ok(cpus)) => Ok(cpus),
            _ => bail!("-smp {smp} doesn't tell the number of vCPUs; give it cpus=N"),
        }
    }

    /// What describes the guest's CPUs to it.
    pub fn described(&self) -> Described {
        let machines = || {
            ["machine", "M"]
                .into_iter()
                .flat_map(|name| self.texts(name))
        };
        let virt = machines().any(|text| {
            let kind = text.split(',').next().unwrap_or(text);
            let kind = kind.strip_prefix("type=").unwrap_or(kind);
            kind == "virt" || kind.starts_with("virt-")
        });
        let no_acpi = self.has("no-acpi")
            || machines().any(|text| text.split(',').any(|part| part == "acpi=off"));
        let dtb = self.values("dtb").last();
        let direct = self.values("kernel").next().is_some() && !self.has_firmware();
        match dtb {
            Some(file) => Described::ByFile(file.into()),
            None if virt && (direct || no_acpi) => Described::ByTree,
            None => Described::Otherwise,
        }
    }

    /// Whether KVM runs the guest.
    pub fn has_kvm(&self) -> bool {
        let accelerators = self.texts("accel").chain(self.texts("machine"));
        let kvm = |text: &str| {
            let mut parts = text.split(',');
            parts.any(|part| ["kvm", "accel=kvm", "accel=kvm:tcg"].contains(&part))
        };
        self.has("enable-kvm") || accelerators.chain(self.texts("M")).any(kvm)
    }

    fn has(&self, name: &str) -> bool {
        let is = |word: &OsString| {
            let word = word.to_str().and_then(|word| word.strip_prefix('-'));
            word.is_some_and(|word| word.strip_prefix('-').unwrap_or(word) == name)
        };
        self.arguments.iter().any(is)
    }

    fn has_firmware(&self) -> bool {
        let flash = self.texts("drive").any(|text| text.contains("if=pflash"));
        flash || ["bios", "pflash"].iter().any(|name| self.has(name))
    }

    /// The guest's kernel, if QEMU loads it.
    pub fn kernel(&self) -> Option<PathBuf> {
        self.values("kernel").last().map(PathBuf::from)
    }
}

#[cfg(test)]
mod tests {
    //! vCPUs and description are told as QEMU takes its options.
    use super::*;

    fn of<T>(line: &str, ask: impl Fn(&QemuCommand<'_>) -> T) -> T {
        let words: Vec<_> = line.split(' ').map(OsString::from).collect();
        ask(&QemuCommand::read(&words).unwrap())
    }

    #[test]
    fn the_number_of_vcpus_is_smps() {
        for (line, cpus) in [
            ("qemu -nographic", 1),
            ("qemu -smp 4", 4),
            ("qemu --smp 4,maxcpus=8", 4),
            ("qemu -smp maxcpus=8,cpus=3", 3),
            ("qemu -smp 1 -smp cpus=2", 2),
        ] {
            assert_eq!(of(line, |line| line.cpus().unwrap()), cpus, "{line}");
        }
        for line in ["qemu -smp sockets=2,cores=2", "qemu -smp many"] {
            assert!(of(line, |line| line.cpus().is_err()), "{line}");
        }
    }

    #[test]
    fn kvm_is_found_in_each_form() {
        for (line, kvm) in [
            ("qemu -accel kvm", true),
            ("qemu -enable-kvm", true),
            ("qemu -M virt,accel=kvm:tcg", true),
            ("qemu -machine virt -accel tcg", false),
        ] {
            assert_eq!(of(line, |line| line.has_kvm()), kvm, "{line}");
        }
    }

    #[test]
    fn a_tree_describes_direct_kernels_and_firmware_without_acpi() {
        use Described::{ByFile, ByTree, Otherwise};
        for (line, described) in [
            ("qemu -M virt -kernel Image", ByTree),
            ("qemu -machine virt-9.2,gic-version=3 -kernel Image", ByTree),
            ("qemu -machine type=virt,acpi=off -bios EFI", ByTree),
            ("qemu -M virt -no-acpi -bios EFI", ByTree),
            ("qemu -M virt -bios EFI -kernel Image", Otherwise),
            ("qemu -M virt -drive if=pflash,file=EFI", Otherwise),
            ("qemu -M q35 -kernel bzImage", Otherwise),
            (
                "qemu -M virt -kernel Image -dtb mine",
                ByFile("mine".into()),
            ),
        ] {
            assert_eq!(of(line, |line| line.described()), described, "{line}");
        }
    }
}
