// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq scx start`: the scheduler, until a signal or the kernel ends it.

use std::time::Duration;

use anyhow::Context;
use vcpufreq_host_bpf::ScxService;

use super::lock::Lock;
use crate::{
    manager,
    message::warn,
    signals::{EndSignals, Ready, wait},
};

/// The exit code when the kernel has ended the scheduler: the unit isn't to load it again.
const ENDED: u8 = 3;
/// How often to look whether it has.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Loads the scheduler and waits; returns the exit code.
///
/// # Errors
/// What is missing, in the way, or refused, in one line.
pub fn start() -> anyhow::Result<u8> {
    ScxService::check_host()?;
    let lock = Lock::take(Some(std::process::id()))?;
    ScxService::check_no_other()?;
    let signals = EndSignals::take().context("can't wait for signals")?;
    let service = ScxService::start()?;
    manager::ready()?;
    let code = loop {
        if let Ready::Signal(_) = wait(&signals, &[], Some(LOOK_EVERY))? {
            break 0;
        }
        if let Some(why) = service.ended() {
            warn(&format!(
                "the kernel has ended the scheduler ({why}); VMs go on with clamps; start it again"
            ));
            break ENDED;
        }
    };
    drop(service);
    drop(lock);
    Ok(code)
}
