// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises, on each board of `lab/topologies` and of Debian's device trees, with boost on and off:
//! - The guest has all OPPs of its CPUs, those for boost too, with their powers.
//! - Its capacities are those that Linux computes for the board, within 1.
//! - A request brings the CPU to the requested OPP.
//! - Clusters are the board's, and CPUs share a table as they share a clock.
#![allow(clippy::unwrap_used)]

#[cfg(test)]
#[path = "../../../dt/tests/dt/blob.rs"]
mod blob;
#[cfg(test)]
#[path = "../../../dt/tests/dt/debian_trees.rs"]
mod debian_trees;
mod facts;
mod linux;
mod trees;

use std::collections::BTreeMap;

use clap::Parser;
use vcpufreq::cli::{Cli, Command, DtArgs};
use vcpufreq::config::{VcpuConfig, resolve};
use vcpufreq_device::{ClampMode, Headroom, Khz, VcpuSpec, clamp};
use vcpufreq_host::HostCpus;
use vcpufreq_host::fakes::FakeHost;

use blob::{Tree, cell, read_resolved};
use facts::{BoardFacts, PolicyFacts};
use linux::{LinuxCpu, boot, capacities};
use trees::TreeBoards;

const CPU: &str = "sys/devices/system/cpu";

/// A board as a host, and what the product makes of it.
struct BoardGuest {
    board: BoardFacts,
    boost: bool,
    host: Vec<LinuxCpu>,
    vcpus: Vec<VcpuConfig>,
    specs: Vec<VcpuSpec>,
    tree: Tree,
}

impl BoardGuest {
    /// One vCPU for each CPU, that mirrors it.
    fn new(board: BoardFacts, boost: bool) -> Self {
        let host = boot(&board, boost);
        let files = files(&board, &host, boost);
        let args = arguments(host.len());
        let cpus = HostCpus::read(&files.root());
        let count = u32::try_from(host.len()).unwrap();
        let vcpus = resolve::vcpus(&args.vcpus, &cpus, count).unwrap();
        let config = resolve::device_config(&vcpus, ClampMode::Exact, Headroom::None).unwrap();
        let blob = vcpufreq::dt::dt(&args, &files.root()).unwrap();
        Self {
            board,
            boost,
            host,
            vcpus,
            specs: config.vcpus,
            tree: read_resolved(&blob),
        }
    }

    /// Each CPU's policy.
    fn policies(&self) -> Vec<PolicyFacts> {
        let policies = self.board.policies().into_iter();
        let each = policies.flat_map(|(_, one)| vec![one.clone(); one.cpus as usize]);
        each.collect()
    }

    /// The highest frequency of each vCPU.
    fn tops(&self) -> Vec<u32> {
        let tops = self.vcpus.iter().map(|vcpu| vcpu.opps.last().unwrap().khz);
        tops.collect()
    }

    /// Each vCPU's capacity, as Linux computes it from the tree.
    fn capacities(&self) -> Vec<u64> {
        let given = self.tops().into_iter().enumerate().map(|(cpu, top)| {
            let per_mhz = cell(&self.tree, &Self::node(cpu), "capacity-dmips-mhz");
            (u64::from(per_mhz), u64::from(top))
        });
        capacities(given)
    }

    /// A CPU's node: the emulated interrupt controller takes 16 CPUs of one affinity.
    fn node(cpu: usize) -> String {
        format!("/cpus/cpu@{:x}", (cpu & 0xf) | ((cpu >> 4) << 8))
    }

    /// The path of a CPU's OPP table, if it has one.
    fn table(&self, cpu: usize) -> Option<String> {
        let path = self.tree[&Self::node(cpu)].get("operating-points-v2")?;
        Some(String::from_utf8(path.clone()).unwrap())
    }

