// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Interrupts that can go to several CPUs.

use vcpufreq_host::CpuList;

use super::{Sheet, Unit, UnitContext, irqbalance};
use vcpufreq_host::undo::{Format, Unread};

use crate::finding::Effect;

const DIR: &str = "/proc/irq";

pub(super) const UNITS: &[Unit] = &[Unit {
    name: "interrupts",
    reason: "devices interrupt housekeeping CPUs only",
    plan,
    effect,
}];

fn plan(cx: &UnitContext, sheet: &mut Sheet) {
    if cx.settings().interrupts.is_none() {
        return;
    }
    let mask = cx.housekeeping().mask();
    sheet.file(format!("{DIR}/default_smp_affinity"), Format::Mask, &mask);
    for irq in irqs(cx) {
        let path = format!("{DIR}/{irq}/smp_affinity");
        // Per-CPU interrupts have no writable mask: each CPU's are its own.
        if !cx.look.writable(&path) {
            continue;
        }
        let now = cx.look.read(&path).ok();
        match now.as_deref().and_then(CpuList::from_mask) {
            // It can't reach a real-time CPU, and stays where it is.
            Some(cpus) if cpus.and(&cx.rt).is_empty() => {
                sheet.file(path, Format::Mask, cpus.mask());
            }
            _ => sheet.file(path, Format::Mask, &mask),
        }
    }
    irqbalance::look(cx, sheet);
}

fn irqs(cx: &UnitContext) -> Vec<String> {
    let mut names = cx.look.list(DIR).unwrap_or_default();
    names.retain(|name| name.parse::<u32>().is_ok());
    names
}

/// Where the hardware sends each, which is what counts.
fn effect(cx: &UnitContext) -> Effect {
    for irq in irqs(cx) {
        if !cx.look.writable(&format!("{DIR}/{irq}/smp_affinity")) {
            continue;
        }
        let path = format!("{DIR}/{irq}/effective_affinity");
        let path = match cx.look.read(&path) {
            Err(Unread::Missing) => format!("{DIR}/{irq}/smp_affinity"),
            _ => path,
        };
        match cx.look.read(&path).map(|mask| CpuList::from_mask(&mask)) {
            Ok(Some(cpus)) if cpus.and(&cx.rt).is_empty() => {}
            Ok(Some(cpus)) => {
                let reached = cpus.and(&cx.rt);
                return Effect::Not(format!(
                    "interrupt {irq} still goes to CPU {reached}; if its device's driver manages it, boot with isolcpus=managed_irq,{}",
                    cx.rt
                ));
            }
            // It has gone with its device.
            Err(Unread::Missing) => {}
            _ => return Effect::Unseen(format!("{path} can't be read")),
        }
    }
    Effect::Effective
}
