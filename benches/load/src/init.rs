// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The program's life: on a host a line protocol, in a guest all of userland.

use std::fs;
use std::io::stdin;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::termios::{SetArg, cfmakeraw, tcgetattr, tcsetattr};

use crate::answer;
use crate::commands::answer_commands;
use crate::device::in_guest;
use crate::signals::tidy_up_on_signals;
use crate::teams;

/// Carries out the commands on stdin. With `turns N` does so many turns, as a process of a build. As the
/// first process of a guest it mounts what it reads, and powers off at the end.
pub fn run() -> ExitCode {
    if in_guest() {
        first_process();
    }
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [word, count] = &words[..] {
        if word == teams::TURNS {
            return teams::turns(count);
        }
    }
    match tidy_up_on_signals().and_then(|()| answer_commands()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vcpufreq-load: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// It must not return: the kernel would panic.
fn first_process() -> ! {
    if let Err(error) = set_up().and_then(|()| answer_commands()) {
        println!("{}", answer::line(&Err(error.context("guest"))));
    }
    let Err(error) = reboot(RebootMode::RB_POWER_OFF);
    let error = anyhow::Error::from(error).context("guest: cannot power off");
    println!("{}", answer::line(&Err(error)));
    loop {
        std::thread::park();
    }
}

fn set_up() -> Result<()> {
    // rt-app's files need room, which a large ramdisk hasn't left in its own tmpfs.
    for (kind, path) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/tmp"),
        ("debugfs", "/sys/kernel/debug"),
    ] {
        let there = fs::create_dir_all(path);
        let mounted = mount(Some(kind), path, Some(kind), MsFlags::empty(), None::<&str>);
        // The kernel may have mounted devtmpfs of its own accord, and have no debugfs.
        if !["devtmpfs", "debugfs"].contains(&kind) {
            there?;
            mounted.with_context(|| format!("mounting {kind} at {path}"))?;
        }
    }
    // It samples memory 200 times a second, which would be measured.
    let sampling = Path::new("/sys/module/damon_stat/parameters/enabled");
    if sampling.exists() {
        fs::write(sampling, "N")?;
    }
    let console = stdin();
    // No echo, no translation: what is read is what was written.
    let mut raw = tcgetattr(&console)?;
    cfmakeraw(&mut raw);
    Ok(tcsetattr(&console, SetArg::TCSANOW, &raw)?)
}
