// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The program's end.

use std::{
    ffi::OsString,
    io::{self, Read as _, Write as _},
    os::{
        fd::AsFd as _,
        unix::{net::UnixStream, process::ExitStatusExt as _},
    },
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use clap::Args;
use nix::poll::PollFlags;
use vcpufreq_bridge::TUNED_AT_MOST;

use super::wire::{LINE, Lasts, TuneAnswer, TuneReply, TuneVerb, VERSION};
use crate::{
    lifecycle::state::StateDir,
    message::printable,
    patience::patience,
    stats::{self, VmmSocket},
    sys::{connect_now, is_ready, uninterrupted},
};

/// How long a VMM may take to answer, in all.
const PATIENCE: Duration = patience(5);
const LATE: &str = "the VMM doesn't answer in time; try again";

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
        let still = || lasts(args.pid, handle);
        return vmm
            .wait_for_end(handle, (args.lasts.0.min(TUNED_AT_MOST), PATIENCE), still)
            .map(|()| 0);
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

/// How long what has this handle lasts from now on, of what VMM `pid` says to `vcpufreq stats`.
fn lasts(pid: u32, handle: u64) -> anyhow::Result<Option<Duration>> {
    let stats = stats::ask(&VmmSocket::find(&StateDir::of_user()?, pid)?)?;
    let mut tunings = stats.tunings.iter();
    let tuning = tunings.find(|tuning| tuning.handle == handle);
    Ok(tuning.map(|tuning| Duration::from_millis(tuning.left_ms).min(TUNED_AT_MOST)))
}

/// A connection to a VMM. A guest may have taken that over: what it answers has a largest size and a
/// latest time, and nothing of it acts on a terminal.
pub(super) struct TuneConnection {
    stream: UnixStream,
    /// What it has sent of a line.
    input: Vec<u8>,
    /// When a line is too late.
    until: Instant,
}

impl TuneConnection {
    fn to(pid: u32) -> anyhow::Result<Self> {
        Self::at(&StateDir::of_user()?.tune_socket(pid)?, PATIENCE)
    }

    /// The VMM at `path`, which may take so long to answer.
    pub fn at(path: &Path, patience: Duration) -> anyhow::Result<Self> {
        let connected = connect_now(path);
        let stream = connected.with_context(|| {
            format!(
                "no VMM of this user takes calls at {}; check PID with vcpufreq stats, or try again",
                path.display()
            )
        })?;
        Ok(Self {
            stream,
            input: Vec::new(),
            until: Instant::now() + patience,
        })
    }

    /// The handle that a call is about.
    pub fn call(&mut self, call: TuneVerb) -> anyhow::Result<u64> {
        // No wait: nothing else was sent.
        let sent = self.stream.write_all(call.line()?.as_bytes());
        // What it says before it hangs up counts.
        match self.answer().and_then(|answer| answer.context(LATE)) {
            Ok(TuneAnswer::Handle(handle)) => Ok(handle),
            Ok(TuneAnswer::Error(why)) => bail!("{}", printable(&why)),
            Ok(TuneAnswer::Ended(_)) => bail!("the VMM's answer is to no call"),
            Err(error) => match sent {
                Ok(()) => Err(error),
                Err(_) => bail!("the VMM takes no calls of this user"),
            },
        }
    }

    /// Waits until what has this handle is in force no longer: `lasts`, unless another client has
    /// prolonged that, which `still` tells, and `patience`.
    fn wait_for_end(
        &mut self,
        handle: u64,
        (mut lasts, patience): (Duration, Duration),
        still: impl Fn() -> anyhow::Result<Option<Duration>>,
    ) -> anyhow::Result<()> {
        loop {
            self.until = Instant::now() + lasts + patience;
            match self.answer()? {
                Some(TuneAnswer::Ended(ended)) if ended == handle => return Ok(()),
                Some(_) => bail!("the VMM's answer is to no call"),
                None => lasts = still()?.context("the VMM doesn't tell that it has ended")?,
            }
        }
    }

    /// The next line; none if it is too late.
    fn answer(&mut self) -> anyhow::Result<Option<TuneAnswer>> {
        let mut piece = [0; LINE];
        loop {
            let left = self.until.saturating_duration_since(Instant::now());
            if let Some(end) = self.input.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.input.drain(..=end).collect();
                return read(&line).map(Some);
            }
            if self.input.len() >= LINE {
                return read(&self.input).map(Some);
            }
            if left.is_zero() || !is_ready(self.stream.as_fd(), PollFlags::POLLIN, left) {
                return Ok(None);
            }
            let room = LINE - self.input.len();
            // An error is that it has closed a call unread.
            match uninterrupted(|| self.stream.read(&mut piece[..room])).unwrap_or(0) {
                0 => {
                    bail!("the VMM has hung up: it has ended, or takes calls of another user alone")
                }
                bytes => self.input.extend(&piece[..bytes]),
            }
        }
    }
}

