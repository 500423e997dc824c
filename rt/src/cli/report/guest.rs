// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest that is measured, through a shell that may be lost: a connection that breaks takes the
//! test's output with it, and may leave the test running.
//!
//! A script in the guest prints its exit code last. Output without it is of a shell that was lost.
//! Then new shells are tried, until one has ended what the lost one left: its processes have a word
//! of this report's in their environment.

use std::{
    process,
    thread::sleep,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, bail, ensure};
use vcpufreq_host::CpuList;

use super::{args::ReportArgs, required::RequiredTests, running::ReportProcesses, shell::Shell};
use crate::measure::Test;

/// In front of the exit code of a script.
const ENDED: &str = "# vcpufreq-rt ended ";
/// In the environment of what a script starts.
const WORD: &str = "VCPUFREQ_RT_REPORT";
/// How long to try for a new shell.
const PATIENCE: Duration = Duration::from_secs(600);
/// Between two tries, at most.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// How long a shell may take for more than the test, or for ending processes.
const MARGIN: Duration = Duration::from_secs(300);

/// A guest and its CPUs.
#[derive(Debug)]
pub(super) struct MeasuredGuest {
    shell: Shell,
    pub(super) cpus: CpuList,
    pub(super) others: CpuList,
    /// `WORD=` this report's own.
    word: String,
}

impl MeasuredGuest {
    pub(super) fn new(
        command: &str,
        cpus: CpuList,
        args: &ReportArgs,
        running: &ReportProcesses,
    ) -> anyhow::Result<Self> {
        let shell = Shell::by(command, running)?;
        let others = args.guest_others.clone().unwrap_or_default();
        // What has no CPU to load there has no load there.
        let loads = match others.is_empty() {
            true => [].as_slice(),
            false => &args.loads,
        };
        let required = RequiredTests {
            measured: true,
            loads,
            net_to: args.net_to,
        };
        shell.require(&required).context("in the guest")?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let word = format!(
            "{WORD}={}-{}",
            process::id(),
            now.unwrap_or_default().as_nanos()
        );
        Ok(Self {
            shell,
            cpus,
            others,
            word,
        })
    }

    /// Runs the script of a test; its stdout, or `None` if the shell was lost.
    pub(super) fn run(
        &self,
        script: &str,
        test: &Test,
        meanwhile: &mut dyn FnMut(),
    ) -> anyhow::Result<Option<String>> {
        let script = format!(
            "export {}\ntrap 'echo \"{ENDED}$?\"' EXIT\n{script}",
            self.word
        );
        let limit = Duration::from_secs(test.seconds()).checked_add(MARGIN);
        let output = self.shell.output(&script, limit, meanwhile)?;
        match exit_code(&output.printed) {
            Some(0) => Ok(Some(output.printed)),
            Some(code) => bail!(
                "measuring ended with exit code {code}: {}",
                output.last_error()
            ),
            None => {
                eprintln!(
                    "vcpufreq: the guest's shell was lost ({}: {}); trying for a new one",
                    output.status,
                    output.last_error()
                );
                Ok(None)
            }
        }
    }

    /// Waits until a shell is there again, and has ended what the lost one left.
    pub(super) fn recover(&self) -> anyhow::Result<()> {
        self.recover_in(PATIENCE)
    }

    fn recover_in(&self, patience: Duration) -> anyhow::Result<()> {
        let script = format!(
            "for d in /proc/[0-9]*; do grep -qs '{}' $d/environ && kill -TERM ${{d#/proc/}}; \
             done 2> /dev/null\necho \"{ENDED}0\"\n",
            self.word
        );
        let begun = Instant::now();
        let mut pause = Duration::from_millis(100);
        loop {
            let output = self.shell.output(&script, Some(MARGIN), &mut || ());
            let output = output.context("in the guest")?;
            if exit_code(&output.printed) == Some(0) {
                return Ok(());
            }
            ensure!(
                begun.elapsed() < patience,
                "the guest's shell was lost, and none was there for {} s ({}); what was measured \
                 before is in the file of --out",
                patience.as_secs(),
                output.last_error()
            );
            sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }
}

/// That of a script which printed it last.
fn exit_code(printed: &str) -> Option<i32> {
    let last = printed.lines().next_back()?;
    last.strip_prefix(ENDED)?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    //! Promises: a script that ends has its exit code, and one without it was lost; a new shell ends
    //! what the lost one left, and none for too long is an error.
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;
    use crate::measure::Length;

    fn guest(command: &str) -> MeasuredGuest {
        MeasuredGuest {
            shell: Shell::by(command, &ReportProcesses::default()).unwrap(),
            cpus: "0".parse().unwrap(),
            others: CpuList::default(),
            word: format!("{WORD}=test-{}", process::id()),
        }
    }

    fn test() -> Test {
        Test {
            cpus: "0".parse().unwrap(),
            main: None,
            length: Length::Seconds(1),
            interval_us: 1000,
            priority: 1,
            bins_us: 10,
            break_us: None,
            spike_us: None,
        }
    }

    #[test]
    fn a_script_without_its_exit_code_was_lost() {
        let guest = guest("sh");
        let run = |script: &str| guest.run(script, &test(), &mut || ());
        let printed = run("echo 1\n").unwrap().expect("it ended");
        assert_eq!(printed, format!("1\n{ENDED}0\n"));
        let failed = run("echo why >&2\nexit 4\n").unwrap_err().to_string();
        assert_eq!(failed, "measuring ended with exit code 4: why");
        assert_eq!(run("echo 1\nkill -KILL $$\n").unwrap(), None);
    }

    #[test]
    fn a_new_shell_ends_what_the_lost_one_left() {
        let dir = tempfile::tempdir().unwrap();
        let (pid, tries) = (dir.path().join("pid"), dir.path().join("tries"));
        // Lost twice more, then there again.
        let shell = dir.path().join("guest-shell");
        let tries = tries.display();
        let text = format!(
            "#!/bin/sh\necho >> {tries}\n[ $(wc -l < {tries}) -ge 4 ] || exit 255\nexec sh\n"
        );
        fs::write(&shell, text).unwrap();
        fs::set_permissions(&shell, fs::Permissions::from_mode(0o755)).unwrap();
        let left = guest("sh");
        let script = format!(
            "sleep 1000.5 > /dev/null 2>&1 &\necho $! > {}\nkill -KILL $$\n",
            pid.display()
        );
        assert_eq!(left.run(&script, &test(), &mut || ()).unwrap(), None);
        let stat = format!("/proc/{}/stat", fs::read_to_string(&pid).unwrap().trim());
        assert!(fs::exists(&stat).unwrap());
        let new = guest(&shell.display().to_string());
        new.recover_in(PATIENCE).unwrap();
        // Gone, or a zombie of the process that takes orphans.
        let has_ended = || !fs::read_to_string(&stat).is_ok_and(|text| !text.contains(") Z"));
        let begun = Instant::now();
        while !has_ended() && begun.elapsed() < PATIENCE {
            std::thread::yield_now();
        }
        assert!(has_ended(), "it is still there");
        let none = guest("false").recover_in(Duration::ZERO).unwrap_err();
        assert!(
            none.to_string().contains("the guest's shell was lost"),
            "{none}"
        );
    }
}
