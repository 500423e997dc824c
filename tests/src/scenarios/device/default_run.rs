// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq run` with kernel and initrd and nothing else, or `vcpufreq qemu` with no option but the
//! number of vCPUs: cur_perf follows the pCPU by each path. With pins it mirrors their pCPUs, and reports that in its first line.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::harness::frequency::let_ticks_pass;
use crate::harness::migration::{move_to, scaled};
use crate::harness::plan::{Plan, cur_perf, first_cpus, last_of, registers};
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
    // QEMU's guests have one path.
    let paths = match plan.vmm {
        Vmm::Qemu => &PATHS[..1],
        _ => &PATHS[..],
    };
    let policies = Policy::all()?;
    for policy in &policies {
        sysfs::write(format!("{}/scaling_governor", policy.path), "userspace")?;
    }
    let unpinned: Vec<Value> = paths
        .iter()
        .map(|path| follows(plan.vmm, &policies, path).with_context(|| format!("{path:?}")))
        .collect::<Result<_>>()?;
    for policy in &policies {
        sysfs::write(format!("{}/scaling_governor", policy.path), "schedutil")?;
    }
    let pinned = mirrors(plan.vmm, &policies)
        .unwrap_or_else(|error| json!({ "right": false, "error": format!("{error:#}") }));
    let figures = json!({ "unpinned": unpinned, "pinned": pinned });
    Ok(LabVerdict::with_figures(figures)
        .check_rows("what runs unpinned reads true", &unpinned)
        .check_rows("what mirrors is pinned", [&pinned]))
}

/// What the kernel prints at its boot takes an exit for each character: once is enough.
const QUIET: [&str; 2] = ["--cmdline", "console=ttyS0 quiet"];

/// A guest with these options and no others.
fn bare(vmm: Vmm, vcpus: usize, options: &[String]) -> Result<Vm> {
    let setup = Setup {
        vmm,
        pins: vec![String::new(); vcpus],
        options: options.into(),
        silent: true,
        ..Setup::default()
    };
    if vmm == Vmm::Qemu {
        return Vm::boot(&setup);
    }
    Vm::boot_prepared(&setup, |command| {
        *command = Command::new("/bin/vcpufreq");
        command
            .args(["run", "--kernel", "/lab/guest-kernel"])
            .args(["--initrd", "/lab/guest-initramfs"])
            .args(options);
        if vcpus > 1 {
            command.args(["--cpus", &vcpus.to_string()]);
        }
    })
}

/// Has the vCPU on a pCPU of each policy in turn, forces that to each of its frequencies, up
/// and down, and compares cur_perf with what docs/design.md makes of it.
fn follows(vmm: Vmm, policies: &[Policy], path: &[&str]) -> Result<Value> {
    let (_, like) = last_of(policies)?;
    let quiet: &[&str] = if path.is_empty() { &[] } else { &QUIET };
    let options = path.iter().chain(quiet).map(|word| (*word).to_owned());
    let mut vm = bare(vmm, 1, &options.collect::<Vec<_>>())?;
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
    let first = said.lines().next().unwrap_or_default();
    let named = first.contains("aren't pinned") && first.contains("--pin");
    Ok(json!({
        "right": wrong.is_empty() && named, "options": path, "compared": compared,
        "wrong": wrong.len(), "first_wrong": wrong.first(), "first_line": first,
    }))
}

/// With nothing but a pin for each vCPU they have their pCPUs' tables, and a domain for each policy;
/// with `--host-topology=false` they have none.
fn mirrors(vmm: Vmm, policies: &[Policy]) -> Result<Value> {
    let mut options: Vec<String> = match vmm {
        Vmm::Qemu => Vec::new(),
        _ => QUIET.map(str::to_owned).into(),
    };
    for (vcpu, pcpu) in first_cpus(policies).iter().enumerate() {
        options.extend(["--pin".to_owned(), format!("{vcpu}={pcpu}")]);
    }
    let mirrored = tables(vmm, policies, &options)?;
    options.push("--host-topology=false".to_owned());
    let plain = tables(vmm, policies, &options)?;
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

fn tables(vmm: Vmm, policies: &[Policy], options: &[String]) -> Result<Value> {
    let mut vm = bare(vmm, policies.len(), options)?;
    let base = registers(&mut vm)?;
    let mut read = |offset| -> Result<Vec<u64>> {
        let vcpus = 0..u64::try_from(policies.len())?;
        let of = |vcpu| vm.number(format!("peek {vcpu} {:#x}", base + vcpu * 0x1000 + offset));
        vcpus.map(of).collect()
    };
    let (lens, domains) = (read(TABLE_LEN)?, read(DOMAIN)?);
    let said = vm.quit()?;
    Ok(json!({
        "table_lens": lens, "domains": domains, "first_line": said.lines().next(),
    }))
}
