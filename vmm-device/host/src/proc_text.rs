// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The values in procfs' texts.

#![forbid(unsafe_code)]

use std::{fs, io};

/// The value of a line `name: value`, without the white space around it, in a text such as those of
/// `/proc/PID/status` and `/proc/PID/sched`.
#[must_use]
pub fn proc_field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    let found = fields.find(|(key, _)| key.trim() == name);
    found.map(|(_, value)| value.trim())
}

/// Field `number`, 3 or above, in the text of a proc_pid_stat(5). The name before those, in
/// parentheses, can hold anything.
#[must_use]
pub fn stat_field(stat: &str, number: usize) -> Option<&str> {
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(number.checked_sub(3)?)
}

/// The clamp in force for a thread (uclamp.min, uclamp.max; 0 to 1024 each), its cgroup's included,
/// in the text of its `/proc/PID/sched`. `None` from a kernel that doesn't show it.
#[must_use]
pub fn effective_clamp(sched: &str) -> Option<(u32, u32)> {
    let field = |name| proc_field(sched, name)?.parse().ok();
    Some((
        field("effective uclamp.min")?,
        field("effective uclamp.max")?,
    ))
}

/// The signals that this process ignores, as under nohup(1): bit 0 is signal 1.
///
/// # Errors
/// As reading `/proc/self/status`; `InvalidData` if that doesn't show them.
pub fn ignored_signals() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mask = proc_field(&status, "SigIgn").and_then(|mask| u64::from_str_radix(mask, 16).ok());
    mask.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    //! A name in a text is no value.
    use super::*;

    #[test]
    fn a_line_is_found_by_its_whole_name() {
        let status = "Name:\tPPid:\t7\nTracerPid:\t8\nPid:\t9\nPPid:\t10\nVmRSS:\t  12 kB\n";
        let fields = ["PPid", "Pid", "VmRSS", "id"].map(|name| proc_field(status, name));
        assert_eq!(fields, [Some("10"), Some("9"), Some("12 kB"), None]);
    }

    #[test]
    fn fields_count_behind_the_name() {
        let stat = "40 (a) S 9 (b)) R 2 0";
        let fields = [2, 3, 4, 5, 6].map(|number| stat_field(stat, number));
        assert_eq!(fields, [None, Some("R"), Some("2"), Some("0"), None]);
        assert_eq!(stat_field("40", 3), None);
    }

    #[test]
    fn the_clamp_in_force_is_not_the_threads_own() {
        let sched = "uclamp.min                                   :                    0\n\
                     effective uclamp.min                         :                  205\n\
                     effective uclamp.max                         :                  512\n";
        assert_eq!(effective_clamp(sched), Some((205, 512)));
        assert_eq!(effective_clamp("policy : 0"), None);
    }

    #[test]
    fn the_signal_that_rusts_runtime_ignores_is_shown() {
        const SIGPIPE: u64 = 1 << (libc::SIGPIPE - 1);
        assert_eq!(ignored_signals().unwrap() & SIGPIPE, SIGPIPE);
    }
}
