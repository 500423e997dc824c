// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a kernel with checks of its own has found wrong: reports in its log, and leaks.

use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::harness::sysfs;

/// What a report's first line contains. kmemleak's reports are in a file of its own.
const SIGNS: [&str; 9] = [
    "BUG: ",
    "WARNING: ",
    "UBSAN: ",
    "ODEBUG: ",
    "INFO: ",
    "Internal error",
    "Unable to handle kernel",
    "list_add corruption",
    "list_del corruption",
];
/// Lines that are kept of a report.
const LINES: usize = 40;
/// Where kmemleak is asked, if the kernel has it.
const KMEMLEAK: &str = "/sys/kernel/debug/kmemleak";
/// kmemleak takes nothing that is younger than 5 s for lost.
const OLD_ENOUGH: Duration = Duration::from_secs(6);

/// A data race that involves none of these is the kernel's own: it has many that are known, in
/// statistics and hints.
const DATA_RACE: &str = "BUG: KCSAN";
const OURS: [&str; 3] = ["[vcpufreq_", "[lab_", "bpf_prog_"];

/// Reports of the kernel's own defects, by what each contains: it is no report where all of that
/// stands. By an irqfd (under its wait queue's lock, interrupts off) the first active SPI of a guest
/// kicks all vCPUs, which waits for other CPUs: `vgic_queue_irq_unlock()` of Linux 7.3, whichever
/// VMM it is. Whenever Linux 7.3 makes its scheduling domains, at its start too, it loses 16 bytes.
const KNOWN: [&[&str]; 2] = [
    &[
        "WARNING: at smp_call_function_many_cond",
        "kvm_make_all_cpus_request",
        "vgic_irqfd_set_irq",
        "irqfd_wakeup",
    ],
    &[
        "leak: ",
        "(size 16)",
        "__kmalloc_cache_node_noprof",
        "build_sched_domains",
    ],
];

/// The log, read to where the last look ended.
static LOG: Mutex<Option<File>> = Mutex::new(None);

/// For the command line of a guest's kernel with checks, as the lab has it for a host's. It keeps freed
/// objects out of lists of pointers per CPU, where kmemleak would find those that were lost since, and
/// has modules of KUnit run their tests.
pub const CMDLINE: &str = " slab_debug=F,kmalloc-* kunit.enable=1 kunit.autorun=1";

/// Whether guests have a kernel with checks.
static GUESTS: AtomicBool = AtomicBool::new(false);

/// From now on the log of each guest's kernel is checked at its end.
pub fn watch_guests() {
    GUESTS.store(true, Ordering::Relaxed);
}

/// Whether it is.
pub fn guests_are_watched() -> bool {
    GUESTS.load(Ordering::Relaxed)
}

/// What was found since the last look.
#[derive(Debug, Default)]
pub struct Found {
    /// Reports, each with its first lines.
    pub reports: Vec<String>,
    /// First lines of those that are the kernel's own: known ones, and data races.
    pub elsewhere: Vec<String>,
}

/// The reports that came since the last look, or the start.
pub fn look() -> Result<Found> {
    let mut log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
    let log = match &mut *log {
        Some(log) => log,
        none => none.insert(open()?),
    };
    Ok(Found::of(&records(log)?))
}

/// Whether the kernel looks for leaks.
pub fn has_kmemleak() -> bool {
    Path::new(KMEMLEAK).exists()
}

/// Objects that nothing points to. Takes seconds.
pub fn leaks() -> Result<Vec<String>> {
    sleep(OLD_ENOUGH);
    // An object counts as lost when a second scan finds it unchanged.
    for _ in 0..2 {
        sysfs::write(KMEMLEAK, "scan")?;
    }
    let text = sysfs::text(KMEMLEAK)?;
    let found = text.split("unreferenced object").skip(1);
    let found = found.map(|one| format!("leak:{one}"));
    Ok(found.filter(|one| !is_of_kernel(one)).collect())
}

/// Reports none of the present leaks again.
pub fn forget_leaks() -> Result<()> {
    sysfs::write(KMEMLEAK, "clear")
}

/// Turns kmemleak's own scans off, which would be work of a measured CPU.
pub fn calm() -> Result<()> {
    match has_kmemleak() {
        true => sysfs::write(KMEMLEAK, "scan=off"),
        false => Ok(()),
    }
}

