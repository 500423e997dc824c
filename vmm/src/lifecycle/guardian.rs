// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A small process that outlives the VMM and cleans up after it, however that
//! ends.
//!
//! ```text
//! VMM ──────────────── pipe, write end ───────────────▶ guardian's stdin
//!  the kernel closes it when the VMM is gone, kill -9 included ─▶ end of file
//! ```
//! It starts before the VMM makes anything, in a session of its own, and ignores signals that end
//! process groups. It knows the VMM by its record and its terminal only. A VMM that ends by itself
//! has removed its record before; then the guardian has nothing to do and ends.

use std::{
    io::{self, IsTerminal, Read, Write},
    os::fd::AsFd,
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    thread::sleep,
    time::Duration,
};

use anyhow::{Context, bail};
use nix::{
    sys::termios::{LocalFlags, OutputFlags, SetArg, Termios, tcgetattr, tcsetattr},
    unistd::setsid,
};
use vcpufreq_device::host::HostRoot;
use vcpufreq_rt::KernelHost;

use crate::{
    lifecycle::cleanup::{Cleaned, Cleaner},
    lifecycle::state::{self, NoRecord, OwnerStatus},
    sys,
};

/// The guardian's output when it is on guard.
const READY: &[u8] = b"on guard\n";
/// How often to look whether a VMM that is ending has ended. It takes some
/// milliseconds, or as long as a device keeps one of its threads in the kernel.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// How long to try to remove a cgroup whose processes are ending.
const PATIENCE: Duration = Duration::from_secs(60);

/// A guardian, seen from its VMM.
#[derive(Debug)]
pub struct Guardian {
    child: Child,
    alive: Option<ChildStdin>,
}

impl Guardian {
    /// Starts one for this process, whose record will be at `record`; it is on
    /// guard when this returns.
    ///
    /// # Errors
    /// When the process can't be started.
    pub fn start(record: &Path) -> anyhow::Result<Self> {
        let mut child = Command::new("/proc/self/exe")
            .arg("guardian")
            .arg(record)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(console())
            .spawn()
            .context("can't start the guardian; check that /proc is mounted and processes can be started")?;
        let alive = child.stdin.take();
        let mut said = Vec::new();
        let mut output = child.stdout.take().context("the guardian has no output")?;
        output
            .by_ref()
            .take(READY.len() as u64)
            .read_to_end(&mut said)
            .context("can't hear from the guardian")?;
        if said != READY {
            let status = child.wait().context("the guardian did not start")?;
            bail!("the guardian ended at once with {status}; try again");
        }
        Ok(Self { child, alive })
    }

    /// Ends the guardian of a VMM that ends and has removed its record. If a record is left, drop
    /// the guardian instead: it stays on guard until this process is gone.
    pub fn dismiss(mut self) {
        drop(self.alive.take());
        // It can't fail for a child that hasn't been waited for.
        let _ = self.child.wait();
    }
}

/// The VMM's terminal, if it has one: killed in raw mode, it can't put it back.
fn console() -> Stdio {
    let stdin = io::stdin();
    let terminal = stdin
        .is_terminal()
        .then(|| stdin.as_fd().try_clone_to_owned());
    match terminal {
        Some(Ok(terminal)) => terminal.into(),
        Some(Err(_)) | None => Stdio::null(),
    }
}

/// A terminal as it was before the VMM.
struct Terminal(Termios);

impl Terminal {
    /// That of stderr, if it is one.
    fn of_stderr() -> Option<Self> {
        tcgetattr(io::stderr()).ok().map(Self)
    }

    /// Puts it back if it is in raw mode. A shell that is at its prompt by now
    /// edits lines with output processing on: its terminal is left alone.
    fn put_back(&self) {
        let raw = tcgetattr(io::stderr()).is_ok_and(|now| {
            let cooked = now.output_flags.contains(OutputFlags::OPOST);
            !cooked && !now.local_flags.contains(LocalFlags::ISIG)
        });
        if raw {
            // A terminal that is gone needs no settings.
            let _ = tcsetattr(io::stderr(), SetArg::TCSANOW, &self.0);
        }
    }
}

/// The guardian's own life: until the VMM whose record is at `record` is gone
/// and nothing of it is left.
///
/// # Errors
/// When it could not go on guard, or something could not be removed; then the
/// record stays for the next start or cleanup.
pub fn guard(record: &Path) -> anyhow::Result<()> {
    sys::ignore_group_signals();
    // Fails for the leader of a process group only, which a child isn't.
    setsid().context("can't leave the session")?;
    let terminal = Terminal::of_stderr();
    let mut output = io::stdout();
    output.write_all(READY)?;
    output.flush()?;
    wait_for_end_of_file();
    // A VMM that ends by itself puts it back, then removes its record.
    if let Some(terminal) = terminal.filter(|_| record.exists()) {
        terminal.put_back();
    }
    clean_after(record)
}

/// The VMM never writes: what arrives is the end of the file. A signal
/// interrupts at most.
fn wait_for_end_of_file() {
    let mut byte = [0];
    loop {
        match io::stdin().read(&mut byte) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // There is nothing to wait for any more.
            Err(_) => return,
        }
    }
}

fn clean_after(path: &Path) -> anyhow::Result<()> {
    let host = HostRoot::default();
    let cleaner = Cleaner {
        patience: PATIENCE,
        ..Cleaner::new(&host)
    };
    let mut cleaned = Cleaned::default();
    match state::read(path) {
        Ok(record) => {
            cleaner.check(path, &record)?;
            // Its files are closed a moment before the process is gone.
            while record.owner.status(&KernelHost::from(&host)) == OwnerStatus::InUse {
                sleep(LOOK_EVERY);
            }
            cleaner.by_record(path, &record, &mut cleaned);
        }
        // Removed by the VMM itself, or never finished.
        Err(NoRecord::Gone | NoRecord::Wrong(_)) => state::remove(path)?,
        Err(why) => return Err(why.into()),
    }
    if let Some(left) = cleaned.left.first() {
        bail!("{left}");
    }
    Ok(())
}
