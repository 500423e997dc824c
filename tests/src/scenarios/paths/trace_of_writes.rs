// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where the time of a write goes: the host's function graph of a few functions
//! while the guest writes, by each path. The trace takes time too, about 0.3 µs
//! for each function that is entered, so shares count, not sums.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;

use anyhow::Result;
use serde_json::{Value, json};

use super::cost::Measured;
use crate::harness::sysfs;
use crate::scenarios::{Plan, Policy};

const TRACING: &str = "/sys/kernel/tracing";
const WRITES: u64 = 60;
/// From the trap to the clamp; those that a kernel hasn't got are left out.
const FUNCTIONS: [&str; 22] = [
    "handle_exit",
    "io_mem_abort",
    "kvm_io_bus_write",
    "eventfd_signal_mask",
    "ep_poll_callback",
    "ep_autoremove_wake_function",
    "try_to_wake_up",
    "perf_trace_kvm_mmio",
    "perf_tp_event",
    "bpf_trace_run4",
    "vcpufreq_host_request",
    "xfer_to_guest_mode_handle_work",
    "task_work_run",
    "kernfs_fop_write_iter",
    "cgroup_file_write",
    "cpu_uclamp_write",
    "cpu_util_update_eff",
    "uclamp_update_active",
    "kvm_vcpu_ioctl",
    "kvm_arch_vcpu_load",
    "kvm_arch_vcpu_put",
    "kvm_handle_mmio_return",
];

pub fn run(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let mut rows = serde_json::Map::new();
    for path in ["exit", "kernel", "bpf"] {
        let mut guest = Measured::boot(plan, &policies, path, false)?;
        let bare = guest.writes(WRITES)?;
        start()?;
        let traced = guest.writes(WRITES);
        let trace = stop()?;
        let (bare, traced) = (bare.0, traced?.0);
        let vcpu = format!("vcpu{}", guest.vcpu);
        let mut functions = serde_json::Map::new();
        for (name, mut ns) in durations(&trace, &vcpu) {
            ns.sort_unstable();
            let median = ns.get(ns.len() / 2).copied().unwrap_or(0);
            functions.insert(name, json!({ "n": ns.len(), "median_ns": median }));
        }
        let row = json!({
            "write_ns": bare, "write_traced_ns": traced, "functions": functions,
            "excerpt": excerpt(&trace),
        });
        rows.insert(path.to_owned(), row);
        guest.vm.quit()?;
    }
    let held = !rows.is_empty();
    Ok(json!({ "held": held, "paths": rows }))
}

fn set(file: &str, value: &str) -> Result<()> {
    sysfs::write(format!("{TRACING}/{file}"), value)
}

fn start() -> Result<()> {
    set("tracing_on", "0")?;
    set("trace", "")?;
    for function in FUNCTIONS {
        // Inlined, or of another kernel.
        let mut file = fs::OpenOptions::new();
        let filter = file.append(true);
        let mut filter = filter.open(format!("{TRACING}/set_ftrace_filter"))?;
        let _ = filter.write_all(format!("{function}\n").as_bytes());
    }
    set("current_tracer", "function_graph")?;
    for option in ["funcgraph-tail", "funcgraph-proc", "funcgraph-abstime"] {
        set(&format!("options/{option}"), "1")?;
    }
    for event in ["sched/sched_switch", "sched/sched_waking"] {
        set(&format!("events/{event}/enable"), "1")?;
    }
    set("buffer_size_kb", "8192")?;
    set("tracing_on", "1")
}

fn stop() -> Result<String> {
    set("tracing_on", "0")?;
    let trace = fs::read_to_string(format!("{TRACING}/trace"))?;
    for event in ["sched/sched_switch", "sched/sched_waking"] {
        set(&format!("events/{event}/enable"), "0")?;
    }
    set("current_tracer", "nop")?;
    set("set_ftrace_filter", "")?;
    set("tracing_on", "1")?;
    Ok(trace)
}

/// `12.3 |  2)  vcpu1-99  | + 12.345 us  |  } /* handle_exit */`, and of one
/// that calls none of the others `|  name();`
fn durations(trace: &str, thread: &str) -> BTreeMap<String, Vec<u64>> {
    let mut found: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for line in trace.lines().filter(|line| line.contains(thread)) {
        let Some((before, after)) = line.split_once(" us ") else {
            continue;
        };
        let us = before.split_whitespace().last().map(str::parse::<f64>);
        let name = after.rsplit(['|', '*']).find_map(|text| {
            let text = text.trim().trim_end_matches(['/', ';', '(', ')', ' ']);
            (!text.is_empty() && text != "}").then(|| text.to_owned())
        });
        if let (Some(Ok(us)), Some(name)) = (us, name) {
            let name = name.split_whitespace().next().unwrap_or_default();
            // Three digits behind the point: whole nanoseconds.
            let ns = format!("{:.0}", us * 1000.0).parse().unwrap_or(0);
            found.entry(name.to_owned()).or_default().push(ns);
        }
    }
    found
}

/// Some lines from the middle.
fn excerpt(trace: &str) -> Vec<&str> {
    let lines: Vec<&str> = trace.lines().collect();
    let middle = lines.len() / 2;
    lines[middle..(middle + 90).min(lines.len())].to_vec()
}
