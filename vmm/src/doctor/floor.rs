// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the doctor finds of a policy's lowest frequency: what the scheduler's servers keep for fair
//! tasks is a minimum to schedutil, whatever the clamp.

use super::DoctorFinding;
use vcpufreq_device::host::{PolicyFloor, Reserved};

use crate::floors::mhz;

pub(super) const NAME: &str = "fair server";
const KNOW: &str = "run doctor as root, with debugfs mounted, to know";
pub(super) const REMOVE: &str = "vcpufreq rt apply --profile no-fair-server; vcpufreq rt restore brings it \
                      back. Without it a real-time task that never sleeps keeps fair tasks off its CPU";

pub(super) fn finding(of: &PolicyFloor) -> DoctorFinding {
    let cpus = format!("CPUs {}", of.cpus);
    let floor = &of.floor;
    let reserved = format!(
        "{} of capacity {} ({})",
        floor.util,
        floor.capacity,
        mhz(&[floor.khz])
    );
    let (what, by_default) = match of.reserved {
        Reserved::NoServer => {
            return DoctorFinding::absent(NAME, cpus + ": none", "Linux has it from 6.12 on");
        }
        Reserved::Known(0) => (format!("{cpus}: nothing is reserved"), false),
        Reserved::Known(_) => (format!("{cpus}: {reserved} is reserved"), false),
        Reserved::Default(_) => (format!("{cpus}: unknown, by default {reserved}"), true),
    };
    let below = &floor.opps_below_khz;
    if below.is_empty() {
        return match by_default {
            true => DoctorFinding::limit(NAME, what, "no OPP would be below that").change(KNOW),
            false => DoctorFinding::good(NAME, what, "no OPP is below that"),
        };
    }
    let lowest: Vec<u32> = floor.lowest_khz.into_iter().collect();
    let why = format!(
        "while busy they run at {} at least: a request for {} gets that",
        mhz(&lowest),
        mhz(below)
    );
    let change = match by_default {
        true => format!("{KNOW}; to remove it: {REMOVE}"),
        false => REMOVE.to_owned(),
    };
    DoctorFinding::limit(NAME, what, why).change(change)
}
