// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The CPU time that a process and its descendants have taken.

use std::fs;
use std::time::Duration;

use nix::unistd::{SysconfVar, sysconf};

/// What the process, its children that it has waited for, and its living descendants have taken;
/// zero for one that has ended. Linux counts it in ticks, of 10 ms mostly (proc_pid_stat(5)).
pub fn taken_by(pid: u32) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
    let children = children.unwrap_or_default();
    let children = children
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok());
    ticks(&stat) + children.map(taken_by).sum::<Duration>()
}

/// utime, stime, cutime and cstime: the 12th to 15th word behind the program's name.
fn ticks(stat: &str) -> Duration {
    let words = stat.rsplit_once(") ").map_or("", |(_, words)| words);
    let times = words.split(' ').skip(11).take(4);
    let ticks: u64 = times.filter_map(|word| word.parse::<u64>().ok()).sum();
    let per_s = sysconf(SysconfVar::CLK_TCK).ok().flatten();
    let per_s = per_s.and_then(|per_s| u32::try_from(per_s).ok());
    Duration::from_secs(ticks) / per_s.unwrap_or(100)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};
    use std::thread::sleep;

    #[test]
    fn times_are_read_behind_any_name() {
        let times = "R 1 1 1 0 -1 4194304 9 9 9 9 100 50 7 3 20 0 1 0 5";
        for name in ["qemu", "a) b", "( )"] {
            let expected = Duration::from_millis(1600);
            assert_eq!(ticks(&format!("7 ({name}) {times}")), expected, "{name}");
        }
        assert_eq!(ticks(""), Duration::ZERO);
    }

    #[test]
    fn a_descendants_time_counts_and_waiting_does_not() {
        let shell = |line: &str| {
            Command::new("sh")
                .args(["-c", line])
                .stdin(Stdio::piped())
                .spawn()
                .unwrap()
        };
        let mut busy = shell("(while :; do :; done); :");
        // Without end where it isn't counted.
        while taken_by(busy.id()) < Duration::from_millis(100) {
            sleep(Duration::from_millis(10));
        }
        let mut waits = shell("read word");
        sleep(Duration::from_millis(300));
        assert!(taken_by(waits.id()) < Duration::from_millis(100));
        let loops = fs::read_to_string(format!("/proc/{0}/task/{0}/children", busy.id())).unwrap();
        for pid in loops.split_whitespace() {
            let ended = Command::new("kill").arg(pid).status().unwrap();
            assert!(ended.success());
        }
        busy.wait().unwrap();
        drop(waits.stdin.take());
        waits.wait().unwrap();
        assert_eq!(taken_by(waits.id()), Duration::ZERO);
    }
}
