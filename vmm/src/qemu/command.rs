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
    /// When there is no program, or one that leaves the foreground.
    pub fn read(words: &'a [OsString]) -> anyhow::Result<Self> {
        let (program, arguments) = words.split_first().context("no QEMU is named")?;
        let command = Self { program, arguments };
        if command.has("daemonize") {
            bail!(
                "the server of a VM ends with QEMU, which stays in the foreground; leave -daemonize out"
            );
        }
        Ok(command)
    }

    pub fn program(&self) -> &OsStr {
        self.program
    }

    pub fn arguments(&self) -> &[OsString] {
        self.arguments
    }

    /// The arguments of a QEMU that makes the same device tree: of machine, CPUs, memory and kernel.
    /// Without devices, disks, sockets and files that it would write: they are the guest's.
    pub fn of_tree(&self) -> Vec<OsString> {
        let mut kept: Vec<OsString> = ["-nodefaults", "-display", "none"].map(Into::into).into();
        let mut words = self.arguments.iter();
        while let Some(word) = words.next() {
            let Some(name) = word.to_str().and_then(option) else {
                continue;
            };
            if FLAGS.contains(&name) {
                kept.push(word.clone());
            } else if let Some(value) = taken(name).and_then(|take| take(words.next()?)) {
                kept.extend([word.clone(), value]);
            }
        }
        kept
    }

    /// The values of an option, in order.
    fn values(&self, name: &str) -> impl Iterator<Item = &OsStr> {
        let pairs = self.arguments.iter().zip(self.arguments.iter().skip(1));
        pairs.filter_map(move |(option, value)| {
            (option.to_str().and_then(self::option)? == name).then_some(value.as_os_str())
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
            _ => bail!("-smp {smp} doesn't give the number of vCPUs; add cpus=N"),
        }
    }

    /// What describes the guest's CPUs to it.
    pub fn described(&self) -> Described {
        let virt = self.is_machine("virt") && !self.is_of_another_architecture();
        let no_acpi = self.has("no-acpi")
            || (self.machines()).any(|text| text.split(',').any(|part| part == "acpi=off"));
        let dtb = self.values("dtb").last();
        let direct = self.values("kernel").next().is_some() && !self.has_firmware();
        match dtb {
            Some(file) => Described::ByFile(file.into()),
            None if virt && (direct || no_acpi) => Described::ByTree,
            None => Described::Otherwise,
        }
    }

    /// Whether it is one for x86-64.
    pub fn is_x86(&self) -> bool {
        let name = self.program.to_str().unwrap_or_default();
        name.contains("x86_64")
            || ["q35", "pc", "microvm"]
                .iter()
                .any(|kind| self.is_machine(kind))
    }

    fn machines(&self) -> impl Iterator<Item = &str> {
        (["machine", "M"].into_iter()).flat_map(|name| self.texts(name))
    }

    /// Whether the machine is of this kind, of any version.
    fn is_machine(&self, kind: &str) -> bool {
        self.machines().any(|text| {
            let own = text.split(',').next().unwrap_or(text);
            let version = own.strip_prefix("type=").unwrap_or(own).strip_prefix(kind);
            version.is_some_and(|version| version.is_empty() || version.starts_with('-'))
        })
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
        let is = |word: &OsString| word.to_str().and_then(option) == Some(name);
        self.arguments.iter().any(is)
    }

    fn has_firmware(&self) -> bool {
        let flash = self.texts("drive").any(|text| text.contains("if=pflash"));
        let of_machine = ["machine", "M"].into_iter();
        let mut of_machine = of_machine.flat_map(|name| self.texts(name));
        flash
            || of_machine.any(|text| text.split(',').any(|part| part.starts_with("pflash")))
            || ["bios", "pflash"].iter().any(|name| self.has(name))
    }

    /// Its `virt` is another machine than Arm's.
    fn is_of_another_architecture(&self) -> bool {
        let name = self.program.to_str().unwrap_or_default();
        ["riscv", "loongarch", "m68k", "or1k", "xtensa"]
            .iter()
            .any(|other| name.contains(other))
    }

    /// The guest's kernel, if QEMU loads it.
    pub fn kernel(&self) -> Option<PathBuf> {
        self.values("kernel").last().map(PathBuf::from)
    }
}

/// Options without a value that a device tree depends on.
const FLAGS: [&str; 2] = ["enable-kvm", "no-acpi"];

/// The name of an option: QEMU takes it with one dash or two.
fn option(word: &str) -> Option<&str> {
    let name = word.strip_prefix('-')?;
    Some(name.strip_prefix('-').unwrap_or(name))
}

/// What to make of an option's value for a device tree; none of an option that it does not depend on.
fn taken(name: &str) -> Option<fn(&OsString) -> Option<OsString>> {
    match name {
        "accel" | "append" | "bios" | "cpu" | "initrd" | "kernel" | "L" | "m" | "numa" | "smp" => {
            Some(|value| Some(value.clone()))
        }
        "machine" | "M" => Some(machine_alone),
        "object" => Some(memory_alone),
        // A second one is in the tree.
        "serial" => Some(|_| Some("null".into())),
        _ => None,
    }
}

/// A machine without properties that name other objects than memory.
fn machine_alone(value: &OsString) -> Option<OsString> {
    let parts = value.to_str()?.split(',');
    let named = ["pflash", "confidential-guest-support=", "dumpdtb="];
    let parts = parts.filter(|part| !named.iter().any(|name| part.starts_with(name)));
    Some(parts.collect::<Vec<_>>().join(",").into())
}

/// Memory of the same name and size that is not allocated yet; none of another object.
fn memory_alone(value: &OsString) -> Option<OsString> {
    let mut parts = value.to_str()?.split(',');
    parts
        .next()
        .filter(|kind| kind.starts_with("memory-backend-"))?;
    let kept = parts.filter(|part| part.starts_with("id=") || part.starts_with("size="));
    let parts = ["memory-backend-ram"].into_iter().chain(kept);
    Some(parts.collect::<Vec<_>>().join(",").into())
}

#[cfg(test)]
mod tests {
    //! vCPUs and machine are read as QEMU reads its options.
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
    fn a_tree_is_made_without_devices_and_files() {
        for (line, of_tree) in [
            (
                "qemu -M virt,pflash0=rom,gic-version=3 -cpu host -accel kvm -smp 2 -m 1G",
                "-M virt,gic-version=3 -cpu host -accel kvm -smp 2 -m 1G",
            ),
            (
                "qemu -kernel Image --append quiet -serial file:log -device virtio-net-pci -no-acpi",
                "-kernel Image --append quiet -serial null -no-acpi",
            ),
            (
                "qemu -object memory-backend-file,id=m,size=1G,prealloc=on -numa node,memdev=m \
                 -object rng-random,id=r -qmp unix:q,server=on -chardev socket,path=s,id=c",
                "-object memory-backend-ram,id=m,size=1G -numa node,memdev=m",
            ),
        ] {
            let words = of(line, |line| line.of_tree());
            let words: Vec<_> = words.iter().map(|word| word.to_str().unwrap()).collect();
            assert_eq!(
                words.join(" "),
                format!("-nodefaults -display none {of_tree}")
            );
        }
    }

    #[test]
    fn a_qemu_that_leaves_the_foreground_is_refused() {
        let words = ["qemu", "-daemonize"].map(OsString::from);
        let line = QemuCommand::read(&words).err().unwrap().to_string();
        assert!(line.contains("leave -daemonize out"), "{line}");
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
            ("qemu -M virt,pflash0=rom -kernel Image", Otherwise),
            ("qemu-system-riscv64 -M virt -kernel Image", Otherwise),
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
