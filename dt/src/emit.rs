// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The nodes of a machine, after Linux' bindings `arm/cpus.yaml`,
//! `opp/opp-v2.yaml`, `cpufreq/qemu,virtual-cpufreq.yaml`, `cpu/idle-states.yaml`
//! and the cpu-map of devicetree.org's `cpu-map.yaml`.

use std::collections::BTreeMap;

use vm_fdt::{FdtWriter, FdtWriterResult};

use crate::base::{Base, TreeError};
use crate::error::REGION_STRIDE;
use crate::facts::{CpuFacts, CpufreqRegion, Opp, OppTable, RESERVED, RegionKind};
use crate::flat::flatten;
use crate::machine::Machine;
use crate::node::{Node, NodeTarget, PropertyValue};
use crate::power;

/// A machine with the phandles of its nodes: one for each CPU, one for each OPP table, and two for
/// idle states. They are contiguous from a number that the caller gives.
#[derive(Clone, Copy, Debug)]
pub struct Nodes<'a> {
    machine: &'a Machine,
    first: u32,
    cpus: Option<&'a [u32]>,
}

/// The properties of a CPU's node that [`Nodes::with_performance`] gives it.
pub(crate) const PERFORMANCE: [&str; 4] = [
    "cpu-idle-states",
    "capacity-dmips-mhz",
    "operating-points-v2",
    "dynamic-power-coefficient",
];

/// What Linux' driver binds to: registers of a device, or in RAM.
pub(crate) const REGISTERS: &str = "qemu,virtual-cpufreq";

/// The node of ranges that a guest's kernel keeps off.
pub(crate) const RESERVED_MEMORY: &str = "reserved-memory";
/// What a fragment of an overlay adds to its target.
pub(crate) const OVERLAY: &str = "__overlay__";

/// The idle states of [`Nodes::idle_states`]: of a CPU, and of one for real-time work.
pub(crate) const STANDBY: [&str; 2] = ["cpu-standby", "cpu-standby-rt"];

impl<'a> Nodes<'a> {
    /// Allots phandles from `first` on. `None` if they would leave the range of phandles, 1 to
    /// 0xffff_fffe.
    pub fn new(machine: &'a Machine, first: u32) -> Option<Self> {
        let nodes = Self {
            machine,
            first,
            cpus: None,
        };
        first.checked_add(Self::count(machine))?;
        (first != 0).then_some(nodes)
    }

    /// The same for CPUs whose nodes have these phandles, one for each.
    pub(crate) fn with_cpu_phandles(self, cpus: &'a [u32]) -> Self {
        let cpus = Some(cpus);
        Self { cpus, ..self }
    }

    /// How many a machine has.
    pub(crate) fn count(machine: &Machine) -> u32 {
        let facts = machine.facts();
        // Checked facts: at most 512 of each.
        u32::try_from(facts.cpus.len() + facts.opp_tables.len() + 2).unwrap_or(u32::MAX)
    }

    /// The phandle of a CPU's node; `None` if there is no CPU of that index.
    pub fn cpu_phandle(&self, cpu: usize) -> Option<u32> {
        (cpu < self.machine.facts().cpus.len()).then(|| self.cpu_target(cpu).phandle)
    }

    /// The first number above those allotted.
    pub fn next_phandle(&self) -> u32 {
        self.first + Self::count(self.machine)
    }

    fn nth(&self, index: usize) -> u32 {
        // Below count, and new() found that this many fit.
        self.first + u32::try_from(index).unwrap_or_default()
    }

    fn cpu_target(&self, cpu: usize) -> NodeTarget {
        let given = self.cpus.and_then(|cpus| cpus.get(cpu));
        NodeTarget {
            label: format!("cpu{cpu}"),
            phandle: given.copied().unwrap_or_else(|| self.nth(cpu)),
        }
    }

    fn table_target(&self, table: usize) -> NodeTarget {
        NodeTarget {
            label: format!("opp_table{table}"),
            phandle: self.nth(self.machine.facts().cpus.len() + table),
        }
    }

