// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Promises: the device tree compiler takes blob and source without a word,
//! and they are the same tree, also when merged with QEMU's, of which all stays; Linux'
//! bindings have nothing against the nodes
//! in a guest's tree, and would have if something were misspelt.
//!
//! `check-bindings` lists its own needs.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use vcpufreq_dt::vm_fdt::{FdtWriter, FdtWriterResult};
use vcpufreq_dt::{CpufreqRegion, Machine, MergeNote, Nodes, RegionKind, Seeds, dtb, dts, merge};
use vcpufreq_dt::{overlay, registers_in_ram, write_cpufreq, write_cpus, write_opp_tables};

use crate::blob::{read, read_resolved};
use crate::dtc::{NO_DTC, compile, dtc, tool, tree_of_qemu};
use crate::ordered::OrderedNode;
use crate::samples::{all, little_big, machine};
use crate::shapes::stays;

#[test]
fn dtc_takes_source_and_blob_for_the_same_tree() {
    let dir = tempfile::tempdir().unwrap();
    for (name, machine) in all() {
        let (Some(first), Some(second)) = (dtc(), dtc()) else {
            println!("{NO_DTC}");
            return;
        };
        let blob = dtb(&machine).unwrap();
        let (source_file, blob_file) = (dir.path().join("dts"), dir.path().join("dtb"));
        fs::write(&source_file, dts(&machine)).unwrap();
        fs::write(&blob_file, &blob).unwrap();
        let ours = read_resolved(&blob);
        assert_eq!(
            read_resolved(&compile(first, "dts", &source_file)),
            ours,
            "{name}"
        );
        assert_eq!(
            read_resolved(&compile(second, "dtb", &blob_file)),
            ours,
            "{name}"
        );
    }
}