fn read(line: &[u8]) -> anyhow::Result<TuneAnswer> {
    match serde_json::from_slice::<TuneReply>(line) {
        Ok(reply) if reply.version == VERSION => Ok(reply.reply),
        _ => bail!("the VMM's answer can't be read; is it of another version?"),
    }
}

#[cfg(test)]
mod tests {
    //! What stands for a VMM that a guest has taken over, keeps no client from its end. One that hangs
    //! up is no late one.
    use std::os::unix::net::UnixListener;

    use nix::sys::socket::{Backlog, listen};

    use super::*;

    /// A socket at which a VMM does this with its first client.
    fn vmm(
        answer: impl FnOnce(UnixStream) + Send + 'static,
    ) -> (tempfile::TempDir, TuneConnection) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("13.tune");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || answer(listener.accept().unwrap().0));
        let connection = TuneConnection::at(&path, Duration::from_millis(50));
        (dir, connection.unwrap())
    }

    const CALL: TuneVerb = TuneVerb::Untune { handle: 7 };

    #[test]
    fn one_that_takes_no_connections_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("13.tune");
        let listener = UnixListener::bind(&path).unwrap();
        listen(&listener, Backlog::new(0).unwrap()).unwrap();
        let _waits = UnixStream::connect(&path).unwrap();
        let refused = TuneConnection::at(&path, PATIENCE).map(drop).unwrap_err();
        assert!(refused.to_string().contains("takes calls"), "{refused}");
    }

    #[test]
    fn a_byte_now_and_then_is_given_up() {
        let (_dir, mut connection) = vmm(|mut stream| {
            while stream.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let late = connection.call(CALL).unwrap_err().to_string();
        assert!(late == LATE || late.contains("can't be read"), "{late}");
    }

    #[test]
    fn an_answer_without_an_end_is_given_up() {
        let (_dir, mut connection) =
            vmm(|mut stream| while stream.write_all(&[b' '; 4096]).is_ok() {});
        connection.until = Instant::now() + PATIENCE;
        let line = connection.call(CALL).unwrap_err().to_string();
        assert!(line.contains("can't be read"), "{line}");
    }

    #[test]
    fn one_that_hangs_up_without_a_look_is_not_late() {
        let (_dir, mut connection) =
            vmm(|stream| assert!(is_ready(stream.as_fd(), PollFlags::POLLIN, PATIENCE)));
        connection.until = Instant::now() + PATIENCE;
        let line = connection.call(CALL).unwrap_err().to_string();
        assert!(line.contains("has hung up"), "{line}");
    }

    #[test]
    fn an_end_is_waited_for_as_long_as_it_lasts() {
        let (_dir, mut connection) = vmm(|stream| {
            // Until the client has hung up.
            (&stream).read_to_end(&mut Vec::new()).unwrap();
        });
        let waits = std::cell::Cell::new(2);
        let still = || {
            waits.set(waits.get() - 1);
            Ok((waits.get() > 0).then_some(Duration::from_millis(1)))
        };
        let times = (Duration::from_millis(1), Duration::ZERO);
        let line = connection.wait_for_end(7, times, still).unwrap_err();
        assert!(line.to_string().contains("doesn't tell"), "{line}");
        assert_eq!(waits.get(), 0, "prolonged once");
        let end = TuneAnswer::Ended(7).line().unwrap();
        let (_dir, mut connection) = vmm(move |mut stream| {
            stream.write_all(end.as_bytes()).unwrap();
            (&stream).read_to_end(&mut Vec::new()).unwrap();
        });
        let times = (Duration::ZERO, PATIENCE);
        connection.wait_for_end(7, times, || Ok(None)).unwrap();
    }
}
