// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Processes that are started, and the signals that they are started with.

use std::{
    fs::File,
    io::{self, Write as _},
    os::unix::process::CommandExt as _,
    process::Command,
};

use nix::{
    sys::{
        prctl::set_pdeathsig,
        signal::{SigHandler, SigSet, Signal, signal},
    },
    unistd::getppid,
};
use vcpufreq_host::ignored_signals;

/// Those of `signals` that this process doesn't ignore.
///
/// # Errors
/// When procfs doesn't show them.
pub(super) fn heeded(signals: &[Signal]) -> io::Result<SigSet> {
    let ignored = ignored_signals()?;
    let heeded = |one: &Signal| (ignored >> (*one as i32 - 1)) & 1 == 0;
    Ok(signals.iter().copied().filter(heeded).collect())
}

/// Has this process learn of its children's ends, which it doesn't where SIGCHLD is ignored.
#[expect(unsafe_code, reason = "sigaction")]
pub(super) fn heed_children() -> nix::Result<()> {
    // SAFETY: SIG_DFL is no function of ours.
    unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) }.map(|_| ())
}

/// Has a process that is started get SIGTERM when this thread ends, however that comes about. It
/// starts with no signal blocked.
#[expect(unsafe_code, reason = "pre_exec runs between fork and exec")]
pub(super) fn end_with_this_thread(command: &mut Command) {
    let mine = std::process::id();
    let ask = move || {
        SigSet::empty().thread_set_mask()?;
        set_pdeathsig(Signal::SIGTERM)?;
        match u32::try_from(getppid().as_raw()) {
            Ok(parent) if parent == mine => Ok(()),
            // It has ended in between.
            _ => Err(io::ErrorKind::Interrupted.into()),
        }
    };
    // SAFETY: the three calls are async-signal-safe, and nothing of this allocates.
    unsafe { command.pre_exec(ask) };
}

/// Has a process that is started enter the cgroup of this `cgroup.procs`. The file's position moves
/// when it has.
///
/// # Errors
/// When this process can have no more files.
#[expect(unsafe_code, reason = "pre_exec runs between fork and exec")]
pub(super) fn enter(command: &mut Command, procs: &File) -> io::Result<()> {
    // Both share one position, also across fork.
    let mut procs = procs.try_clone()?;
    // 0 is the process that writes it.
    let enter = move || procs.write_all(b"0");
    // SAFETY: write(2) is async-signal-safe, and nothing of this allocates.
    unsafe { command.pre_exec(enter) };
    Ok(())
}
