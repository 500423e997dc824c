// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A test and the load beside it as one shell script, the same for host and guest: whatever can
//! run `sh` there can measure there.

use std::net::IpAddr;

use serde::Serialize;
use vcpufreq_host::CpuList;

use super::cyclictest::Test;

/// What the other CPUs do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TestLoad {
    /// Nothing.
    Idle,
    /// stress-ng on each of them.
    Stress,
    /// hackbench over all of them: many threads that wake one another.
    Hackbench,
    /// A ping flood from one of them.
    Net,
}

impl TestLoad {
    /// Its word on the command line and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Stress => "stress",
            Self::Hackbench => "hackbench",
            Self::Net => "net",
        }
    }
}

impl std::str::FromStr for TestLoad {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Idle, Self::Stress, Self::Hackbench, Self::Net];
        let found = all.into_iter().find(|load| load.name() == text);
        found.ok_or_else(|| "a load is idle, stress, hackbench or net".to_owned())
    }
}

/// What is put beside a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beside {
    /// Which load.
    pub load: TestLoad,
    /// Where.
    pub cpus: CpuList,
    /// How busy stress-ng keeps each of them, 1..=100.
    pub percent: u8,
    /// stress-ng's `SCHED_FIFO` priority; `None`: it is no real-time task.
    pub stress_fifo: Option<u8>,
    /// How much hackbench does.
    pub hackbench: Hackbench,
    /// Where the flood goes.
    pub net_to: Option<IpAddr>,
}

/// How many threads hackbench has that wake one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Hackbench {
    /// Groups; what is sent stays in its group.
    pub groups: u16,
    /// Senders of a group, and as many receivers; each sends to all of these.
    pub fds: u16,
}

impl Default for Hackbench {
    /// A group as hackbench itself has it: 40 threads.
    fn default() -> Self {
        Self { groups: 1, fds: 20 }
    }
}

/// So that a load outlives a test that was slow to start, and not a report that was killed.
const MARGIN_S: u64 = 60;

/// The script. Its stdout and exit code are cyclictest's; `group` is a cgroup that may use the
/// CPUs that are measured.
#[must_use]
pub fn script(test: &Test, beside: &Beside, group: Option<&str>) -> String {
    let load = loads(beside, limit_s(test));
    let command = test.command();
    let measured = match group {
        // The threads find their CPU there only.
        Some(group) => format!("sh -c 'echo $$ > {group}/cgroup.procs && exec {command}'"),
        None => command,
    };
    // In the background: a shell hears of a signal only while it waits for none in front.
    format!("{BEGIN}{load}{measured} < /dev/null &\nwait $!\ncode=$?\n{STILL}{END}exit $code\n")
}

/// The load alone, until stdin ends: beside a test that runs elsewhere.
#[must_use]
pub fn load_script(test: &Test, beside: &Beside) -> String {
    let load = loads(beside, limit_s(test));
    format!("{BEGIN}{load}echo started\nread line\ncode=0\n{STILL}{END}exit $code\n")
}

/// A signal that ends the shell ends the test, which it started last, and the loads.
const BEGIN: &str = "load=\ntrap 'kill -TERM $! $load 2> /dev/null; wait; exit 143' HUP INT TERM\n";
/// Ends the loads.
const END: &str = "[ -z \"$load\" ] || kill -TERM $load 2> /dev/null\nwait\n";
/// A load that has ended meanwhile wasn't beside all of the test.
const STILL: &str = "for one in $load; do kill -0 $one 2> /dev/null || { echo 'the load ended before the test did' >&2; code=3; }; done\n";

fn limit_s(test: &Test) -> u64 {
    test.seconds().saturating_add(MARGIN_S)
}

