// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device tree that an arm64 guest boots with.
//!
//! CPUs, OPP tables and the vcpufreq node come from `vcpufreq_dt`; here is the
//! rest of the board. Bindings: Linux `Documentation/devicetree/bindings`
//! (`arm,gic-v3`, `arm,gic`, `arm,arch_timer`, `psci`, `serial/8250`, `virtio/mmio`,
//! `reserved-memory/shared-dma-pool`).

use vcpufreq_dt::{Machine, Nodes};
use vm_fdt::{Error, FdtWriter};

use super::gic::Gic;
use super::image::BootPlacement;
use super::layout::{
    DISK_BASE, DISK_SIZE, DISK_SPI, GICC_BASE, GICC_SIZE, GICD_BASE, GICD_SIZE, GICD_V2_SIZE,
    GICR_BASE, GICR_STRIDE, RAM_BASE, UART_BASE, UART_SIZE, UART_SPI,
};

/// Phandles of the GIC and of bounce buffers; those of `vcpufreq_dt` come after them.
const GIC_PHANDLE: u32 = 1;
const BOUNCE_PHANDLE: u32 = 2;
/// Bytes of a protected guest's bounce buffers, and what these are a multiple of: as much as a disk's
/// requests have in flight. Linux chooses their place.
const BOUNCE_SIZE: u64 = 8 << 20;
const BOUNCE_ALIGNMENT: u64 = 2 << 20;
/// First interrupt cell: shared or private peripheral interrupt.
const SPI: u32 = 0;
const PPI: u32 = 1;
/// Third interrupt cell.
const EDGE_RISING: u32 = 1;
const LEVEL_HIGH: u32 = 4;
/// Secure, non-secure, virtual and hypervisor timer as private interrupts
/// (Arm BSA; KVM's default for the virtual one is INTID 27 = 16 + 11).
const TIMER_PPIS: [u32; 4] = [13, 14, 11, 10];
/// Input clock of a 16550 for which its divisors are usually quoted, in Hz.
const UART_CLOCK_HZ: u32 = 1_843_200;

/// How a disk reaches its guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskDma {
    /// All of it.
    Direct,
    /// Bounce buffers, which a protected guest shares.
    Bounced,
}

/// The device tree of `machine`, as a blob.
pub fn build(
    machine: &Machine,
    cmdline: &str,
    place: &BootPlacement,
    (gic, disk): (Gic, Option<DiskDma>),
) -> Result<Vec<u8>, Error> {
    // At most 1026 phandles: there are always enough numbers left for them.
    let nodes = Nodes::new(machine, BOUNCE_PHANDLE + 1).ok_or(Error::DuplicatePhandle)?;
    let mut fdt = FdtWriter::new()?;
    let root = fdt.begin_node("")?;
    fdt.property_u32("#address-cells", 2)?;
    fdt.property_u32("#size-cells", 2)?;
    fdt.property_string("compatible", "linux,dummy-virt")?;
    fdt.property_string("model", "vcpufreq")?;
    fdt.property_u32("interrupt-parent", GIC_PHANDLE)?;
    write_chosen(&mut fdt, cmdline, place)?;
    let memory = fdt.begin_node(&format!("memory@{RAM_BASE:x}"))?;
    fdt.property_string("device_type", "memory")?;
    fdt.property_array_u64("reg", &[RAM_BASE, place.ram_size])?;
    fdt.end_node(memory)?;
    vcpufreq_dt::write_cpus(&mut fdt, &nodes)?;
    vcpufreq_dt::write_opp_tables(&mut fdt, &nodes)?;
    write_psci(&mut fdt)?;
    let vcpus = machine.facts().cpus.len();
    write_gic(&mut fdt, gic, vcpus as u64)?;
    write_timer(&mut fdt, gic, vcpus)?;
    write_serial(&mut fdt)?;
    if let Some(dma) = disk {
        write_disk(&mut fdt, dma)?;
    }
    vcpufreq_dt::write_cpufreq(&mut fdt, &nodes)?;
    fdt.end_node(root)?;
    fdt.finish()
}

fn write_chosen(fdt: &mut FdtWriter, cmdline: &str, place: &BootPlacement) -> Result<(), Error> {
    let chosen = fdt.begin_node("chosen")?;
    fdt.property_string("bootargs", cmdline)?;
    fdt.property_string("stdout-path", &format!("/serial@{UART_BASE:x}"))?;
    if let Some((start, len)) = place.initrd {
        fdt.property_u64("linux,initrd-start", start)?;
        fdt.property_u64("linux,initrd-end", start + len)?;
    }
    fdt.end_node(chosen)
}

