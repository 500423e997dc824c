// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Runs of other programs: what they print is kept, and cargo's is also read
//! for how far it is.

use std::io::{BufReader, Read};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::progress::{Step, above};

/// Settings that make cargo draw its progress bar into a pipe.
pub const CARGO_BAR: [(&str, &str); 3] = [
    ("CARGO_TERM_COLOR", "never"),
    ("CARGO_TERM_PROGRESS_WHEN", "always"),
    ("CARGO_TERM_PROGRESS_WIDTH", "80"),
];

/// This machine's cargo: the one that runs this program.
pub fn machine_cargo() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Runs a command to its end; whether it succeeded, and its output.
pub fn output(command: &mut Command) -> Result<(bool, String)> {
    let output = command
        .output()
        .with_context(|| format!("cannot start {:?}", command.get_program()))?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    Ok((output.status.success(), text))
}

/// Runs a command to its end; on failure its whole output goes to stderr and
/// the error names `what` was being done.
pub fn quietly(command: &mut Command, what: &str) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("{what}: cannot start {:?}", command.get_program()))?;
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        above(|| eprint!("{out}{errors}"));
        bail!("{what} failed ({}); its output is above", output.status);
    }
    Ok(out)
}

/// The same for a cargo with the settings above; `step` shows how far it is.
/// The bar isn't part of the output.
pub fn cargo(command: &mut Command, step: &Step) -> Result<(bool, String)> {
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {:?}", command.get_program()))?;
    let out = child.stdout.take().context("no output")?;
    let errors = child.stderr.take().context("no output")?;
    let (out, errors) = std::thread::scope(|scope| {
        let errors = scope.spawn(|| read(errors, |line| compiled(line).map(|far| step.note(&far))));
        let mut tests = 0;
        let out = read(out, |line| {
            if line.starts_with("test ") {
                tests += 1;
                step.note(&format!("{tests} tests have run"));
            }
            None
        });
        (out, errors.join())
    });
    let status = child.wait()?;
    let mut text = out?;
    // A panic of that thread is one of this program.
    text.push_str(&errors.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?);
    Ok((status.success(), text))
}

/// Hands each line to `each`, also lines that overwrite each other; gives
/// those of which that made nothing.
fn read(from: impl Read, mut each: impl FnMut(&str) -> Option<()>) -> Result<String> {
    let mut kept = String::new();
    let mut line = Vec::new();
    for byte in BufReader::new(from).bytes() {
        let byte = byte?;
        if !matches!(byte, b'\n' | b'\r') {
            line.push(byte);
            continue;
        }
        let text = String::from_utf8_lossy(&line);
        if each(&text).is_none() && !(text.is_empty() && byte == b'\r') {
            kept.push_str(&text);
            kept.push('\n');
        }
        line.clear();
    }
    kept.push_str(&String::from_utf8_lossy(&line));
    Ok(kept)
}

/// From `    Building [===>   ] 3/12: one, two`, how far that is.
fn compiled(line: &str) -> Option<String> {
    let bar = line.trim_start_matches("\u{1b}[K").trim_start();
    let (_, count) = bar.strip_prefix("Building [")?.split_once("] ")?;
    let count = count.split(':').next()?;
    let (done, all) = count.trim().split_once('/')?;
    Some(format!("{done} of {all} compiled"))
}

#[cfg(test)]
mod tests {
    //! Promise: cargo's bar is progress, all else is output.
    use super::*;

    #[test]
    fn bar_is_told_apart() {
        let printed = "\r    Building [>       ] 0/12: one       \r\u{1b}[K   Compiling one v1\n\
                       \r    Building [==>     ] 3/12: two, thr...\r\nerror: x\r\nlast";
        let mut far = Vec::new();
        let kept = read(printed.as_bytes(), |line| {
            compiled(line).map(|text| far.push(text))
        });
        assert_eq!(far, ["0 of 12 compiled", "3 of 12 compiled"]);
        assert_eq!(
            kept.unwrap(),
            "\u{1b}[K   Compiling one v1\n\nerror: x\n\nlast"
        );
    }
}
