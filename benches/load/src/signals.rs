// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A signal ends rt-app and removes its files before it ends this program.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill};
use nix::unistd::Pid;

const SIGNALS: [Signal; 3] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM];

/// The rt-app that runs, and its folder.
static RUNNING: Mutex<Option<RunningLoad>> = Mutex::new(None);

struct RunningLoad {
    process: Option<Pid>,
    folder: std::path::PathBuf,
}

impl RunningLoad {
    fn end(&self) {
        // What has ended, or isn't there, needs neither.
        let _ = self.process.map(|pid| kill(pid, Signal::SIGKILL));
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn running() -> MutexGuard<'static, Option<RunningLoad>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on signals tidy up. To be called before other threads are started.
///
/// # Errors
/// The kernel's.
pub fn tidy_up_on_signals() -> Result<()> {
    let signals: SigSet = SIGNALS.into_iter().collect();
    signals.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
    let wait = move || {
        let Ok(signal) = signals.wait() else { return };
        // The lock stays with this thread, so that nothing is started behind.
        let running = running();
        running.iter().for_each(RunningLoad::end);
        std::process::exit(128 + signal as i32);
    };
    let thread = std::thread::Builder::new().name("signals".to_owned());
    thread.spawn(wait).context("starting a thread")?;
    Ok(())
}

/// Runs `command`, whose files are in `folder`, which `fill` fills and which is there until `read` has
/// looked at it.
///
/// # Errors
/// When the folder can't be made, filled or removed, or the program can't be started.
pub fn run_in<T>(
    folder: &Path,
    command: &mut Command,
    fill: impl FnOnce() -> Result<()>,
    read: impl FnOnce(&Output) -> T,
) -> Result<T> {
    let start = || {
        let mut now = running();
        let running = now.insert(RunningLoad {
            process: None,
            folder: folder.to_owned(),
        });
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        fill()?;
        let child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| {
                let program = Path::new(command.get_program()).display();
                format!("starting {program}; install it, or have it in the guest's ramdisk")
            })?;
        running.process = Some(Pid::from_raw(i32::try_from(child.id())?));
        anyhow::Ok(child)
    };
    let done = start().and_then(|child| Ok(child.wait_with_output()?));
    let done = done.map(|output| read(&output));
    // Its number may be another's from now on.
    *running() = None;
    let removed = fs::remove_dir_all(folder).with_context(|| folder.display().to_string());
    let done = done?;
    removed.map(|()| done)
}
