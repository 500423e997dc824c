// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The daemon that spreads interrupts: it moves them back, unless told.

use super::{Context, Sheet, Unit, by_value};
use crate::{
    host::Unread,
    irqbalance,
    plan::{Finding, Target, ThreadStat},
};

/// Before the interrupts themselves: none is moved back between, and in a restore it is let go last.
pub(super) const UNITS: &[Unit] = &[Unit {
    name: "irqbalance",
    reason: "it moves interrupts back to CPUs that it isn't told to keep off",
    plan,
    // What it answers is what it keeps off.
    effect: by_value,
}];

fn plan(cx: &Context, sheet: &mut Sheet) {
    if cx.settings().interrupts.is_none() {
        return;
    }
    let all = match super::threads::all(cx.look) {
        Ok(all) => all,
        Err(why) => return sheet.cannot("/proc (irqbalance)".to_owned(), why),
    };
    for pid in of_root(sheet, &all) {
        match by_socket(cx, sheet, pid) {
            // In the second case it has just ended.
            Ok(()) | Err(Unread::Missing) => {}
            Err(_) => by_hand(cx, sheet, pid),
        }
    }
}

/// Those that root started, or this user. Another user's process may have the name, and moves no
/// interrupt: what it answers, and what is in its environment, is its own invention.
fn of_root(sheet: &mut Sheet, all: &[(u32, String)]) -> Vec<u32> {
    let (mut found, mut others) = (Vec::new(), Vec::new());
    for (pid, _) in all.iter().filter(|(_, name)| name == irqbalance::NAME) {
        match irqbalance::is_of_root(sheet.look, *pid) {
            Ok(true) => found.push(*pid),
            Ok(false) => others.push(*pid),
            // It has just ended.
            Err(Unread::Missing) => {}
            Err(why) => sheet.cannot(format!("/proc/{pid}/status"), why),
        }
    }
    sheet.impostors(irqbalance::NAME, "root's", &others);
    found
}

/// At run time, beside what it keeps off already, where it lets us.
fn by_socket(cx: &Context, sheet: &mut Sheet, pid: u32) -> Result<(), Unread> {
    let start_ticks = ThreadStat::read(cx.look, pid)?.start_ticks;
    let now = irqbalance::banned(cx.look, pid, start_ticks)?;
    let want = irqbalance::with(&now, &cx.rt);
    sheet.add(Target::BannedCpus { pid, start_ticks }, Some(want));
    Ok(())
}

/// By what it is told when it is started.
fn by_hand(cx: &Context, sheet: &mut Sheet, pid: u32) {
    match irqbalance::by_itself(cx.look, pid) {
        Ok(left_alone) if cx.rt.without(&left_alone).is_empty() => {}
        Ok(_) => sheet.finding(Finding::Hand(format!(
            "irqbalance runs and moves interrupts back: put IRQBALANCE_BANNED_CPULIST={} into /etc/default/irqbalance and restart it (systemctl restart irqbalance), or stop it",
            cx.rt
        ))),
        // It has just ended.
        Err(Unread::Missing) => {}
        Err(why) => sheet.cannot(irqbalance::environ(pid), why),
    }
}
