// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The facts of real boards, from the device trees that Debian's kernels bring.

use std::collections::BTreeMap;
use std::fs;

use crate::blob::{Tree, cell, read_part};
use crate::debian_trees::debian_trees;
use crate::facts::{BoardFacts, PolicyFacts};

/// The boards whose trees have an OPP table for each CPU, one of each kind, by a tree's name.
#[derive(Default)]
pub struct TreeBoards {
    pub boards: BTreeMap<String, BoardFacts>,
    /// Trees that [`BoardFacts`] can't express, counted by reason.
    pub skipped: BTreeMap<&'static str, usize>,
}

impl TreeBoards {
    /// `None` without trees.
    pub fn read() -> Option<Self> {
        let (mut kinds, mut found) = (BTreeMap::new(), Self::default());
        for file in debian_trees()? {
            // What isn't at the root is of no CPU.
            let is_of_cpus = |name: &str| name == "cpus" || name.contains("opp");
            let tree = read_part(&fs::read(&file).unwrap(), is_of_cpus);
            match facts(&tree) {
                Ok(facts) => {
                    let name = file.file_stem().unwrap().to_string_lossy().into_owned();
                    kinds.entry(format!("{facts:?}")).or_insert((name, facts));
                }
                Err(why) => *found.skipped.entry(why).or_default() += 1,
            }
        }
        found.boards = kinds.into_values().collect();
        Some(found)
    }
}

/// A CPU's node.
struct CpuNode<'a> {
    path: &'a str,
    /// Its `reg`, in whose order Linux numbers CPUs.
    number: &'a [u8],
    /// The phandle of its OPP table.
    table: &'a [u8],
}

fn facts(tree: &Tree) -> Result<BoardFacts, &'static str> {
    let mut cpus = Vec::new();
    for (path, node) in tree {
        let is_cpu = path
            .strip_prefix("/cpus/cpu@")
            .is_some_and(|rest| !rest.contains('/'));
        let is_off = node
            .get("status")
            .is_some_and(|status| !status.starts_with(b"ok"));
        if !is_cpu || is_off {
            continue;
        }
        let table = node.get("operating-points-v2");
        cpus.push(CpuNode {
            path,
            number: &node["reg"],
            table: table.ok_or("a CPU has no table")?,
        });
    }
    if cpus.is_empty() {
        return Err("no CPUs");
    }
    cpus.sort_by_key(|cpu| cpu.number);
    let mut policies: Vec<(&[u8], PolicyFacts)> = Vec::new();
    for cpu in &cpus {
        let table = tree
            .iter()
            .find(|(_, node)| node.get("phandle").is_some_and(|is| is == cpu.table));
        let (table, node) = table.ok_or("the table isn't at the root")?;
        let is_shared = node.contains_key("opp-shared");
        let before = policies.iter().position(|(of, _)| *of == cpu.table);
        match before.filter(|_| is_shared) {
            Some(one) if one + 1 == policies.len() => policies[one].1.cpus += 1,
            Some(_) => return Err("CPUs of a policy don't follow each other"),
            None => policies.push((cpu.table, policy(tree, cpu.path, table)?)),
        }
    }
    let policies = policies.into_iter().map(|(_, policy)| policy).collect();
    Ok(BoardFacts::new(Some(clusters(tree, &cpus)?), policies))
}

/// A policy with one CPU, by the nodes of that CPU and of its table.
fn policy(tree: &Tree, cpu: &str, table: &str) -> Result<PolicyFacts, &'static str> {
    let mut opps = BTreeMap::new();
    let children = tree.iter().filter(|(path, _)| {
        path.strip_prefix(table)
            .is_some_and(|rest| rest.starts_with('/'))
    });
    for (_, node) in children {
        let hz = node.get("opp-hz").ok_or("an OPP has no frequency")?;
        let hz = u64::from_be_bytes(hz[..].try_into().map_err(|_| "an OPP has two clocks")?);
        let uv = node.get("opp-microvolt").and_then(|uv| uv.first_chunk());
        let uv = uv.map(|uv| u32::from_be_bytes(*uv));
        let khz = u32::try_from(hz / 1000).map_err(|_| "an OPP is no CPU's")?;
        opps.insert(khz, (uv, node.contains_key("turbo-mode")));
    }
    let boost = opps.values().rev().take_while(|(_, boost)| *boost).count();
    if opps.values().filter(|(_, boost)| *boost).count() > boost {
        return Err("boost is below another OPP");
    }
    if opps.len() == boost {
        return Err("a table has no OPP without boost");
    }
    if opps.len() == 1 {
        // There is nothing to choose, and one entry is no table.
        return Err("a table has one OPP");
    }
    let khz: Vec<u32> = opps.keys().copied().collect();
    let uv: Option<Vec<u32>> = opps.values().map(|(uv, _)| *uv).collect();
    let number = |name: &str| {
        let is_there = tree[cpu].contains_key(name);
        is_there.then(|| cell(tree, cpu, name))
    };
    // Without voltages there are no powers; then any will do.
    let coefficient = number("dynamic-power-coefficient").filter(|_| uv.is_some());
    Ok(PolicyFacts {
        cpus: 1,
        times: 1,
        dmips_mhz: number("capacity-dmips-mhz"),
        cppc: None,
        boost,
        uv: uv.unwrap_or_default(),
        power_coefficient: coefficient,
        uw: coefficient.is_none().then(|| khz.clone()),
        khz,
    })
}

/// How many CPUs each cluster of cpu-map has. Without it Linux knows of none: all are one.
fn clusters(tree: &Tree, cpus: &[CpuNode<'_>]) -> Result<Vec<u32>, &'static str> {
    let cluster_of = |cpu: &CpuNode<'_>| {
        let phandle = tree[cpu.path].get("phandle")?;
        let mut cores = tree.iter();
        let (core, _) = cores.find(|(path, node)| {
            path.starts_with("/cpus/cpu-map/") && node.get("cpu") == Some(phandle)
        })?;
        core.split("/core").next()
    };
    let mut sizes: Vec<(Option<&str>, u32)> = Vec::new();
    for cluster in cpus.iter().map(cluster_of) {
        match sizes.iter().position(|(of, _)| *of == cluster) {
            Some(one) if one + 1 == sizes.len() => sizes[one].1 += 1,
            Some(_) => return Err("CPUs of a cluster don't follow each other"),
            None => sizes.push((cluster, 1)),
        }
    }
    Ok(sizes.into_iter().map(|(_, size)| size).collect())
}
