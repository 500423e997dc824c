// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's side, as its first process or as a service: reads a line from the console, carries it
//! out, and answers. `quit` powers off, `restart` reboots, `kexec` restarts
//! the kernel.

use std::io::{BufRead as _, Write as _, stdin, stdout};

use nix::sys::reboot::RebootMode;
use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};
use vcpufreq_load::answer::{self, READY};

use crate::harness::console_commands::Deeds;
use crate::harness::kexec;
use crate::harness::machine::{calm_kernel, mount_kernel_files, power_off};

/// The guest's first process, or a service.
pub fn main() {
    if let Err(error) = serve() {
        println!("{}", answer::line(&Err(error.context("guest"))));
    }
    power_off(RebootMode::RB_POWER_OFF);
}

fn serve() -> anyhow::Result<()> {
    // An init system has mounted them.
    if std::process::id() == 1 {
        mount_kernel_files()?;
    }
    calm_kernel()?;
    let console = stdin();
    // No echo, no translation: what is read is what the host wrote.
    let mut raw = tcgetattr(&console)?;
    cfmakeraw(&mut raw);
    tcsetattr(&console, SetArg::TCSANOW, &raw)?;
    let mut deeds = Deeds::default();
    println!("{READY}");
    stdout().flush()?;
    for line in console.lock().lines() {
        let line = line?;
        match line.trim() {
            "quit" => break,
            "restart" => power_off(RebootMode::RB_AUTOBOOT),
            "kexec" => {
                // Fails only.
                let Err(error) = kexec::restart() else { break };
                println!("{}", answer::line(&Err(error)));
            }
            line => {
                println!("{}", answer::line(&deeds.carry_out(line)));
                stdout().flush()?;
            }
        }
    }
    Ok(())
}
