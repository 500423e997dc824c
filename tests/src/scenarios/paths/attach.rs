// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The library's example, a VMM of its own, by each path.

use anyhow::Result;
use kvm_ioctls::Kvm;
use serde_json::json;
use vcpufreq_bridge::AccessPath;
use vcpufreq_host::HostRoot;
use vcpufreq_host_bpf::BpfBackend;
use vcpufreq_tests::LabVerdict;

#[path = "../../../../vmm-device/bridge/examples/attach/main.rs"]
mod example;

/// Its guest reads a frequency and asks for one, and only by `exit` it exits.
pub fn run() -> Result<LabVerdict> {
    let kvm = Kvm::new()?;
    let builder = || example::builder(&HostRoot::default());
    let mut rows = Vec::new();
    let mut right = true;
    let by_kvm = builder()?.ioeventfd(false);
    let by_bpf = builder()?.ioeventfd(false).backend(BpfBackend::default());
    for (builder, wanted, exits_wanted) in [
        (by_bpf, AccessPath::Backend("bpf"), 0),
        (by_kvm, AccessPath::Ioeventfd, 0),
        (builder()?, AccessPath::Exit, 2),
    ] {
        let (path, khz, exits, totals) = example::run(&kvm, builder.start()?)?;
        let counted = totals.counters;
        right &= path == wanted
            && exits == exits_wanted
            && khz > 0
            // The guest ends right after its request: the worker of `bpf` may find it overtaken.
            && (counted.requests, counted.applied + counted.superseded) == (1, 1);
        rows.push(json!({
            "path": format!("{path:?}"), "reads_khz": khz, "exits": exits,
            "counted": format!("{counted:?}"),
        }));
    }
    Ok(LabVerdict::default()
        .check("each builder's path, its exits and counts", right, &rows)
        .figure("rows", rows))
}
