// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's side: the device of shared memory, as `abi/vcpufreq-shm.h` has it.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};

use crate::harness::sys::Registers;
use crate::harness::sysfs;

const DEVICES: &str = "/sys/bus/pci/devices";
const IDS: [(&str, &str); 2] = [("vendor", "0x1af4"), ("device", "0x1110")];
/// In the first BAR.
const DOORBELL: u64 = 0xc;
/// In the third.
const MAGIC: (usize, u32) = (0, 0x7166_7076);
const VERSION: (usize, u32) = (4, 1);
const PEER: usize = 0x14;
const PAGES: u64 = 0x1000;

/// On the PCI bus: the first vCPU's registers, the doorbell, and what rings it for that vCPU; none without a
/// device. It is switched on, and left so.
pub fn find() -> Result<Option<String>> {
    let Ok(devices) = fs::read_dir(DEVICES) else {
        return Ok(None);
    };
    for device in devices {
        let path = device?.path();
        if !is_it(&path)? {
            continue;
        }
        if sysfs::text(path.join("enable"))?.trim() == "0" {
            sysfs::write(path.join("enable"), 1)?;
        }
        let resources = sysfs::text(path.join("resource"))?;
        let (registers, memory) = (bar(&resources, 0)?, bar(&resources, 2)?);
        return at(memory, registers).map(Some);
    }
    Ok(None)
}

/// The same of memory whose doorbell is among `registers`.
pub fn at(memory: u64, registers: u64) -> Result<String> {
    let header = Registers::map(memory)?;
    for (offset, wanted) in [MAGIC, VERSION] {
        let found = header.read(offset);
        ensure!(found == wanted, "at {offset:#x}: {found:#x}");
    }
    let ring = header.read(PEER) << 16;
    let (base, bell) = (memory + PAGES, registers + DOORBELL);
    Ok(format!("{base:#x},{bell:#x},{ring:#x}"))
}

fn is_it(path: &Path) -> Result<bool> {
    for (file, id) in IDS {
        if sysfs::text(path.join(file))?.trim() != id {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Where a BAR begins, of lines of begin, end and flags.
fn bar(resources: &str, number: usize) -> Result<u64> {
    let line = resources.lines().nth(number);
    let begin = line.and_then(|line| line.split(' ').next()?.strip_prefix("0x"));
    let address = u64::from_str_radix(begin.context("a device without that BAR")?, 16)?;
    ensure!(address != 0, "BAR {number} has no address");
    Ok(address)
}