fn write_psci(fdt: &mut FdtWriter) -> Result<(), Error> {
    let psci = fdt.begin_node("psci")?;
    let compatible = ["arm,psci-1.0", "arm,psci-0.2"].map(str::to_owned);
    fdt.property_string_list("compatible", compatible.to_vec())?;
    fdt.property_string("method", "hvc")?;
    fdt.end_node(psci)
}

fn write_gic(fdt: &mut FdtWriter, gic: Gic, vcpus: u64) -> Result<(), Error> {
    let (compatible, reg) = match gic {
        Gic::V2 => (
            "arm,cortex-a15-gic",
            [GICD_BASE, GICD_V2_SIZE, GICC_BASE, GICC_SIZE],
        ),
        Gic::V3 => (
            "arm,gic-v3",
            [GICD_BASE, GICD_SIZE, GICR_BASE, vcpus * GICR_STRIDE],
        ),
    };
    let node = fdt.begin_node(&format!("interrupt-controller@{GICD_BASE:x}"))?;
    fdt.property_string("compatible", compatible)?;
    fdt.property_u32("#interrupt-cells", 3)?;
    fdt.property_u32("#address-cells", 2)?;
    fdt.property_u32("#size-cells", 2)?;
    fdt.property_null("ranges")?;
    fdt.property_null("interrupt-controller")?;
    fdt.property_array_u64("reg", &reg)?;
    fdt.property_phandle(GIC_PHANDLE)?;
    fdt.end_node(node)
}

/// Third cell of a private interrupt. That of a GICv2 has a bit for each CPU that gets it.
fn ppi_flags(gic: Gic, vcpus: usize) -> u32 {
    let cpus = (0..vcpus.min(8)).fold(0, |mask, cpu| mask | (1 << cpu));
    match gic {
        Gic::V2 => LEVEL_HIGH | (cpus << 8),
        Gic::V3 => LEVEL_HIGH,
    }
}

fn write_timer(fdt: &mut FdtWriter, gic: Gic, vcpus: usize) -> Result<(), Error> {
    let timer = fdt.begin_node("timer")?;
    fdt.property_string("compatible", "arm,armv8-timer")?;
    fdt.property_null("always-on")?;
    let cells = TIMER_PPIS.map(|ppi| [PPI, ppi, ppi_flags(gic, vcpus)]);
    fdt.property_array_u32("interrupts", cells.as_flattened())?;
    fdt.end_node(timer)
}

fn write_serial(fdt: &mut FdtWriter) -> Result<(), Error> {
    let serial = fdt.begin_node(&format!("serial@{UART_BASE:x}"))?;
    fdt.property_string("compatible", "ns16550a")?;
    fdt.property_array_u64("reg", &[UART_BASE, UART_SIZE])?;
    fdt.property_array_u32("interrupts", &[SPI, UART_SPI, EDGE_RISING])?;
    fdt.property_u32("clock-frequency", UART_CLOCK_HZ)?;
    fdt.end_node(serial)
}

/// Without `dma-coherent` Linux would clean caches for a device that sees them.
fn write_disk(fdt: &mut FdtWriter, dma: DiskDma) -> Result<(), Error> {
    let is_bounced = dma == DiskDma::Bounced;
    if is_bounced {
        let memory = fdt.begin_node("reserved-memory")?;
        fdt.property_u32("#address-cells", 2)?;
        fdt.property_u32("#size-cells", 2)?;
        fdt.property_null("ranges")?;
        let pool = fdt.begin_node("restricted-dma-pool")?;
        fdt.property_string("compatible", "restricted-dma-pool")?;
        fdt.property_u64("size", BOUNCE_SIZE)?;
        fdt.property_u64("alignment", BOUNCE_ALIGNMENT)?;
        fdt.property_phandle(BOUNCE_PHANDLE)?;
        fdt.end_node(pool)?;
        fdt.end_node(memory)?;
    }
    let disk = fdt.begin_node(&format!("virtio_mmio@{DISK_BASE:x}"))?;
    fdt.property_string("compatible", "virtio,mmio")?;
    fdt.property_array_u64("reg", &[DISK_BASE, DISK_SIZE])?;
    fdt.property_array_u32("interrupts", &[SPI, DISK_SPI, EDGE_RISING])?;
    fdt.property_null("dma-coherent")?;
    if is_bounced {
        fdt.property_u32("memory-region", BOUNCE_PHANDLE)?;
    }
    fdt.end_node(disk)
}

#[cfg(test)]
#[path = "fdt_tests.rs"]
mod tests;
