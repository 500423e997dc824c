// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! cur_perf by `--cur-perf`, with the host held at each of its frequencies in turn. A vCPU with a
//! coarser table reads its nearest entry. With `request` a vCPU reads its own request, whatever the
//! host's frequency.

use anyhow::{Context, Result};
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use crate::harness::plan::{cur_perf, registers};
use crate::harness::policy::Policy;
use crate::harness::sysfs;
use crate::harness::vm::Vm;

/// The option that gives a vCPU the ends of its pCPU's table alone.
pub fn coarse_table(vcpu: usize, policy: &Policy) -> [String; 2] {
    let table = format!("{vcpu}={},{}", policy.min(), policy.max());
    ["--table".to_owned(), table]
}

/// A vCPU with that table and `--cur-perf table`: between its entries it reads the
/// nearer one.
pub fn nearest_entries(vm: &mut Vm, vcpu: usize, policy: &Policy) -> Result<LabVerdict> {
    let (min, max) = (policy.min(), policy.max());
    let nearest = |khz: u32| if khz - min < max - khz { min } else { max };
    let rows = at_each_opp(vm, vcpu, policy)?;
    let between = rows
        .iter()
        .filter(|(host, _)| (min + 1..max).contains(host));
    let both = |end| between.clone().any(|(host, _)| nearest(*host) == end);
    // Else this is no test of the rounding.
    let tried = both(min) && both(max);
    let right = rows.iter().all(|&(host, read)| read == nearest(host));
    let figures = json!({ "host_and_read_khz": rows });
    Ok(LabVerdict::with_figures(figures)
        .check("it reads both ends between them", tried, &rows)
        .check("it reads the nearest entries", right, &rows))
}

/// A vCPU with `--cur-perf request` that has asked for `asked` last.
pub fn asked_for(vm: &mut Vm, vcpu: usize, policy: &Policy, asked: u32) -> Result<LabVerdict> {
    let rows = at_each_opp(vm, vcpu, policy)?;
    let right = rows.iter().all(|&(_, read)| read == asked);
    let figures = json!({ "asked_khz": asked, "host_and_read_khz": rows });
    Ok(LabVerdict::with_figures(figures).check("it reads its request", right, &rows))
}

/// What the host runs at and the vCPU reads, with the pCPU held at each OPP.
fn at_each_opp(vm: &mut Vm, vcpu: usize, policy: &Policy) -> Result<Vec<(u32, u32)>> {
    let base = registers(vm)?;
    let mut rows = Vec::new();
    for &khz in &policy.opps {
        hold(policy, khz, khz)?;
        // The frequency moves with the vCPU's own work, and a page of the path
        // `ioeventfd` follows it: the second look is at what has settled.
        cur_perf(vm, base, vcpu)?;
        let read = cur_perf(vm, base, vcpu)?;
        rows.push((policy.khz()?, read));
    }
    hold(policy, policy.min(), policy.max())?;
    // Else the host didn't set the frequency that the test asked for.
    let held = rows.iter().map(|(host, _)| *host);
    held.eq(policy.opps.iter().copied())
        .then_some(rows)
        .context("the host doesn't keep to its limits")
}

/// The lowest limit first, so that neither is beyond the other.
fn hold(policy: &Policy, min: u32, max: u32) -> Result<()> {
    let set = |name: &str, khz| sysfs::write(format!("{}/scaling_{name}_freq", policy.path), khz);
    set("min", policy.min())?;
    set("max", max)?;
    set("min", min)
}