    fn standby_target(&self, real_time: bool) -> NodeTarget {
        let facts = self.machine.facts();
        let label = if real_time { "standby_rt" } else { "standby" };
        NodeTarget {
            label: label.to_owned(),
            phandle: self.nth(facts.cpus.len() + facts.opp_tables.len() + usize::from(real_time)),
        }
    }

    /// PSCI's standby, which KVM takes for a wait for interrupt, where the machine
    /// has it. The times are plausible for a VM: two exits. A real-time CPU does
    /// without wherever a timer is nearer than its residency (`menu_select`), and
    /// waits by WFI.
    pub(crate) fn idle_states(&self) -> Option<Node> {
        if !self.machine.facts().standby {
            return None;
        }
        let state = |real_time: bool| {
            let name = STANDBY[usize::from(real_time)];
            let residency_us = if real_time { 1_000_000 } else { 20 };
            Node::new(name)
                .target(self.standby_target(real_time))
                .with("compatible", PropertyValue::Text("arm,idle-state"))
                .with("arm,psci-suspend-param", PropertyValue::Number(0))
                .with("entry-latency-us", PropertyValue::Number(5))
                .with("exit-latency-us", PropertyValue::Number(5))
                .with("min-residency-us", PropertyValue::Number(residency_us))
        };
        let cpus = &self.machine.facts().cpus;
        let has = |real_time: &bool| cpus.iter().any(|cpu| cpu.real_time == *real_time);
        let states = Node::new("idle-states")
            .with("entry-method", PropertyValue::Text("psci"))
            .children([false, true].into_iter().filter(has).map(state));
        Some(states)
    }

    fn cpus(&self) -> Node {
        let cpus = &self.machine.facts().cpus;
        Node::new("cpus")
            .with("#address-cells", PropertyValue::Number(2))
            .with("#size-cells", PropertyValue::Number(0))
            .children([self.cpu_map()])
            .children(self.idle_states())
            .children((0..cpus.len()).map(|index| self.cpu(index, &cpus[index])))
    }

    /// Linux reads capacities on its walk through this map, so it isn't only
    /// there for the clusters. It wants names numbered from 0 without a gap.
    pub(crate) fn cpu_map(&self) -> Node {
        let mut sockets: BTreeMap<u32, BTreeMap<u32, Vec<usize>>> = BTreeMap::new();
        for (index, cpu) in self.machine.facts().cpus.iter().enumerate() {
            let socket = sockets.entry(cpu.place.socket).or_default();
            socket.entry(cpu.place.cluster).or_default().push(index);
        }
        let clusters = |of: &BTreeMap<u32, Vec<usize>>| -> Vec<Node> {
            let nodes = of.values().enumerate();
            let node = |(number, members): (usize, &Vec<usize>)| {
                Node::new(format!("cluster{number}")).children(self.cores(members))
            };
            nodes.map(node).collect()
        };
        let map = Node::new("cpu-map");
        if sockets.len() <= 1 {
            return map.children(sockets.values().flat_map(clusters));
        }
        let nodes = sockets.values().enumerate();
        map.children(
            nodes.map(|(number, of)| Node::new(format!("socket{number}")).children(clusters(of))),
        )
    }

    /// The cores of a cluster, with a node for each thread where there are several.
    fn cores(&self, members: &[usize]) -> impl Iterator<Item = Node> {
        let number = |cpu: usize| self.machine.facts().cpus[cpu].place.core;
        let mut cores: Vec<Vec<usize>> = Vec::new();
        for &cpu in members {
            let is_own =
                |core: &&mut Vec<usize>| number(cpu).is_some() && number(core[0]) == number(cpu);
            match cores.iter_mut().find(is_own) {
                Some(core) => core.push(cpu),
                None => cores.push(vec![cpu]),
            }
        }
        let refers =
            |node: Node, cpu| node.with("cpu", PropertyValue::Reference(self.cpu_target(cpu)));
        cores.into_iter().enumerate().map(move |(number, threads)| {
            let core = Node::new(format!("core{number}"));
            match threads[..] {
                [cpu] => refers(core, cpu),
                _ => core.children(
                    threads
                        .into_iter()
                        .enumerate()
                        .map(|(number, cpu)| refers(Node::new(format!("thread{number}")), cpu)),
                ),
            }
        })
    }