/// From the oldest record.
pub fn open() -> Result<File> {
    let mut options = File::options();
    let log = options.read(true).custom_flags(libc::O_NONBLOCK);
    log.open("/dev/kmsg").context("/dev/kmsg")
}

/// The messages that weren't read yet.
pub fn records(log: &mut File) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut record = [0_u8; 8192];
    loop {
        match log.read(&mut record) {
            Ok(length) => {
                let text = String::from_utf8_lossy(&record[..length]).into_owned();
                let message = text.split_once(';').map_or("", |(_, message)| message);
                found.push(message.trim_end().to_owned());
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(found),
            // Records were overwritten while they were read: go on.
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
            Err(error) => return Err(error).context("/dev/kmsg"),
        }
    }
}

impl Found {
    fn of(messages: &[String]) -> Self {
        let mut found = Self::default();
        for report in reports(messages) {
            match is_of_kernel(&report) {
                true => found
                    .elsewhere
                    .extend(report.lines().next().map(str::to_owned)),
                false => found.reports.push(first_lines(&report)),
            }
        }
        found
    }
}

/// Whether this project has no part in it.
fn is_of_kernel(report: &str) -> bool {
    let has = |text: &&str| report.contains(*text);
    let known = KNOWN.iter().any(|parts| parts.iter().all(has));
    known || (report.contains(DATA_RACE) && !OURS.iter().any(has))
}

/// Each from its sign to the next one's.
fn reports(messages: &[String]) -> Vec<String> {
    let mut found: Vec<Vec<&str>> = Vec::new();
    for message in messages {
        if SIGNS.iter().any(|sign| message.contains(sign)) {
            found.push(Vec::new());
        }
        if let Some(report) = found.last_mut() {
            report.push(message);
        }
    }
    found.into_iter().map(|report| report.join("\n")).collect()
}

fn first_lines(report: &str) -> String {
    report.lines().take(LINES).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    //! Promises: each kind of report is found, from its first line on; a data race of the kernel's
    //! own is listed apart.
    use super::*;

    fn found(lines: &[&str]) -> Found {
        let lines: Vec<String> = lines.iter().map(|&line| line.to_owned()).collect();
        Found::of(&lines)
    }

    #[test]
    fn reports_begin_at_their_signs() {
        let found = found(&[
            "lab_cpufreq: 2 policies",
            "BUG: KASAN: slab-use-after-free in plant+0x1/0x2 [x]",
            "Read of size 4",
            "WARNING: possible circular locking dependency detected",
            "insmod/1 is trying to acquire lock:",
        ]);
        assert_eq!(found.reports.len(), 2);
        assert!(found.reports[0].ends_with("Read of size 4"));
        assert!(found.reports[1].starts_with("WARNING: possible circular"));
        assert!(found.elsewhere.is_empty());
    }

    #[test]
    fn known_reports_are_known_by_all_of_their_parts() {
        assert_eq!(found(KNOWN[0]).elsewhere.len(), 1);
        assert_eq!(found(&KNOWN[0][..3]).reports.len(), 1);
        for parts in KNOWN {
            assert!(is_of_kernel(&parts.join("\n")));
            (0..parts.len()).for_each(|n| assert!(!is_of_kernel(parts[n])));
        }
    }

    #[test]
    fn reports_are_cut_short() {
        let lines = [&["UBSAN: shift-out-of-bounds"][..], &["x"; 2 * LINES]].concat();
        assert_eq!(found(&lines).reports[0].lines().count(), LINES);
    }

    #[test]
    fn a_race_is_this_projects_wherever_its_module_stands() {
        let mut lines = vec!["BUG: KCSAN: data-race in apply / apply"];
        lines.extend(["x"; 2 * LINES]);
        assert_eq!(found(&lines).elsewhere.len(), 1);
        lines.push(" apply+0x1/0x2 [vcpufreq_host]");
        assert_eq!(found(&lines).reports.len(), 1);
    }

    #[test]
    fn data_races_of_the_kernels_own_are_listed_apart() {
        let own = "BUG: KCSAN: data-race in ktime_get / tick";
        let ours = "BUG: KCSAN: data-race in apply / apply";
        let found = found(&[
            own,
            " ktime_get+0x1/0x2",
            ours,
            " apply+0x1/0x2 [vcpufreq_host]",
        ]);
        assert_eq!(found.elsewhere, [own]);
        assert_eq!(found.reports.len(), 1);
        assert!(found.reports[0].starts_with(ours));
    }
}
