// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the sandbox adds to an access by each path: the same guest with `--sandbox off`. A filter of
//! system calls costs each exit to the VMM time, and nothing else of an access is one.

use anyhow::Result;
use serde_json::{Value, json};

use super::measured::Measured;
use crate::harness::plan::Plan;
use crate::harness::policy::Policy;

/// The bound of an access with the sandbox against one without it, by each path. By `exit`, where the
/// filter has a cost, up to 1.07 was seen. By `shm` the vCPU makes no system call, and the sandbox adds
/// nothing; still a write took 1.02 on one build and 1.08 on the next, because the worker wakes up at
/// other moments. So two figures within 8 % of each other do not differ here, and 1.10 is the next
/// tenth: it finds a system call or a context switch that is new in an access, not a longer filter.
const MOST: f64 = 1.10;

/// The shares of reads and writes by each of these paths; `with` has the medians with the sandbox.
pub fn measure(
    plan: &Plan,
    policies: &[Policy],
    paths: &[&'static str],
    with: impl Fn(&str, &str) -> Option<f64>,
) -> Result<Vec<Value>> {
    let mut shares = Vec::new();
    for path in paths {
        let mut guest = Measured::boot_with(plan, policies, path, &["--sandbox", "off"])?;
        let without = [
            ("read", guest.reads()?.0),
            ("write", guest.timed_writes()?.0),
        ];
        guest.vm.quit()?;
        let [read, write] = without.map(|(op, without)| Some(with(path, op)? / without));
        shares.push(json!({ "path": path, "read": read, "write": write }));
    }
    Ok(shares)
}

/// Those above their bound, and those that were not measured.
pub fn out_of_bound(shares: &[Value]) -> Vec<String> {
    let wrong = shares.iter().filter(|share| {
        let within = |op: &str| share[op].as_f64().is_some_and(|share| share <= MOST);
        !(within("read") && within("write"))
    });
    wrong
        .map(|share| format!("the sandbox's share: {share}"))
        .collect()
}
