// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `--console`: what the user wants at the other end of the guest's console, from text.

use vcpufreq_vm::console_output::ConsoleEnd;

use super::values::MemSize;

/// Reads `stdio`, `none` or `file:PATH,max=SIZE`.
///
/// # Errors
/// What is to be written instead.
pub fn console_end(text: &str) -> Result<ConsoleEnd, String> {
    let wrong = || format!("'{text}' is no console; write stdio, none or file:PATH,max=SIZE");
    match text {
        "stdio" => return Ok(ConsoleEnd::Stdio),
        "none" => return Ok(ConsoleEnd::Nothing),
        _ => {}
    }
    let file = text.strip_prefix("file:").ok_or_else(wrong)?;
    let (path, max) = file.rsplit_once(",max=").ok_or_else(wrong)?;
    let MemSize(max_mib) = max.parse().map_err(|_| wrong())?;
    if path.is_empty() || max_mib == 0 || max_mib > u64::MAX >> 20 {
        return Err(wrong());
    }
    Ok(ConsoleEnd::File {
        path: path.into(),
        max: max_mib << 20,
    })
}

#[cfg(test)]
mod tests {
    //! Each syntax gives its value; nothing else is taken, in one line.
    use super::*;

    #[test]
    fn consoles() {
        let file = |path: &str, mib: u64| ConsoleEnd::File {
            path: path.into(),
            max: mib << 20,
        };
        for (text, choice) in [
            ("stdio", ConsoleEnd::Stdio),
            ("none", ConsoleEnd::Nothing),
            ("file:log,max=64", file("log", 64)),
            ("file:/a,b=c,max=1G", file("/a,b=c", 1024)),
        ] {
            assert_eq!(console_end(text), Ok(choice));
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
            let line = console_end(text).unwrap_err();
            assert!(line.contains("file:PATH,max=SIZE"), "{line}");
            assert_eq!(line.lines().count(), 1, "{line}");
        }
    }
}
