// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guardian of `rt exec`: a process in a session of its own, on housekeeping CPUs. It restores
//! when the other end of its stdin is closed, and only what was changed for this exec.

use std::{
    env::current_dir,
    io,
    os::fd::AsFd as _,
    path::Path,
    process::{Child, ChildStdout, Command, ExitStatus, Stdio, id},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CpuSet, sched_setaffinity},
    sys::signal::SigSet,
    unistd::{Pid, read, setsid},
};
use vcpufreq_host::CpuList;

use vcpufreq_host::undo::{KernelHost, Owner};

use super::signals::CommandSignals;
use crate::{
    cli::{
        args::GuardArgs,
        output::{print, warn},
    },
    restore::{RestoreError, Restored, restore_of},
};

/// The guardian's output when it is on guard.
const READY: &str = "on guard\n";
/// How long it may take until then. In a build for tests a busy machine makes no failure.
const STARTS_WITHIN: Duration = Duration::from_secs(if cfg!(debug_assertions) { 600 } else { 30 });
/// A wait that takes longer is a line.
const SILENCE: Duration = Duration::from_secs(1);
/// How long a guest of the command, or a thread in a partition, may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(30);
/// How long the guardian may take to restore, which waits for that end.
const RESTORES_WITHIN: Duration =
    Duration::from_secs(if cfg!(debug_assertions) { 600 } else { 40 });
/// How long one that was killed may take to be gone.
const GONE_WITHIN: Duration = Duration::from_secs(if cfg!(debug_assertions) { 600 } else { 1 });
const LOOK_EVERY: Duration = Duration::from_millis(100);
const UNHEARD: &str = "can't hear from the guardian";

/// A guardian, seen from exec. One that is dropped restores when this process is gone.
pub(super) struct RestoreGuardian {
    child: Child,
    /// Nothing comes any more: it ends when the guardian does.
    output: ChildStdout,
    command: Command,
    owner: Owner,
    /// It has ended, and another one could not be started.
    is_lost: bool,
}

impl RestoreGuardian {
    /// Starts one for this process; it is on guard when this returns.
    ///
    /// # Errors
    /// When it can't be started, or can't run on these CPUs.
    pub(super) fn start(cpus: &CpuList, root: Option<&Path>) -> anyhow::Result<Self> {
        let owner = process(id())?;
        let mut command = Command::new("/proc/self/exe");
        command.args(["rt", "guard", "--pid"]).arg(id().to_string());
        command.arg(format!("--start-ticks={}", owner.start_ticks));
        if !cpus.is_empty() {
            command.arg(format!("--cpus={cpus}"));
        }
        command.current_dir(root.unwrap_or(Path::new("/")));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let (child, output) = on_guard(&mut command)?;
        Ok(Self {
            child,
            output,
            command,
            owner,
            is_lost: false,
        })
    }

    /// Starts another guardian in the place of one that has ended, with a line.
    pub(super) fn guard_again(&mut self) {
        if self.is_lost || matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        match on_guard(&mut self.command) {
            Ok((child, output)) => {
                (self.child, self.output) = (child, output);
                warn("the guardian has ended; another is on guard");
            }
            Err(error) => {
                self.is_lost = true;
                warn(&format!(
                    "the guardian has ended, and another can't be started ({error:#}); if exec is killed, run vcpufreq rt restore"
                ));
            }
        }
    }

    /// The process that settings are changed for: this one.
    pub(super) fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Ends it when nothing was changed.
    pub(super) fn dismiss(mut self) {
        end_now(&mut self.child);
    }

    /// Has it restore, and waits for that. What is left, it names; a guardian that was killed, or
    /// hangs, can't. A signal that asks exec to end ends a long wait, and the guardian restores alone.
    pub(super) fn end(self, host: &KernelHost, signals: &CommandSignals) {
        self.end_within(RESTORES_WITHIN, host, signals);
    }

