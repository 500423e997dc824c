// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Only a program on `kvm_mmio` may call the module's function: elsewhere it could be under a run
//! queue's lock. The module stays as long as anything needs it, and a file whose set-up is refused
//! is as before.

use std::fs::{File, OpenOptions};

use anyhow::Result;
use serde_json::json;
use vcpufreq_host_bpf::{DEVICE, HostModule, verify};
use vcpufreq_tests::LabVerdict;

use super::group::ClampGroup;
use crate::harness::{console_commands, sys};

const REFUSED: [&str; 3] = ["refused_switch", "refused_entry", "refused_userspace_exit"];

pub fn run() -> Result<LabVerdict> {
    let load = |name: &str| -> Result<()> {
        let object = std::fs::read(format!("/lab/bpf/{name}.bpf.o"))?;
        Ok(verify(&object)?)
    };
    let without = load("allowed").is_err();
    console_commands::insmod("vcpufreq_host", "")?;
    let allowed = load("allowed").map_err(|error| error.to_string());
    let mut said = Vec::new();
    for name in REFUSED {
        said.push(load(name).map_or_else(|error| error.to_string(), |()| "loaded".into()));
    }
    // While a VMM has it open, it can't be removed.
    let open = HostModule::open(2, 1)?;
    let kept = console_commands::rmmod("vcpufreq_host").is_err();
    let set_up = set_up_twice(open)?;
    console_commands::unload_host_module()?;
    let all_refused = said.iter().all(|line| forbidden(line));
    let figures = json!({
        "without_module_refused": without, "allowed": format!("{allowed:?}"),
        "refused": said, "kept_while_open": kept,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("refused without the module", without, ())
        .check("the module stays while it is open", kept, ())
        .check(
            "what is allowed loads",
            allowed.is_ok(),
            format!("{allowed:?}"),
        )
        .part("set_up_twice", set_up)
        .check("all else is refused", all_refused, &said))
}

/// While one file of this process is set up another one is refused. That has nothing to bind
/// then, and is set up when the first one is closed.
fn set_up_twice(first: HostModule) -> Result<LabVerdict> {
    let open = || -> Result<File> { Ok(OpenOptions::new().read(true).write(true).open(DEVICE)?) };
    let group = ClampGroup::with_current("refused")?;
    let bind = |file: &File| sys::bind_group(file, 0, &group.min, &group.max);
    let second = open()?;
    let error = |result: std::io::Result<()>| result.err().and_then(|error| error.raw_os_error());
    let busy = error(sys::set_up_host_module(&second, 2, 1));
    let bound = error(bind(&second));
    drop(first);
    let again = error(sys::set_up_host_module(&second, 2, 1));
    let then_bound = error(bind(&second));
    let errors = [busy, bound, again, then_bound];
    let wanted = [Some(libc::EBUSY), Some(libc::EINVAL), None, None];
    let figures = json!({
        "errno_while_other_is": busy, "errno_of_bind": bound,
        "errno_later": again, "errno_of_bind_later": then_bound,
    });
    Ok(LabVerdict::with_figures(figures).check_eq("refused while another is", &errors, wanted))
}

/// The message of the verifier: up to Linux 7.2, and from 7.3 on.
fn forbidden(said: &str) -> bool {
    let words = [
        "is not allowed",
        "Use a kfunc allowed for this program type",
    ];
    words.iter().any(|words| said.contains(words))
}
