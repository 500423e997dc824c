// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! System management interrupts, which stop a CPU behind the kernel's back. Intel's processors count
//! them; others tell nobody.

use std::collections::BTreeMap;

use vcpufreq_device::host::CpuList;

use crate::host::{Look, Unread};

/// MSR_SMI_COUNT: bits 31 to 0, since reset.
const REGISTER: u64 = 0x34;

/// The device file of a CPU's registers, of the kernel's module msr.
pub(crate) fn path(cpu: u32) -> String {
    format!("/dev/cpu/{cpu}/msr")
}

/// Whether this processor counts them.
pub(crate) fn is_counted(look: &dyn Look) -> bool {
    let info = look.read("/proc/cpuinfo");
    info.is_ok_and(|text| text.contains("GenuineIntel"))
}

/// How many a CPU has had since reset.
pub(crate) fn count(look: &dyn Look, cpu: u32) -> Result<u64, Unread> {
    let value = look.register(&path(cpu), REGISTER)?;
    Ok(value & 0xffff_ffff)
}

/// How many each CPU has had since reset; `None` where they aren't counted, or this user can't see
/// it.
#[must_use]
pub fn smis(look: &dyn Look, cpus: &CpuList) -> Option<BTreeMap<u32, u64>> {
    if !is_counted(look) {
        return None;
    }
    let counts = cpus.iter().map(|cpu| Some((cpu, count(look, cpu).ok()?)));
    counts.collect()
}
