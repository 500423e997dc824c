// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The reader's end: selects a VMM and reads its answer.

use std::{
    io::Read,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, bail};
use vcpufreq_device::host::HostRoot;
use vcpufreq_rt::KernelHost;

use super::Stats;
use crate::{
    lifecycle::state::{OwnerStatus, StateDir, known},
    patience::patience,
};

/// How long a VMM may take to answer.
const PATIENCE: Duration = patience(5);

/// Asks the VMM whose socket is at `path`.
///
/// # Errors
/// When there is none, or it doesn't answer.
pub fn ask(path: &Path) -> anyhow::Result<Stats> {
    let mut socket = UnixStream::connect(path).with_context(|| {
        format!(
            "no VMM answers at {}; it has ended, or runs with --no-bridge",
            path.display()
        )
    })?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let mut text = String::new();
    socket
        .read_to_string(&mut text)
        .context("the VMM doesn't answer; try again")?;
    if text.is_empty() {
        bail!("the VMM answers root and its own user alone; ask as one of them");
    }
    serde_json::from_str(&text).context("the VMM's answer can't be read; is it of another version?")
}

/// The socket of VMM `pid`, or of the only one that runs.
///
/// # Errors
/// When there is none, or more than one and no `pid`.
pub fn choose(dir: &StateDir, pid: Option<u32>) -> anyhow::Result<PathBuf> {
    if let Some(pid) = pid {
        return Ok(dir.socket(pid)?);
    }
    let running = running(dir)?;
    match running[..] {
        [pid] => Ok(dir.socket(pid)?),
        [] => bail!("no VMM of this user runs; start one with vcpufreq run"),
        _ => {
            let pids: Vec<_> = running.iter().map(u32::to_string).collect();
            bail!(
                "several VMMs run; give the process of one: {}",
                pids.join(", ")
            )
        }
    }
}

/// Processes of the VMMs of this user that run.
///
/// # Errors
/// When the directory of records can't be read.
pub fn running(dir: &StateDir) -> anyhow::Result<Vec<u32>> {
    let host = HostRoot::default();
    let all = dir.list()?;
    let records = all.iter().filter_map(|(_, record)| known(record));
    Ok(records
        .filter(|record| record.owner.status(&KernelHost::from(&host)) == OwnerStatus::InUse)
        .map(|record| record.owner.pid)
        .collect())
}
