// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq run` with kernel and initrd and nothing else: cur_perf follows the pCPU by
//! each path. With pins it mirrors their pCPUs, and reports that in its first line. The same of
//! `vcpufreq qemu` before a QEMU command line, by the path that it chooses.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::harness::frequency::let_ticks_pass;
use crate::harness::migration::{move_to, scaled};
use crate::harness::plan::{Plan, cur_perf, first_cpus, largest_of, registers};
use crate::harness::policy::Policy;
use crate::harness::sysfs;
use crate::harness::vm::{Setup, Vm};
use crate::harness::vmm::Vmm;

/// The best that the host offers, which is `bpf`, and the others.
const PATHS: [&[&str]; 3] = [&[], &["--path", "exit"], &["--path", "ioeventfd"]];
/// Registers of a vCPU's page.
const TABLE_LEN: u64 = 0x08;
const DOMAIN: u64 = 0x14;

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    for policy in &policies {
        sysfs::write(format!("{}/scaling_governor", policy.path), "userspace")?;
    }
    let paths = match plan.vmm {
        Vmm::Qemu => &PATHS[..1],
        _ => &PATHS[..],
    };
    let unpinned: Vec<Value> = paths
        .iter()
        .map(|path| follows(plan, &policies, path).with_context(|| format!("{path:?}")))
        .collect::<Result<_>>()?;
    for policy in &policies {
        sysfs::write(format!("{}/scaling_governor", policy.path), "schedutil")?;
    }
    let pinned = mirrors(plan, &policies)
        .unwrap_or_else(|error| json!({ "right": false, "error": format!("{error:#}") }));
    let figures = json!({ "unpinned": unpinned, "pinned": pinned });
    Ok(LabVerdict::with_figures(figures)
        .check_rows("what runs unpinned reads true", &unpinned)
        .check_rows("what mirrors is pinned", [&pinned]))
}

/// What the kernel prints at its boot takes an exit for each character: once is enough.
const QUIET: [&str; 2] = ["--cmdline", "console=ttyS0 quiet"];

/// A guest with these options and no others.
fn bare(plan: &Plan, pins: &[String], options: &[&str]) -> Result<Vm> {
    let setup = Setup {
        vmm: plan.vmm,
        pins: pins.to_vec(),
        silent: true,
        ..Setup::default()
    };
    if plan.vmm == Vmm::Qemu {
        return Vm::boot(&setup.with(options));
    }
    Vm::boot_prepared(&setup, |command| {
        *command = Command::new("/bin/vcpufreq");
        command
            .args(["run", "--kernel", "/lab/guest-kernel"])
            .args(["--initrd", "/lab/guest-initramfs"])
            .args(options);
        // One without a pin is what there is without options.
        if pins.iter().any(|pin| !pin.is_empty()) {
            command.args(["--cpus", &pins.len().to_string()]);
        }
        let pins = pins.iter().enumerate().filter(|(_, pin)| !pin.is_empty());
        for (vcpu, pin) in pins {
            command.args(["--pin", &format!("{vcpu}={pin}")]);
        }
    })
}

/// Has the vCPU on a pCPU of each policy in turn, forces that to each of its frequencies, up
/// and down, and compares cur_perf with what docs/design.md makes of it.
fn follows(plan: &Plan, policies: &[Policy], path: &[&str]) -> Result<Value> {
    // A vCPU without a pCPU of its own counts in the largest ones' kHz.
    let (_, like) = largest_of(policies)?;
    let quiet: &[&str] = if path.is_empty() { &[] } else { &QUIET };
    let mut vm = bare(plan, &[String::new()], &[path, quiet].concat())?;
    let base = registers(&mut vm)?;
    let (mut compared, mut wrong) = (0, Vec::new());
    for policy in policies {
        move_to(&vm, policy.cpu())?;
        let possible: Vec<u32> = policy.possible().collect();
        for khz in possible.iter().chain(possible.iter().rev()) {
            sysfs::write(format!("{}/scaling_setspeed", policy.path), khz)?;
            let_ticks_pass();
            let read = cur_perf(&mut vm, base, 0)?;
            let (host_khz, on) = (policy.khz()?, vm.pcpu(0)?);
            let expected = scaled(like, policy, host_khz);
            compared += 1;
            if (read, host_khz, on) != (expected, *khz, policy.cpu()) {
                wrong.push(json!({
                    "pcpu": on, "host_khz": host_khz, "reads_khz": read, "expected_khz": expected,
                }));
            }
        }
    }
    let said = vm.quit()?;
    let first = told(plan, &said, "aren't pinned").unwrap_or_default();
    let named = first.contains("aren't pinned") && first.contains("--pin");
    Ok(json!({
        "right": wrong.is_empty() && named, "options": path, "compared": compared,
        "wrong": wrong.len(), "first_wrong": wrong.first(), "first_line": first,
    }))
}

/// With nothing but a pin for each vCPU they have their pCPUs' tables, and a domain for each policy;
/// with `--host-topology=false` they have none.
fn mirrors(plan: &Plan, policies: &[Policy]) -> Result<Value> {
    let quiet = match plan.vmm {
        Vmm::Qemu => &[][..],
        _ => &QUIET,
    };
    let mirrored = tables(plan, policies, quiet)?;
    let plain = tables(
        plan,
        policies,
        &[quiet, &["--host-topology=false"]].concat(),
    )?;
    let domains = mirrored["domains"].as_array().into_iter().flatten();
    let domains: BTreeSet<_> = domains.filter_map(Value::as_u64).collect();
    let lens: Vec<_> = policies.iter().map(|policy| policy.opps.len()).collect();
    let right = mirrored["table_lens"] == json!(lens)
        && mirrored["first_line"]
            .as_str()
            .is_some_and(|line| line.contains("mirror CPUs"))
        && domains.len() == policies.len()
        && plain["table_lens"] == json!(vec![1; policies.len()]);
    Ok(json!({ "right": right, "mirrored": mirrored, "plain": plain }))
}

fn tables(plan: &Plan, policies: &[Policy], options: &[&str]) -> Result<Value> {
    let pins: Vec<String> = first_cpus(policies).iter().map(u32::to_string).collect();
    let mut vm = bare(plan, &pins, options)?;
    let base = registers(&mut vm)?;
    let mut read = |offset| -> Result<Vec<u64>> {
        let vcpus = 0..u64::try_from(policies.len())?;
        let of = |vcpu| vm.number(format!("peek {vcpu} {:#x}", base + vcpu * 0x1000 + offset));
        vcpus.map(of).collect()
    };
    let (lens, domains) = (read(TABLE_LEN)?, read(DOMAIN)?);
    let said = vm.quit()?;
    Ok(json!({
        "table_lens": lens, "domains": domains, "first_line": told(plan, &said, "mirror CPUs"),
    }))
}

/// The first line; of `vcpufreq qemu`, which may first tell of QEMU's tree, the one with these words.
fn told<'a>(plan: &Plan, said: &'a str, words: &str) -> Option<&'a str> {
    let mut lines = said.lines();
    match plan.vmm {
        Vmm::Qemu => lines.find(|line| line.contains(words)),
        _ => lines.next(),
    }
}
