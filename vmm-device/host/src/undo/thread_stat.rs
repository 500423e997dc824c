// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Facts of a thread or process in procfs.

use super::{
    host::{ReadHost, Unread},
    value,
};
use crate::{proc_field, stat_field};

/// The fields of proc_pid_stat(5) that count here.
#[derive(Clone, Debug)]
pub struct ThreadStat {
    /// Field 22.
    pub start_ticks: u64,
    /// Of a process: it has no thread left.
    pub has_ended: bool,
    /// Field 3: a kernel thread that is parked, and does nothing.
    pub is_parked: bool,
    /// Fields 9 and 4: a kernel thread that kthreadd made. A process can take a kernel thread's
    /// name, but neither this flag nor this parent.
    pub is_kernel_thread: bool,
    /// Fields 41 and 40; `None` for other policies than OTHER, FIFO, RR.
    pub scheduling: Option<String>,
}

/// A flag of the kernel's sched.h.
const PF_KTHREAD: u32 = 0x0020_0000;
/// The process that makes all other kernel threads.
const KTHREADD: &str = "2";

impl ThreadStat {
    /// Those of thread or process `pid`.
    ///
    /// # Errors
    /// As [`ReadHost::read`] of its stat; [`Unread::Refused`] when that is no line of this form.
    pub fn read(look: &dyn ReadHost, pid: u32) -> Result<Self, Unread> {
        let text = look.read(&format!("/proc/{pid}/stat"))?;
        let field = |number| stat_field(&text, number).ok_or(Unread::Refused);
        let number = |at: usize| field(at).ok()?.parse::<u32>().ok();
        let policy = number(41).zip(number(40));
        let flags: u32 = field(9)?.parse().map_err(|_| Unread::Refused)?;
        Ok(Self {
            start_ticks: field(22)?.parse().map_err(|_| Unread::Refused)?,
            has_ended: process_has_ended(&text).ok_or(Unread::Refused)?,
            is_parked: field(3)? == "P",
            is_kernel_thread: flags & PF_KTHREAD != 0 && field(4)? == KTHREADD,
            scheduling: policy
                .and_then(|(policy, priority)| value::scheduling_text(policy, priority)),
        })
    }
}

/// Whether a process has ended, by its proc_pid_stat(5): it is a zombie, or dead, and no thread of it
/// is left. A process whose main thread has ended is a zombie while its other threads run.
fn process_has_ended(stat: &str) -> Option<bool> {
    let is_zombie = ["Z", "X"].contains(&stat_field(stat, 3)?);
    // 0 if the kernel has released the task since it was looked up: the process is gone, or a thread
    // that calls execve(2) takes the number over. The next look tells.
    Some(is_zombie && stat_field(stat, 20)? == "1")
}

/// The users of a process, by proc_pid_status(5): real, effective, saved, and for files.
///
/// # Errors
/// As [`ReadHost::read`] of its status; [`Unread::Refused`] when that has no users.
pub fn users(look: &dyn ReadHost, pid: u32) -> Result<Vec<u32>, Unread> {
    let text = look.read(&format!("/proc/{pid}/status"))?;
    let line = proc_field(&text, "Uid").ok_or(Unread::Refused)?;
    let numbers = line.split_whitespace();
    let users = numbers.map(|number| number.parse().map_err(|_| Unread::Refused));
    users.collect()
}

#[cfg(test)]
mod tests {
    //! A zombie's other threads run on.
    use super::*;

    #[test]
    fn a_process_lives_as_long_as_one_of_its_threads() {
        for (state, threads, has_ended) in [
            ("S", 1, false),
            ("Z", 1, true),
            ("X", 1, true),
            ("Z", 2, false),
            ("X", 0, false),
        ] {
            let stat = format!("7 (a) {state} {}{threads} 0 4000", "1 ".repeat(16));
            let said = process_has_ended(&stat);
            assert_eq!(said, Some(has_ended), "{state}, {threads} threads");
        }
        assert_eq!(process_has_ended("7 (a) Z 1"), None);
    }
}
