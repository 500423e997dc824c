// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest's disk (`run --disk`): its sectors are the file's, before and after a reset; no request
//! exits to the VMM. A protected guest has bounce buffers, without which its kernel would give the disk
//! addresses of pages that the host can't read.

use std::fs::{self, File};

use anyhow::{Result, ensure};
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use crate::harness::console_commands::digest;
use crate::harness::guest_shell::ask;
use crate::harness::leftovers::left_soon;
use crate::harness::plan::{Plan, first_cpus};
use crate::harness::policy::Policy;
use crate::harness::trace::exits::Exits;
use crate::harness::vm::{BOOT, Vm};

const FILE: &str = "/run/disk";
const IN_GUEST: &str = "/dev/vda";
const MODULES: [&str; 2] = ["virtio_mmio", "virtio_blk"];
const BYTES: usize = 4 << 20;
/// QUEUE_NOTIFY of the disk's registers.
const NOTIFY: u64 = 0x0920_0050;
/// What the guest writes, and where.
const BLOCK: usize = 4096;
const WRITTEN: usize = 37;

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let pattern: Vec<u8> = (0..BYTES)
        .map(|at| ((at % 251) ^ (at >> 12)).to_le_bytes()[0])
        .collect();
    fs::write(FILE, &pattern)?;
    let policies = Policy::all()?;
    let setup = plan
        .mirroring(&first_cpus(&policies))
        .with(&["--disk", FILE]);
    let mut vm = plan.guest(&setup)?;
    let exits = Exits::watch()?;
    load(plan, &mut vm)?;
    let first = vm.ask(format!("digest {IN_GUEST}"))?;
    let notifications = exits.stop()?.at(NOTIFY..NOTIFY + 4);
    let in_file = digest(FILE)?;
    let bounce = vm.ask("dmesg restricted-dma-pool")?;
    let write = format!(
        "busybox dd if=/dev/zero of={IN_GUEST} bs={BLOCK} seek={WRITTEN} count=1 conv=fsync"
    );
    ask(&mut vm, &write)?;
    let mut expected = pattern;
    expected
        .iter_mut()
        .skip(WRITTEN * BLOCK)
        .take(BLOCK)
        .for_each(|byte| *byte = 0);
    let is_written = fs::read(FILE)? == expected;
    vm.tell("restart")?;
    vm.expect("@ready", BOOT)?;
    load(plan, &mut vm)?;
    let after_reset = vm.ask(format!("digest {IN_GUEST}"))?;
    let size = File::open(FILE)?.metadata()?.len();
    let said = vm.quit()?;
    let figures = json!({
        "in_guest": first, "in_file": in_file, "after_reset": after_reset, "bounce": bounce,
        "notifications": notifications.trapped, "exited": notifications.exited, "vmm_said": said,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("the guest reads the file", &first, in_file)
        .check("the file has what the guest wrote", is_written, ())
        .check_eq("so it is after a reset", &after_reset, digest(FILE)?)
        .check_eq("the file's size stays", &size, BYTES as u64)
        .check("requests are trapped", notifications.trapped > 0, ())
        .check_eq("no request exits", &notifications.exited, 0)
        .check_eq(
            "bounce buffers are a protected guest's",
            &!bounce.is_empty(),
            plan.protected,
        ))
}

/// A protected guest whose kernel can't share memory: its VMM ends by a line when it uses its disk.
pub fn not_shared(plan: &Plan) -> Result<LabVerdict> {
    fs::write(FILE, vec![0; BYTES])?;
    let policies = Policy::all()?;
    let setup = plan
        .mirroring(&first_cpus(&policies))
        .with(&["--disk", FILE]);
    let mut vm = plan.guest(&setup)?;
    for module in MODULES {
        vm.tell(&format!("insmod {module}"))?;
    }
    let said = vm.finish(2)?;
    let is_named = |line: &str| line.contains("; build its kernel with CONFIG_ARM_PKVM_GUEST and");
    Ok(LabVerdict::default()
        .check("a line says why", said.lines().any(is_named), said)
        .check_none("nothing is left", &left_soon()?))
}

/// Loads the disk's drivers, which the kernel of a protected guest has built in.
fn load(plan: &Plan, vm: &mut Vm) -> Result<()> {
    for module in MODULES.iter().filter(|_| !plan.protected) {
        vm.ask(format!("insmod {module}"))?;
    }
    let found = vm.ask("read /sys/block/vda/size")?;
    ensure!(
        found == (BYTES / 512).to_string(),
        "the guest's disk has {found} sectors"
    );
    Ok(())
}
