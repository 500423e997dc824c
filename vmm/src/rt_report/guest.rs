// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest that is measured, through a shell in it.

use anyhow::Context as _;
use vcpufreq_rt::Cpus;

use super::{args::ReportArgs, running::Running, shell::Shell};
use vcpufreq_device::host::monotonic_ns;

/// How often the clocks are compared.
const LOOKS: u32 = 5;

/// A guest and its CPUs.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) shell: Shell,
    pub(super) cpus: Cpus,
    pub(super) others: Cpus,
}

impl Guest {
    pub(super) fn new(
        command: &str,
        cpus: Cpus,
        args: &ReportArgs,
        running: &Running,
    ) -> anyhow::Result<Self> {
        let shell = Shell::by(command, running)?;
        shell.require(&args.loads).context("in the guest")?;
        let others = args.guest_others.clone().unwrap_or_default();
        Ok(Self {
            shell,
            cpus,
            others,
        })
    }

    /// What to add to the guest's `CLOCK_MONOTONIC` for the host's, in µs, and how far off that may
    /// be: the guest looked at its clock some time between the question and the answer, and what
    /// all of the answers allow is left.
    pub(super) fn clocks(&self) -> anyhow::Result<(i64, u64)> {
        let mut allowed = (i64::MIN, i64::MAX);
        for _ in 0..LOOKS {
            let before = monotonic_ns() / 1000;
            let text = self.shell.run("head -n 3 /proc/timer_list\n");
            let after = monotonic_ns() / 1000;
            let guest = now_us(&text.context("asking for the guest's clock")?)
                .context("the guest's /proc/timer_list has no 'now at'; be root there")?;
            let apart = |host: u64| -> anyhow::Result<i64> {
                Ok(i64::try_from(host)? - i64::try_from(guest)?)
            };
            allowed = (allowed.0.max(apart(before)?), allowed.1.min(apart(after)?));
        }
        let width = allowed.1.checked_sub(allowed.0);
        let width = width.filter(|width| *width >= 0);
        let width =
            width.context("the guest's clock doesn't run as the host's; can't compare them")?;
        Ok((allowed.0 + width / 2, width.unsigned_abs().div_ceil(2)))
    }
}

/// `now at 123456789 nsecs`, in µs.
fn now_us(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("now at "))?;
    let ns: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(ns / 1000)
}

#[cfg(test)]
mod tests {
    //! Promise: the guest's clock is read as its kernel writes it.
    use super::*;

    #[test]
    fn the_guests_clock() {
        let text = "Timer List Version: v0.10\nHRTIMER_MAX_CLOCK_BASES: 8\nnow at 17223344 nsecs\n";
        assert_eq!(now_us(text), Some(17_223));
        assert_eq!(now_us("cat: permission denied"), None);
    }
}
