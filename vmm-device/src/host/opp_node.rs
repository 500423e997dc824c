// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Operating points from the host's own device tree
//! (`/sys/firmware/devicetree`, binding `operating-points-v2`): the voltages
//! that cpufreq doesn't show.

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

/// The operating points of the table that a CPU's node points to.
pub fn of_cpu(root: &HostRoot, cpu: u32) -> Option<Vec<HostOpp>> {
    let node = root.path(format!("{CPUS}/cpu{cpu}/of_node"));
    let phandle = cells(&node.join("operating-points-v2"))?.first().copied()?;
    let table = find_phandle(&root.path(TREE), phandle, MAX_DEPTH)?;
    let children = std::fs::read_dir(table).ok()?;
    let dirs = children.filter_map(|entry| Some(entry.ok()?.path()));
    Some(dirs.filter_map(|dir| opp(&dir)).collect())
}

fn opp(dir: &Path) -> Option<HostOpp> {
    let hz = cells(&dir.join("opp-hz"))?;
    let hz = match hz[..] {
        [high, low, ..] => (u64::from(high) << 32) | u64::from(low),
        _ => return None,
    };
    // Both may list a value per regulator, opp-microvolt also target, minimum
    // and maximum: the first is the target of the CPU's own supply.
    let first = |name| cells(&dir.join(name))?.first().copied();
    Some(HostOpp {
        khz: u32::try_from(hz / 1000).ok()?,
        boost: dir.join("turbo-mode").exists(),
        uv: first("opp-microvolt"),
        uw: first("opp-microwatt"),
    })
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
