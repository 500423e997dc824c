// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Promises: each fact is in the tree, where Linux looks for it; the nodes
//! can be written into another tree with phandles of the caller's choice.

use std::collections::BTreeMap;

use vcpufreq_dt::vm_fdt::{Error, FdtWriter};
use vcpufreq_dt::{
    CpuPlace, Nodes, RegionKind, dtb, dts, write_cpufreq, write_cpus, write_opp_tables,
};

use crate::blob::{Tree, cell, read, read_resolved};
use crate::samples::{all, cpus, largest, little_big, machine, three_kinds};

fn tree(facts: vcpufreq_dt::MachineFacts) -> Tree {
    read_resolved(&dtb(&machine(facts)).unwrap())
}

#[test]
fn a_cpu_has_what_linux_reads() {
    let tree = tree(little_big());
    let cpu = &tree["/cpus/cpu@2"];
    assert_eq!(cpu["device_type"], b"cpu\0");
    assert_eq!(cpu["compatible"], b"arm,armv8\0");
    assert_eq!(cpu["enable-method"], b"psci\0");
    assert_eq!(cpu["reg"], [0, 0, 0, 0, 0, 0, 0, 2]);
    assert_eq!(cpu["operating-points-v2"], b"/opp-table-1");
    assert_eq!(cell(&tree, "/cpus", "#address-cells"), 2);
    assert_eq!(cell(&tree, "/cpus", "#size-cells"), 0);
}

#[test]
fn capacity_is_on_every_cpu_or_linux_ignores_all() {
    for (name, machine) in all() {
        let tree = read(&dtb(&machine).unwrap());
        let cpus = tree.keys().filter(|path| path.starts_with("/cpus/cpu@"));
        let with = cpus.filter(|path| tree[*path].contains_key("capacity-dmips-mhz"));
        assert_eq!(with.count(), machine.facts().cpus.len(), "{name}");
    }
}

#[test]
fn affinity_fields_are_in_the_name_and_the_reg() {
    let tree = tree(largest());
    let cpu = &tree["/cpus/cpu@100000f0f"];
    assert_eq!(cpu["reg"], [0, 0, 0, 1, 0, 0, 0x0f, 0x0f]);
}

#[test]
fn standby_is_there_only_where_it_is_wanted() {
    for standby in [true, false] {
        let facts = vcpufreq_dt::MachineFacts {
            standby,
            ..little_big()
        };
        let tree = tree(facts);
        let has = |(path, node): (&String, &BTreeMap<String, Vec<u8>>)| {
            path.contains("standby") || node.contains_key("cpu-idle-states")
        };
        assert_eq!(tree.iter().any(has), standby);
        assert_eq!(tree.contains_key("/cpus/idle-states"), standby);
    }
}

#[test]
fn a_real_time_cpu_is_never_asked_to_stand_by_where_a_timer_is_near() {
    let mut facts = little_big();
    facts.cpus[3].real_time = true;
    let tree = tree(facts);
    let state = |cpu: &str| {
        let path = tree[&format!("/cpus/{cpu}")]["cpu-idle-states"].clone();
        String::from_utf8(path).unwrap()
    };
    assert_eq!(state("cpu@0"), "/cpus/idle-states/cpu-standby");
    assert_eq!(state("cpu@3"), "/cpus/idle-states/cpu-standby-rt");
    assert_eq!(cell(&tree, &state("cpu@0"), "min-residency-us"), 20);
    assert_eq!(cell(&tree, &state("cpu@3"), "min-residency-us"), 1_000_000);
}

#[test]
fn the_cpu_map_has_every_cpu_in_its_cluster() {
    let mut facts = little_big();
    // Any numbers: their order is the order of the nodes.
    for (cpu, cluster) in facts.cpus.iter_mut().zip([40, 7, 7, 40]) {
        cpu.place.cluster = cluster;
    }
    let tree = tree(facts);
    let core = |path: &str| tree[&format!("/cpus/cpu-map/{path}")]["cpu"].clone();
    assert_eq!(core("cluster0/core0"), b"/cpus/cpu@1");
    assert_eq!(core("cluster0/core1"), b"/cpus/cpu@2");
    assert_eq!(core("cluster1/core0"), b"/cpus/cpu@0");
    assert_eq!(core("cluster1/core1"), b"/cpus/cpu@3");
    assert_eq!(tree.keys().filter(|path| path.contains("/core")).count(), 4);
}

