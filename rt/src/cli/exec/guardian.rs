// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guardian of `rt exec`: a process in a session of its own, on housekeeping CPUs. It restores
//! when the other end of its stdin is closed, and only what was changed for this exec.

use std::{
    env::current_dir,
    io::{self, Read as _},
    os::fd::AsFd as _,
    path::Path,
    process::{Child, ChildStdout, Command, Stdio, id},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sched::{CpuSet, sched_setaffinity},
    sys::signal::SigSet,
    unistd::{Pid, setsid},
};
use vcpufreq_host::CpuList;

use vcpufreq_host::undo::{KernelHost, Owner};

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
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A guardian, seen from exec. One that is dropped restores when this process is gone.
pub(super) struct RestoreGuardian {
    child: Child,
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
        Ok(Self {
            child: on_guard(&mut command)?,
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
            Ok(child) => {
                self.child = child;
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

    /// Has it restore, and waits for that. What is left, it names; a guardian that was killed, can't.
    pub(super) fn end(mut self, host: &KernelHost) {
        // Closes its stdin.
        let status = self.child.wait();
        if !status.is_ok_and(|status| status.code().is_some()) {
            bring_back(host, &self.owner);
        }
    }
}

/// Starts a guardian; it is on guard when this returns.
fn on_guard(command: &mut Command) -> anyhow::Result<Child> {
    let mut child = command.spawn().context(
        "can't start the guardian; check that /proc is mounted and processes can be started",
    )?;
    let output = child.stdout.take().context("the guardian has no output")?;
    let ready = hear_ready(output, STARTS_WITHIN);
    if ready.is_err() {
        end_now(&mut child);
    }
    if !ready? {
        let status = child.wait().context("the guardian did not start")?;
        bail!("the guardian ended at once with {status}; try again");
    }
    Ok(child)
}

fn end_now(guardian: &mut Child) {
    // It is a child that hasn't been waited for: neither can fail.
    let _ = guardian.kill();
    let _ = guardian.wait();
}

/// Whether a guardian with this output is on guard, or has ended; waits for that so long at most.
fn hear_ready(output: ChildStdout, within: Duration) -> anyhow::Result<bool> {
    const UNHEARD: &str = "can't hear from the guardian";
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
    let mut said = String::new();
    // The guardian writes all of it at once.
    let read = output.take(READY.len() as u64).read_to_string(&mut said);
    read.context(UNHEARD)?;
    Ok(said == READY)
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
    let owner = Owner::of(&KernelHost::default(), pid).ok();
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
    //! A guardian that says nothing is given up.
    use super::*;

    #[test]
    fn a_guardian_that_does_not_start_is_given_up() {
        let mut command = Command::new("sleep");
        let command = command.arg("3600").stdout(Stdio::piped());
        let mut child = command.spawn().expect("a process");
        let output = child.stdout.take().expect("stdout");
        let heard = hear_ready(output, Duration::from_millis(1));
        let line = heard.expect_err("it said nothing").to_string();
        assert!(line.contains("doesn't start"), "{line}");
        child.kill().expect("a child");
        child.wait().expect("its end");
    }
}
