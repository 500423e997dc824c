// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq bench` on the lab's host, as anyone calls it.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::Plan;
use crate::deeds::{insmod, rmmod};

const OUT: &str = "/run/ramp.json";
const HTML: &str = "/run/ramp.html";
const TRACE: &str = "/run/ramp.trace.json";
const SPEED_MODEL: &str = "/sys/module/lab_cpufreq/parameters/speed_model";
/// A read takes 2 ms, and ends in a timer's interrupt.
const NULL_BLK: &str = "irqmode=2 completion_nsec=2000000 nr_devices=1 queue_mode=2";

/// No cpuidle in the guest, as on the host: each entry to PSCI's standby has the
/// guest's GIC driver access KVM's eight times (docs/design.md).
const GUEST_CMDLINE: &str = "nokaslr cpuidle.off=1";

/// `bench`, or `bench:SCENARIO:SCENARIO...` for these alone.
pub fn run(plan: &Plan, name: &str) -> Result<Value> {
    // A CPU that leaves a deep idle state spends its exit latency in the one
    // stream of instructions that all emulated CPUs share.
    rmmod("lab_cpuidle")?;
    insmod("configfs", "")?;
    insmod("null_blk", NULL_BLK)?;
    let mut command = Command::new("/bin/vcpufreq");
    command
        .args([
            "bench",
            "--kernel",
            "/lab/guest-kernel",
            "--initrd",
            "/lab/guest-initramfs",
        ])
        .args([
            "--guest-module",
            "/lab/modules/configfs.ko",
            "--guest-module",
        ])
        .arg(format!("/lab/modules/null_blk.ko {NULL_BLK}"))
        .arg("--guest-module")
        .arg(format!("/lab/modules/{}.ko", plan.driver))
        .args(["--guest-cmdline", GUEST_CMDLINE])
        .args(["--speed-switch", SPEED_MODEL])
        .args(["--out", OUT, "--html", HTML, "--perfetto", TRACE]);
    if let Some(path) = &plan.path {
        command.args(["--path", path]);
    }
    for scenario in name.split(':').skip(1) {
        command.args(["--scenario", scenario]);
    }
    let output = command.output().context("starting vcpufreq bench")?;
    rmmod("null_blk")?;
    rmmod("configfs")?;
    insmod("lab_cpuidle", "")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    let report: Value = fs::read_to_string(OUT)
        .ok()
        .and_then(|text| serde_json::from_str(&text).ok())
        .unwrap_or_default();
    Ok(json!({
        "held": output.status.success(), "exit_code": output.status.code(),
        "report": report, "html": fs::read_to_string(HTML).unwrap_or_default(),
        "trace": fs::read_to_string(TRACE).unwrap_or_default(),
        "table": text(&output.stdout), "said": text(&output.stderr),
    }))
}