#[test]
fn threads_and_sockets_are_in_the_cpu_map_where_there_are_several() {
    // Of each CPU socket, cluster and core; its node below the map.
    type Row<'a> = (&'a str, [(u32, u32, Option<u32>); 4], [&'a str; 4]);
    let rows: [Row; 3] = [
        (
            "two cores of two threads",
            [
                (5, 1, Some(0)),
                (5, 1, Some(0)),
                (5, 1, Some(2)),
                (5, 1, Some(2)),
            ],
            [
                "cluster0/core0/thread0",
                "cluster0/core0/thread1",
                "cluster0/core1/thread0",
                "cluster0/core1/thread1",
            ],
        ),
        (
            "one thread each",
            [(0, 0, Some(9)), (0, 0, None), (0, 0, None), (0, 1, Some(9))],
            [
                "cluster0/core0",
                "cluster0/core1",
                "cluster0/core2",
                "cluster1/core0",
            ],
        ),
        (
            "two sockets",
            [
                (0, 0, None),
                (0, 1, Some(2)),
                (4, 2, Some(4)),
                (4, 2, Some(4)),
            ],
            [
                "socket0/cluster0/core0",
                "socket0/cluster1/core0",
                "socket1/cluster0/core0/thread0",
                "socket1/cluster0/core0/thread1",
            ],
        ),
    ];
    for (name, places, nodes) in rows {
        let mut facts = little_big();
        for (cpu, (socket, cluster, core)) in facts.cpus.iter_mut().zip(places) {
            cpu.place = CpuPlace {
                socket,
                cluster,
                core,
            };
        }
        let tree = tree(facts);
        for (cpu, node) in nodes.iter().enumerate() {
            let refers = &tree[&format!("/cpus/cpu-map/{node}")]["cpu"];
            assert_eq!(refers, format!("/cpus/cpu@{cpu}").as_bytes(), "{name}");
        }
        let map = tree
            .iter()
            .filter(|(path, _)| path.starts_with("/cpus/cpu-map/"));
        assert_eq!(
            map.filter(|(_, node)| node.contains_key("cpu")).count(),
            4,
            "{name}"
        );
    }
}

#[test]
fn an_opp_has_frequency_voltage_and_power() {
    let tree = tree(little_big());
    assert_eq!(tree["/opp-table-0"]["compatible"], b"operating-points-v2\0");
    assert!(tree["/opp-table-0"].contains_key("opp-shared"));
    let opp = "/opp-table-0/opp-1800000000";
    assert_eq!(tree[opp]["opp-hz"], 1_800_000_000_u64.to_be_bytes());
    assert_eq!(cell(&tree, opp, "opp-microvolt"), 900_000);
    assert_eq!(cell(&tree, opp, "opp-microwatt"), 305_000);
}

#[test]
fn frequencies_beyond_32_bits_of_hz_are_whole() {
    let tree = tree(largest());
    let opp = &tree["/opp-table-0/opp-6400000000"];
    assert_eq!(opp["opp-hz"], 6_400_000_000_u64.to_be_bytes());
}

#[test]
fn what_is_not_known_is_left_out() {
    let machine_tree = tree(three_kinds());
    assert!(!machine_tree["/opp-table-0"].contains_key("opp-shared"));
    let opp = &machine_tree["/opp-table-0/opp-300000000"];
    assert!(!opp.contains_key("opp-microvolt") && !opp.contains_key("opp-microwatt"));
    assert!(!machine_tree["/cpus/cpu@0"].contains_key("dynamic-power-coefficient"));
    let bare_tree = tree(cpus(&[(1024, 1_000_000)]));
    assert!(!bare_tree["/cpus/cpu@0"].contains_key("operating-points-v2"));
    assert!(
        !bare_tree
            .keys()
            .any(|path| path.contains("cpufreq") || path.contains("opp"))
    );
}

#[test]
fn the_device_is_where_the_facts_say() {
    let tree = tree(largest());
    let node = &tree["/cpufreq@100000000"];
    assert_eq!(node["compatible"], b"qemu,virtual-cpufreq\0");
    assert_eq!(
        node["reg"],
        [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x20, 0, 0]
    );
}

#[test]
fn behind_shared_memory_is_its_doorbell() {
    let mut facts = little_big();
    let region = facts.cpufreq.as_mut().unwrap();
    (region.size, region.kind) = (0x2_0000, RegionKind::SharedMemory);
    let tree = tree(facts);
    let node = &tree["/cpufreq@b000000"];
    assert_eq!(node["compatible"], b"vcpufreq,shm\0");
    let header = include_str!("../../abi/vcpufreq-shm.h");
    assert!(header.contains("_COMPATIBLE\t\t\"vcpufreq,shm\"\n"));
    let cells: [u64; 4] = [0xb00_0000, 0x2_0000, 0xb02_0000, 0x1000];
    assert_eq!(node["reg"], cells.map(u64::to_be_bytes).concat());
}

/// P = C · f · V² holds with C = 100 for these powers, as Linux computes it.
#[test]
fn the_power_coefficient_is_the_one_that_powers_follow() {
    let mut facts = little_big();
    for opp in &mut facts.opp_tables[0].opps {
        let (mhz, mv) = (u64::from(opp.khz / 1000), u64::from(opp.uv.unwrap() / 1000));
        opp.uw = Some(u32::try_from(100 * mv * mv * mhz / 1_000_000).unwrap());
    }
    let tree = tree(facts);
    assert_eq!(cell(&tree, "/cpus/cpu@0", "dynamic-power-coefficient"), 100);
    assert_eq!(cell(&tree, "/cpus/cpu@1", "dynamic-power-coefficient"), 100);
}

/// A table of the emulated host's: its powers are nearly C · f · V².
#[test]
fn powers_from_the_coefficient_are_near_the_stated_ones() {
    let machine = machine(little_big());
    let tree = read(&dtb(&machine).unwrap());
    for (table, cpu) in [(0, "/cpus/cpu@0"), (1, "/cpus/cpu@2")] {
        let c = u64::from(cell(&tree, cpu, "dynamic-power-coefficient"));
        for opp in &machine.facts().opp_tables[table].opps {
            let (mhz, mv) = (u64::from(opp.khz / 1000), u64::from(opp.uv.unwrap() / 1000));
            let (linux, stated) = (c * mv * mv * mhz / 1_000_000, u64::from(opp.uw.unwrap()));
            assert!(
                linux.abs_diff(stated) * 100 < stated * 3,
                "{linux} for {stated}"
            );
        }
    }
}

/// A VMM's tree with the machine's nodes in it, phandles from `first`.
fn embedded(first: u32, taken: u32) -> Result<Vec<u8>, Error> {
    let machine = machine(little_big());
    let nodes = Nodes::new(&machine, first).unwrap();
    let mut fdt = FdtWriter::new()?;
    let root = fdt.begin_node("")?;
    let gic = fdt.begin_node("intc@8000000")?;
    fdt.property_phandle(taken)?;
    fdt.end_node(gic)?;
    write_cpus(&mut fdt, &nodes)?;
    write_opp_tables(&mut fdt, &nodes)?;
    write_cpufreq(&mut fdt, &nodes)?;
    fdt.end_node(root)?;
    fdt.finish()
}

#[test]
fn nodes_go_into_another_tree() {
    let tree = read(&embedded(10, 1).unwrap());
    assert_eq!(cell(&tree, "/cpus/cpu@0", "phandle"), 10);
    assert_eq!(cell(&tree, "/cpus/cpu@3", "phandle"), 13);
    assert_eq!(cell(&tree, "/opp-table-0", "phandle"), 14);
    assert_eq!(cell(&tree, "/cpus/cpu@2", "operating-points-v2"), 15);
    assert!(tree.contains_key("/cpufreq@b000000"));
}

#[test]
fn a_phandle_that_is_taken_is_refused() {
    assert_eq!(embedded(10, 15), Err(Error::DuplicatePhandle));
    assert!(embedded(10, 17).is_ok());
}

#[test]
fn phandles_are_told_and_stay_valid() {
    let machine = machine(little_big());
    let nodes = Nodes::new(&machine, 10).unwrap();
    assert_eq!(nodes.cpu_phandle(3), Some(13));
    assert_eq!(nodes.cpu_phandle(4), None);
    assert_eq!(nodes.next_phandle(), 18);
    assert!(Nodes::new(&machine, 0).is_none());
    // 0xffff_fffe is the last one that there is.
    assert!(Nodes::new(&machine, u32::MAX - 8).is_some());
    assert!(Nodes::new(&machine, u32::MAX - 7).is_none());
}

#[test]
fn source_is_for_people() {
    let text = dts(&machine(little_big()));
    for line in [
        "/dts-v1/;",
        "\t\t\t\t\tcpu = <&cpu3>;",
        "\t\tcpu3: cpu@3 {",
        "\t\t\tcapacity-dmips-mhz = <512>;",
        "\topp_table1: opp-table-1 {",
        "\t\topp-shared;",
        "\t\t\topp-hz = /bits/ 64 <2800000000>;",
        "\t\treg = <0x0 0xb000000 0x0 0x10000>;",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
    }
    assert!(
        !text.contains("phandle"),
        "they would clash where this is included"
    );
}
