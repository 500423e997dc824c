// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The daemon that spreads interrupts. It moves them back to real-time CPUs unless its environment
//! or the kernel's isolation bans these; only people can change that.

use vcpufreq_host::CpuList;

use super::{CPU, Sheet, UnitContext, threads};
use vcpufreq_host::undo::{ReadHost, Unread, is_trusted, users};

use crate::{finding::Finding, partition};

/// Its name in procfs.
const NAME: &str = "irqbalance";

/// A finding for each irqbalance that bans less than the real-time CPUs.
pub(super) fn look(cx: &UnitContext, sheet: &mut Sheet) {
    let all = match threads::all(cx.look) {
        Ok(all) => all,
        Err(why) => return sheet.cannot("/proc (irqbalance)".to_owned(), why),
    };
    for pid in of_root(sheet, &all) {
        match banned(cx.look, pid) {
            Ok(banned) if cx.rt.without(&banned).is_empty() => {}
            Ok(_) => sheet.finding(Finding::Hand(format!(
                "irqbalance runs and moves interrupts back: put IRQBALANCE_BANNED_CPULIST={} into /etc/default/irqbalance and restart it (systemctl restart irqbalance), or stop it",
                cx.rt
            ))),
            // It has just ended.
            Err(Unread::Missing) => {}
            Err(why) => sheet.cannot(environ(pid), why),
        }
    }
}

/// Those that root started, or this user. Another user's process may have the name; it moves no
/// interrupt, and its environment can hold anything.
fn of_root(sheet: &mut Sheet, all: &[(u32, String)]) -> Vec<u32> {
    let (mut found, mut others) = (Vec::new(), Vec::new());
    for (pid, _) in all.iter().filter(|(_, name)| name == NAME) {
        match users(sheet.look, *pid) {
            Ok(users) if !users.is_empty() && users.iter().all(|user| is_trusted(*user)) => {
                found.push(*pid);
            }
            Ok(_) => others.push(*pid),
            // It has just ended.
            Err(Unread::Missing) => {}
            Err(why) => sheet.cannot(format!("/proc/{pid}/status"), why),
        }
    }
    sheet.impostors(NAME, "root's", &others);
    found
}

/// What it bans: what is in its environment, or else what isolcpus and nohz_full have.
fn banned(look: &dyn ReadHost, pid: u32) -> Result<CpuList, Unread> {
    let environ = look.read(&environ(pid))?;
    let list = |name: &str| {
        let path = format!("{CPU}/{name}");
        partition::list(look, &path).unwrap_or_default()
    };
    Ok(by_environ(&environ).unwrap_or_else(|| list("isolated").or(&list("nohz_full"))))
}

fn environ(pid: u32) -> String {
    format!("/proc/{pid}/environ")
}

/// The CPUs that an environment of irqbalance's bans, by either of its two variables.
fn by_environ(environ: &str) -> Option<CpuList> {
    environ.split('\0').find_map(|pair| {
        let (name, value) = pair.split_once('=')?;
        match name {
            "IRQBALANCE_BANNED_CPULIST" => value.parse().ok(),
            "IRQBALANCE_BANNED_CPUS" => CpuList::from_mask(value),
            _ => None,
        }
    })
}
