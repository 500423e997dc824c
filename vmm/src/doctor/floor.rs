// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the doctor finds of a policy's lowest frequency: what the scheduler's servers keep for fair
//! tasks is a minimum to schedutil, whatever the clamp.

use super::DoctorFinding;
use vcpufreq_host::{PolicyFloor, Reserved};

use crate::floors::mhz;

pub(super) const NAME: &str = "fair server";
const KNOW: &str = "run doctor as root, with debugfs mounted";
pub(super) const REMOVE: &str = "vcpufreq rt apply --profile no-fair-server; vcpufreq rt restore brings it \
                      back. Without it a real-time task that never sleeps keeps fair tasks off its CPU";

pub(super) fn finding(of: &PolicyFloor) -> DoctorFinding {
    let finding = match of.floor.opps_below_khz.is_empty() {
        true => none_below(of.reserved),
        false => some_below(of),
    };
    finding.on_cpus(of.cpus.clone())
}

/// Of policies with any capacity and frequencies, so that all of them have one line.
fn none_below(reserved: Reserved) -> DoctorFinding {
    let why = "no OPP is below that";
    match reserved {
        Reserved::NoServer => DoctorFinding::absent(NAME, "none", "Linux has it from 6.12 on"),
        Reserved::Known(0) => DoctorFinding::good(NAME, "nothing is reserved", why),
        Reserved::Known(util) => {
            DoctorFinding::good(NAME, format!("{util} of 1024 is reserved"), why)
        }
        Reserved::Default(util) => {
            let what = format!("unknown, by default {util} of 1024 is reserved");
            DoctorFinding::absent(NAME, what, format!("{why}; to know, {KNOW}"))
        }
    }
}

fn some_below(of: &PolicyFloor) -> DoctorFinding {
    let floor = &of.floor;
    let is_default = matches!(of.reserved, Reserved::Default(_));
    let (by_default, change) = match is_default {
        true => (
            "unknown, by default ",
            format!("{KNOW}; to remove it: {REMOVE}"),
        ),
        false => ("", REMOVE.to_owned()),
    };
    let what = format!(
        "{by_default}{} of capacity {} ({}) is reserved",
        floor.util,
        floor.capacity,
        mhz(&[floor.khz])
    );
    let lowest: Vec<u32> = floor.lowest_khz.into_iter().collect();
    let why = format!(
        "while busy they run at {} at least: a request for {} gets that",
        mhz(&lowest),
        mhz(&floor.opps_below_khz)
    );
    DoctorFinding::limit(NAME, what, why).change(change)
}
