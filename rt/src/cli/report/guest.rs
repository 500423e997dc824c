// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest that is measured, through a shell in it.

use anyhow::Context as _;
use vcpufreq_device::host::CpuList;

use super::{args::ReportArgs, running::Running, shell::Shell};

/// A guest and its CPUs.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) shell: Shell,
    pub(super) cpus: CpuList,
    pub(super) others: CpuList,
}

impl Guest {
    pub(super) fn new(
        command: &str,
        cpus: CpuList,
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
}