    /// The OPPs of a CPU: kHz, and µW if there are any.
    fn opps(&self, cpu: usize) -> BTreeMap<u32, Option<u32>> {
        let Some(table) = self.table(cpu) else {
            return BTreeMap::new();
        };
        let children = self.tree.iter().filter(|(path, _)| {
            path.strip_prefix(&table)
                .is_some_and(|rest| rest.starts_with('/'))
        });
        let opps = children.map(|(path, node)| {
            let hz = u64::from_be_bytes(node["opp-hz"][..].try_into().unwrap());
            let uw = node.get("opp-microwatt");
            let uw = uw.map(|_| cell(&self.tree, path, "opp-microwatt"));
            (u32::try_from(hz / 1000).unwrap(), uw)
        });
        opps.collect()
    }
}

/// One vCPU for each of so many CPUs.
fn arguments(cpus: usize) -> DtArgs {
    let mut line = ["vcpufreq", "dt", "--format=dtb", "--host-topology"]
        .map(str::to_owned)
        .to_vec();
    line.push(format!("--cpus={cpus}"));
    line.extend((0..cpus).map(|cpu| format!("--pin={cpu}={cpu}")));
    match Cli::try_parse_from(line).unwrap().command {
        Command::Dt(args) => *args,
        _ => panic!("another command"),
    }
}

fn list<T: ToString>(values: impl IntoIterator<Item = T>) -> String {
    let words = values.into_iter().map(|value| value.to_string());
    words.collect::<Vec<_>>().join(" ")
}

/// What Linux 7.3 shows of the host in sysfs, procfs and debugfs.
fn files(board: &BoardFacts, host: &[LinuxCpu], boost: bool) -> FakeHost {
    let files = FakeHost::empty();
    let all = format!("0-{}\n", host.len() - 1);
    for name in ["present", "possible", "online"] {
        files.write(&format!("{CPU}/{name}"), &all);
    }
    files.write("proc/sys/kernel/osrelease", "7.3.4\n");
    files.write("proc/version", "Linux version 7.3.4\n");
    files.write(
        &format!("{CPU}/cpufreq/boost"),
        format!("{}\n", u8::from(boost)),
    );
    for (number, cpu) in host.iter().enumerate() {
        let dir = format!("{CPU}/cpu{number}");
        files.write(
            &format!("{dir}/cpu_capacity"),
            format!("{}\n", cpu.capacity),
        );
        files.write(
            &format!("{dir}/topology/core_cpus_list"),
            format!("{number}\n"),
        );
        files.write(&format!("{dir}/topology/package_cpus_list"), &all);
    }
    for cpus in board.clusters() {
        let range = format!("{}-{}\n", cpus[0], cpus[cpus.len() - 1]);
        for cpu in &cpus {
            files.write(
                &format!("{CPU}/cpu{cpu}/topology/cluster_cpus_list"),
                &range,
            );
        }
    }
    for (first, policy) in board.policies() {
        policy_files(&files, first, &policy, &host[first as usize]);
    }
    files
}

fn policy_files(files: &FakeHost, first: u32, policy: &PolicyFacts, cpu: &LinuxCpu) {
    let cpus = list(first..first + policy.cpus);
    let (plain, boosted) = policy.listed();
    files.policy(first, &cpus, &list(plain), &cpu.max_khz.to_string());
    let dir = format!("{CPU}/cpufreq/policy{first}");
    files.write(&format!("{dir}/affected_cpus"), cpus);
    files.write(&format!("{dir}/scaling_max_freq"), cpu.max_khz.to_string());
    let Some(cppc) = &policy.cppc else {
        files.write(&format!("{dir}/scaling_boost_frequencies"), list(boosted));
        let power: Vec<_> = policy.khz().into_iter().zip(policy.uw()).collect();
        return files.energy_model(first, "0x1", &power);
    };
    files.remove(&format!("{dir}/scaling_available_frequencies"));
    files.write(&format!("{dir}/scaling_driver"), "cppc_cpufreq\n");
    for number in first..first + policy.cpus {
        for (name, value) in [
            ("lowest_perf", cppc.lowest_perf),
            ("nominal_perf", cppc.nominal_perf),
            ("highest_perf", cppc.highest_perf),
            ("lowest_freq", cppc.lowest_mhz),
            ("nominal_freq", cppc.nominal_mhz),
        ] {
            let file = format!("{CPU}/cpu{number}/acpi_cppc/{name}");
            files.write(&file, value.to_string());
        }
    }
}

