// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian's Chromium without a window, for the test that looks at pages (`benches/tests/browser.rs`).
//! It is unpacked and runs in its own tree.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use anyhow::Result;

use crate::arch::Arch;
use crate::cache::{Cache, key};
use crate::packages;
use crate::root::Root;

/// Letters without a font would have no width.
const PACKAGES: [&str; 2] = ["chromium-headless-shell", "fonts-dejavu-core"];
const PROGRAM: &str = "/usr/lib/chromium/chromium-headless-shell";

/// A program that is Chromium: files that it is given are of its current folder.
pub fn program(cache: &Cache, root: &Root) -> Result<PathBuf> {
    let list = PACKAGES.join(",");
    let id = root.id();
    let parts = [&*id, &list].map(str::as_bytes);
    let dir = cache.entry("chromium", &key(parts), |to| {
        let place = (Arch::X86_64, "Chromium (about 100 MB to fetch)");
        packages::unpack(root, to, place, &PACKAGES, &[])
    })?;
    // The entry's place is known when it is whole.
    let program = dir.join("chromium");
    let mut enter = packages::online(&dir.join("tree"));
    enter.arg(PROGRAM);
    let words = [enter.get_program()].into_iter().chain(enter.get_args());
    let words: Vec<_> = words.map(quoted).collect();
    let text = format!("#!/bin/sh\nSHARED=$PWD exec {} \"$@\"\n", words.join(" "));
    fs::write(&program, text)?;
    fs::set_permissions(&program, Permissions::from_mode(0o755))?;
    Ok(program)
}

/// A word of a shell's.
fn quoted(word: &OsStr) -> String {
    format!("'{}'", word.to_string_lossy().replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    //! Promise: a shell takes a word as it is.
    use super::*;

    #[test]
    fn a_quoted_word_is_one() {
        assert_eq!(quoted(OsStr::new("it's $HOME")), r"'it'\''s $HOME'");
    }
}
