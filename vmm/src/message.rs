// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the program writes: results to stdout; to stderr one line each, and to the host's log those of a
//! process that has no stderr.

use std::{
    env,
    ffi::OsString,
    io::{self, Write},
    os::unix::net::UnixDatagram,
    sync::atomic::{AtomicBool, Ordering},
};

pub use vcpufreq_rt::cli::print;

/// Prints a warning. One write has the whole line, because a VMM may write to the same stderr. A
/// stderr that takes nothing is no reason to end.
pub fn warn(text: &str) {
    let line = format!("{}\n", warning(text));
    let _ = io::stderr().write_all(line.as_bytes());
    if IS_LOGGED.load(Ordering::Relaxed) {
        // The same holds of the log.
        let _ = log(text);
    }
}

static IS_LOGGED: AtomicBool = AtomicBool::new(false);

/// The socket of the host's log: syslog(3).
const LOG: &str = "/dev/log";
/// In a build for tests, another one.
const LOG_OF_TEST: &str = "VCPUFREQ_TEST_LOG";

/// From now on the host's log gets each warning, too: this process' stderr has no reader.
pub fn warn_in_log() {
    IS_LOGGED.store(true, Ordering::Relaxed);
}

/// One datagram of the facility daemon and the level warning. The log adds the time, and may be full.
fn log(text: &str) -> io::Result<()> {
    let of_test = env::var_os(LOG_OF_TEST).filter(|_| cfg!(debug_assertions));
    let socket = UnixDatagram::unbound()?;
    socket.set_nonblocking(true)?;
    // A longer datagram may be refused, and all of it lost.
    let text: String = text.chars().take(16 << 10).collect();
    let line = format!("<28>vcpufreq[{}]: {text}", std::process::id());
    let path = of_test.unwrap_or_else(|| OsString::from(LOG));
    socket.send_to(line.as_bytes(), path).map(|_| ())
}

/// The line of a warning.
pub fn warning(text: &str) -> String {
    format!("vcpufreq: {text}")
}

/// Joins the lines of a parser's error.
pub fn one_line(text: &str) -> String {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    lines.collect::<Vec<_>>().join("; ")
}

/// More than a line has characters.
const LONGEST: usize = 1000;

/// The text of a process that a guest may have taken over: nothing of it acts on a terminal, looks
/// like another line, or fills the screen.
pub fn printable(text: &str) -> String {
    let is_plain = |char: &char| *char == ' ' || char.is_ascii_graphic();
    let chars = text.chars().take(LONGEST);
    chars
        .map(|char| if is_plain(&char) { char } else { '?' })
        .collect()
}

/// clap's text for a usage error, without the usage.
pub fn usage(error: &clap::Error) -> String {
    let text = error.to_string();
    let ends = ["\n\nUsage:", "\n\nFor more information"];
    let end = ends.iter().filter_map(|end| text.find(end)).min();
    one_line(text[..end.unwrap_or(text.len())].trim_start_matches("error: "))
}

/// An error and its causes. A cause that is in the error's own text already isn't repeated.
pub fn chain(error: &anyhow::Error) -> String {
    let mut line = one_line(&error.to_string());
    for cause in error.chain().skip(1) {
        let cause = one_line(&cause.to_string());
        if !line.contains(&cause) {
            line = format!("{line}: {cause}");
        }
    }
    line
}