    fn end_within(mut self, within: Duration, host: &KernelHost, signals: &CommandSignals) {
        drop(self.child.stdin.take());
        let pid = self.child.id();
        match self.ends_within(within, signals) {
            Ok(GuardianEnd::Ended) => {}
            Ok(GuardianEnd::Signal) => {
                return warn(&format!(
                    "told to end; the guardian, process {pid}, goes on to restore"
                ));
            }
            Ok(GuardianEnd::Hangs) => {
                warn(&format!("the guardian, process {pid}, hangs; it is killed"));
                let _ = self.child.kill();
            }
            Err(why) => warn(&format!("{why:#}")),
        }
        // One that the kernel can't end yet is waited for no longer.
        let mut files = [PollFd::new(self.output.as_fd(), PollFlags::POLLIN)];
        let within = PollTimeout::try_from(GONE_WITHIN).unwrap_or(PollTimeout::MAX);
        let has_ended = poll(&mut files, within).is_ok_and(|ready| ready > 0);
        let status = has_ended.then(|| self.child.wait().ok()).flatten();
        if !status.is_some_and(has_tried) {
            bring_back(host, &self.owner);
        }
    }

    /// Waits for its end. After a second a signal ends that.
    fn ends_within(
        &self,
        within: Duration,
        signals: &CommandSignals,
    ) -> anyhow::Result<GuardianEnd> {
        let until = Instant::now() + within;
        let mut files = vec![PollFd::new(self.output.as_fd(), PollFlags::POLLIN)];
        let mut part = within.min(SILENCE);
        loop {
            poll(&mut files, PollTimeout::try_from(part)?).context(UNHEARD)?;
            if files[0].any() == Some(true) {
                return Ok(GuardianEnd::Ended);
            }
            if files.len() > 1 && signals.has_been_told_to_end()? {
                return Ok(GuardianEnd::Signal);
            }
            part = until.saturating_duration_since(Instant::now());
            if part.is_zero() {
                return Ok(GuardianEnd::Hangs);
            }
            if files.len() == 1 {
                let most = within.as_secs();
                warn(&format!(
                    "waits for the guardian to restore, at most {most} s"
                ));
                files.push(PollFd::new(signals.as_fd(), PollFlags::POLLIN));
            }
        }
    }
}

/// How a wait for the end of a guardian has ended.
enum GuardianEnd {
    Ended,
    /// By a signal that asks exec to end.
    Signal,
    /// It has not ended in time.
    Hangs,
}

/// Whether a guardian has restored, or has named what is left: [`guard`]'s exit codes. One that
/// panicked has another.
fn has_tried(status: ExitStatus) -> bool {
    matches!(status.code(), Some(0 | 1))
}

/// Starts a guardian, with its output; it is on guard when this returns.
fn on_guard(command: &mut Command) -> anyhow::Result<(Child, ChildStdout)> {
    let mut child = command.spawn().context(
        "can't start the guardian; check that /proc is mounted and processes can be started",
    )?;
    let output = child.stdout.take().context("the guardian has no output")?;
    let ready = hear_ready(&output, STARTS_WITHIN);
    if ready.is_err() {
        end_now(&mut child);
    }
    if !ready? {
        let status = child.wait().context("the guardian did not start")?;
        bail!("the guardian ended at once with {status}; try again");
    }
    Ok((child, output))
}

fn end_now(guardian: &mut Child) {
    // It is a child that hasn't been waited for: neither can fail.
    let _ = guardian.kill();
    let _ = guardian.wait();
}

/// Whether a guardian with this output is on guard, or has ended; waits for that so long at most.
fn hear_ready(output: &ChildStdout, within: Duration) -> anyhow::Result<bool> {
    // The signals of exec are blocked, and end no wait.
    let is_heard = |within| -> anyhow::Result<bool> {
        let mut files = [PollFd::new(output.as_fd(), PollFlags::POLLIN)];
        Ok(poll(&mut files, PollTimeout::try_from(within)?).context(UNHEARD)? > 0)
    };
    if !is_heard(within.min(SILENCE))? {
        let most = within.as_secs();
        warn(&format!(
            "waits for the guardian to start, at most {most} s"
        ));
        if !is_heard(within)? {
            bail!("the guardian doesn't start; try again");
        }
    }
    let mut said = [0; READY.len()];
    // The guardian writes all of it at once.
    let bytes = read(output, &mut said).context(UNHEARD)?;
    Ok(said[..bytes] == *READY.as_bytes())
}

