// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How a program in a guest, or on a pipe, answers a line: `@ok ANSWER` or `@error WHY`, and `@ready`
//! once, before the first one. On a console a kernel's messages stand between answers.

use anyhow::{Result, anyhow};

/// Printed once, when lines are read.
pub const READY: &str = "@ready";
const OK: &str = "@ok";
const ERROR: &str = "@error";

/// The line that answers.
#[must_use]
pub fn line(outcome: &Result<String>) -> String {
    match outcome {
        Ok(answer) => format!("{OK} {answer}"),
        Err(error) => format!("{ERROR} {error:#}"),
    }
}

/// What a line answers, [`READY`] with nothing; `None` for a line that is no answer.
#[must_use]
pub fn read(line: &str) -> Option<Result<String>> {
    let line = line.trim_end();
    let words = [OK, READY, ERROR].into_iter();
    let start = words.filter_map(|word| line.find(word)).min()?;
    let (word, text) = line[start..]
        .split_once(' ')
        .unwrap_or((&line[start..], ""));
    match word {
        OK | READY => Some(Ok(text.to_owned())),
        ERROR => Some(Err(anyhow!("{text}"))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    //! Promise: what one end writes the other reads, behind a kernel's message too.
    use super::*;

    #[test]
    fn an_answer_is_read_as_it_was_written() {
        let read = |text: &str| read(text).map(|outcome| outcome.map_err(|why| why.to_string()));
        for outcome in ["", "5 MHz @error"].map(str::to_owned).map(Ok) {
            let written = format!("[  1.0] usb@1: {}\r\n", line(&outcome));
            assert_eq!(read(&written), Some(Ok(outcome.unwrap())));
        }
        let error = anyhow!("no file").context("reading @ok");
        assert_eq!(
            read(&line(&Err(error))),
            Some(Err("reading @ok: no file".to_owned()))
        );
        assert_eq!(read(READY), Some(Ok(String::new())));
        assert_eq!(read("[  1.0] usb@1: connected"), None);
    }
}