    fn cpu(&self, index: usize, cpu: &CpuFacts) -> Node {
        let node = Node::new(format!("cpu@{:x}", cpu.reg))
            .target(self.cpu_target(index))
            .with("device_type", PropertyValue::Text("cpu"))
            .with("compatible", PropertyValue::Text("arm,armv8"))
            .with("reg", PropertyValue::Addresses(vec![cpu.reg]))
            .with("enable-method", PropertyValue::Text("psci"));
        self.with_performance(node, index, cpu)
    }

    /// Only the CPU's performance properties, with the phandle.
    pub(crate) fn performance(&self, index: usize) -> Node {
        let node = Node::new("").target(self.cpu_target(index));
        self.with_performance(node, index, &self.machine.facts().cpus[index])
    }

    fn with_performance(&self, node: Node, index: usize, cpu: &CpuFacts) -> Node {
        let dmips_mhz = self.machine.capacity_dmips_mhz()[index];
        let table = cpu.opp_table;
        let coefficient = table
            .and_then(|table| power::coefficient(&self.machine.facts().opp_tables[table]))
            .map(PropertyValue::Number);
        let standby = self.machine.facts().standby;
        let standby = standby.then(|| PropertyValue::Reference(self.standby_target(cpu.real_time)));
        let table = table.map(|table| PropertyValue::Reference(self.table_target(table)));
        let [idle_states, capacity, operating_points, power] = PERFORMANCE;
        node.with_some(idle_states, standby)
            .with(capacity, PropertyValue::Number(dmips_mhz))
            .with_some(operating_points, table)
            .with_some(power, coefficient)
    }

    pub(crate) fn opp_tables(&self) -> impl Iterator<Item = Node> {
        let tables = self.machine.facts().opp_tables.iter();
        tables
            .enumerate()
            .map(|(index, table)| opp_table(index, table).target(self.table_target(index)))
    }

    pub(crate) fn cpufreq(&self) -> Option<Node> {
        self.machine.facts().cpufreq.map(cpufreq)
    }

    /// What keeps the guest's kernel off registers in its RAM, as a child of `/reserved-memory`.
    pub(crate) fn reserved(&self) -> Option<Node> {
        let in_ram = |region: &CpufreqRegion| region.kind == RegionKind::GuestRam;
        self.machine.facts().cpufreq.filter(in_ram).map(reserved)
    }

    fn root(&self) -> Node {
        Node::new("")
            .with("#address-cells", PropertyValue::Number(2))
            .with("#size-cells", PropertyValue::Number(2))
            .children([self.cpus()])
            .children(self.opp_tables())
            .children(self.reserved().map(reserved_memory))
            .children(self.cpufreq())
    }
}

fn opp_table(index: usize, table: &OppTable) -> Node {
    Node::new(format!("opp-table-{index}"))
        .with("compatible", PropertyValue::Text("operating-points-v2"))
        .with_some("opp-shared", table.shared.then_some(PropertyValue::Flag))
        .children(table.opps.iter().map(opp))
}

fn opp(opp: &Opp) -> Node {
    let hz = u64::from(opp.khz) * 1000;
    Node::new(format!("opp-{hz}"))
        .with("opp-hz", PropertyValue::Wide(hz))
        .with_some("opp-microvolt", opp.uv.map(PropertyValue::Number))
        .with_some("opp-microwatt", opp.uw.map(PropertyValue::Number))
}

