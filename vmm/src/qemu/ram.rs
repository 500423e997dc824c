// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's RAM as a file, in which the registers are: one that this program makes for QEMU, or
//! the one of a memory object on QEMU's command line.

use std::{fs::File, os::fd::BorrowedFd, process::Child};

use anyhow::{Context, bail};
use vcpufreq_bridge::shm::sealed_memory;

use super::inherited::inherited;
use crate::{
    config::ram_place::RamPlace,
    qemu_command::{Described, QemuCommand},
    serve::{Served, SharedWithVmm, WantedRam, check_coherent, ram_of, registers_in},
};

/// The name of the memory object that is added to QEMU.
const OBJECT: &str = "vcpufreq-ram";

/// Checks that a guest of `command` can have its registers in its RAM, as far as QEMU needn't be
/// asked.
///
/// # Errors
/// What is in the way, and what to do.
pub fn check(command: &QemuCommand<'_>) -> anyhow::Result<()> {
    match command.described() {
        Described::ByFile(_) => {
            bail!("--path ram puts the registers into QEMU's own device tree; leave -dtb out")
        }
        _ if command.is_x86() => bail!("--path ram needs a guest with a device tree; leave it out"),
        // EDK2 takes the end of RAM for itself.
        _ if command.has_firmware() || command.kernel().is_none() => bail!(
            "--path ram needs a kernel that QEMU loads: firmware uses the RAM that the registers are \
             in; give QEMU -kernel, or leave --path out"
        ),
        Described::Otherwise => bail!("--path ram needs QEMU's machine virt; leave --path out"),
        Described::ByTree => {}
    }
    if command.has_kvm() {
        check_coherent()?;
    }
    Ok(())
}

/// The RAM of a guest that QEMU is about to start.
pub enum GuestRam {
    /// This program's, for which QEMU gets an object. The registers are there before the guest.
    Made {
        /// Its file.
        file: File,
        /// How much that is.
        size: u64,
        /// The registers.
        shared: SharedWithVmm,
    },
    /// That of an object of QEMU's command line.
    OfQemu(RamPlace),
}

impl GuestRam {
    /// For `command`.
    ///
    /// # Errors
    /// When no memory can be made; what of the vCPUs' options no device can have.
    pub fn make(
        command: &QemuCommand<'_>,
        place: RamPlace,
        served: &Served,
    ) -> anyhow::Result<Self> {
        if command.names_memory() {
            return Ok(Self::OfQemu(place));
        }
        let size = place.size;
        let file = sealed_memory(size);
        let file = file.context("can't make a file in memory for the guest's RAM")?;
        let shared = registers_in(file.try_clone()?, place, served)?;
        Ok(Self::Made { file, size, shared })
    }

    /// The options that give it to QEMU.
    ///
    /// # Errors
    /// As fcntl(2), when the file can't be left open for QEMU.
    pub fn arguments(&self) -> anyhow::Result<Vec<String>> {
        let names = ["-name", "debug-threads=on"].map(str::to_owned);
        let Self::Made { file, size, .. } = self else {
            return Ok(names.into());
        };
        let number = inherited(file)?;
        let object = [
            "-object".to_owned(),
            format!(
                "memory-backend-file,id={OBJECT},size={size},mem-path=/proc/self/fd/{number},share=on"
            ),
            "-machine".to_owned(),
            format!("memory-backend={OBJECT}"),
        ];
        Ok([&names[..], &object].concat())
    }

    /// The registers in the RAM of `qemu`, which was started; none if it has ended.
    ///
    /// # Errors
    /// As [`ram_of`] and [`registers_in`].
    pub fn of_started(
        self,
        (qemu, process): (&mut Child, BorrowedFd<'_>),
        served: &Served,
    ) -> anyhow::Result<Option<SharedWithVmm>> {
        let process = (qemu.id(), process);
        let mut has_ended = || Ok(qemu.try_wait().context("can't wait for QEMU")?.is_some());
        match self {
            Self::Made { shared, .. } => Ok(Some(shared)),
            Self::OfQemu(place) => {
                let of_object = WantedRam {
                    place,
                    or: "or leave it out",
                };
                let ram = ram_of(process, of_object, &mut has_ended)?;
                ram.map(|ram| registers_in(ram, place, served)).transpose()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! What can't be served is one line.
    use std::ffi::OsString;

    use super::*;

    #[test]
    fn a_guest_that_cannot_have_it_is_refused() {
        for (line, wanted) in [
            ("qemu -M virt -kernel Image -dtb mine", "leave -dtb out"),
            ("qemu -M virt,acpi=off -bios EFI", "give QEMU -kernel"),
            ("qemu -M virt", "give QEMU -kernel"),
            ("qemu-system-x86_64 -kernel bzImage", "a device tree"),
            ("qemu -M vexpress-a15 -kernel Image", "machine virt"),
        ] {
            let words: Vec<_> = line.split(' ').map(OsString::from).collect();
            let command = QemuCommand::read(&words).unwrap();
            let error = check(&command).unwrap_err().to_string();
            assert!(error.contains(wanted), "{line}: {error}");
        }
        let words = ["qemu", "-M", "virt", "-kernel", "Image"].map(OsString::from);
        assert!(check(&QemuCommand::read(&words).unwrap()).is_ok());
    }
}
