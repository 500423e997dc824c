// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Only a program on `kvm_mmio` may call the module's function: elsewhere it could be under a run
//! queue's lock. And the module stays as long as anything needs it.

use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};
use vcpufreq_host_bpf::{HostModule, verify};

use crate::deeds;

const REFUSED: [&str; 3] = ["refused_switch", "refused_entry", "refused_userspace_exit"];

pub fn run() -> Result<Value> {
    let load = |name: &str| verify(Path::new(&format!("/lab/bpf/{name}.bpf.o")));
    let without = load("allowed").is_err();
    deeds::insmod("vcpufreq_host", "")?;
    let allowed = load("allowed").map_err(|error| error.to_string());
    let mut said = Vec::new();
    for name in REFUSED {
        said.push(load(name).map_or_else(|error| error.to_string(), |()| "loaded".into()));
    }
    // While a VMM has it open, it can't be removed.
    let open = HostModule::open(2, 1)?;
    let kept = deeds::rmmod("vcpufreq_host").is_err();
    drop(open);
    deeds::unload_host_module()?;
    let held = without && kept && allowed.is_ok() && said.iter().all(|line| forbidden(line));
    Ok(json!({
        "held": held, "without_module_refused": without, "allowed": format!("{allowed:?}"),
        "refused": said, "kept_while_open": kept,
    }))
}

/// What the verifier says of it: up to Linux 7.2, and from 7.3 on.
fn forbidden(said: &str) -> bool {
    let words = [
        "is not allowed",
        "Use a kfunc allowed for this program type",
    ];
    words.iter().any(|words| said.contains(words))
}
