// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! irqbalance's control socket: which CPUs it keeps off.
//!
//! ```text
//! setup ─▶ SLEEP 10 IRQ 7 LOAD 0 DIFF 0 CLASS 0 BANNED 00000008   then it closes
//! settings cpus 2-3 ─▶                                            then it closes
//! ```
//! Root's only: another user's process may have its name. From its `sock_handle()` and
//! irqbalance(1), section API. It takes what it is told when it looks
//! at the interrupts next, SLEEP seconds apart, and answers with what is in force until then. It
//! hears root only. Versions before 1.6 have the socket elsewhere, 1.6 frees a list before it reads
//! it, and one started by hand may have no socket with a name: these have to be told by their
//! environment.
//!
//! It sends its answer without MSG_NOSIGNAL and doesn't ignore SIGPIPE: a client that is killed, or
//! doesn't wait any longer, between question and answer ends it.

use std::{io, time::Duration};
use vcpufreq_device::host::CpuList;

use crate::{
    host::{Host, Look, Reading, Unread},
    own_dir, partition,
    plan::{self, ThreadStat},
};

/// Its name in procfs.
pub(crate) const NAME: &str = "irqbalance";

/// The text of an empty ban list.
const NONE: &str = "none";
/// How far apart to look whether it has taken a list.
pub(crate) const BETWEEN_LOOKS: Duration = Duration::from_millis(20);
/// Longer than its interval, which is at most waited for as a minute.
const SLACK_S: u64 = 3;
const LONGEST_S: u64 = 60;

fn socket(pid: u32) -> String {
    format!("/run/irqbalance/irqbalance{pid}.sock")
}

/// The banned CPUs of the instance with this number and start, as a list or [`NONE`].
///
/// # Errors
/// `Missing` when that instance has ended, or why it can't be asked.
pub(crate) fn banned(look: &dyn Look, pid: u32, start_ticks: u64) -> Reading {
    still_runs(look, pid, start_ticks)?;
    match answered(look, pid) {
        Ok(cpus) => Ok(text(&cpus)),
        Err(why) => {
            // Another client's question, before this one, may have ended it.
            still_runs(look, pid, start_ticks)?;
            match why {
                // It runs: its value isn't gone.
                Unread::Missing => Err(Unread::Refused),
                other => Err(other),
            }
        }
    }
}

fn answered(look: &dyn Look, pid: u32) -> Result<CpuList, Unread> {
    let answer = look.ask(&socket(pid), pid, "setup")?;
    let (_, mask) = answer.rsplit_once("BANNED ").ok_or(Unread::Refused)?;
    CpuList::from_mask(mask).ok_or(Unread::Refused)
}

fn still_runs(look: &dyn Look, pid: u32, start_ticks: u64) -> Result<(), Unread> {
    let stat = ThreadStat::read(look, pid)?;
    let runs = !stat.is_ending && stat.start_ticks == start_ticks;
    match runs && is_of_root(look, pid)? {
        true => Ok(()),
        false => Err(Unread::Missing),
    }
}

/// Whether root runs a process, or this user: with the user's rights in all respects, so that it
/// was started by no other.
///
/// # Errors
/// Why procfs doesn't show it.
pub(crate) fn is_of_root(look: &dyn Look, pid: u32) -> Result<bool, Unread> {
    let users = plan::users(look, pid)?;
    Ok(!users.is_empty() && users.into_iter().all(own_dir::is_trusted))
}

/// Makes `cpus`, as [`banned`] gives them, its list. Its own, which it has from its environment or
/// the kernel, is given back as such: it follows these again.
pub(crate) fn ban(host: &dyn Host, pid: u32, cpus: &str) -> io::Result<()> {
    let own = |own: CpuList| text(&own) == cpus;
    // It can be told no empty list: an empty one is its own.
    let list = match cpus == NONE || by_itself(host, pid).is_ok_and(own) {
        true => "NULL",
        false => cpus,
    };
    // 1.7 and 1.8 read on behind the end: a blank ends the list for them.
    host.tell(&socket(pid), pid, &format!("settings cpus {list} "))
}

/// How often to look whether it has taken a list.
pub(crate) fn looks(look: &dyn Look, pid: u32) -> u128 {
    let answer = look.ask(&socket(pid), pid, "setup").unwrap_or_default();
    let mut words = answer
        .split_whitespace()
        .skip_while(|word| *word != "SLEEP");
    let interval = words.nth(1).and_then(|word| word.parse().ok());
    let seconds = interval.unwrap_or(LONGEST_S).min(LONGEST_S) + SLACK_S;
    Duration::from_secs(seconds).as_millis() / BETWEEN_LOOKS.as_millis()
}

/// What it keeps off when nobody has told it otherwise by its socket: what is in its environment,
/// or else what isolcpus and nohz_full have.
///
/// # Errors
/// Why its environment can't be read.
pub(crate) fn by_itself(look: &dyn Look, pid: u32) -> Result<CpuList, Unread> {
    let environ = look.read(&environ(pid))?;
    let list = |name: &str| {
        let path = format!("/sys/devices/system/cpu/{name}");
        partition::list(look, &path).unwrap_or_default()
    };
    Ok(told(&environ).unwrap_or_else(|| list("isolated").or(&list("nohz_full"))))
}

pub(crate) fn environ(pid: u32) -> String {
    format!("/proc/{pid}/environ")
}

/// The CPUs that an environment of irqbalance's bans, by either of its two variables.
fn told(environ: &str) -> Option<CpuList> {
    environ.split('\0').find_map(|pair| {
        let (name, value) = pair.split_once('=')?;
        match name {
            "IRQBALANCE_BANNED_CPULIST" => value.parse().ok(),
            "IRQBALANCE_BANNED_CPUS" => CpuList::from_mask(value),
            _ => None,
        }
    })
}

/// A list of banned CPUs with others.
pub(crate) fn with(banned: &str, cpus: &CpuList) -> String {
    text(&banned.parse::<CpuList>().unwrap_or_default().or(cpus))
}

fn text(cpus: &CpuList) -> String {
    match cpus.is_empty() {
        true => NONE.to_owned(),
        false => cpus.to_string(),
    }
}
