// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A kernel's first bytes, and another VMM's device tree, for tests here and of the program.

use vm_fdt::{FdtWriter, FdtWriterResult};

use crate::image_header::{COFF_LEN, IMAGE_SIZE_AT, MAGIC, MAGIC_AT, PE_OFFSET_AT};

/// Bytes of the file that [`image`]'s one PE section asks for.
pub const FILE_LEN: u64 = 8192;

/// The first bytes of an Image that takes `size` bytes in memory.
pub fn image(size: u64) -> Vec<u8> {
    let mut head = vec![0; 512];
    head[..2].copy_from_slice(b"MZ");
    put(&mut head, IMAGE_SIZE_AT, &size.to_le_bytes());
    put(&mut head, MAGIC_AT, MAGIC);
    put(&mut head, PE_OFFSET_AT, &64_u32.to_le_bytes());
    put(&mut head, 64, b"PE\0\0");
    put(&mut head, 70, &1_u16.to_le_bytes());
    let section = 64 + COFF_LEN;
    put(&mut head, section + 16, &4096_u32.to_le_bytes());
    put(&mut head, section + 20, &4096_u32.to_le_bytes());
    head
}

pub(crate) fn put(head: &mut [u8], at: usize, bytes: &[u8]) {
    head[at..at + bytes.len()].copy_from_slice(bytes);
}

/// QEMU's device tree of a guest with so many CPUs and so many bytes of RAM at 1 GiB, as far as
/// registers in RAM need it.
///
/// # Errors
/// None for sizes that fit.
pub fn qemu_tree(cpus: u32, ram: u64) -> FdtWriterResult<Vec<u8>> {
    let mut fdt = FdtWriter::new()?;
    let root = fdt.begin_node("")?;
    fdt.property_u32("#address-cells", 2)?;
    fdt.property_u32("#size-cells", 2)?;
    let memory = fdt.begin_node("memory@40000000")?;
    fdt.property_string("device_type", "memory")?;
    fdt.property_array_u64("reg", &[1 << 30, ram])?;
    fdt.end_node(memory)?;
    let node = fdt.begin_node("cpus")?;
    fdt.property_u32("#address-cells", 1)?;
    fdt.property_u32("#size-cells", 0)?;
    for reg in 0..cpus {
        let cpu = fdt.begin_node(&format!("cpu@{reg:x}"))?;
        fdt.property_string("compatible", "arm,cortex-a57")?;
        fdt.property_u32("reg", reg)?;
        fdt.end_node(cpu)?;
    }
    fdt.end_node(node)?;
    fdt.end_node(root)?;
    fdt.finish()
}
