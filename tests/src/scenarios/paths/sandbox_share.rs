// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the sandbox adds to an access by each path: the same guest with `--sandbox off`. A filter of
//! system calls costs each exit to the VMM time, and nothing else of an access is one.

use anyhow::Result;
use serde_json::{Value, json};

use super::cost::{CostRow, OF_RUN};
use super::measured::Measured;
use crate::harness::plan::Plan;
use crate::harness::policy::Policy;

/// An access with the sandbox against one without it, at most: by `exit`, and by the other paths.
const OF_EXIT: f64 = 1.08;
const OF_OTHERS: f64 = 1.03;

/// The shares of reads and writes by each path of `vcpufreq run`; `with` has the sandbox.
pub fn measure(plan: &Plan, policies: &[Policy], with: &[CostRow]) -> Result<Vec<Value>> {
    let mut shares = Vec::new();
    for path in OF_RUN {
        let mut guest = Measured::boot_with(plan, policies, path, &["--sandbox", "off"])?;
        let without = [
            ("read", guest.reads()?.0),
            ("write", guest.timed_writes()?.0),
        ];
        guest.vm.quit()?;
        let [read, write] = without.map(|(op, without)| {
            let found = with.iter().find(|row| (row.path, row.op) == (path, op));
            found.map(|row| row.median_ns / without)
        });
        shares.push(json!({ "path": path, "read": read, "write": write }));
    }
    Ok(shares)
}

/// Those above their bound, and those that were not measured.
pub fn out_of_bound(shares: &[Value]) -> Vec<String> {
    let wrong = shares.iter().filter(|share| {
        let bound = if share["path"] == "exit" {
            OF_EXIT
        } else {
            OF_OTHERS
        };
        let within = |op: &str| share[op].as_f64().is_some_and(|share| share <= bound);
        !(within("read") && within("write"))
    });
    wrong
        .map(|share| format!("the sandbox's share: {share}"))
        .collect()
}
