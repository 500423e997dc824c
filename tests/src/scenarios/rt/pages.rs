// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest whose memory is one page of 1 GiB.

use anyhow::Result;
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use crate::harness::plan::Plan;
use crate::harness::sysfs;
use crate::harness::vm::{self, Setup, Vm};

const PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-1048576kB";

/// Refused with one line as long as the host has no such page; then the guest
/// boots in it and answers, and gives it back.
pub fn gib_page(plan: &Plan, pcpu: u32) -> Result<LabVerdict> {
    let setup = Setup {
        mem_mib: Some(1024),
        ..plan
            .mirroring(&[pcpu])
            .with(&["--rt", "0=fifo:1", "--hugepages", "1G"])
    };
    let alone = Setup {
        silent: true,
        ..setup.clone()
    };
    let refused = vm::command(&alone).output()?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    // Before it comes the note that no partition was applied.
    let line = said.lines().last().unwrap_or_default();
    let told = refused.status.code() == Some(2) && line.contains("nr_hugepages");
    sysfs::write(pages("nr_hugepages"), 1)?;
    let before = free()?;
    let mut guest = Vm::boot_real_time(&setup)?;
    let meanwhile = free()?;
    let kernel = guest.ask("read /proc/sys/kernel/osrelease")?;
    guest.quit()?;
    let after = free()?;
    sysfs::write(pages("nr_hugepages"), 0)?;
    let free = [before, meanwhile, after];
    let figures = json!({ "without_one": line, "free": free });
    Ok(LabVerdict::with_figures(figures)
        .check("refused without one", told, line)
        .check("the guest boots", !kernel.is_empty(), &kernel)
        .check_eq("it takes one and gives it back", &free, [1, 0, 1]))
}

fn pages(file: &str) -> String {
    format!("{PAGES}/{file}")
}

fn free() -> Result<u64> {
    Ok(sysfs::text(pages("free_hugepages"))?.trim().parse()?)
}
