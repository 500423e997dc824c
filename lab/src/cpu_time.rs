// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The CPU time that a process and its descendants have taken.

use std::fs;
use std::time::Duration;

use nix::unistd::{SysconfVar, sysconf};

/// What the process, its children that it has waited for, and its living descendants have taken;
/// zero for one that has ended. Linux counts it in ticks, of 10 ms mostly (proc_pid_stat(5)).
pub fn taken_by(pid: u32) -> Duration {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let stats = processes.filter_map(|process| {
        let number = process.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(process.path().join("stat")).ok()?;
        Some((number, parent(&stat)?, ticks(&stat)))
    });
    of_family(pid, &stats.collect::<Vec<_>>())
}

/// Of processes with their parents. Not all kernels list a process' children in procfs.
fn of_family(pid: u32, all: &[(u32, u32, Duration)]) -> Duration {
    let own = all.iter().filter(|(one, _, _)| *one == pid);
    let children = all.iter().filter(|(_, parent, _)| *parent == pid);
    let of_children = children.map(|(child, _, _)| of_family(*child, all));
    own.map(|(_, _, took)| *took).chain(of_children).sum()
}

/// The second word behind the program's name.
fn parent(stat: &str) -> Option<u32> {
    let (_, words) = stat.rsplit_once(") ")?;
    words.split(' ').nth(1)?.parse().ok()
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
        let name = format!("vcpufreq-cpu-time-{}", std::process::id());
        let ends = std::env::temp_dir().join(name);
        let until = ends.display();
        let mut busy = shell(&format!("(while [ ! -e '{until}' ]; do :; done); :"));
        // Without end where it isn't counted.
        while taken_by(busy.id()) < Duration::from_millis(100) {
            sleep(Duration::from_millis(10));
        }
        let mut waits = shell("read word");
        sleep(Duration::from_millis(300));
        assert!(taken_by(waits.id()) < Duration::from_millis(100));
        fs::write(&ends, "").unwrap();
        busy.wait().unwrap();
        fs::remove_file(&ends).unwrap();
        drop(waits.stdin.take());
        waits.wait().unwrap();
        assert_eq!(taken_by(waits.id()), Duration::ZERO);
    }
}
