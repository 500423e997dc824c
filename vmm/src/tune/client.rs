// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The program's end.

use std::{
    ffi::OsString,
    io::{self, BufRead as _, BufReader, Read as _, Write as _},
    os::unix::{net::UnixStream, process::ExitStatusExt as _},
    process::Command,
    time::Duration,
};

use anyhow::{Context, bail};
use clap::Args;

use super::wire::{LINE, Lasts, TuneAnswer, TuneReply, TuneVerb, VERSION};
use crate::{lifecycle::state::StateDir, message::printable, patience::patience};

/// How long a VMM may take to answer.
const PATIENCE: Duration = patience(5);

/// Options of `tune`.
#[derive(Debug, Args)]
pub struct TuneArgs {
    /// The VMM's process, as in `vcpufreq stats`
    pub pid: u32,
    /// The vCPU, and with it the others of its domain
    #[arg(long, value_name = "N")]
    pub vcpu: u16,
    /// Requests count as this at least
    #[arg(long, value_name = "KHZ", required_unless_present = "ceiling")]
    pub floor: Option<u32>,
    /// Requests count as this at most. Except with scx, it also limits what other load can raise
    #[arg(long, value_name = "KHZ")]
    pub ceiling: Option<u32>,
    /// For so long, as 200ms or 5s; at most 1 hour
    #[arg(long = "for", value_name = "TIME")]
    pub lasts: Lasts,
    /// Run this meanwhile: its end is the end of floor and ceiling, and its exit code that of tune.
    /// Without it the handle is printed, and tune ends with them
    #[arg(last = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}

/// Sets a floor or a ceiling; returns the exit code.
///
/// # Errors
/// Why nothing was set, or that the VMM has ended before the time.
pub fn tune(args: &TuneArgs) -> anyhow::Result<u8> {
    let mut vmm = TuneConnection::to(args.pid)?;
    let handle = vmm.call(TuneVerb::Tune {
        vcpu: args.vcpu,
        floor_khz: args.floor,
        ceiling_khz: args.ceiling,
        for_ms: millis(args.lasts),
    })?;
    let [program, arguments @ ..] = &args.command[..] else {
        writeln!(io::stdout(), "{handle}").context("can't print the handle")?;
        return vmm.wait_for_end(handle).map(|()| 0);
    };
    let ran = Command::new(program).args(arguments).status();
    let shown = program.to_string_lossy();
    let status = ran.with_context(|| format!("can't run {shown}; correct CMD"))?;
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal));
    Ok(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(2))
}

/// Has what was set last for so long from now on.
///
/// # Errors
/// When it isn't in force.
pub fn retune(pid: u32, handle: u64, lasts: Lasts) -> anyhow::Result<()> {
    let for_ms = millis(lasts);
    let call = TuneVerb::Retune { handle, for_ms };
    TuneConnection::to(pid)?.call(call).map(drop)
}

/// Ends what was set.
///
/// # Errors
/// When it isn't in force.
pub fn untune(pid: u32, handle: u64) -> anyhow::Result<()> {
    TuneConnection::to(pid)?
        .call(TuneVerb::Untune { handle })
        .map(drop)
}

fn millis(lasts: Lasts) -> u64 {
    u64::try_from(lasts.0.as_millis()).unwrap_or(u64::MAX)
}

/// A connection to a VMM. A guest may have taken that over: what it answers has a largest size, and
/// nothing of it acts on a terminal.
struct TuneConnection(BufReader<UnixStream>);

impl TuneConnection {
    fn to(pid: u32) -> anyhow::Result<Self> {
        let path = StateDir::of_user()?.tune_socket(pid)?;
        let connected = UnixStream::connect(&path);
        let stream = connected.with_context(|| {
            format!(
                "no VMM of this user answers at {}; check PID with vcpufreq stats",
                path.display()
            )
        })?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// The handle that a call is about.
    fn call(&mut self, call: TuneVerb) -> anyhow::Result<u64> {
        let sent = self.0.get_mut().write_all(call.line()?.as_bytes());
        // What it says before it hangs up counts.
        let answer = self.answer();
        match answer {
            Ok(TuneAnswer::Handle(handle)) => Ok(handle),
            Ok(TuneAnswer::Error(why)) => bail!("{}", printable(&why)),
            Ok(TuneAnswer::Ended(_)) => bail!("the VMM's answer is to no call"),
            Err(error) => match sent {
                Ok(()) => Err(error),
                Err(_) => bail!("the VMM takes no calls of this user"),
            },
        }
    }

    /// Waits until what has this handle is in force no longer.
    fn wait_for_end(&mut self, handle: u64) -> anyhow::Result<()> {
        self.0.get_mut().set_read_timeout(None)?;
        let ended = self.answer()?;
        if ended != TuneAnswer::Ended(handle) {
            bail!("the VMM's answer is to no call");
        }
        Ok(())
    }

    fn answer(&mut self) -> anyhow::Result<TuneAnswer> {
        let mut line = Vec::new();
        let limit = u64::try_from(LINE).unwrap_or(u64::MAX);
        let read = (&mut self.0).take(limit).read_until(b'\n', &mut line);
        read.context("the VMM doesn't answer; try again")?;
        if line.is_empty() {
            bail!("the VMM has hung up: it has ended, or takes calls of another user alone");
        }
        match serde_json::from_slice::<TuneReply>(&line) {
            Ok(reply) if reply.version == VERSION => Ok(reply.reply),
            _ => bail!("the VMM's answer can't be read; is it of another version?"),
        }
    }
}
