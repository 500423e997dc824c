// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command of `rt exec`: its start, the signals that it gets, and its exit code.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Seek as _},
    os::unix::process::ExitStatusExt as _,
    path::Path,
    process::{Child, Command, ExitStatus},
};

use anyhow::{Context as _, anyhow};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{guardian::RestoreGuardian, signals::CommandSignals};
use crate::cli::{
    child::{end_with_this_thread, enter},
    output::warn,
};

/// What a shell reports for a command that a signal ended, without the signal's number.
const SIGNALLED: i32 = 128;
/// As env(1) has it: a command that isn't there, and one that can't be started.
const NOT_FOUND: u8 = 127;
const NOT_STARTED: u8 = 126;

/// Runs a command to its end, in `group` if one is given; its exit code. A signal that has come before
/// keeps it from starting. Meanwhile another guardian replaces one that has ended.
///
/// # Errors
/// When it can't enter the group, or can't be waited for; it gets SIGTERM when this process ends.
pub(super) fn run(
    words: &[OsString],
    group: Option<&Path>,
    signals: &CommandSignals,
    guardian: &mut RestoreGuardian,
) -> anyhow::Result<u8> {
    if let Some(signal) = signals.pending()? {
        return Ok(code(SIGNALLED + signal as i32));
    }
    let mut child = match start(words, group)? {
        Ok(child) => child,
        Err(code) => return Ok(code),
    };
    let pid = Pid::from_raw(i32::try_from(child.id())?);
    loop {
        if let Some(status) = child.try_wait().context("can't wait for the command")? {
            return Ok(exit_code(status));
        }
        guardian.guard_again();
        let arrived = signals.next()?;
        if arrived.signal != Signal::SIGCHLD && arrived.is_of_process {
            // It may have ended: then its end comes next.
            let _ = kill(pid, arrived.signal);
        }
    }
}

/// Starts a command; a shell's exit code for one that can't be started.
///
/// # Errors
/// When it can't enter the group.
fn start(words: &[OsString], group: Option<&Path>) -> anyhow::Result<Result<Child, u8>> {
    let (program, arguments) = words.split_first().context("no command is given")?;
    let mut command = Command::new(program);
    command.args(arguments);
    let procs = match group {
        Some(group) => Some(entry(&mut command, group).map_err(|why| not_entered(group, &why))?),
        None => None,
    };
    end_with_this_thread(&mut command);
    let error = match command.spawn() {
        Ok(child) => return Ok(Ok(child)),
        Err(error) => error,
    };
    if let (Some(group), Some(mut procs)) = (group, procs) {
        if procs.stream_position()? == 0 {
            return Err(not_entered(group, &error));
        }
    }
    let name = Path::new(program).display();
    warn(&format!(
        "{name} can't be started ({error}); check its path"
    ));
    Ok(Err(match error.kind() {
        io::ErrorKind::NotFound => NOT_FOUND,
        _ => NOT_STARTED,
    }))
}

/// Has a command enter a group before it does anything else.
fn entry(command: &mut Command, group: &Path) -> io::Result<File> {
    let procs = File::options()
        .write(true)
        .open(group.join("cgroup.procs"))?;
    enter(command, &procs)?;
    Ok(procs)
}

fn not_entered(group: &Path, why: &io::Error) -> anyhow::Error {
    anyhow!(
        "{} can't be entered ({why}); see the lines above, or leave --enter out",
        group.display()
    )
}

fn exit_code(status: ExitStatus) -> u8 {
    let signalled = status.signal().map(|signal| SIGNALLED + signal);
    code(status.code().or(signalled).unwrap_or(SIGNALLED))
}

fn code(number: i32) -> u8 {
    u8::try_from(number).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    //! A command is in its group before it starts, or isn't started.
    use std::{fs, os::unix::fs::symlink};

    use tempfile::TempDir;

    use super::*;

    fn start_in(group: &TempDir, program: &str) -> anyhow::Result<Result<Child, u8>> {
        start(&[program.into()], Some(group.path()))
    }

    #[test]
    fn a_command_starts_in_its_group() {
        let group = TempDir::new().expect("a folder");
        let procs = group.path().join("cgroup.procs");
        fs::write(&procs, "").expect("a file");
        let started = start_in(&group, "true").expect("it enters");
        let status = started.expect("it starts").wait().expect("its end");
        assert!(status.success(), "{status}");
        assert_eq!(fs::read_to_string(&procs).expect("a file"), "0");
        let started = start_in(&group, "/nowhere/a-program").expect("it enters");
        assert_eq!(started.expect_err("no program"), NOT_FOUND);
    }

    #[test]
    fn a_command_that_cannot_enter_is_not_started() {
        let group = TempDir::new().expect("a folder");
        symlink("/dev/full", group.path().join("cgroup.procs")).expect("a link");
        let line = start_in(&group, "true").expect_err("no entry").to_string();
        assert!(line.contains("can't be entered (No space"), "{line}");
    }
}
