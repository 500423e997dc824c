// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device tree that an arm64 guest boots with.
//!
//! CPUs, OPP tables and the vcpufreq node come from `vcpufreq_dt`; here is the
//! rest of the board. Bindings: Linux `Documentation/devicetree/bindings`
//! (`arm,gic-v3`, `arm,gic`, `arm,arch_timer`, `psci`, `serial/8250`).

use vcpufreq_dt::{Machine, Nodes};
use vm_fdt::{Error, FdtWriter};

use super::gic::Gic;
use super::image::BootPlacement;
use super::layout::{
    GICC_BASE, GICC_SIZE, GICD_BASE, GICD_SIZE, GICD_V2_SIZE, GICR_BASE, GICR_STRIDE, RAM_BASE,
    UART_BASE, UART_SIZE, UART_SPI,
};

/// Phandle of the GIC; those of `vcpufreq_dt` come after it.
const GIC_PHANDLE: u32 = 1;
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

/// The device tree of `machine`, as a blob.
pub fn build(
    machine: &Machine,
    cmdline: &str,
    place: &BootPlacement,
    gic: Gic,
) -> Result<Vec<u8>, Error> {
    // At most 1025 phandles: there are always enough numbers left for them.
    let nodes = Nodes::new(machine, GIC_PHANDLE + 1).ok_or(Error::DuplicatePhandle)?;
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

#[cfg(test)]
mod tests {
    //! Each node describes the guest's hardware, where `layout` puts it.

    use std::collections::BTreeMap;

    use vcpufreq_dt::{CpuFacts, CpuPlace, CpufreqRegion, MachineFacts, RegionKind};

    use super::super::image::FDT_MAX;
    use super::super::layout::{CPUFREQ_BASE, mpidr_affinity};
    use super::*;

    const PLACE: BootPlacement = BootPlacement {
        ram_size: 512 << 20,
        kernel_block: RAM_BASE,
        fdt: RAM_BASE + (64 << 20),
        initrd: Some((RAM_BASE + (66 << 20), 1000)),
    };

    fn machine(vcpus: u16) -> Machine {
        let cpu = |vcpu| CpuFacts {
            reg: mpidr_affinity(vcpu),
            capacity: 1024,
            khz_max: 2_000_000,
            opp_table: None,
            place: CpuPlace::default(),
            real_time: false,
        };
        let facts = MachineFacts {
            cpus: (0..vcpus).map(cpu).collect(),
            opp_tables: vec![],
            standby: false,
            cpufreq: Some(CpufreqRegion {
                base: CPUFREQ_BASE,
                size: u64::from(vcpus).next_multiple_of(16) * 0x1000,
                kind: RegionKind::Registers,
            }),
        };
        Machine::try_from(facts).unwrap()
    }

    fn word(blob: &[u8], at: usize) -> usize {
        let bytes = blob[at..at + 4].try_into().unwrap();
        usize::try_from(u32::from_be_bytes(bytes)).unwrap()
    }

    fn text(blob: &[u8], at: usize) -> String {
        let bytes = blob[at..].iter().copied().take_while(|&byte| byte != 0);
        String::from_utf8(bytes.collect()).unwrap()
    }

    /// All properties of a blob, by `/node/property`.
    fn properties(blob: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let (mut at, strings) = (word(blob, 8), word(blob, 12));
        let (mut path, mut found) = (Vec::new(), BTreeMap::new());
        loop {
            let token = word(blob, at);
            at += 4;
            match token {
                1 => {
                    let name = text(blob, at);
                    at += (name.len() + 1).next_multiple_of(4);
                    path.push(name);
                }
                2 => drop(path.pop()),
                3 => {
                    let (len, name) = (word(blob, at), word(blob, at + 4));
                    let key = format!("{}/{}", path.join("/"), text(blob, strings + name));
                    found.insert(key, blob[at + 8..at + 8 + len].to_vec());
                    at += 8 + len.next_multiple_of(4);
                }
                4 => {}
                9 => return found,
                other => panic!("token {other} at {at:#x}"),
            }
        }
    }

    fn cells(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    #[test]
    fn nodes_say_where_things_are() {
        let blob = build(&machine(2), "console=ttyS0 quiet", &PLACE, Gic::V3).unwrap();
        let found = properties(&blob);
        let rows: [(&str, Vec<u8>); 9] = [
            ("/chosen/bootargs", b"console=ttyS0 quiet\0".to_vec()),
            ("/chosen/stdout-path", b"/serial@9000000\0".to_vec()),
            ("/chosen/linux,initrd-start", cells(&[0, 0x4420_0000])),
            ("/chosen/linux,initrd-end", cells(&[0, 0x4420_03e8])),
            (
                "/memory@40000000/reg",
                cells(&[0, 0x4000_0000, 0, 512 << 20]),
            ),
            (
                "/interrupt-controller@10000000/reg",
                cells(&[0, 0x1000_0000, 0, 0x1_0000, 0, 0x1001_0000, 0, 0x4_0000]),
            ),
            ("/serial@9000000/interrupts", cells(&[0, 1, 1])),
            (
                "/cpufreq@a000000/reg",
                cells(&[0, 0x0a00_0000, 0, 0x1_0000]),
            ),
            ("/psci/method", b"hvc\0".to_vec()),
        ];
        for (name, value) in rows {
            assert_eq!(found.get(name), Some(&value), "{name}");
        }
        let parent = &found["/interrupt-parent"];
        assert_eq!(parent, &found["/interrupt-controller@10000000/phandle"]);
        let timer = cells(&[1, 13, 4, 1, 14, 4, 1, 11, 4, 1, 10, 4]);
        assert_eq!(found["/timer/interrupts"], timer);
    }

    #[test]
    fn a_guest_without_initrd_has_none_in_the_tree() {
        let place = BootPlacement {
            initrd: None,
            ..PLACE
        };
        let found = properties(&build(&machine(1), "", &place, Gic::V3).unwrap());
        assert!(!found.contains_key("/chosen/linux,initrd-start"));
        assert_eq!(found["/chosen/bootargs"], b"\0");
    }

    #[test]
    fn the_largest_guest_has_all_its_cpus_and_fits() {
        let blob = build(&machine(512), "", &PLACE, Gic::V3).unwrap();
        assert!(blob.len() < usize::try_from(FDT_MAX).unwrap());
        let found = properties(&blob);
        assert_eq!(found["/cpus/cpu@1f0f/reg"], cells(&[0, 0x1f0f]));
        assert_eq!(found["/cpus/cpu@1f0f/enable-method"], b"psci\0");
        let gic = &found["/interrupt-controller@10000000/reg"];
        assert_eq!(gic[24..], cells(&[0, 512 * 0x2_0000]));
    }

    #[test]
    fn a_gicv2_has_a_cpu_interface_and_a_mask_of_cpus() {
        let found = properties(&build(&machine(3), "", &PLACE, Gic::V2).unwrap());
        let gic = "/interrupt-controller@10000000";
        assert_eq!(found[&format!("{gic}/compatible")], b"arm,cortex-a15-gic\0");
        let reg = cells(&[0, 0x1000_0000, 0, 0x1000, 0, 0x1001_0000, 0, 0x2000]);
        assert_eq!(found[&format!("{gic}/reg")], reg);
        // Three vCPUs in bits 15:8.
        let flags = 0x704;
        let timer = [13, 14, 11, 10].map(|ppi| [1, ppi, flags]);
        assert_eq!(found["/timer/interrupts"], cells(timer.as_flattened()));
    }
}
