// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Thermal zones that would slow the real-time CPUs down. The kernel has no switch for that alone:
//! a zone whose mode is disabled isn't looked at at all (`__thermal_zone_device_update`), its
//! critical trip included.

use vcpufreq_device::host::CpuList;

use super::{Context, Sheet, Unit};
use crate::{check::Effect, plan::Finding, value::Format};

const DIR: &str = "/sys/class/thermal";

pub(super) const UNITS: &[Unit] = &[Unit {
    name: "thermal-throttling",
    reason: "heat does not lower a real-time CPU's frequency",
    plan,
    effect,
}];

/// Cooling devices that lower the frequency of a real-time CPU: `cpufreq-cpu3` is that of the
/// policy of CPU 3.
fn devices(cx: &Context) -> Vec<String> {
    let mut names = cx.look.list(DIR).unwrap_or_default();
    names.retain(|name| {
        let kind = cx.look.read(&format!("{DIR}/{name}/type"));
        let kind = kind.unwrap_or_default();
        let cpu = kind
            .strip_prefix("cpufreq-cpu")
            .and_then(|cpu| cpu.parse::<u32>().ok());
        name.starts_with("cooling_device") && cpu.is_some_and(|cpu| slows(cx, cpu))
    });
    names
}

fn slows(cx: &Context, cpu: u32) -> bool {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/cpufreq/affected_cpus");
    let cpus = cx.look.read(&path).unwrap_or_default().replace(' ', ",");
    cx.rt.contains(cpu)
        || cpus
            .parse()
            .is_ok_and(|cpus: CpuList| !cpus.and(&cx.rt).is_empty())
}

/// The zones that use one of these devices.
fn zones(cx: &Context, devices: &[String]) -> Vec<String> {
    let mut names = cx.look.list(DIR).unwrap_or_default();
    names.retain(|name| {
        let links = cx.look.list(&format!("{DIR}/{name}")).unwrap_or_default();
        let mut devices_of = links
            .iter()
            .filter(|link| link.starts_with("cdev"))
            .filter_map(|link| cx.look.link_name(&format!("{DIR}/{name}/{link}")));
        name.starts_with("thermal_zone") && devices_of.any(|device| devices.contains(&device))
    });
    names
}

fn plan(cx: &Context, sheet: &mut Sheet) {
    let Some(throttling) = cx.settings().thermal_throttling else {
        return;
    };
    let zones = zones(cx, &devices(cx));
    if zones.is_empty() {
        sheet.absent(DIR, "no thermal zone slows the real-time CPUs down");
    }
    for zone in zones {
        let mode = if throttling { "enabled" } else { "disabled" };
        sheet.file(format!("{DIR}/{zone}/mode"), Format::Text, mode);
        if !throttling {
            sheet.finding(Finding::Note(format!(
                "{zone} is off: it slows no CPU down any more, and the kernel doesn't shut the machine down at its critical temperature either; what the hardware does by itself stays. Cool the machine for its full load"
            )));
        }
    }
}

fn effect(cx: &Context) -> Effect {
    for device in devices(cx) {
        let path = format!("{DIR}/{device}/cur_state");
        match cx.look.number(&path) {
            Some(0) => {}
            Some(state) => {
                return Effect::Not(format!("{path} is {state}: the CPU is slowed down now"));
            }
            None => return Effect::Unseen(format!("{path} can't be read")),
        }
    }
    Effect::Effective
}
