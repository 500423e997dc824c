// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command line `vcpufreq rt`: from its options to output and exit code.
//!
//! A program takes [`RtCommand`] as a subcommand and passes it to [`run`]. stdout has the result,
//! stderr warnings. The program prints an error and ends with exit code 2. Its subcommand is named
//! `rt`: `exec` starts the program once more, as its guardian.

mod args;
mod child;
mod compare;
mod exec;
mod output;
mod report;
mod result_file;
mod text;

use anyhow::{Context, bail};
use serde_json::json;

use args::profiles;
pub use args::{CompareArgs, ExecArgs, GuardArgs, PartitionArgs, RtArgs, RtCommand, Wanted};
use output::ChangeOutput;
pub use output::{DrawReports, print};
pub use report::ReportArgs;

use vcpufreq_host::undo::KernelHost;

use crate::{
    apply::apply,
    check::{check, is_ready},
    finding::Finding,
    plan::plan,
    record::Record,
    restore::{Restored, restore},
};

/// Carries out a command on the running host; returns the exit code: 0 done, 1 a finding, as the
/// command's help has it. `draw` makes the page of `--html`.
///
/// # Errors
/// Why nothing was done, for one line on stderr and exit code 2.
pub fn run(command: &RtCommand, draw: DrawReports) -> anyhow::Result<u8> {
    match command {
        RtCommand::Plan(args) => plan_command(args),
        RtCommand::Apply(args) => apply_command(args),
        RtCommand::Check(args) => check_command(args),
        RtCommand::Restore { json } => restore_command(*json),
        RtCommand::Exec(args) => exec::exec(args),
        RtCommand::Guard(args) => exec::guard(args),
        RtCommand::Report(args) => report::report(args, draw),
        RtCommand::Compare(args) => compare::compare(args, draw),
        RtCommand::Profiles { name } => {
            print(profiles(name.as_deref())?)?;
            Ok(0)
        }
    }
}

fn plan_command(args: &RtArgs) -> anyhow::Result<u8> {
    let host = KernelHost::at_or_running(args.partition.root.as_deref());
    let wanted = args.partition.wanted(&host)?;
    let plan = plan(&host, &wanted.partition, &wanted.profile);
    if args.json {
        let report = json!({ "profile": wanted.profile_name, "plan": plan });
        print(format!("{report:#}\n"))?;
    } else {
        print(text::plan(&plan, &wanted.profile_name))?;
    }
    Ok(u8::from(!plan.unseen.is_empty()))
}

fn apply_command(args: &RtArgs) -> anyhow::Result<u8> {
    if args.partition.root.is_some() {
        bail!("apply changes the running host only; leave --root out");
    }
    let host = KernelHost::default();
    let wanted = args.partition.wanted(&host)?;
    let plan = plan(&host, &wanted.partition, &wanted.profile);
    let mut changes = ChangeOutput::new(args.json);
    let profile = (wanted.profile_name.as_str(), &wanted.profile);
    let applied = apply(&host, &plan, profile, &mut |name, old, new| {
        changes.add(name, old, new);
    })?;
    // Facts about the machine that can't be read are a matter of plan and check.
    let hidden: Vec<_> = plan
        .unseen
        .iter()
        .filter(|one| one.setting != "host")
        .collect();
    for unseen in &hidden {
        eprintln!("vcpufreq: {}: {}", unseen.path, unseen.why);
    }
    for finding in &plan.findings {
        if let Finding::Hand(what) | Finding::Impostor(what) = finding {
            eprintln!("vcpufreq: {what}");
        }
    }
    let report = json!({
        "made": applied.made, "closed_record_of_earlier_boot": applied.closed_earlier_boot,
    });
    let code = changes.end(&applied.refused, report)?;
    Ok(code.max(u8::from(!hidden.is_empty())))
}

/// The guests and profile of the options; without any, those of what apply did.
fn named_or_applied(args: &PartitionArgs, host: &KernelHost) -> anyhow::Result<Wanted> {
    const NAME: &str = "name guests with --guest to check a host without apply";
    if args.names_guests() {
        return args.wanted(host);
    }
    if args.profile.is_some() || args.housekeeping.is_some() {
        bail!(
            "--profile and --housekeeping are for guests that --guest or --config names; leave them out to check what was applied"
        );
    }
    match Record::read(host).context(NAME)? {
        Some(record) if !record.is_of_another_boot(host)? => Ok(Wanted {
            partition: record.partition,
            profile_name: record.profile_name,
            profile: record.profile,
        }),
        _ => bail!("nothing is applied here; {NAME}"),
    }
}

fn check_command(args: &RtArgs) -> anyhow::Result<u8> {
    let host = KernelHost::at_or_running(args.partition.root.as_deref());
    let wanted = named_or_applied(&args.partition, &host)?;
    let plan = plan(&host, &wanted.partition, &wanted.profile);
    let checked = check(&host, &plan, &wanted.profile);
    let ready = is_ready(&plan, &checked);
    if args.json {
        let report = json!({
            "profile": wanted.profile_name, "partition": plan.partition, "settings": checked,
            "cmdline": plan.cmdline, "findings": plan.findings, "absent": plan.absent,
            "unseen": plan.unseen,
        });
        print(format!("{report:#}\n"))?;
    } else {
        print(text::check(&plan, &checked, &wanted.profile_name))?;
    }
    Ok(u8::from(!ready))
}

fn restore_command(json: bool) -> anyhow::Result<u8> {
    let host = KernelHost::default();
    let mut changes = ChangeOutput::new(json);
    let restored = restore(&host, &mut |name, now, old| changes.add(name, now, old))?;
    match restored {
        Restored::Nothing => {
            eprintln!("vcpufreq: nothing was applied, nothing is changed");
            changes.end(&[], json!({ "restored": "nothing" }))
        }
        Restored::EarlierBoot => {
            eprintln!(
                "vcpufreq: what was applied ended with an earlier boot; its record is closed, nothing is changed"
            );
            changes.end(&[], json!({ "restored": "earlier-boot" }))
        }
        Restored::Done {
            brought_back,
            gone,
            left,
        } => {
            for name in &gone {
                eprintln!("vcpufreq: {name} is gone, and its value with it");
            }
            let report = json!({ "restored": brought_back, "gone": gone });
            changes.end(&left, report)
        }
    }
}
