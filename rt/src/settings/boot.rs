// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel's command line: the words of the profile that it lacks.

use vcpufreq_host::CpuList;

use super::{CPU, Sheet, UnitContext, threads};
use crate::{finding::Finding, partition};

const CMDLINE: &str = "/proc/cmdline";

/// The words that are missing, as they have to stand on the command line.
pub(super) fn missing(cx: &UnitContext, sheet: &mut Sheet) -> Option<String> {
    let wanted = &cx.profile.cmdline;
    if wanted.is_empty() {
        return None;
    }
    let running = match cx.look.read(CMDLINE) {
        Ok(text) => text,
        Err(why) => {
            sheet.cannot(CMDLINE.to_owned(), why);
            return None;
        }
    };
    let mut missing = Vec::new();
    for word in wanted {
        let word = word
            .replace("{rt}", &cx.rt.to_string())
            .replace("{housekeeping}", &cx.housekeeping().to_string());
        match presence(&running, &word) {
            Presence::There => {
                if let Some(why) = ignored(cx, sheet, &word) {
                    sheet.finding(Finding::Reboot(format!(
                        "{word} is on the command line and not in force ({why}); boot a kernel that takes it"
                    )));
                }
            }
            Presence::Missing => missing.push(word),
            Presence::Other(other) => {
                sheet.finding(Finding::Reboot(format!(
                    "the command line has {other}; replace it by {word}"
                )));
                missing.push(word);
            }
        }
    }
    (!missing.is_empty()).then(|| missing.join(" "))
}

/// Options without which these words do nothing.
const NEEDED: &[(&str, &str)] = &[
    ("CPU_ISOLATION", "isolcpus"),
    ("NO_HZ_FULL", "nohz_full"),
    ("RCU_NOCB_CPU", "rcu_nocbs"),
    ("RCU_NOCB_CPU", "rcu_nocb_poll"),
];

/// The options of the kernel that the profile's words need, each with one of these words.
pub(super) fn needed(cx: &UnitContext) -> Vec<(&'static str, &'static str)> {
    let asked = |name: &str| {
        let mut words = cx.profile.cmdline.iter();
        words.any(|word| word.split('=').next() == Some(name))
    };
    let mut needed: Vec<_> = NEEDED
        .iter()
        .filter(|(_, word)| asked(word))
        .copied()
        .collect();
    needed.dedup_by_key(|(option, _)| *option);
    needed
}

/// Why a present word has no effect, as far as the kernel shows it: for `nohz_full`, for the CPUs
/// that `isolcpus` takes out of load balancing, and, by its threads, for `rcu_nocbs`.
fn ignored(cx: &UnitContext, sheet: &mut Sheet, word: &str) -> Option<String> {
    let (name, value) = word.split_once('=')?;
    match name {
        "nohz_full" => lacking(cx, "nohz_full", value),
        "isolcpus" => lacking(cx, "isolated", &of_domain(value)?),
        "rcu_nocbs" => not_offloaded(cx, sheet, value),
        _ => None,
    }
}

/// The list in the kernel's own file, if that lacks one of these CPUs.
fn lacking(cx: &UnitContext, file: &str, wanted: &str) -> Option<String> {
    let path = format!("{CPU}/{file}");
    let has = cx.look.read(&path).ok()?;
    let in_force = partition::list(cx.look, &path).unwrap_or_default();
    let wanted: CpuList = wanted.parse().ok()?;
    (!wanted.without(&in_force).is_empty()).then(|| format!("{path} has '{has}'"))
}

/// The callbacks of an offloaded CPU are done by a thread, `rcuop/N` or, in a kernel that isn't
/// preemptible, `rcuos/N`; others have none, or a parked one (rcu_spawn_cpu_nocb_kthread()).
fn not_offloaded(cx: &UnitContext, sheet: &mut Sheet, cpus: &str) -> Option<String> {
    let cpus: CpuList = cpus.parse().ok()?;
    let threads = match threads::all(cx.look) {
        Ok(threads) => threads,
        Err(why) => {
            sheet.cannot("/proc (rcuop threads)".to_owned(), why);
            return None;
        }
    };
    let mut runs = |cpu: u32| {
        let names = [format!("rcuop/{cpu}"), format!("rcuos/{cpu}")];
        names.iter().any(|name| {
            let found = threads::kernel_threads(sheet, &threads, name);
            found.is_none_or(|found| found.iter().any(|(_, stat)| !stat.is_parked))
        })
    };
    let without = cpus
        .iter()
        .find(|cpu| cx.online.contains(*cpu) && !runs(*cpu));
    without.map(|cpu| format!("no thread rcuop/{cpu} runs"))
}

/// The CPUs of `isolcpus=[flags,]list`, if their domain is what is meant: without flags it is
/// (Documentation/admin-guide/kernel-parameters.txt).
fn of_domain(value: &str) -> Option<String> {
    let is_list = |part: &&str| part.starts_with(|c: char| c.is_ascii_digit());
    let (list, flags): (Vec<_>, Vec<_>) = value.split(',').partition(is_list);
    (flags.is_empty() || flags.contains(&"domain")).then(|| list.join(","))
}

enum Presence<'a> {
    There,
    Missing,
    Other(&'a str),
}

/// The kernel takes - and _ as one in names, and of two words of one name the last.
fn presence<'a>(running: &'a str, word: &str) -> Presence<'a> {
    let name = |word: &str| word.split('=').next().unwrap_or(word).replace('-', "_");
    let value = |word: &str| word.split_once('=').map(|(_, value)| value.to_owned());
    let found = running
        .split_whitespace()
        .rfind(|found| name(found) == name(word));
    match found {
        None => Presence::Missing,
        Some(found) if same(value(found), value(word)) => Presence::There,
        Some(found) => Presence::Other(found),
    }
}

/// As texts or as CPU lists; flags such as `managed_irq,domain,3` as texts.
fn same(a: Option<String>, b: Option<String>) -> bool {
    let (Some(a), Some(b)) = (&a, &b) else {
        return a == b;
    };
    a == b || a.parse::<CpuList>().is_ok_and(|a| Ok(a) == b.parse())
}

#[cfg(test)]
mod tests {
    //! Promise: a word counts as there only with the value that is wanted.
    use super::*;

    #[test]
    fn presences() {
        let running = "console=ttyS0 nohz_full=3 rcu-nocbs=2,3 quiet irqaffinity=0-3 nohz_full=2-3";
        for (word, expected) in [
            ("nohz_full=2-3", "there"),
            ("rcu_nocbs=2-3", "there"),
            ("quiet", "there"),
            ("irqaffinity=0-1", "irqaffinity=0-3"),
            ("rcu_nocb_poll", "missing"),
        ] {
            let said = match presence(running, word) {
                Presence::There => "there",
                Presence::Missing => "missing",
                Presence::Other(other) => other,
            };
            assert_eq!(said, expected, "{word}");
        }
    }
}