/// `/reserved-memory` with this range.
pub(crate) fn reserved_memory(range: Node) -> Node {
    Node::new(RESERVED_MEMORY)
        .with("#address-cells", PropertyValue::Number(2))
        .with("#size-cells", PropertyValue::Number(2))
        .with("ranges", PropertyValue::Flag)
        .children([range])
}

/// Linux maps what is `no-map` nowhere itself, so that a driver's ioremap takes it.
fn reserved(CpufreqRegion { base, .. }: CpufreqRegion) -> Node {
    Node::new(format!("cpufreq@{base:x}"))
        .with("reg", PropertyValue::Addresses(vec![base, RESERVED]))
        .with("no-map", PropertyValue::Flag)
}

fn cpufreq(CpufreqRegion { base, size, kind }: CpufreqRegion) -> Node {
    let (compatible, reg) = match kind {
        RegionKind::Registers | RegionKind::GuestRam => (REGISTERS, vec![base, size]),
        // Checked facts: the doorbell's page is below 2^64.
        RegionKind::SharedMemory => (
            "vcpufreq,shm",
            vec![base, size, base.wrapping_add(size), REGION_STRIDE],
        ),
    };
    Node::new(format!("cpufreq@{base:x}"))
        .with("compatible", PropertyValue::Text(compatible))
        .with("reg", PropertyValue::Addresses(reg))
}

/// Writes `/cpus`. The writer must be in the root node, past its properties.
///
/// # Errors
/// The writer's refusal: a phandle that is taken, or a place where no node can be.
pub fn write_cpus(fdt: &mut FdtWriter, nodes: &Nodes<'_>) -> FdtWriterResult<()> {
    nodes.cpus().write(fdt)
}

/// Writes the `opp-table-N` nodes that `/cpus` refers to. The writer must be
/// in the root node, past its properties.
///
/// # Errors
/// As [`write_cpus`].
pub fn write_opp_tables(fdt: &mut FdtWriter, nodes: &Nodes<'_>) -> FdtWriterResult<()> {
    nodes.opp_tables().try_for_each(|node| node.write(fdt))
}

/// Writes the virtual cpufreq device's node, if the machine has the device.
/// The writer must be in the root node or a `simple-bus`, past its properties;
/// there `#address-cells` and `#size-cells` are 2.
///
/// # Errors
/// As [`write_cpus`].
pub fn write_cpufreq(fdt: &mut FdtWriter, nodes: &Nodes<'_>) -> FdtWriterResult<()> {
    nodes.cpufreq().map_or(Ok(()), |node| node.write(fdt))
}

/// A tree of only these nodes, as a blob. Phandles are from 1 on.
///
/// # Errors
/// None for a checked machine; the type is the writer's.
pub fn dtb(machine: &Machine) -> FdtWriterResult<Vec<u8>> {
    let mut fdt = FdtWriter::new()?;
    standalone(machine).write(&mut fdt)?;
    fdt.finish()
}

/// The tree of [`dtb`] as source, to be read, compiled or included.
pub fn dts(machine: &Machine) -> String {
    format!("/dts-v1/;\n\n{}", standalone(machine))
}

/// An overlay that puts registers in a guest's RAM into a tree, as a VMM applies one that makes the tree
/// itself: into `/reserved-memory`, and into a root whose addresses and sizes are two cells each.
///
/// # Errors
/// None for one region; the type is the writer's.
pub fn overlay(region: CpufreqRegion) -> Result<Vec<u8>, TreeError> {
    let nodes = [reserved_memory(reserved(region)), cpufreq(region)];
    let fragment = Node::new("fragment@0")
        .with("target-path", PropertyValue::Text("/"))
        .children([Node::new(OVERLAY).children(nodes)]);
    // vm-fdt takes no name that begins with a line.
    flatten(&Base {
        reservations: Vec::new(),
        boot_cpu: 0,
        root: Node::new("").children([fragment]).into_base(),
    })
}

fn standalone(machine: &Machine) -> Node {
    let nodes = Nodes {
        machine,
        first: 1,
        cpus: None,
    };
    nodes.root()
}
