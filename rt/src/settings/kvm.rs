// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! KVM's own polling, and options of its modules.

use super::{Context, Sheet, Unit, by_value};
use crate::{host::Unread, plan::Finding, value::Format};

pub(super) const UNITS: &[Unit] = &[
    Unit {
        name: "halt-poll-ns",
        reason: "how long KVM polls before a vCPU's thread sleeps",
        plan: |cx, sheet| {
            if let Some(want) = cx.settings().halt_poll_ns {
                let path = "/sys/module/kvm/parameters/halt_poll_ns";
                sheet.file(path, Format::Text, want);
            }
        },
        effect: by_value,
    },
    Unit {
        name: "module-options",
        reason: "options that are fixed when a module is loaded",
        plan: module_options,
        effect: by_value,
    },
];

/// Compared, never written: most are read-only, and those that aren't have effect on new VMs only.
fn module_options(cx: &Context, sheet: &mut Sheet) {
    for option in &cx.profile.module_options {
        let parts = option.split_once('.');
        let Some((module, (name, want))) =
            parts.and_then(|(module, rest)| Some((module, rest.split_once('=')?)))
        else {
            sheet.finding(Finding::Hand(format!(
                "'{option}' of module-options is no option: write it as MODULE.NAME=VALUE in the profile"
            )));
            continue;
        };
        let path = format!("/sys/module/{module}/parameters/{name}");
        match cx.look.read(&path) {
            Ok(now) if now == want => {}
            Ok(now) => sheet.finding(Finding::Reboot(format!(
                "{module}'s option {name} is {now}, not {want}: put 'options {module} {name}={want}' into a file of /etc/modprobe.d, or {module}.{name}={want} on the command line"
            ))),
            Err(Unread::Missing) => sheet.absent(path, "the module isn't loaded or has no such option"),
            Err(why) => sheet.cannot(path, why),
        }
    }
}