fn loads(beside: &Beside, limit_s: u64) -> String {
    let Beside { cpus, percent, .. } = beside;
    let Hackbench { groups, fds } = beside.hackbench;
    match beside.load {
        TestLoad::Idle => String::new(),
        TestLoad::Stress => {
            let mut text = String::new();
            let fifo = beside.stress_fifo.map_or(String::new(), |priority| {
                format!(" --sched fifo --sched-prio {priority}")
            });
            for cpu in cpus.iter() {
                text += &format!(
                    "stress-ng --quiet --cpu 1 --cpu-load {percent}{fifo} --taskset {cpu} --timeout {limit_s}s > /dev/null 2>&1 < /dev/null &\nload=\"$load $!\"\n"
                );
            }
            text + SETTLE
        }
        // A group of its own, so that what hackbench has started ends too; and the loop ends when
        // this shell does, however that comes about.
        TestLoad::Hackbench => format!(
            "setsid sh -c 'while kill -0 $0 2> /dev/null; do taskset -c {cpus} hackbench -g {groups} -f {fds} -l 100 || exit; done' $$ > /dev/null 2>&1 < /dev/null &\nload=-$!\n{SETTLE}"
        ),
        TestLoad::Net => beside.net_to.map_or(String::new(), |address| {
            let limit_s = limit_s.min(PING_MAX_S);
            format!(
                "taskset -c {cpus} ping -q -f -w {limit_s} {address} > /dev/null 2>&1 < /dev/null &\nload=$!\n{SETTLE}"
            )
        }),
    }
}

/// ping's longest time: some 24 days.
const PING_MAX_S: u64 = 2_000_000;
/// A load that has ended already fails the run before the test.
const SETTLE: &str = "sleep 1\nfor one in $load; do kill -0 $one 2> /dev/null || { echo 'the load ended at once' >&2; kill -TERM $load 2> /dev/null; exit 3; }; done\n";

#[cfg(test)]
mod tests {
    //! Promises: each other CPU has its own load, none of the measured; a load that doesn't start
    //! fails the test; the script's result is the test's.
    use std::{
        io::{BufRead as _, BufReader, Read as _},
        process::{Command, Stdio},
    };

    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    use super::*;
    use crate::measure::Length;

    fn test() -> Test {
        Test {
            cpus: "3".parse().unwrap(),
            main: None,
            length: Length::Seconds(10),
            interval_us: 1000,
            priority: 80,
            bins_us: 400,
            break_us: None,
            spike_us: None,
        }
    }

    fn beside(load: TestLoad) -> Beside {
        Beside {
            load,
            cpus: "0-2".parse().unwrap(),
            percent: 60,
            stress_fifo: None,
            hackbench: Hackbench::default(),
            net_to: None,
        }
    }

    /// In the place of the pause after which loads are looked at: until so many run. Nothing else
    /// tells how long that takes; and a shell that has just forked may lose the signal that ends it.
    fn until_they_run(script: &str, loads: usize) -> String {
        let wait =
            format!("until [ $(grep -c . \"$RUNNING\") -ge {loads} ]; do sleep 0.01; done\n");
        assert!(script.contains("sleep 1\n"));
        script.replace("sleep 1\n", &wait)
    }

    /// A load that goes on until it is ended.
    const LASTS: &str = "echo runs >> \"$RUNNING\"; exec sleep 1000.25";