/// What is wrong with a guest, by one look at it.
type Look = fn(&BoardGuest) -> Vec<String>;

/// What is wrong on any of these boards, with its name, by these looks.
fn wrong<'a>(boards: impl IntoIterator<Item = (&'a String, &'a BoardFacts)>, looks: &[Look]) {
    let mut all = Vec::new();
    for (name, board) in boards {
        let with_boost = [false, true]
            .into_iter()
            .filter(|boost| !boost || board.has_boost());
        for boost in with_boost {
            let guest = BoardGuest::new(board.clone(), boost);
            let found = looks.iter().flat_map(|look| look(&guest));
            all.extend(found.map(|what| format!("{name}, boost {boost}: {what}")));
        }
    }
    assert!(all.is_empty(), "{} wrong:\n{}", all.len(), all.join("\n"));
}

/// The same on the boards of `lab/topologies`.
fn wrong_in_the_lab(look: Look) {
    let boards = BoardFacts::all();
    assert!(boards.len() >= 16, "{}", boards.len());
    wrong(boards.iter().map(|(name, board)| (name, board)), &[look]);
}

#[test]
fn hosts_of_debians_device_trees_are_mirrored() {
    let Some(found) = TreeBoards::read() else {
        return;
    };
    println!(
        "{} kinds of boards; without: {:#?}",
        found.boards.len(),
        found.skipped
    );
    assert!(found.boards.len() >= 40, "{}", found.boards.len());
    let looks: [Look; 4] = [missing_opps, wrong_capacities, wrong_requests, wrong_groups];
    wrong(&found.boards, &looks);
}

#[test]
fn no_opp_is_missing() {
    wrong_in_the_lab(missing_opps);
}

fn missing_opps(guest: &BoardGuest) -> Vec<String> {
    let mut found = Vec::new();
    for (cpu, policy) in guest.policies().iter().enumerate() {
        let (is, expected) = (guest.opps(cpu), policy.khz());
        let (top, expected_top) = (guest.tops()[cpu], policy.top_khz(guest.boost));
        if top != expected_top {
            found.push(format!("CPU {cpu} ends at {top}, not {expected_top}"));
        }
        if !is.keys().eq(&expected) {
            found.push(format!("CPU {cpu} has {:?} of {expected:?}", is.keys()));
        } else if !is.values().flatten().eq(&policy.uw()[..expected.len()]) {
            found.push(format!("CPU {cpu} has powers {:?}", is.values()));
        }
    }
    found
}

#[test]
fn capacities_are_what_linux_computes() {
    wrong_in_the_lab(wrong_capacities);
}

fn wrong_capacities(guest: &BoardGuest) -> Vec<String> {
    let tops = guest.policies().into_iter();
    let tops = tops.map(|policy| u64::from(policy.top_khz(guest.boost)));
    let host = guest.host.iter().zip(tops);
    let expected = capacities(host.map(|(cpu, top)| (cpu.per_mhz, top)));
    let is = guest.capacities();
    let off = is.iter().zip(&expected).enumerate();
    let off = off.filter(|(_, (is, expected))| is.abs_diff(**expected) > 1);
    off.map(|(cpu, (is, expected))| format!("CPU {cpu} has {is}, not {expected}"))
        .collect()
}

