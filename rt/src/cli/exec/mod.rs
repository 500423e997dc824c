// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq rt exec`: apply, check, run a command, restore.
//!
//! ```text
//! exec ── a pipe ──▶ guardian ──▶ restores at the pipe's end
//!   └──▶ CMD         the kernel closes the pipe when exec is gone, kill -9 included
//! ```
//! The guardian restores in each case, so there is one way back. exec replaces one that was killed, and
//! restores only if it can't, or if its guardian hangs. If both are killed, the record stays for
//! `vcpufreq rt restore`.

mod command;
mod guardian;
mod signals;

use super::{
    args::{ExecArgs, Wanted},
    output::warn,
    text,
};
use anyhow::{bail, ensure};
use vcpufreq_host::undo::{KernelHost, ReadHost as _};

use crate::{
    apply::apply,
    check::{check, is_ready},
    plan::{RtPlan, plan},
    settings::partition_group,
};
use guardian::RestoreGuardian;
pub(super) use guardian::guard;
use signals::CommandSignals;

/// Runs a command with the settings; returns its exit code, or that of a shell for a command that
/// can't be started.
///
/// # Errors
/// Why the command was not started. What had been changed is restored.
pub(super) fn exec(args: &ExecArgs) -> anyhow::Result<u8> {
    let root = args.partition.root.as_deref();
    let host = KernelHost::at_or_running(root);
    let wanted = args.partition.wanted(&host)?;
    let group = match args.enter {
        true => Some(host.root().path(group_to_enter(&wanted)?)),
        false => None,
    };
    let mut plan = plan(&host, &wanted.partition, &wanted.profile);
    let signals = CommandSignals::take()?;
    let mut guardian = RestoreGuardian::start(&wanted.partition.housekeeping, root)?;
    plan.owner = Some(guardian.owner().clone());
    if let Err(why) = prepare(&host, &plan, &wanted) {
        guardian.dismiss();
        return Err(why);
    }
    let done = command::run(&args.command, group.as_deref(), &signals, &mut guardian);
    guardian.end(&host, &signals);
    done
}

/// The cgroup of the guest's CPUs.
///
/// # Errors
/// When none will be made, or it is unclear which one is meant.
fn group_to_enter(wanted: &Wanted) -> anyhow::Result<String> {
    ensure!(
        wanted.profile.settings.cpuset.is_some(),
        "--enter needs a partition, and cpuset is none; set it to isolated, or leave --enter out"
    );
    match wanted.partition.guests.as_slice() {
        [guest] => Ok(format!("{}/rt", partition_group(&guest.name))),
        guests => bail!(
            "--enter is for one guest, and {} are named; name one",
            guests.len()
        ),
    }
}

/// Applies, and prints what `rt check` finds. A finding doesn't keep the command from running: on many
/// hosts a reboot or a driver's interrupts are always among them.
///
/// # Errors
/// Why nothing was changed.
fn prepare(host: &KernelHost, planned: &RtPlan, wanted: &Wanted) -> anyhow::Result<()> {
    let profile = (wanted.profile_name.as_str(), &wanted.profile);
    let applied = apply(host, planned, profile, &mut |name, old, new| {
        warn(&format!("{name}: {old} → {new}"));
    })?;
    for (name, why) in &applied.refused {
        warn(&format!("{name}: {why}"));
    }
    let now = plan(host, &wanted.partition, &wanted.profile);
    let checked = check(host, &now, &wanted.profile);
    if !is_ready(&now, &checked) {
        let found = text::check(&now, &checked, &wanted.profile_name);
        warn(&format!("check has findings:\n{}", found.trim_end()));
    }
    Ok(())
}
