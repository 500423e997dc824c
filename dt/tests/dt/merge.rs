// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Promises: a merged tree has the machine's CPU performance and all else of
//! the base; a base that is wrong, whatever is in it, is one line.

use proptest::collection::vec;
use proptest::prelude::{any, proptest};
use vcpufreq_dt::vm_fdt::{FdtReserveEntry, FdtWriter, FdtWriterResult};
use vcpufreq_dt::{
    MAX_TREE, Machine, MergeError, RegionKind, Seeds, TreeError, dtb, initrd, memory, merge,
    registers_in_ram,
};

use crate::blob::{Tree, cell, read, read_resolved};
use crate::samples::{all, little_big, machine};

const GIC_PHANDLE: u32 = 0x8005;
const BOOT_CPU: u32 = 2;
const BOOT_CPU_AT: usize = 28;
const RESERVED: (u64, u64) = (0x4800_0000, 0x1_0000);

/// A CPU of the base: name, reg in one cell, phandle.
type Cpu = (&'static str, Option<u32>, Option<u32>);

/// As QEMU writes them: phandles fall, the last one has none here.
const CPUS: [Cpu; 4] = [
    ("cpu@0", Some(0), Some(0x8004)),
    ("cpu@1", Some(1), Some(0x8003)),
    ("cpu@100", Some(0x100), Some(0x8002)),
    ("cpu@101", Some(0x101), None),
];

fn write_base(fdt: &mut FdtWriter, cpus: &[Cpu]) -> FdtWriterResult<()> {
    let gic = fdt.begin_node("intc@8000000")?;
    fdt.property_phandle(GIC_PHANDLE)?;
    let its = fdt.begin_node("its@8080000")?;
    fdt.property_null("msi-controller")?;
    fdt.end_node(its)?;
    fdt.end_node(gic)?;
    let node = fdt.begin_node("cpus")?;
    fdt.property_u32("#address-cells", 1)?;
    fdt.property_u32("#size-cells", 0)?;
    let map = fdt.begin_node("cpu-map")?;
    let socket = fdt.begin_node("socket0")?;
    fdt.end_node(socket)?;
    fdt.end_node(map)?;
    for &(name, reg, phandle) in cpus {
        let cpu = fdt.begin_node(name)?;
        fdt.property_string("compatible", "arm,cortex-a57")?;
        reg.map_or(Ok(()), |reg| fdt.property_u32("reg", reg))?;
        fdt.property_u32("capacity-dmips-mhz", 7)?;
        phandle.map_or(Ok(()), |phandle| fdt.property_phandle(phandle))?;
        fdt.end_node(cpu)?;
    }
    fdt.end_node(node)?;
    let chosen = fdt.begin_node("chosen")?;
    fdt.property_string("bootargs", "quiet")?;
    fdt.property_u64("kaslr-seed", 1)?;
    fdt.property_u64("rng-seed", 2)?;
    fdt.end_node(chosen)
}

/// A tree whose root has these children, and addresses of so many cells.
fn tree_of(cells: u32, write: impl FnOnce(&mut FdtWriter) -> FdtWriterResult<()>) -> Vec<u8> {
    let reserved = FdtReserveEntry::new(RESERVED.0, RESERVED.1).unwrap();
    let mut fdt = FdtWriter::new_with_mem_reserv(&[reserved]).unwrap();
    fdt.set_boot_cpuid_phys(BOOT_CPU);
    let root = fdt.begin_node("").unwrap();
    fdt.property_u32("#address-cells", cells).unwrap();
    fdt.property_u32("#size-cells", cells).unwrap();
    write(&mut fdt).unwrap();
    fdt.end_node(root).unwrap();
    fdt.finish().unwrap()
}

fn base_of(cpus: &[Cpu]) -> Vec<u8> {
    tree_of(2, |fdt| write_base(fdt, cpus))
}

/// The sample with four CPUs, for a guest that finds the registers itself.
fn four() -> Machine {
    machine(little_big()).without_cpufreq()
}

fn merged(base: &[u8]) -> Vec<u8> {
    merge(base, &four(), Seeds::Drop).unwrap().blob
}

/// `tree` below `/cpus`, without what describes a CPU itself, and its OPP
/// tables; CPUs are numbered in the order of their nodes.
fn performance(blob: &[u8], names: [&str; 4]) -> Tree {
    let numbered = |text: &str| {
        let numbers = names.iter().enumerate();
        numbers.fold(format!("{text}\0"), |text, (number, name)| {
            text.replace(&format!("/{name}\0"), &format!("/cpu {number}\0"))
        })
    };
    let ours = |path: &str| path.starts_with("/cpus/") || path.starts_with("/opp-table");
    let own = ["compatible", "device_type", "enable-method", "reg"];
    let mut tree = read_resolved(blob);
    tree.retain(|path, _| ours(path));
    tree.into_iter()
        .map(|(path, mut node)| {
            if path.starts_with("/cpus/cpu@") {
                node.retain(|name, _| !own.contains(&name.as_str()));
            }
            if let Some(cpu) = node.get_mut("cpu") {
                *cpu = numbered(&String::from_utf8(cpu.clone()).unwrap()).into_bytes();
            }
            (numbered(&path), node)
        })
        .collect()
}

#[test]
fn a_merged_tree_has_what_dt_makes() {
    let alone = performance(&dtb(&four()).unwrap(), ["cpu@0", "cpu@1", "cpu@2", "cpu@3"]);
    let merged = performance(&merged(&base_of(&CPUS)), CPUS.map(|cpu| cpu.0));
    assert_eq!(merged, alone);
}

#[test]
fn all_else_of_the_base_stays() {
    let base = base_of(&CPUS);
    let merged = merge(&base, &four(), Seeds::Keep).unwrap().blob;
    assert_eq!(merged[BOOT_CPU_AT..][..4], BOOT_CPU.to_be_bytes());
    let reserved = [RESERVED.0, RESERVED.1, 0, 0].map(u64::to_be_bytes);
    assert_eq!(&merged[40..72], reserved.as_flattened());
    let merged = read(&merged);
    for (path, node) in read(&base) {
        if path.starts_with("/cpus/cpu-map") {
            assert!(!merged.contains_key(&path) || path == "/cpus/cpu-map");
            continue;
        }
        for (name, value) in node
            .iter()
            .filter(|(name, _)| *name != "capacity-dmips-mhz")
        {
            assert_eq!(merged[&path].get(name), Some(value), "{path} {name}");
        }
    }
}

#[test]
fn new_phandles_are_above_those_of_the_base() {
    let tree = read(&merged(&base_of(&CPUS)));
    assert_eq!(cell(&tree, "/cpus/cpu@0", "phandle"), 0x8004);
    let new = ["/cpus/cpu@101", "/opp-table-0", "/opp-table-1"];
    for path in new {
        assert!(cell(&tree, path, "phandle") > GIC_PHANDLE, "{path}");
    }
    let last = "/cpus/cpu-map/cluster1/core1";
    let cpu = cell(&tree, "/cpus/cpu@101", "phandle");
    assert_eq!(cell(&tree, last, "cpu"), cpu);
}

#[test]
fn random_seeds_are_for_one_boot() {
    for (seeds, kept) in [(Seeds::Keep, true), (Seeds::Drop, false)] {
        let tree = read(&merge(&base_of(&CPUS), &four(), seeds).unwrap().blob);
        let chosen = &tree["/chosen"];
        let has = ["kaslr-seed", "rng-seed"].map(|name| chosen.contains_key(name));
        assert_eq!(has, [kept; 2]);
        assert_eq!(chosen["bootargs"], b"quiet\0");
    }
}

#[test]
fn padding_is_left_out() {
    let mut base = base_of(&CPUS);
    let whole = merged(&base);
    base.resize(1 << 20, 0);
    assert_eq!(merged(&base), whole, "behind the tree");
    base[4..8].copy_from_slice(&(1_u32 << 20).to_be_bytes());
    assert_eq!(merged(&base), whole, "within it");
}

#[test]
fn a_merged_tree_can_be_merged_again() {
    let once = merged(&base_of(&CPUS));
    let twice = merged(&once);
    assert_eq!(read_resolved(&twice), read_resolved(&once));
    let mut bare = little_big();
    bare.cpus.iter_mut().for_each(|cpu| cpu.opp_table = None);
    (bare.opp_tables, bare.standby, bare.cpufreq) = (vec![], false, None);
    let tree = read(&merge(&once, &machine(bare), Seeds::Drop).unwrap().blob);
    let left = |path: &&String| path.contains("opp") || path.contains("standby");
    assert_eq!(tree.keys().find(left), None);
    assert!(!tree["/cpus/cpu@0"].contains_key("operating-points-v2"));
}

/// A base that has a reserved range of its own.
fn base_with_reserved() -> Vec<u8> {
    tree_of(2, |fdt| {
        write_base(fdt, &CPUS)?;
        let reserved = fdt.begin_node("reserved-memory")?;
        let own = fdt.begin_node("own@1000")?;
        fdt.end_node(own)?;
        fdt.end_node(reserved)
    })
}

#[test]
fn registers_in_ram_are_reserved_once() {
    let mut facts = little_big();
    let region = facts.cpufreq.as_mut().unwrap();
    (region.base, region.kind) = (0x5fe0_0000, RegionKind::GuestRam);
    let machine = machine(facts);
    for base in [base_of(&CPUS), base_with_reserved()] {
        let once = merge(&base, &machine, Seeds::Drop).unwrap().blob;
        let twice = merge(&once, &machine, Seeds::Drop).unwrap().blob;
        for blob in [once, twice] {
            let tree = read(&blob);
            let range = &tree["/reserved-memory/cpufreq@5fe00000"];
            let reg = [0x5fe0_0000_u64, 0x20_0000].map(u64::to_be_bytes).concat();
            assert_eq!(range["reg"], reg);
            assert!(range.contains_key("no-map"));
            let node = &tree["/cpufreq@5fe00000"];
            assert_eq!(node["compatible"], b"qemu,virtual-cpufreq\0");
            let named = blob.windows(16).filter(|name| *name == b"cpufreq@5fe00000");
            assert_eq!(named.count(), 2, "the range and the device");
            assert_eq!(registers_in_ram(&blob).unwrap(), machine.facts().cpufreq);
        }
    }
    let kept = merge(&base_with_reserved(), &machine, Seeds::Drop).unwrap();
    assert!(read(&kept.blob).contains_key("/reserved-memory/own@1000"));
}

#[test]
fn registers_of_a_device_are_not_in_ram() {
    let of_device = merge(&base_of(&CPUS), &machine(little_big()), Seeds::Drop).unwrap();
    for blob in [&of_device.blob, &base_with_reserved(), &base_of(&CPUS)] {
        assert_eq!(registers_in_ram(blob).unwrap(), None);
    }
    assert!(registers_in_ram(&of_device.blob[..40]).is_err());
}

#[test]
fn the_ram_of_a_base_is_read() {
    let base = tree_of(2, |fdt| {
        let memory = fdt.begin_node("memory@40000000")?;
        fdt.property_string("device_type", "memory")?;
        fdt.property_array_u64("reg", &[0x4000_0000, 0x1000_0000])?;
        fdt.end_node(memory)?;
        write_base(fdt, &CPUS)
    });
    assert_eq!(memory(&base).unwrap(), [(0x4000_0000, 0x1000_0000)]);
    assert_eq!(memory(&base_of(&CPUS)).unwrap(), []);
    assert!(memory(&base[..base.len() - 40]).is_err());
}

#[test]
fn the_initrd_of_a_base_is_read() {
    let with = |cells: [Vec<u8>; 2]| {
        let base = tree_of(2, |fdt| {
            let chosen = fdt.begin_node("chosen")?;
            fdt.property("linux,initrd-start", &cells[0])?;
            fdt.property("linux,initrd-end", &cells[1])?;
            fdt.end_node(chosen)?;
            write_base(fdt, &CPUS)
        });
        initrd(&base).unwrap()
    };
    let of = |number: u64| number.to_be_bytes().to_vec();
    let (start, end) = (0x4800_0000, 0x4900_0001);
    assert_eq!(with([of(start), of(end)]), Some((start, end)));
    let short = [start, end].map(|number| of(number)[4..].to_vec());
    assert_eq!(with(short), Some((start, end)));
    assert_eq!(with([of(start), vec![1, 2, 3]]), None);
    assert_eq!(initrd(&base_of(&CPUS)).unwrap(), None);
    assert!(initrd(&base_of(&CPUS)[..40]).is_err());
}

#[test]
fn registers_get_a_node_if_the_machine_has_them() {
    let with = machine(little_big());
    let tree = read(&merge(&base_of(&CPUS), &with, Seeds::Drop).unwrap().blob);
    assert!(tree.contains_key("/cpufreq@b000000"));
    assert!(!read(&merged(&base_of(&CPUS))).contains_key("/cpufreq@b000000"));
    let narrow = tree_of(1, |fdt| write_base(fdt, &CPUS));
    let error = merge(&narrow, &with, Seeds::Drop).unwrap_err();
    assert_eq!(error, MergeError::RootCells);
    assert!(merge(&narrow, &four(), Seeds::Drop).is_ok());
}

#[test]
fn every_machine_goes_into_its_own_tree() {
    for (name, machine) in all() {
        let base = dtb(&machine).unwrap();
        let merged = merge(&base, &machine, Seeds::Drop).unwrap().blob;
        assert_eq!(read_resolved(&merged), read_resolved(&base), "{name}");
        assert!(merged.len() <= MAX_TREE, "{name}");
    }
}

fn nested(fdt: &mut FdtWriter, depth: usize) -> FdtWriterResult<()> {
    if depth == 0 {
        return Ok(());
    }
    let node = fdt.begin_node("n")?;
    nested(fdt, depth - 1)?;
    fdt.end_node(node)
}

fn phandle_node(fdt: &mut FdtWriter, name: &str, phandle: u32) -> FdtWriterResult<()> {
    let node = fdt.begin_node(name)?;
    fdt.property_u32("phandle", phandle)?;
    fdt.end_node(node)
}

#[test]
fn a_wrong_base_is_one_line() {
    let [zero, one, two, three] = CPUS;
    let wrong_reg = |node: &str| MergeError::CpuReg {
        node: node.to_owned(),
    };
    let count = MergeError::CpuCount {
        found: 3,
        wanted: 4,
    };
    let large = u32::try_from(MAX_TREE).unwrap() + 1;
    let mut too_large = base_of(&CPUS);
    too_large[4..8].copy_from_slice(&large.to_be_bytes());
    let rows = [
        ("no /cpus", tree_of(2, |_| Ok(())), MergeError::NoCpus),
        ("three CPUs", base_of(&[zero, one, two]), count),
        (
            "outside MPIDR_EL1",
            base_of(&[zero, one, two, ("cpu@9", Some(0x8000_0003), None)]),
            wrong_reg("/cpus/cpu@9"),
        ),
        (
            "the same reg twice",
            base_of(&[zero, one, two, ("cpu@9", Some(0x100), None)]),
            wrong_reg("/cpus/cpu@9"),
        ),
        (
            "no reg",
            base_of(&[("cpu@0", None, None), one, two, three]),
            wrong_reg("/cpus/cpu@0"),
        ),
        (
            "a CPU's phandle twice",
            tree_of(2, |fdt| {
                phandle_node(fdt, "a", 0x8004)?;
                write_base(fdt, &CPUS)
            }),
            MergeError::Phandle {
                node: "/cpus/cpu@0".to_owned(),
                phandle: 0x8004,
            },
        ),
        (
            "too large",
            too_large,
            MergeError::TooLarge { size: MAX_TREE + 1 },
        ),
    ];
    for (name, base, error) in rows {
        let found = merge(&base, &four(), Seeds::Drop).unwrap_err();
        assert_eq!(found, error, "{name}");
        assert!(!found.to_string().contains('\n'), "{name}: {found}");
    }
    assert_eq!(
        MergeError::TooLarge { size: MAX_TREE + 1 }.to_string(),
        "a tree of 2097153 bytes, Linux takes 2097152"
    );
}

/// The root and 62 below it, as in Linux.
#[test]
fn nodes_are_nested_to_a_limit() {
    let deep = |depth| {
        tree_of(2, |fdt| {
            nested(fdt, depth).and_then(|()| write_base(fdt, &CPUS))
        })
    };
    assert!(merge(&deep(62), &four(), Seeds::Drop).is_ok());
    let deepest = with_nodes_at_the_end((MAX_TREE - 10_000) / 16);
    for base in [deep(63), deepest] {
        let node = format!("...{}", "/n".repeat(48));
        let error = merge(&base, &four(), Seeds::Drop).unwrap_err();
        assert_eq!(error, MergeError::NotATree(TreeError::TooDeep { node }));
    }
}

/// The base with so many nodes in each other, more than a writer makes.
fn with_nodes_at_the_end(depth: usize) -> Vec<u8> {
    let mut base = base_of(&CPUS);
    // The strings come behind the root's end and that of the tree.
    let strings = usize::try_from(word(&base, 12)).unwrap();
    let begin = [1_u32.to_be_bytes(), *b"n\0\0\0"].concat().repeat(depth);
    let end = 2_u32.to_be_bytes().repeat(depth);
    let added = u32::try_from(begin.len() + end.len()).unwrap();
    base.splice(strings - 8..strings - 8, [begin, end].concat());
    for size in [4, 12, 36] {
        let grown = word(&base, size) + added;
        base[size..size + 4].copy_from_slice(&grown.to_be_bytes());
    }
    base
}

/// A tree that is a base itself, or one line.
fn survives(base: &[u8], machine: &Machine) {
    let merged = merge(base, machine, Seeds::Drop);
    let again = merged.and_then(|merged| merge(&merged.blob, machine, Seeds::Drop));
    if let Err(error) = again {
        assert!(!error.to_string().contains('\n'), "{error}");
    }
}

fn word(base: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(base[at..at + 4].try_into().unwrap())
}

#[test]
fn the_broken_rule_of_the_flattened_form_is_named() {
    let base = base_of(&CPUS);
    let place = |at| usize::try_from(word(&base, at)).unwrap();
    // The root begins with its tag, its name, and a property: tag, length, name.
    let (structure, strings) = (place(8), place(12));
    let part = |part| TreeError::Part { part };
    let node = || "/".to_owned();
    let name = |at| TreeError::Name { node: node(), at };
    let tag = |tag, at| TreeError::Tag {
        node: node(),
        tag,
        at,
    };
    let version = |version, oldest| TreeError::Version { version, oldest };
    let large = u32::MAX;
    let rows: [(usize, u32, TreeError); 13] = [
        (0, 0, TreeError::Magic { found: 0 }),
        (20, 15, version(15, 16)),
        (24, 18, version(17, 18)),
        (4, 1 << 20, part("size")),
        (8, large, part("structure")),
        (36, large, part("structure")),
        (32, large, part("strings")),
        (16, word(&base, 4) - 8, part("reservations")),
        (structure, 2, tag(2, 0)),
        (structure + 4, u32::from_be_bytes(*b"x\0\0\0"), name(4)),
        (structure + 8, 7, tag(7, 8)),
        (structure + 12, large, part("structure")),
        (structure + 16, large, name(16)),
    ];
    for (at, value, error) in rows {
        let mut wrong = base.clone();
        wrong[at..at + 4].copy_from_slice(&value.to_be_bytes());
        let found = merge(&wrong, &four(), Seeds::Drop).unwrap_err();
        assert_eq!(found, MergeError::NotATree(error), "{value:#x} at {at}");
    }
    // Of the first two names of properties, "#address-cells" and "#size-cells".
    let mut wrong = base.clone();
    wrong[strings] = b'\n';
    let found = merge(&wrong, &four(), Seeds::Drop).unwrap_err();
    assert_eq!(found, MergeError::NotATree(name(16)));
}

#[test]
fn a_truncated_base_is_refused() {
    let base = base_of(&CPUS);
    for len in 0..base.len() {
        let error = merge(&base[..len], &four(), Seeds::Drop).unwrap_err();
        assert!(matches!(error, MergeError::NotATree(_)), "{len}: {error}");
    }
}

#[test]
fn any_byte_may_be_wrong() {
    let (base, machine) = (base_of(&CPUS), four());
    for at in 0..base.len() {
        let mut wrong = base.clone();
        let values = match at {
            0..40 => (0..=255).collect(),
            _ => vec![0, 1, 3, 9, 0xff],
        };
        for value in values {
            wrong[at] = value;
            survives(&wrong, &machine);
        }
    }
}

proptest! {
    #[test]
    fn any_bytes_may_be_wrong(changes in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..12)) {
        let mut wrong = base_of(&CPUS);
        for (at, value) in changes {
            let at = at.index(wrong.len());
            wrong[at] = value;
        }
        survives(&wrong, &four());
    }

    #[test]
    fn any_words_may_be_wrong(changes in vec((any::<proptest::sample::Index>(), 0..12_u32), 1..12)) {
        let mut wrong = base_of(&CPUS);
        for (at, value) in changes {
            let at = at.index(wrong.len() / 4) * 4;
            wrong[at..at + 4].copy_from_slice(&value.to_be_bytes());
        }
        survives(&wrong, &four());
    }
}