#[test]
fn dtc_takes_what_is_merged_with_the_tree_of_qemu() {
    let (Some(base), Some(dtc)) = (tree_of_qemu(), dtc()) else {
        println!("{NO_DTC}");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let machine = machine(little_big()).without_cpufreq();
    let merged = merge(&base, &machine, Seeds::Drop).unwrap().blob;
    assert!(merged.len() < 8 << 10, "{} bytes", merged.len());
    let file = dir.path().join("dtb");
    fs::write(&file, &merged).unwrap();
    assert_eq!(read(&compile(dtc, "dtb", &file)), read(&merged));
    let tree = read_resolved(&merged);
    assert_eq!(
        tree["/cpus/cpu-map/socket0/cluster1/core1"]["cpu"],
        b"/cpus/cpu@3"
    );
    assert_eq!(tree["/cpus/cpu@3"]["operating-points-v2"], b"/opp-table-1");
    assert_eq!(tree["/cpus/cpu@0"]["compatible"], b"arm,cortex-a57\0");
}

#[test]
fn the_overlay_puts_registers_into_the_tree_of_qemu() {
    let (Some(base), Some(mut apply)) = (tree_of_qemu(), tool("fdtoverlay")) else {
        println!("{NO_DTC}");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let [before, over, after] = ["base", "dtbo", "dtb"].map(|name| dir.path().join(name));
    let region = CpufreqRegion {
        base: 0x5fe0_0000,
        size: 0x1_0000,
        kind: RegionKind::GuestRam,
    };
    let blob = overlay(region).unwrap();
    assert_eq!(registers_in_ram(&blob).unwrap(), Some(region));
    fs::write(&before, &base).unwrap();
    fs::write(&over, blob).unwrap();
    let (input, output) = (apply.arg("-i").arg(&before), &after);
    let applied = input.arg("-o").arg(output).arg(&over).output().unwrap();
    assert!(applied.status.success(), "{applied:?}");
    let tree = fs::read(&after).unwrap();
    assert_eq!(registers_in_ram(&base).unwrap(), None);
    assert_eq!(registers_in_ram(&tree).unwrap(), Some(region));
}

#[test]
fn dtc_takes_what_is_merged_with_odd_trees_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let (source, file) = (dir.path().join("dts"), dir.path().join("dtb"));
    fs::write(&source, include_str!("../shapes.dts")).unwrap();
    let machine = machine(little_big());
    for flags in [
        &["-@", "-q"][..],
        &["-q", "-V", "16"],
        &["-@", "-q", "-H", "both", "-p", "999"],
    ] {
        let (Some(mut first), Some(mut second)) = (dtc(), dtc()) else {
            println!("{NO_DTC}");
            return;
        };
        first.args(flags);
        let base = compile(first, "dts", &source);
        let merged = merge(&base, &machine, Seeds::Keep).unwrap();
        let node = "/cpus/cpu@0".to_owned();
        assert_eq!(merged.notes, [MergeNote::CpuOrder { node }]);
        fs::write(&file, &merged.blob).unwrap();
        second.arg("-q");
        let (base, read_back) = (OrderedNode::read(&base), compile(second, "dtb", &file));
        let tree = OrderedNode::read(&merged.blob);
        assert_eq!(OrderedNode::read(&read_back), tree);
        let kept = base.children.iter().filter(|child| {
            // Without -@ nothing but the CPUs knows it.
            child.name != "opp-table-0" || flags.contains(&"-@")
        });
        let kept = OrderedNode {
            children: kept.cloned().collect(),
            ..base.clone()
        };
        stays(&kept, &tree);
        assert!(
            tree.children
                .iter()
                .any(|child| child.name == "cpufreq@b000000")
        );
        let without = merge(&merged.blob, &machine, Seeds::Drop).unwrap();
        let chosen = OrderedNode::read(&without.blob).at("chosen@0").clone();
        assert_eq!(chosen.property("bootargs"), Some(&b"quiet\0"[..]));
        assert_eq!(chosen.property("kaslr-seed"), None);
    }
}

#[test]
fn the_trees_of_qemu_here_keep_what_smp_says() {
    let machine = machine(little_big()).without_cpufreq();
    let joined = |cluster: &str| MergeNote::ClustersJoined {
        cluster: cluster.to_owned(),
        of: 2,
    };
    let rows = [
        (
            "4",
            "socket0/cluster0/core3",
            vec![joined("socket0/cluster0")],
        ),
        // What the line of the first tells to do.
        ("4,clusters=2", "socket0/cluster1/core1", vec![]),
        (
            "4,sockets=2,cores=1,threads=2",
            "socket1/cluster0/core0/thread1",
            vec![],
        ),
        (
            "4,sockets=1,cores=2,threads=2",
            "socket0/cluster0/core1/thread1",
            vec![joined("socket0/cluster0")],
        ),
    ];
    for (smp, last, notes) in rows {
        for kind in [
            "virt,gic-version=2",
            "virt,gic-version=3,virtualization=on,its=off",
            "virt,gic-version=3,secure=on",
        ] {
            let Some(base) = dumped(kind, &["-cpu", "max", "-smp", smp]) else {
                println!("SKIP: no qemu-system-aarch64 on the PATH or in VCPUFREQ_LAB_ROOT");
                return;
            };
            let merged = merge(&base, &machine, Seeds::Keep).unwrap();
            let tree = OrderedNode::read(&merged.blob);
            stays(&OrderedNode::read(&base), &tree);
            let has = tree.at("cpus/cpu@3").property("operating-points-v2");
            assert!(has.is_some());
            assert_eq!(merged.notes, notes, "{kind} {smp}");
            let cpu = tree.at(&format!("cpus/cpu-map/{last}")).property("cpu");
            let phandle = tree.at("cpus/cpu@3").property("phandle");
            assert_eq!(cpu, phandle, "{kind} {smp}");
        }
    }
}

/// A guest's tree: the nodes with what a binding wants beside them. A board's name isn't among that:
/// the check knows that these are no whole boards.
fn guest(machine: &Machine) -> FdtWriterResult<Vec<u8>> {
    let nodes = Nodes::new(machine, 1).unwrap();
    let mut fdt = FdtWriter::new()?;
    let root = fdt.begin_node("")?;
    fdt.property_u32("#address-cells", 2)?;
    fdt.property_u32("#size-cells", 2)?;
    let psci = fdt.begin_node("psci")?;
    fdt.property_string("compatible", "arm,psci-1.0")?;
    fdt.property_string("method", "hvc")?;
    fdt.end_node(psci)?;
    write_cpus(&mut fdt, &nodes)?;
    write_opp_tables(&mut fdt, &nodes)?;
    write_cpufreq(&mut fdt, &nodes)?;
    fdt.end_node(root)?;
    fdt.finish()
}

/// Runs `check-bindings`; `None`, with the reason printed, where it can't be
/// tried.
fn check_bindings(blobs: &[PathBuf]) -> Option<Output> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("check-bindings");
    let output = Command::new(script).args(blobs).output().unwrap();
    if output.status.code() == Some(77) {
        println!("SKIP: {}", String::from_utf8_lossy(&output.stderr).trim());
        return None;
    }
    Some(output)
}

