// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VMM itself keeps in memory beside its guest, and how many threads it has.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_bench::piped::threads;
use vcpufreq_tests::LabVerdict;

use crate::harness::plan::{Plan, first_cpus};
use crate::harness::policy::Policy;
use crate::harness::vm::{Setup, Vm};

/// The bound of each path, here and in the scenario `peer`: 6,800 is the 6,584 seen by `bpf`, which
/// keeps the most, and 216 for other builds. Nine tenths are the program's own code and constants: the
/// kernel maps them in pieces of 64 KiB, and nearly each piece has a function that a start runs. So
/// the bound finds a leak, a new library, or a program that is linked without the removal of what
/// it does not need (8,140 then), not a few new functions. A build that needs more raises it, and
/// names what it buys.
///
/// crosvm keeps 6,064 (docs/peers.md), measured without its sandbox: that of this program made 6,488
/// of 6,188 by `bpf`.
pub const MOST_KIB: u64 = 6_800;
/// A mapping of this size is the guest's memory.
const GUEST_KIB: u64 = 100 * 1024;

/// What the VMM keeps by each path.
pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let mut rows = Vec::new();
    let mut more = Vec::new();
    for path in ["exit", "ioeventfd", "bpf", "shm"] {
        let setup = Setup::mirroring(&first_cpus(&Policy::all()?)).with(&["--path", path]);
        let setup = Setup {
            silent: true,
            ..setup
        };
        let vm = plan.guest(&setup)?;
        let own = Own::of(&vm)?;
        if own.kib >= MOST_KIB {
            more.push(format!("{path}: {} KiB", own.kib));
        }
        let mut row = own.json();
        row["path"] = path.into();
        rows.push(row);
        vm.quit()?;
    }
    let figures = json!({ "bound_kib": MOST_KIB, "rows": rows });
    Ok(LabVerdict::with_figures(figures).check_none("no path takes more", &more))
}

/// Of a VMM's process.
pub struct Own {
    /// `VmRSS` less what of it is the guest's memory.
    pub kib: u64,
    /// The names of its threads.
    pub threads: Vec<String>,
    /// What each kind of mapping has of it, in KiB.
    mappings: BTreeMap<String, u64>,
}

impl Own {
    pub fn of(vm: &Vm) -> Result<Self> {
        let path = format!("/proc/{}/smaps", vm.pid());
        let mut mappings = of_smaps(&fs::read_to_string(&path).context(path)?);
        let guest = mappings.remove(GUEST).unwrap_or(0);
        let threads = threads(vm.pid())?;
        Ok(Self {
            kib: vm.resident_kib()?.saturating_sub(guest),
            threads: threads.into_iter().map(|(_, name)| name).collect(),
            mappings,
        })
    }

    pub fn json(&self) -> Value {
        json!({ "vmm_kib": self.kib, "threads": self.threads, "mappings_kib": self.mappings })
    }
}

const GUEST: &str = "guest";

/// The resident KiB of each kind of mapping: of a file, a name of the kernel's, or none.
fn of_smaps(text: &str) -> BTreeMap<String, u64> {
    let mut kinds = BTreeMap::new();
    let (mut kind, mut size) = (String::new(), 0);
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let kib = || words.get(1).and_then(|word| word.parse().ok()).unwrap_or(0);
        match words.first() {
            Some(&"Size:") => size = kib(),
            Some(&"Rss:") if size >= GUEST_KIB => *kinds.entry(GUEST.into()).or_default() += kib(),
            Some(&"Rss:") => *kinds.entry(kind.clone()).or_default() += kib(),
            // `START-END rw-p OFFSET DEVICE INODE NAME`
            Some(first) if !first.ends_with(':') => {
                kind = words.get(5).unwrap_or(&"anonymous").to_string();
            }
            _ => (),
        }
    }
    kinds.retain(|_, kib| *kib > 0);
    kinds
}

#[cfg(test)]
mod tests {
    //! Mappings of a kind are added up; the largest is the guest's.
    use super::*;

    #[test]
    fn mappings_by_kind() {
        let text = "\
00400000-00800000 r-xp 00000000 00:02 7 /bin/vcpufreq
Size: 4096 kB
Rss: 2000 kB
00800000-00900000 rw-p 00400000 00:02 7 /bin/vcpufreq
Size: 1024 kB
Rss: 24 kB
7f0000000000-7f0010000000 rw-s 00000000 00:01 9 /memfd:guest (deleted)
Size: 262144 kB
Rss: 90000 kB
7f0020000000-7f0020001000 rw-p 00000000 00:00 0
Size: 4 kB
Rss: 4 kB
";
        let kinds = of_smaps(text);
        let of = |kind: &str| kinds.get(kind).copied();
        assert_eq!(of("/bin/vcpufreq"), Some(2024));
        assert_eq!(of("anonymous"), Some(4));
        assert_eq!(of(GUEST), Some(90_000));
    }
}
