// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Each node describes the guest's hardware, where `layout` puts it.

use std::collections::BTreeMap;

use vcpufreq_dt::{CpuFacts, CpuPlace, CpufreqRegion, MachineFacts, RegionKind};

use super::super::image::FDT_MAX;
use super::super::layout::{CPUFREQ_BASE, mpidr_affinity};
use super::*;

#[allow(dead_code)]
#[path = "../../../dt/tests/dt/blob.rs"]
mod blob;

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

/// All properties of a blob, by `/node/property`.
fn properties(blob: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let nodes = blob::read(blob).into_iter();
    let all = nodes.flat_map(|(path, node)| {
        let named = move |(name, value)| (format!("{path}/{name}"), value);
        node.into_iter().map(named)
    });
    all.collect()
}

fn cells(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

#[test]
fn nodes_say_where_things_are() {
    let blob = build(&machine(2), "console=ttyS0 quiet", &PLACE, (Gic::V3, None)).unwrap();
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
    let found = properties(&build(&machine(1), "", &place, (Gic::V3, None)).unwrap());
    assert!(!found.contains_key("/chosen/linux,initrd-start"));
    assert_eq!(found["/chosen/bootargs"], b"\0");
}

#[test]
fn the_largest_guest_has_all_its_cpus_and_fits() {
    let blob = build(&machine(512), "", &PLACE, (Gic::V3, None)).unwrap();
    assert!(blob.len() < usize::try_from(FDT_MAX).unwrap());
    let found = properties(&blob);
    assert_eq!(found["/cpus/cpu@1f0f/reg"], cells(&[0, 0x1f0f]));
    assert_eq!(found["/cpus/cpu@1f0f/enable-method"], b"psci\0");
    let gic = &found["/interrupt-controller@10000000/reg"];
    assert_eq!(gic[24..], cells(&[0, 512 * 0x2_0000]));
}

#[test]
fn a_gicv2_has_a_cpu_interface_and_a_mask_of_cpus() {
    let found = properties(&build(&machine(3), "", &PLACE, (Gic::V2, None)).unwrap());
    let gic = "/interrupt-controller@10000000";
    assert_eq!(found[&format!("{gic}/compatible")], b"arm,cortex-a15-gic\0");
    let reg = cells(&[0, 0x1000_0000, 0, 0x1000, 0, 0x1001_0000, 0, 0x2000]);
    assert_eq!(found[&format!("{gic}/reg")], reg);
    // Three vCPUs in bits 15:8.
    let flags = 0x704;
    let timer = [13, 14, 11, 10].map(|ppi| [1, ppi, flags]);
    assert_eq!(found["/timer/interrupts"], cells(timer.as_flattened()));
}

#[test]
fn a_disk_of_a_protected_guest_names_its_bounce_buffers() {
    let of = |dma| properties(&build(&machine(1), "", &PLACE, (Gic::V3, dma)).unwrap());
    let (disk, pool) = (
        "/virtio_mmio@9200000",
        "/reserved-memory/restricted-dma-pool",
    );
    let found = of(Some(DiskDma::Bounced));
    assert_eq!(found[&format!("{disk}/compatible")], b"virtio,mmio\0");
    assert_eq!(found[&format!("{disk}/interrupts")], cells(&[0, 2, 1]));
    assert_eq!(found[&format!("{disk}/dma-coherent")], b"");
    assert_eq!(
        found[&format!("{pool}/compatible")],
        b"restricted-dma-pool\0"
    );
    assert_eq!(found[&format!("{pool}/size")], cells(&[0, 8 << 20]));
    let named = &found[&format!("{disk}/memory-region")];
    assert_eq!(named, &found[&format!("{pool}/phandle")]);
    let found = of(Some(DiskDma::Direct));
    assert!(found.contains_key(&format!("{disk}/reg")));
    let is_extra = |name: &&String| name.contains("reserved") || name.contains("memory-region");
    assert_eq!(found.keys().find(is_extra), None);
    let is_disk = |name: &&String| name.starts_with(disk);
    assert_eq!(of(None).keys().find(is_disk), None);
}
