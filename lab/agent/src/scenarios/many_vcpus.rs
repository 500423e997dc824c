// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A Linux guest of many vCPUs, in turn on the pCPUs: each has its policy, each
//! request clamps that vCPU's thread and no other, and none leaves KVM.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::{Plan, Policy, ask_for, cur_perf, registers, set_governor};
use crate::exits::Exits;
use crate::vm::{Setup, Vm};

/// Unless the scenario's name has another number.
const VCPUS: usize = 64;
/// What Linux takes for each CPU comes on top of the usual.
const MEM_MIB: u32 = 512;
/// Bytes of a vCPU's registers.
const PAGE: u64 = 0x1000;
/// By the path `kernel` the worker may have to wait for a pCPU.
const IN_FORCE_TRIES: u32 = 100;

/// `many-vcpus`, or `many-vcpus:COUNT`.
pub fn run(plan: &Plan, name: &str) -> Result<Value> {
    let count = match name.split_once(':') {
        Some((_, count)) => count.parse().context("many-vcpus:COUNT")?,
        None => VCPUS,
    };
    let policies = Policy::all()?;
    let homes = homes(&policies, count);
    let began = Instant::now();
    let mut vm = plan.guest(&setup(plan, &homes))?;
    let boot_ms = u64::try_from(began.elapsed().as_millis())?;
    let resident_kib = vm.resident_kib()?;
    for vcpu in 0..count {
        set_governor(&mut vm, vcpu, "userspace")?;
    }
    let base = registers(&mut vm)?;
    let exits = Exits::watch()?;
    let mut wrong = Vec::new();
    let pcpus: usize = policies.iter().map(|policy| policy.cpus.len()).sum();
    for round in 0..2 {
        // Unlike those of the next vCPU on the pCPU, and of the round before.
        let asked = |vcpu: usize| {
            let opps = &homes[vcpu].1.opps;
            opps[(vcpu / pcpus + round) % opps.len()]
        };
        for vcpu in 0..count {
            ask_for(&mut vm, vcpu, asked(vcpu))?;
        }
        for (vcpu, (_, policy)) in homes.iter().enumerate() {
            let util = policy.util(asked(vcpu));
            let clamp = clamp(&vm, vcpu, (util, util))?;
            if clamp != (util, util) {
                wrong.push(json!({ "vcpu": vcpu, "round": round, "util": util, "clamp": clamp }));
            }
        }
    }
    let mut untrue = Vec::new();
    for (vcpu, (_, policy)) in homes.iter().enumerate() {
        let khz = cur_perf(&mut vm, base, vcpu)?;
        if !policy.opps.contains(&khz) {
            untrue.push(json!({ "vcpu": vcpu, "reads_khz": khz }));
        }
    }
    let seen = exits.stop()?;
    let of_all = seen.at(base..base + PAGE * count as u64);
    let exits_wanted = plan.path.as_deref() == Some("exit");
    let said = vm.quit()?;
    let held = wrong.is_empty()
        && untrue.is_empty()
        // In the second round each asks for another one than before.
        && of_all.trapped >= count as u64
        && (of_all.exited > 0) == exits_wanted;
    Ok(json!({
        "held": held, "vcpus": count, "wrong": wrong, "untrue": untrue,
        "set_perf_trapped": of_all.trapped, "exited": of_all.exited,
        "boot_virtual_ms": boot_ms, "vmm_resident_kib": resident_kib, "vmm_said": said,
    }))
}

/// The pCPU of each vCPU, and its policy.
fn homes(policies: &[Policy], count: usize) -> Vec<(u32, &Policy)> {
    let pcpus = policies.iter().flat_map(|policy| {
        let cpus = policy.cpus.iter();
        cpus.map(move |cpu| (*cpu, policy))
    });
    let pcpus: Vec<_> = pcpus.collect();
    pcpus.into_iter().cycle().take(count).collect()
}

/// Each vCPU like its pCPU, in a domain of its own.
fn setup(plan: &Plan, homes: &[(u32, &Policy)]) -> Setup {
    let pcpus: Vec<_> = homes.iter().map(|(pcpu, _)| *pcpu).collect();
    let mut setup = Setup {
        silent: true,
        mem_mib: Some(MEM_MIB),
        ..plan.mirroring(&pcpus).with(&["--clamp", "exact"])
    };
    let domains = (0..homes.len()).map(|vcpu| format!("--domain={vcpu}={vcpu}"));
    setup.options.extend(domains);
    setup
}

/// The clamp of a vCPU's thread, once it is `wanted`, or what it stays at.
fn clamp(vm: &Vm, vcpu: usize, wanted: (u32, u32)) -> Result<(u32, u32)> {
    for _ in 0..IN_FORCE_TRIES {
        if vm.clamp(vcpu)? == wanted {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    vm.clamp(vcpu)
}
