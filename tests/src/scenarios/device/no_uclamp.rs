// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A host whose kernel can't clamp: `vcpufreq doctor` reports that and what follows,
//! `vcpufreq run` and `vcpufreq demo` refuse, and with `--actuator none` a guest runs by the best path all the same. What it
//! reads is true, and each of its requests is counted as not applicable.

use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use super::bad_input::refused;
use crate::harness::leftovers::leftovers;
use crate::harness::plan::{Plan, ask_for, cur_perf, let_load_decay, registers, set_governor};
use crate::harness::policy::Policy;
use crate::harness::stats::of as stats;
use crate::harness::vm::Setup;

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let (doctor_holds, doctor) = doctor()?;
    let demo = demo()?;
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let refused = refused(
        &plan.mirroring(&[policy.cpu()]),
        &["CONFIG_UCLAMP_TASK", "--actuator none", "--no-bridge"],
    )?;
    let setup = Setup {
        silent: true,
        ..plan
            .mirroring(&[policy.cpu()])
            .with(&["--actuator", "none"])
    };
    let mut vm = plan.guest(&setup)?;
    set_governor(&mut vm, 0, "userspace")?;
    let before = stats(&vm)?["vcpus"][0].clone();
    for &khz in &policy.opps {
        ask_for(&mut vm, 0, khz)?;
    }
    let after = stats(&vm)?["vcpus"][0].clone();
    let made = |name: &str| {
        let count = |stats: &Value| stats["counts"][name].as_u64();
        count(&after).zip(count(&before)).map(|(a, b)| a - b)
    };
    let asked = u64::try_from(policy.opps.len())?;
    let counts = [made("requests"), made("not_applicable"), made("applied")];
    let base = registers(&mut vm)?;
    let mut reads = Vec::new();
    for busy in [false, true] {
        if busy {
            vm.ask("start busy busy 0")?;
        }
        let_load_decay();
        let told = cur_perf(&mut vm, base, 0)?;
        reads.push(json!({ "busy": busy, "guest_reads": told, "host_khz": policy.khz()? }));
    }
    let said = vm.quit()?;
    let true_reads = reads
        .iter()
        .all(|row| row["guest_reads"] == row["host_khz"]);
    let figures = json!({
        "doctor": doctor, "path": after["path"], "asked": asked,
        "requests_not_applicable_applied": counts, "reads": reads, "vmm_said": said,
    });
    let busy = &reads[1]["guest_reads"];
    Ok(LabVerdict::with_figures(figures)
        .check("doctor names it", doctor_holds, &doctor)
        .part("refused", refused)
        .part("demo", demo)
        .check("reads are true", true_reads, &reads)
        .check_eq("a busy vCPU reads the maximum", busy, policy.max())
        .check_eq("by bpf", &after["path"], "bpf")
        .check_eq(
            "requests aren't applicable",
            &counts,
            [Some(asked), Some(asked), Some(0)],
        ))
}

/// Refuses before it starts a guest: exit code 2, and one line with what to do.
fn demo() -> Result<LabVerdict> {
    let files = [
        "--kernel",
        "/lab/guest-kernel",
        "--initrd",
        "/lab/guest-initramfs",
    ];
    let output = Command::new("/bin/vcpufreq")
        .arg("demo")
        .args(files)
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    let left = leftovers()?;
    let names = ["vcpufreq: uclamp is not available", "CONFIG_UCLAMP_TASK"];
    let one_line = said.lines().count() == 1 && names.iter().all(|name| said.contains(name));
    let code = output.status.code();
    let figures = json!({ "exit_code": code, "said": said, "left": left });
    Ok(LabVerdict::with_figures(figures)
        .check("one line names it", one_line, &said)
        .check_eq("the exit code", &code, Some(2))
        .check_none("nothing is left", &left))
}

/// Whether doctor reports the missing feature as a limit with its effect, and the path `bpf` as
/// possible; the two findings.
fn doctor() -> Result<(bool, Vec<Value>)> {
    let output = Command::new("/bin/vcpufreq")
        .args(["doctor", "--json"])
        .output()?;
    let said: Value = serde_json::from_slice(&output.stdout).context("doctor --json")?;
    let all = said.as_array().or_else(|| said["findings"].as_array());
    let of = |subject: &str| {
        let found = all.into_iter().flatten().find(|f| f["subject"] == subject);
        found.cloned().unwrap_or_default()
    };
    let (uclamp, bpf) = (of("uclamp"), of("path"));
    let says = |what: &str, text: &str| uclamp[what].as_str().is_some_and(|s| s.contains(text));
    let held = output.status.code() == Some(1)
        && uclamp["level"] == "limit"
        && says("what", "not available")
        && says("why", "not applicable")
        && says("change", "CONFIG_UCLAMP_TASK")
        && bpf["level"] == "good"
        && bpf["what"] == "bpf";
    Ok((held, vec![uclamp, bpf]))
}
