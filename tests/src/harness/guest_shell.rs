// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A shell in the lab's guest, for host programs that take a shell command: over a socket to the
//! scenario, and from there over the guest's console.

use std::io::{Read as _, Write as _, stdin};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, ExitStatus};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::harness::vm::Vm;

/// The command, to be given to others.
pub const COMMAND: &str = "/init guest-sh";
const SOCKET: &str = "/run/guest-shell";
/// Stands for a line's end on the console, where a request and its answer are one line each.
const LINE: char = '\u{1f}';
/// Between an answer's parts.
const PART: char = '\u{1e}';

/// In the guest: runs a script; its exit code, stdout and stderr as one line.
pub fn run(script: &str) -> Result<String> {
    let output = Command::new("/bin/sh")
        .args(["-c", &script.replace(LINE, "\n")])
        .output()?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).replace('\n', &LINE.to_string());
    let code = output.status.code().unwrap_or(255);
    let (out, errors) = (text(&output.stdout), text(&output.stderr));
    Ok(format!("{code}{PART}{out}{PART}{errors}"))
}

/// What a script that ends well prints in the guest.
pub fn ask(vm: &mut Vm, script: &str) -> Result<String> {
    let answer = vm.ask(format!("sh {}", on_a_line(script)))?;
    let mut parts = answer.split(PART).map(|part| part.replace(LINE, "\n"));
    let (code, out) = (parts.next(), parts.next().unwrap_or_default());
    ensure!(
        code.as_deref() == Some("0"),
        "in the guest '{script}' ended with {code:?}: {out}{}",
        parts.next().unwrap_or_default()
    );
    Ok(out)
}

fn on_a_line(script: &str) -> String {
    script.replace('\n', &LINE.to_string())
}

/// The command itself: hands stdin over, and the answer back; its exit code.
pub fn relay() -> Result<i32> {
    let mut script = String::new();
    stdin().read_to_string(&mut script)?;
    let mut socket = UnixStream::connect(SOCKET).context(SOCKET)?;
    socket.write_all(script.as_bytes())?;
    socket.shutdown(Shutdown::Write)?;
    let mut answer = String::new();
    socket.read_to_string(&mut answer)?;
    let mut parts = answer.split(PART);
    let code = parts.next().context("no exit code")?.parse()?;
    let text = |part: Option<&str>| part.unwrap_or_default().replace(LINE, "\n");
    print!("{}", text(parts.next()));
    eprint!("{}", text(parts.next()));
    Ok(code)
}

/// Runs a command of the host, and what it asks for in the guest meanwhile.
pub fn with_guest(vm: &mut Vm, mut command: Command) -> Result<ExitStatus> {
    // Of the run before.
    let _ = std::fs::remove_file(SOCKET);
    let listener = UnixListener::bind(SOCKET)?;
    listener.set_nonblocking(true)?;
    let mut child = command.spawn().context("starting the command")?;
    loop {
        match listener.accept() {
            Ok((mut socket, _)) => {
                socket.set_nonblocking(false)?;
                let mut script = String::new();
                socket.read_to_string(&mut script)?;
                let answer = vm.ask(format!("sh {}", on_a_line(&script)))?;
                socket.write_all(answer.as_bytes())?;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                if let Some(status) = child.try_wait()? {
                    return Ok(status);
                }
                // Seldom: a look is a task beside what is measured.
                sleep(Duration::from_millis(20));
            }
            Err(error) => bail!(error),
        }
    }
}
