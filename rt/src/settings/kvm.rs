// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! KVM's own polling.

use super::{Unit, by_value};
use crate::value::Format;

pub(super) const UNITS: &[Unit] = &[Unit {
    name: "halt-poll-ns",
    reason: "how long KVM polls before a vCPU's thread sleeps",
    plan: |cx, sheet| {
        if let Some(want) = cx.settings().halt_poll_ns {
            let path = "/sys/module/kvm/parameters/halt_poll_ns";
            sheet.file(path, Format::Text, want);
        }
    },
    effect: by_value,
}];
