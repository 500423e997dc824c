// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Scripts that stand for programs.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

/// Makes `text` a program at `path`. Another process writes it, which has ended then: a program can't
/// be started while it is open for writing, and what another test starts has the files of this
/// process open, too, until it is another program.
pub fn write_script(path: &Path, text: &str) {
    let mut shell = Command::new("sh")
        .args(["-c", "cat > \"$0\" && chmod 755 \"$0\""])
        .arg(path)
        .stdin(Stdio::piped())
        .spawn()
        .expect("a shell");
    let mut input = shell.stdin.take().expect("its input");
    input.write_all(text.as_bytes()).expect("it reads");
    drop(input);
    assert!(shell.wait().expect("its end").success(), "{path:?}");
}
