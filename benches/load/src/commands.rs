// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a line asks for, the same on a pipe and on a guest's console:
//!
//! `start NAME STEP...`, `wait NAME`, `join NAME`, `settle WAKES GAP_US`,
//! `now`, `read PATH`, `write PATH VALUE`, `peek CPU ADDRESS`, `insmod PATH OPTIONS...`, `quit`.

use std::fs;
use std::io::{BufRead as _, Write as _, stdin, stdout};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::kmod::{ModuleInitFlags, finit_module};

use crate::answer::{self, READY};
use crate::phases::{Workers, steps};
use crate::registers;
use crate::settle::{above_minimum, wake_all};
use crate::work::{now_ns, pin_to};

/// `MODULE_INIT_COMPRESSED_FILE` of `include/uapi/linux/module.h`.
const COMPRESSED: ModuleInitFlags = ModuleInitFlags::from_bits_retain(4);

/// Serves lines until `quit` or the end of input.
pub fn answer_commands() -> Result<()> {
    let mut workers = Workers::default();
    print(READY)?;
    for line in stdin().lock().lines() {
        let line = line?;
        if line.trim() == "quit" {
            break;
        }
        print(&answer::line(&carry_out(&mut workers, &line)))?;
    }
    Ok(())
}

fn print(text: &str) -> Result<()> {
    let mut out = stdout().lock();
    writeln!(out, "{text}")?;
    Ok(out.flush()?)
}

fn carry_out(workers: &mut Workers, line: &str) -> Result<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let nothing = |()| String::new();
    match words.as_slice() {
        ["start", name, rest @ ..] => workers.start(name, steps(rest)?).map(nothing),
        ["wait", name] => workers.wait(name).map(nothing),
        ["join", name] => Ok(serde_json::to_string(&workers.join(name)?)?),
        ["settle", wakes, gap_us] => {
            wake_all(wakes.parse()?, Duration::from_micros(gap_us.parse()?))?;
            Ok(serde_json::to_string(&above_minimum()?)?)
        }
        ["now"] => Ok(now_ns().to_string()),
        ["read", path] => {
            let text = fs::read_to_string(path).with_context(|| format!("reading {path}"))?;
            Ok(text.trim().replace('\n', "\\n"))
        }
        ["write", path, value @ ..] => {
            let value = value.join(" ");
            fs::write(path, &value)
                .with_context(|| format!("writing '{value}' to {path}"))
                .map(nothing)
        }
        // On the CPU whose register it is, as the kernel's tick does.
        ["peek", cpu, address] => {
            pin_to(&[cpu.parse()?])?;
            let digits = address.strip_prefix("0x").context("an address is 0x...")?;
            let address = u64::from_str_radix(digits, 16)?;
            Ok(registers::read(address)?.to_string())
        }
        ["insmod", path, options @ ..] => insmod(path, &options.join(" ")).map(nothing),
        _ => bail!("not understood: '{line}'"),
    }
}

fn insmod(path: &str, options: &str) -> Result<()> {
    let file = fs::File::open(Path::new(path)).with_context(|| format!("opening {path}"))?;
    let options = std::ffi::CString::new(options)?;
    // Distributions pack their modules, and the kernel unpacks them.
    let packed = [".xz", ".zst", ".gz"].iter().any(|end| path.ends_with(end));
    let flags = if packed {
        COMPRESSED
    } else {
        ModuleInitFlags::empty()
    };
    let needs = if packed {
        ", which needs CONFIG_MODULE_DECOMPRESS"
    } else {
        ""
    };
    finit_module(file, &options, flags).with_context(|| format!("loading {path}{needs}"))
}

#[cfg(test)]
mod tests {
    //! A joined thread's log is JSON.

    use super::*;
    use crate::load_log::LoadLog;

    #[test]
    fn a_log_is_read_as_it_was_written() {
        let mut workers = Workers::default();
        carry_out(&mut workers, "start a mark=start light=1/1/2 mark=end").unwrap();
        let log: LoadLog =
            serde_json::from_str(&carry_out(&mut workers, "join a").unwrap()).unwrap();
        assert!(log.tid > 0 && log.turns > 0);
        assert_eq!([&log.marks[0].name, &log.marks[1].name], ["start", "end"]);
    }
}