/// Board, boost and CPU; its highest frequency, the capacity that the host shows, and the guest's.
type Seen = (&'static str, bool, usize, u32, u64, u64);

/// As dumps have them: of a GB10 without boost, and of an R-Car H3 on which it was switched on
/// later.
const SEEN: [Seen; 14] = [
    ("gb10", false, 0, 2_808_000, 718, 737),
    ("gb10", false, 5, 3_900_000, 997, 1024),
    ("gb10", false, 10, 2_808_000, 731, 737),
    ("gb10", false, 15, 3_900_000, 1017, 1024),
    ("gb10", false, 19, 3_900_000, 1024, 1024),
    ("gb10", true, 0, 2_808_000, 718, 718),
    ("gb10", true, 5, 3_900_000, 997, 997),
    ("gb10", true, 10, 2_860_000, 731, 731),
    ("gb10", true, 15, 3_978_000, 1017, 1017),
    ("gb10", true, 19, 4_004_000, 1024, 1024),
    // 401 beside 1.6 GHz is 377 beside 1.7 GHz.
    ("r8a77951", false, 0, 1_700_000, 1024, 1024),
    ("r8a77951", false, 4, 1_200_000, 401, 377),
    ("r8a77951", true, 0, 1_700_000, 1024, 1024),
    ("r8a77951", true, 4, 1_200_000, 401, 377),
];

#[test]
fn numbers_of_real_hosts_are_these() {
    for (name, boost, cpu, top_khz, of_host, of_guest) in SEEN {
        let mut boards = BoardFacts::all().into_iter();
        let (_, board) = boards.find(|(other, _)| other == name).unwrap();
        let guest = BoardGuest::new(board, boost);
        let is = (guest.tops()[cpu], guest.host[cpu].capacity);
        let case = format!("{name}, boost {boost}, CPU {cpu}");
        assert_eq!(is, (top_khz, of_host), "{case}");
        let capacity = guest.capacities()[cpu];
        assert!(capacity.abs_diff(of_guest) <= 1, "{case}: {capacity}");
    }
}

#[test]
fn a_request_brings_the_cpu_to_the_opp() {
    wrong_in_the_lab(wrong_requests);
}

fn wrong_requests(guest: &BoardGuest) -> Vec<String> {
    let mut found = Vec::new();
    for (cpu, (host, spec)) in guest.host.iter().zip(&guest.specs).enumerate() {
        // Without a table, so many steps of a range.
        let steps: Vec<u64> = match host.table[..] {
            [] => (1..=20).map(|step| host.max_khz * step / 20).collect(),
            _ => host.table.clone(),
        };
        for khz in steps {
            let asked = Khz(u32::try_from(khz).unwrap());
            let clamp = clamp(spec, asked, ClampMode::Exact, Headroom::None).clamp;
            let runs = host.runs_at(u64::from(clamp.min.get()));
            let expected = khz.min(host.highest());
            // A step of the utilization.
            let off = match host.table[..] {
                [] => host.reference / host.capacity + 1,
                _ => 0,
            };
            if runs.abs_diff(expected) > off {
                found.push(format!("CPU {cpu} runs at {runs}, not {expected}"));
            }
        }
    }
    found
}

#[test]
fn clusters_are_the_boards_and_tables_the_policies() {
    wrong_in_the_lab(wrong_groups);
}

fn wrong_groups(guest: &BoardGuest) -> Vec<String> {
    let mut found = Vec::new();
    let mut clusters = BTreeMap::<String, Vec<String>>::new();
    for (path, node) in &guest.tree {
        let Some(core) = path.find("/core").filter(|_| node.contains_key("cpu")) else {
            continue;
        };
        let cpu = String::from_utf8(node["cpu"].clone()).unwrap();
        clusters
            .entry(path[..core].to_owned())
            .or_default()
            .push(cpu);
    }
    let of_board = guest.board.clusters().into_iter().map(|cpus| {
        let nodes = cpus.into_iter().map(|cpu| BoardGuest::node(cpu as usize));
        sorted(nodes.collect())
    });
    let expected = sorted(of_board.collect());
    let is = sorted(clusters.into_values().map(sorted).collect());
    if is != expected {
        found.push(format!("clusters {is:?}, not {expected:?}"));
    }
    for (a, one) in guest.host.iter().enumerate() {
        for (b, other) in guest.host.iter().enumerate() {
            let share = guest.table(a).is_some() && guest.table(a) == guest.table(b);
            if share != (one.policy == other.policy && !one.table.is_empty()) {
                found.push(format!("CPUs {a} and {b} share a table: {share}"));
            }
        }
    }
    found
}

fn sorted<T: Ord>(mut values: Vec<T>) -> Vec<T> {
    values.sort();
    values
}
