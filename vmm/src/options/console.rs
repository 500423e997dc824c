// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `--console`: what the user wants at the other end of the guest's console. From text to a
//! checked type, and from that to an open file.

use std::{fs::File, path::PathBuf, str::FromStr};

use anyhow::Context;

use super::values::MemSize;
use crate::vm::console_output::{BoundedFile, ConsoleEnd};

/// What is at the other end of the guest's console.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ConsoleChoice {
    /// Standard input and output.
    #[default]
    Stdio,
    /// Nothing.
    Nothing,
    /// A file takes the output.
    File {
        /// Which one; it is made anew.
        path: PathBuf,
        /// The most that is written to it, in MiB.
        max_mib: u64,
    },
}

impl FromStr for ConsoleChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("'{text}' is no console; write stdio, none or file:PATH,max=SIZE");
        match text {
            "stdio" => return Ok(Self::Stdio),
            "none" => return Ok(Self::Nothing),
            _ => {}
        }
        let file = text.strip_prefix("file:").ok_or_else(wrong)?;
        let (path, max) = file.rsplit_once(",max=").ok_or_else(wrong)?;
        let MemSize(max_mib) = max.parse().map_err(|_| wrong())?;
        if path.is_empty() || max_mib == 0 || max_mib > u64::MAX >> 20 {
            return Err(wrong());
        }
        let path = path.into();
        Ok(Self::File { path, max_mib })
    }
}

impl ConsoleChoice {
    /// Makes the file anew, if it is one.
    ///
    /// # Errors
    /// When it can't be made.
    pub fn open(&self) -> anyhow::Result<ConsoleEnd> {
        Ok(match self {
            Self::Stdio => ConsoleEnd::Stdio,
            Self::Nothing => ConsoleEnd::Nothing,
            Self::File { path, max_mib } => {
                let file = File::create(path).with_context(|| {
                    let path = path.display();
                    format!("can't write the guest's console to {path}; give another --console")
                })?;
                ConsoleEnd::File(BoundedFile {
                    path: path.clone(),
                    file,
                    max: max_mib << 20,
                })
            }
        })
    }
}

#[cfg(test)]
mod tests {
    //! Each syntax gives what it says; nothing else is taken, in one line.
    use super::*;

    #[test]
    fn consoles() {
        let file = |path: &str, max_mib| ConsoleChoice::File {
            path: path.into(),
            max_mib,
        };
        for (text, choice) in [
            ("stdio", ConsoleChoice::Stdio),
            ("none", ConsoleChoice::Nothing),
            ("file:log,max=64", file("log", 64)),
            ("file:/a,b=c,max=1G", file("/a,b=c", 1024)),
        ] {
            assert_eq!(text.parse(), Ok(choice));
        }
        for text in [
            "",
            "null",
            "file:log",
            "file:,max=1M",
            "file:log,max=",
            "file:log,max=0",
            "file:log,max=1T",
            "file:log,max=18446744073709551615",
            "log,max=1M",
        ] {
            let line = text.parse::<ConsoleChoice>().unwrap_err();
            assert!(line.contains("file:PATH,max=SIZE"), "{line}");
            assert_eq!(line.lines().count(), 1, "{line}");
        }
    }
}