/// The guardian's own life; its exit code is 1 if something is left.
///
/// # Errors
/// When it could not go on guard.
pub(in crate::cli) fn guard(args: &GuardArgs) -> anyhow::Result<u8> {
    // Exec may have ended by now.
    let owner = Owner {
        pid: args.pid,
        start_ticks: args.start_ticks,
        ..process(id())?
    };
    let host = current_dir().context("the folder of the host can't be named")?;
    // Fails for the leader of a process group only, which a child isn't.
    setsid().context("can't leave the session")?;
    // Nothing but SIGKILL ends it early.
    SigSet::all().thread_block()?;
    if let Some(cpus) = &args.cpus {
        stay_on(cpus).context("the guardian can't run on the housekeeping CPUs; check taskset")?;
    }
    // Where exec is gone already, it has no reader.
    let _ = print(READY);
    // Where it can't be read, there is nothing to wait for.
    let _ = io::copy(&mut io::stdin(), &mut io::sink());
    Ok(u8::from(!bring_back(&KernelHost::at(&host), &owner)))
}

fn process(pid: u32) -> anyhow::Result<Owner> {
    let owner = Owner::read(&KernelHost::default(), pid).ok();
    owner.with_context(|| format!("process {pid} can't be seen in /proc; mount it"))
}

fn stay_on(cpus: &CpuList) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    for cpu in cpus.iter() {
        set.set(usize::try_from(cpu)?)?;
    }
    Ok(sched_setaffinity(Pid::from_raw(0), &set)?)
}

/// Restores what was changed for `owner`; whether nothing is left. A guest that is about to end is
/// waited for.
fn bring_back(host: &KernelHost, owner: &Owner) -> bool {
    let until = Instant::now() + ENDS_WITHIN;
    let mut is_waiting = false;
    loop {
        let why = match restore_of(host, owner, &mut |_, _, _| {}) {
            Ok(Restored::Done { left, .. }) => {
                for (name, why) in &left {
                    warn(&format!("{name}: {why}"));
                }
                return left.is_empty();
            }
            Ok(Restored::Nothing | Restored::EarlierBoot) => return true,
            Err(why) => why,
        };
        let passes = matches!(
            why,
            RestoreError::Guest(_) | RestoreError::Occupied(_) | RestoreError::Busy
        );
        if !passes || Instant::now() >= until {
            warn(&format!("the settings stay in force: {why}"));
            return false;
        }
        if !is_waiting {
            let most = ENDS_WITHIN.as_secs();
            warn(&format!("waits at most {most} s to restore: {why}"));
            is_waiting = true;
        }
        sleep(LOOK_EVERY);
    }
}

#[cfg(test)]
mod tests {
    //! A guardian that says nothing is given up, and one that doesn't end. One that has not restored is
    //! known by its exit code.
    use std::{fs, os::unix::process::ExitStatusExt as _};

    use super::*;

    /// A process that stands for a guardian.
    fn sleeping() -> (Child, ChildStdout) {
        let mut command = Command::new("sleep");
        let command = command.arg("3600").stdout(Stdio::piped());
        let mut child = command.spawn().expect("a process");
        let output = child.stdout.take().expect("stdout");
        (child, output)
    }

    #[test]
    fn a_guardian_that_does_not_start_is_given_up() {
        let (mut child, output) = sleeping();
        let heard = hear_ready(&output, Duration::from_millis(1));
        let line = heard.expect_err("it said nothing").to_string();
        assert!(line.contains("doesn't start"), "{line}");
        end_now(&mut child);
    }

    #[test]
    fn a_guardian_that_does_not_end_is_killed() {
        let (child, output) = sleeping();
        let process = format!("/proc/{}", child.id());
        let guardian = RestoreGuardian {
            child,
            output,
            command: Command::new("sleep"),
            owner: process_of_this(),
            is_lost: false,
        };
        let host = tempfile::TempDir::new().expect("a folder");
        let host = KernelHost::at(host.path());
        let signals = CommandSignals::take().expect("signals");
        guardian.end_within(Duration::from_millis(1), &host, &signals);
        assert!(fs::metadata(process).is_err());
    }

    fn process_of_this() -> Owner {
        process(id()).expect("this process")
    }

    #[test]
    fn a_guardian_that_panicked_has_not_restored() {
        let tried = [0, 1, 2, 101].map(|code| has_tried(ExitStatus::from_raw(code << 8)));
        assert_eq!(tried, [true, true, false, false]);
        assert!(!has_tried(ExitStatus::from_raw(9)), "killed");
    }
}