#[test]
fn bindings_have_nothing_against_the_nodes() {
    let dir = tempfile::tempdir().unwrap();
    let mut blobs = Vec::new();
    for (name, machine) in all() {
        let file = dir.path().join(name.replace(' ', "-"));
        fs::write(&file, guest(&machine).unwrap()).unwrap();
        blobs.push(file);
    }
    if let Some(output) = check_bindings(&blobs) {
        assert!(output.status.success(), "{output:?}");
    }
}

/// What dt-schema says of a root node is no finding where a blob has only CPUs: the schema's name
/// comes on the next line. All else is one, also behind it.
#[test]
fn what_is_required_of_a_boards_root_is_no_finding() {
    let root = "guest: /: 'model' is a required property\n\tfrom schema $id: http://devicetree.org/schemas/root-node.yaml#";
    let cpu = "guest: cpu@0: 'reg' is a required property\n\tfrom schema $id: http://devicetree.org/schemas/arm/cpus.yaml#";
    let other = "guest: /: 'model' is a required property\n\tfrom schema $id: http://devicetree.org/schemas/other.yaml#";
    for (said, code) in [
        (String::new(), 0),
        (root.to_owned(), 0),
        (format!("{root}\n{cpu}"), 1),
        (format!("{cpu}\n{root}"), 1),
        (other.to_owned(), 1),
    ] {
        assert_eq!(checked_by(&said), Some(code), "{said}");
    }
}

/// The exit code of `check-bindings` where `dt-validate` prints this.
fn checked_by(said: &str) -> Option<i32> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("said"), said).unwrap();
    for (name, does) in [
        ("dt-mk-schema", "exit 0".to_owned()),
        ("dt-validate", format!("cat {}/said", dir.path().display())),
    ] {
        let program = dir.path().join(name);
        fs::write(&program, format!("#!/bin/sh\n{does}\n")).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
    }
    let path = std::env::var("PATH").unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("check-bindings");
    let mut check = Command::new(script);
    check.arg(dir.path().join("said"));
    check.env("PATH", format!("{}:{path}", dir.path().display()));
    check.env("VCPUFREQ_BINDINGS", dir.path());
    check.output().unwrap().status.code()
}

/// Each row spoils one name or value in the blob, at the same length. A name
/// within an OPP isn't among them: the bindings allow any there.
#[test]
fn bindings_find_what_is_misspelt() {
    let rows: [(&str, &[u8], &[u8]); 7] = [
        (
            "capacity-dmips-mhx",
            b"capacity-dmips-mhz\0",
            b"capacity-dmips-mhx\0",
        ),
        ("opp-sharex", b"opp-shared\0", b"opp-sharex\0"),
        ("opq-600000000", b"opp-600000000\0", b"opq-600000000\0"),
        (
            "enable-method",
            b"psci\0\0\0\0\0\0\0\x03\0\0\0\x04",
            b"pscj\0\0\0\0\0\0\0\x03\0\0\0\x04",
        ),
        (
            "qemu,virtual-cpufrek",
            b"qemu,virtual-cpufreq\0",
            b"qemu,virtual-cpufrek\0",
        ),
        (
            "operating-points-v3",
            b"\0operating-points-v2\0",
            b"\0operating-points-v3\0",
        ),
        ("cluzter0", b"cluster0\0", b"cluzter0\0"),
    ];
    let dir = tempfile::tempdir().unwrap();
    let good = guest(&machine(little_big())).unwrap();
    for (finding, from, to) in rows {
        let at = good
            .windows(from.len())
            .position(|found| found == from)
            .expect(finding);
        let mut bad = good.clone();
        bad[at..at + from.len()].copy_from_slice(to);
        let file = dir.path().join("bad");
        fs::write(&file, bad).unwrap();
        let Some(output) = check_bindings(&[file]) else {
            return;
        };
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{finding}: {output:?}");
        assert!(said.contains(finding), "{finding}: {said}");
    }
}

/// The tree that a QEMU here has for these options, if there is one.
fn dumped(machine: &str, options: &[&str]) -> Option<Vec<u8>> {
    let mut qemu = tool("qemu-system-aarch64")?;
    let file = tempfile::NamedTempFile::new().unwrap();
    let machine = format!("{machine},dumpdtb={}", file.path().display());
    let alone = ["-nodefaults", "-display", "none", "-M", &machine];
    let output = qemu.args(alone).args(options).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    Some(fs::read(file.path()).unwrap())
}
