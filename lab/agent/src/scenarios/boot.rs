// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The least: a guest with a vCPU on the first CPU of each policy boots,
//! answers, and powers off.

use anyhow::Result;
use serde_json::{Value, json};

use super::Policy;
use crate::vm::{Setup, Vm};

pub fn run() -> Result<Value> {
    let policies = Policy::all()?;
    let pcpus: Vec<u32> = policies.iter().map(Policy::cpu).collect();
    let mut vm = Vm::boot(&plan.mirroring(&pcpus))?;
    let guest = vm.ask("read /proc/sys/kernel/osrelease")?;
    let errors = vm.quit()?;
    Ok(json!({ "held": true, "guest_kernel": guest, "vmm_said": errors }))
}
