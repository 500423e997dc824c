// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's side: reads a line from the console, carries it out, answers
//! `@ok ANSWER` or `@error WHY`. `quit` powers off, `restart` reboots.

use std::io::{BufRead as _, Write as _, stdin, stdout};

use nix::sys::reboot::RebootMode;
use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};

use crate::harness::console_commands::Deeds;
use crate::harness::machine::{calm_kernel, mount_kernel_files, power_off};

/// The guest's first process.
pub fn main() {
    if let Err(error) = serve() {
        println!("@error guest: {error:#}");
    }
    power_off(RebootMode::RB_POWER_OFF);
}

fn serve() -> anyhow::Result<()> {
    mount_kernel_files()?;
    calm_kernel()?;
    let console = stdin();
    // No echo, no translation: what is read is what the host wrote.
    let mut raw = tcgetattr(&console)?;
    cfmakeraw(&mut raw);
    tcsetattr(&console, SetArg::TCSANOW, &raw)?;
    let mut deeds = Deeds::default();
    println!("@ready");
    stdout().flush()?;
    for line in console.lock().lines() {
        let line = line?;
        match line.trim() {
            "quit" => break,
            "restart" => power_off(RebootMode::RB_AUTOBOOT),
            line => {
                let answer = match deeds.carry_out(line) {
                    Ok(answer) => format!("@ok {answer}"),
                    Err(error) => format!("@error {error:#}"),
                };
                println!("{answer}");
                stdout().flush()?;
            }
        }
    }
    Ok(())
}
