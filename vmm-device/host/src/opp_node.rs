// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Operating points from the host's own device tree
//! (`/sys/firmware/devicetree`, binding `operating-points-v2`), and from the kernel's debugfs
//! (`drivers/opp/debugfs.c`): the voltages that cpufreq doesn't show.
//!
//! A tree may have several voltages of a point, `opp-microvolt-NAME`, one for each kind of chip. The
//! kernel takes those of one name (`prop_name` of `drivers/opp/of.c`), and where a point has none
//! of that name, its `opp-microvolt`. debugfs shows which, for root. Else the points that cpufreq
//! lists tell: by `opp-supported-hw`, each kind of chip has its own.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::{CPUS, HostRoot};

const TREE: &str = "sys/firmware/devicetree/base";
/// How deep below the root an OPP table may be; they are at the top, or in
/// `/cpus` or `/soc`.
const MAX_DEPTH: u32 = 3;

/// An operating point as far as the host reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostOpp {
    /// Frequency in kHz.
    pub khz: u32,
    /// Whether only boost adds it.
    pub boost: bool,
    /// Voltage in µV.
    pub uv: Option<u32>,
    /// Power of a busy CPU in µW.
    pub uw: Option<u32>,
}

/// The voltages that the kernel uses for a CPU: frequency in kHz and µV of each point, in no order.
/// Empty without debugfs.
pub fn kernel_voltages(root: &HostRoot, cpu: u32) -> Vec<(u32, u32)> {
    let table = format!("sys/kernel/debug/opp/cpu{cpu}");
    let entries = std::fs::read_dir(root.path(&table)).into_iter().flatten();
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let point = |name: String| {
        // A point with a level is `opp:HZ-LEVEL`.
        let hz = name.strip_prefix("opp:")?.split('-').next()?;
        let khz = u32::try_from(hz.parse::<u64>().ok()? / 1000).ok()?;
        let uv = root.number(format!("{table}/{name}/supply-0/u_volt_target"))?;
        (uv > 0).then_some((khz, uv))
    };
    names.filter_map(point).collect()
}

/// The operating points of the table that a CPU's node points to. `listed` are those that cpufreq
/// has of them, in kHz.
pub fn of_cpu(root: &HostRoot, cpu: u32, listed: &[u32]) -> Option<Vec<HostOpp>> {
    let node = root.path(format!("{CPUS}/cpu{cpu}/of_node"));
    let phandle = cells(&node.join("operating-points-v2"))?.first().copied()?;
    let table = find_phandle(&root.path(TREE), phandle, MAX_DEPTH)?;
    let children = std::fs::read_dir(table).ok()?;
    let dirs = children.filter_map(|entry| Some(entry.ok()?.path()));
    let nodes: Vec<_> = dirs.filter_map(OppNode::read).collect();
    let kinds = kinds(&nodes, listed);
    // Kinds that can't be told apart may still have the same values.
    let value = |node: &OppNode, what: &str| {
        let mut values = kinds.iter().map(|kind| node.value(what, kind.as_deref()));
        let first = values.next()??;
        values.all(|value| value == Some(first)).then_some(first)
    };
    let opp = |node: &OppNode| HostOpp {
        khz: node.khz,
        boost: node.dir.join("turbo-mode").exists(),
        uv: value(node, VOLTAGE),
        uw: value(node, "opp-microwatt"),
    };
    Some(nodes.iter().map(opp).collect())
}

const VOLTAGE: &str = "opp-microvolt";

/// One point's node.
struct OppNode {
    dir: PathBuf,
    khz: u32,
}

impl OppNode {
    fn read(dir: PathBuf) -> Option<Self> {
        let hz = match cells(&dir.join("opp-hz"))?[..] {
            [high, low, ..] => (u64::from(high) << 32) | u64::from(low),
            _ => return None,
        };
        let khz = u32::try_from(hz / 1000).ok()?;
        Some(Self { dir, khz })
    }

    /// A property for a kind of chip, as the kernel looks it up. It may list a value per regulator,
    /// `opp-microvolt` also target, minimum and maximum: the first is the target of the CPU's own
    /// supply.
    fn value(&self, what: &str, kind: Option<&str>) -> Option<u32> {
        let first = |name: &str| cells(&self.dir.join(name))?.first().copied();
        let own = kind.and_then(|kind| first(&format!("{what}-{kind}")));
        own.or_else(|| first(what))
    }

    /// The kinds of chips that it has voltages for.
    fn kinds(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.dir).into_iter().flatten();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let kind = |name: String| {
            let kind = name.strip_prefix(VOLTAGE)?.strip_prefix('-')?;
            Some(kind.to_owned())
        };
        names.filter_map(kind).collect()
    }

    /// Whether chips of this kind have the point, where its name is a speed bin: drivers take the
    /// bin's bit for `opp-supported-hw`.
    fn supports(&self, kind: &str) -> Option<bool> {
        let bin = kind
            .strip_prefix("speed")?
            .split('-')
            .next()?
            .parse()
            .ok()?;
        let mask = *cells(&self.dir.join("opp-supported-hw"))?.first()?;
        Some(1_u32.checked_shl(bin)? & mask != 0)
    }
}

/// The kinds of chips that this one can be: those with a voltage for each listed point. Of these,
/// those for whose speed bin the tree has exactly the listed points, if there are any. `None` alone
/// where the tree names no kinds.
fn kinds(nodes: &[OppNode], listed: &[u32]) -> Vec<Option<String>> {
    let named: BTreeSet<_> = nodes.iter().flat_map(OppNode::kinds).collect();
    if named.is_empty() {
        return vec![None];
    }
    let is_listed = |node: &OppNode| listed.is_empty() || listed.contains(&node.khz);
    let of_listed = nodes.iter().filter(|node| is_listed(node));
    let has_all = |kind: &String| {
        let mut nodes = of_listed.clone();
        nodes.all(|node| node.value(VOLTAGE, Some(kind)).is_some())
    };
    let complete: Vec<_> = named.into_iter().filter(has_all).collect();
    let is_bin = |kind: &&String| {
        let fits = |node: &OppNode| {
            let supports = node.supports(kind);
            supports.is_none_or(|supports| supports == is_listed(node))
        };
        nodes.iter().all(fits)
    };
    let bins: Vec<_> = complete.iter().filter(is_bin).cloned().collect();
    let possible = if bins.is_empty() { complete } else { bins };
    possible.into_iter().map(Some).collect()
}

fn find_phandle(dir: &Path, phandle: u32, depth: u32) -> Option<PathBuf> {
    if cells(&dir.join("phandle")).is_some_and(|cells| cells == [phandle]) {
        return Some(dir.to_owned());
    }
    let entries = std::fs::read_dir(dir).ok().filter(|_| depth > 0)?;
    let subdirs = entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    subdirs
        .map(|entry| entry.path())
        .find_map(|subdir| find_phandle(&subdir, phandle, depth - 1))
}

/// A property as 32-bit big-endian cells.
fn cells(property: &Path) -> Option<Vec<u32>> {
    let bytes = std::fs::read(property).ok()?;
    let cells = bytes.chunks_exact(4).flat_map(<[u8; 4]>::try_from);
    Some(cells.map(u32::from_be_bytes).collect())
}
