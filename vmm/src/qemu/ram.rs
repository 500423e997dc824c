// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's RAM as a file, in which the registers are: one that this program makes for QEMU, or
//! the one of a memory object on QEMU's command line.

use std::{fs::File, process::Child, time::Duration};

use anyhow::{Context, bail, ensure};
use vcpufreq_bridge::shm::{SharedMemory, sealed_memory, vcpu_threads};
use vcpufreq_dt::RESERVED;
use vcpufreq_host::HostRoot;

use super::inherited::inherited;
use crate::{
    options::KVM_DEVICE,
    patience::{patience, patiently},
    qemu_command::{Described, QemuCommand},
    serve::{Served, SharedWithVmm, shared_ram},
};
use vcpufreq_vm::probe::PathFacts;

/// The name of the memory object that is added to QEMU.
const OBJECT: &str = "vcpufreq-ram";
/// How often QEMU's files are looked at for its memory.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// And how long QEMU may take to make RAM.
const WITHIN: Duration = patience(60);

/// Where the registers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamPlace {
    /// Their address in the guest.
    pub base: u64,
    /// Where they are in the file of its RAM, bytes.
    offset: u64,
    /// All of that.
    size: u64,
}

impl RamPlace {
    /// The last 2 MiB of these ranges of RAM, which is one range.
    ///
    /// # Errors
    /// When they are of no use, in one line.
    pub fn last_of(ranges: &[(u64, u64)]) -> anyhow::Result<Self> {
        let [(start, size)] = *ranges else {
            bail!(
                "--path ram needs RAM of one NUMA node, and QEMU has {}; leave -numa or --path out",
                ranges.len()
            );
        };
        let end = start.checked_add(size);
        let last = end.and_then(|end| (end - end % RESERVED).checked_sub(RESERVED));
        // The kernel and its tree are in the first ones.
        let base = last.filter(|last| *last > start.saturating_add(size / 2));
        let base =
            base.context("--path ram takes 2 MiB of the guest's RAM; give QEMU -m 64 or more")?;
        Ok(Self {
            base,
            offset: base - start,
            size,
        })
    }
}

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
        check_coherent(PathFacts::ask(KVM_DEVICE.as_ref(), false))?;
    }
    Ok(())
}

/// Checks that a guest's loads and stores there see the host's cache, and the host theirs: a line of
/// it has a register of each side, so that cleaning it could undo a request.
fn check_coherent(facts: Result<PathFacts, String>) -> anyhow::Result<()> {
    let facts = facts.map_err(anyhow::Error::msg)?;
    ensure!(
        facts.coherent,
        "--path ram needs a CPU with FEAT_S2FWB: a guest's accesses go past this host's caches; leave \
         --path out"
    );
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
        let RamPlace { offset, size, .. } = place;
        let file = sealed_memory(size);
        let file = file.context("can't make a file in memory for the guest's RAM")?;
        let shared = registers_in(file.try_clone()?, offset, served)?;
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
    /// When QEMU shares its RAM with no other process, makes none in time, or this process may not take
    /// its files.
    pub fn of_started(
        self,
        qemu: &mut Child,
        served: &Served,
    ) -> anyhow::Result<Option<SharedWithVmm>> {
        let place = match self {
            Self::Made { shared, .. } => return Ok(Some(shared)),
            Self::OfQemu(place) => place,
        };
        let (host, pid) = (HostRoot::default(), qemu.id());
        let file = patiently(WITHIN, "for QEMU to make its guest's RAM", |part| {
            // It has its memory before it has its vCPUs.
            let threads = vcpu_threads(&host, pid, 1);
            let ram = shared_ram(pid, place.size)?;
            if qemu.try_wait().context("can't wait for QEMU")?.is_some() {
                return Ok(Some(None));
            }
            if ram.is_none() && threads.iter().any(Option::is_some) {
                bail!(
                    "QEMU shares its guest's RAM with no other process; give its memory object \
                     share=on, or leave it out"
                );
            }
            if ram.is_none() {
                part.is_ready(&[], LOOK_EVERY)?;
            }
            Ok(ram.map(Some))
        });
        let Some(file) = file? else {
            bail!(
                "QEMU has made neither RAM nor vCPUs within {} s; leave out -preconfig, or end what \
                 it waits for",
                WITHIN.as_secs()
            );
        };
        file.map(|file| registers_in(file, place.offset, served))
            .transpose()
    }
}

fn registers_in(file: File, offset: u64, served: &Served) -> anyhow::Result<SharedWithVmm> {
    let memory = SharedMemory::in_guest_ram(file, offset, served.count()?);
    let memory = memory.context("can't map the guest's RAM")?;
    let shared = SharedWithVmm::in_guest_ram(memory);
    shared.describe(served)?;
    Ok(shared)
}

#[cfg(test)]
mod tests {
    //! The registers are at the end of the RAM. What can't be served is one line.
    use std::ffi::OsString;

    use vcpufreq_device::{MAX_VCPUS, region_size};

    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_registers_are_in_the_last_2_mib() {
        for (size, base) in [
            (GIB, 0x7fe0_0000),
            (64 << 20, 0x43e0_0000),
            // Not a multiple of 2 MiB.
            (GIB + (1 << 20), 0x7fe0_0000),
        ] {
            let place = RamPlace::last_of(&[(GIB, size)]).unwrap();
            assert_eq!((place.base, place.offset), (base, base - GIB), "{size:#x}");
        }
        for (ranges, line) in [
            (&[(GIB, 4 << 20)][..], "give QEMU -m 64"),
            (&[(u64::MAX, GIB)], "give QEMU -m 64"),
            (&[(GIB, GIB), (2 * GIB, GIB)], "and QEMU has 2"),
            (&[], "and QEMU has 0"),
        ] {
            let error = RamPlace::last_of(ranges).unwrap_err().to_string();
            assert!(error.contains(line), "{error}");
        }
    }

    #[test]
    fn the_registers_of_512_vcpus_fit() {
        let most = u16::try_from(MAX_VCPUS).unwrap();
        assert!(region_size(most) <= RESERVED);
        let file = sealed_memory(64 << 20).unwrap();
        let pages =
            |offset| SharedMemory::in_guest_ram(file.try_clone().unwrap(), offset, most).map(drop);
        let place = RamPlace::last_of(&[(GIB, 64 << 20)]).unwrap();
        assert!(pages(place.offset).is_ok());
        assert!(pages(place.offset + 0x1_0000).is_err());
    }

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

    #[test]
    fn caches_that_a_guest_goes_past_are_refused() {
        let facts = |coherent| PathFacts {
            protected: false,
            readonly_slots: Ok(()),
            ioeventfds: Ok(()),
            coherent,
        };
        assert!(check_coherent(Ok(facts(true))).is_ok());
        let error = check_coherent(Ok(facts(false))).unwrap_err().to_string();
        assert!(error.contains("FEAT_S2FWB"), "{error}");
        assert!(check_coherent(Err("no KVM".to_owned())).is_err());
    }
}