    /// With shell functions in place of the programs.
    fn run(script: &str) -> (Option<i32>, String) {
        let running = tempfile::NamedTempFile::new().expect("a file");
        let script = format!(
            "cyclictest() {{ echo measured; return 7; }}\nstress-ng() {{ {LASTS}; }}\ntaskset() {{ {LASTS}; }}\nexport -f taskset\n{}",
            script.replace("setsid sh", "setsid bash")
        );
        let output = Command::new("bash")
            .args(["-c", &script])
            .env("RUNNING", running.path())
            .stdin(Stdio::null())
            .output();
        let output = output.expect("bash");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code(), text)
    }

    #[test]
    fn each_other_cpu_has_a_load() {
        let text = script(&test(), &beside(TestLoad::Stress), None);
        for cpu in ["0", "1", "2"] {
            assert!(text.contains(&format!("--cpu-load 60 --taskset {cpu} --timeout 70s")));
        }
        assert!(!text.contains("--taskset 3"));
        let text = script(&test(), &beside(TestLoad::Hackbench), None);
        assert!(text.contains("taskset -c 0-2 hackbench -g 1 -f 20 -l 100"));
        let small = Hackbench { groups: 3, fds: 2 };
        let hackbench = Beside {
            hackbench: small,
            ..beside(TestLoad::Hackbench)
        };
        assert!(script(&test(), &hackbench, None).contains("hackbench -g 3 -f 2 -l 100"));
        assert!(!script(&test(), &beside(TestLoad::Idle), None).contains("stress"));
        let fifo = Beside {
            stress_fifo: Some(1),
            ..beside(TestLoad::Stress)
        };
        let text = script(&test(), &fifo, None);
        assert!(text.contains("--cpu-load 60 --sched fifo --sched-prio 1 --taskset 2"));
        let flood = Beside {
            net_to: Some("fe80::1".parse().unwrap()),
            ..beside(TestLoad::Net)
        };
        let text = script(&test(), &flood, None);
        assert!(
            text.contains("taskset -c 0-2 ping -q -f -w 70 fe80::1 "),
            "{text}"
        );
    }

    #[test]
    fn the_result_is_the_tests() {
        let idle = script(&test(), &beside(TestLoad::Idle), None);
        assert_eq!(run(&idle), (Some(7), "measured\n".to_owned()));
        for (load, loads) in [(TestLoad::Stress, 3), (TestLoad::Hackbench, 1)] {
            let text = script(&test(), &beside(load), None);
            let (code, text) = run(&until_they_run(&text, loads));
            assert_eq!((code, text.as_str()), (Some(7), "measured\n"), "{load:?}");
        }
    }

    #[test]
    fn a_load_that_ends_is_no_load() {
        let text = script(&test(), &beside(TestLoad::Stress), None);
        // However long they take to end.
        let ended = text.replace("sleep 1\n", "wait\n");
        let (code, said) = run(&ended.replace("stress-ng --quiet", "false"));
        assert_eq!((code, said.as_str()), (Some(3), ""));
        // The others, which run, end with it, by a signal: not well, as they would by themselves.
        let text = text.replace("sleep 1\n", "wait $first\nsleep 1\n");
        let text = until_they_run(&text, 2);
        let one_ends = format!(
            "stress-ng() {{ [ \"$7\" != 0 ] || exit 1; {LASTS}; }}\ntrap 'wait $! || echo ended' EXIT\n"
        );
        let text = text.replacen("load=\"$load $!\"", "load=\"$load $!\"; first=$!", 1);
        let (code, said) = run(&format!("{one_ends}{text}"));
        assert_eq!((code, said.lines().last()), (Some(3), Some("ended")));
    }

    #[test]
    fn a_load_that_ends_before_the_test_voids_it() {
        let text = script(&test(), &beside(TestLoad::Stress), None);
        // The test itself ends one, and goes on until that has ended.
        let ends = "cyclictest() { set -- $load; kill $1; while grep -qs '^State:.[^Z]' /proc/$1/status; do :; done; }\n";
        let (code, _) = run(&format!("{ends}{}", until_they_run(&text, 3)));
        assert_eq!(code, Some(3));
    }

    #[test]
    fn a_shell_that_is_ended_ends_the_test_and_the_loads() {
        let text = script(&test(), &beside(TestLoad::Stress), None);
        let text = until_they_run(&text, 3);
        let functions = format!(
            "cyclictest() {{ echo $$; exec sleep 1000.25; }}\nstress-ng() {{ {LASTS}; }}\n"
        );
        let running = tempfile::NamedTempFile::new().expect("a file");
        let mut child = Command::new("bash")
            .args(["-c", &format!("{functions}{text}")])
            .env("RUNNING", running.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("bash");
        let mut output = BufReader::new(child.stdout.take().expect("a pipe"));
        let mut line = String::new();
        output.read_line(&mut line).expect("its output");
        let pid = Pid::from_raw(i32::try_from(child.id()).expect("a process"));
        kill(pid, Signal::SIGTERM).expect("it runs");
        assert_eq!(child.wait().expect("its end").code(), Some(143));
        // The pipe's other end is the test's, too: it has ended.
        let mut rest = String::new();
        output.read_to_string(&mut rest).expect("the end");
    }

    #[test]
    fn a_group_is_joined_by_the_test_alone() {
        let text = script(&test(), &beside(TestLoad::Stress), Some("/cg/rt"));
        assert!(text.contains("sh -c 'echo $$ > /cg/rt/cgroup.procs && exec cyclictest "));
    }
}
