// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Types a line at the prompt of `make lab-shell`, as a person would.

use std::io::{Read as _, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::emulator;

/// What the shell shows when it waits for a line.
const PROMPT: &str = "host# ";

/// Starts `emulator`, types `line` and `exit` when the prompt is there; what the
/// console has shown. The emulator has ended when this returns.
pub fn typed(mut emulator: Command, line: &str, limit: Duration) -> Result<String> {
    let emulator = emulator.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = emulator.spawn().context("cannot start the emulator")?;
    let line = line.to_owned();
    let person = std::thread::spawn({
        let (input, output) = (child.stdin.take(), child.stdout.take());
        move || {
            let (mut input, mut output) = input.zip(output).context("no console")?;
            let mut seen = String::new();
            let mut bytes = [0; 4096];
            let mut typed = false;
            loop {
                let count = output.read(&mut bytes)?;
                if count == 0 {
                    ensure!(typed, "no prompt; the console has shown: {seen}");
                    return Ok(seen);
                }
                seen.push_str(&String::from_utf8_lossy(&bytes[..count]));
                if !typed && seen.contains(PROMPT) {
                    writeln!(input, "{line}; exit")?;
                    typed = true;
                }
            }
        }
    });
    let ended = ended(&mut child, limit);
    let seen = person.join();
    let seen = seen.unwrap_or_else(|_| Err(anyhow::anyhow!("the person panicked")))?;
    ended.with_context(|| format!("the console has shown: {seen}"))?;
    Ok(seen)
}

fn ended(child: &mut Child, limit: Duration) -> Result<()> {
    let status = emulator::wait(child, limit, || ())?;
    ensure!(status.success(), "the emulator failed ({status})");
    Ok(())
}
