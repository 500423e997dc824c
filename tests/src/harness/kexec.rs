// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest that starts its kernel anew by itself: kexec(8) without that program.
//!
//! The old kernel's device tree names the place of the first file system: the new one is put there.

use std::fs;
use std::io::Write as _;

use anyhow::{Context as _, Result, ensure};
use nix::sys::reboot::RebootMode;

use crate::harness::machine::power_off;
use crate::harness::sys::{self, Segment};

/// What the guest has of its own kernel and first file system.
const PARTS: [&str; 2] = ["lab/kernel", "lab/initramfs"];
const CHOSEN: &str = "/proc/device-tree/chosen";
/// Where QEMU puts the kernel too: its memory's begin, and what an Image is aligned to.
const KERNEL: u64 = 0x4020_0000;
const ALIGN: u64 = 0x20_0000;

/// On the host: at `path`, the first file system at `initramfs` with itself and `kernel` in it.
pub fn pack(path: &str, kernel: &str, initramfs: &str) -> Result<()> {
    let initramfs = fs::read(initramfs).context("the guest's initramfs")?;
    let kernel = fs::read(kernel).context("the guest's kernel")?;
    let mut archive = initramfs.clone();
    for (name, bytes) in [(PARTS[0], &kernel), (PARTS[1], &initramfs)] {
        entry(&mut archive, name, bytes)?;
    }
    entry(&mut archive, "TRAILER!!!", &[])?;
    fs::write(path, archive).context(path.to_owned())
}

/// A file, as an archive of cpio's format newc has it.
fn entry(archive: &mut Vec<u8>, name: &str, bytes: &[u8]) -> Result<()> {
    const FILE: u32 = 0o100_644;
    let pad = |archive: &mut Vec<u8>| archive.resize(archive.len().next_multiple_of(4), 0);
    let (size, name_size) = (bytes.len(), name.len() + 1);
    pad(archive);
    write!(
        archive,
        "070701{0:08x}{FILE:08x}{0:08x}{0:08x}{1:08x}{0:08x}{size:08x}{0:08x}{0:08x}{0:08x}{0:08x}{name_size:08x}{0:08x}{name}\0",
        0, 1,
    )?;
    pad(archive);
    archive.extend_from_slice(bytes);
    pad(archive);
    Ok(())
}

/// In the guest: starts its kernel anew.
pub fn restart() -> Result<()> {
    let [kernel, initramfs] = PARTS.map(|part| fs::read(format!("/{part}")));
    let (kernel, initramfs) = (kernel?, initramfs?);
    let tree = fs::read("/sys/firmware/fdt").context("the device tree")?;
    let [begin, end] = ["start", "end"].map(|which| chosen(&format!("linux,initrd-{which}")));
    let (begin, end) = (begin?, end?);
    // Of an Image's header.
    let image_size = kernel.get(16..24).and_then(|bytes| bytes.first_chunk());
    let image_size = u64::from_le_bytes(*image_size.context("no Image")?);
    let image_size = image_size.max(kernel.len() as u64);
    ensure!(KERNEL + image_size <= begin, "no room for the kernel");
    let tree_at = end.next_multiple_of(ALIGN);
    let jump_at = tree_at + ALIGN;
    let jump = jump(tree_at, KERNEL);
    let segment = |bytes, at, size| Segment { bytes, at, size };
    sys::load_kernel(
        jump_at,
        &[
            segment(&kernel, KERNEL, image_size),
            // What follows is 0, as the old kernel's tree has it in one piece.
            segment(&initramfs, begin, end - begin),
            segment(&tree, tree_at, tree.len() as u64),
            segment(&jump, jump_at, jump.len() as u64),
        ],
    )?;
    power_off(RebootMode::RB_KEXEC);
    Ok(())
}

/// Enters the kernel with the tree's address in x0, and 0 in x1 to x3.
fn jump(tree: u64, kernel: u64) -> Vec<u8> {
    const LDR_X0_TREE: u32 = 0x5800_00c0;
    const MOV_X1_TO_X3: [u32; 3] = [0xaa1f_03e1, 0xaa1f_03e2, 0xaa1f_03e3];
    const LDR_X4_KERNEL: u32 = 0x5800_0084;
    const BR_X4: u32 = 0xd61f_0080;
    let [one, two, three] = MOV_X1_TO_X3;
    let code = [LDR_X0_TREE, one, two, three, LDR_X4_KERNEL, BR_X4];
    let mut bytes: Vec<u8> = code.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend(tree.to_le_bytes());
    bytes.extend(kernel.to_le_bytes());
    bytes
}

/// A number of the node that the boot loader has written.
fn chosen(name: &str) -> Result<u64> {
    let bytes = fs::read(format!("{CHOSEN}/{name}")).context(name.to_owned())?;
    Ok(bytes
        .iter()
        .fold(0, |sum, byte| (sum << 8) | u64::from(*byte)))
}
