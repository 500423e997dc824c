// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The service as a process, and what the kernel has of it.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::query::ProgInfoIter;
use libbpf_rs::{MapCore as _, MapFlags, MapHandle};
use vcpufreq_host_bpf::PINS;

use super::super::ext_server::{STATE, until};
use crate::harness::sysfs;
use crate::harness::vmm::{KERNEL, SOCKET};
use crate::harness::wait::{SOON, settled, wait_for, wait_until};

pub const PROGRAM: &str = "/bin/vcpufreq";
const OPS: &str = "/sys/kernel/sched_ext/root/ops";
const LOCK: &str = "/run/vcpufreq-scx";
const PATIENCE: Duration = Duration::from_secs(10);

/// `vcpufreq scx` with these words.
pub fn scx(words: &[&str]) -> Result<Output> {
    let mut command = Command::new(PROGRAM);
    Ok(command.arg("scx").args(words).output()?)
}

/// Exit code and the lines that it writes to both.
pub fn said(output: &Output) -> (Option<i32>, String) {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    (
        output.status.code(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

/// `start`, which isn't to start: its one line.
pub fn refused() -> Result<String> {
    let (code, text) = said(&scx(&["start"])?);
    if code != Some(2) || text.lines().count() != 1 {
        bail!("not refused in a line: exit code {code:?}, {text}");
    }
    Ok(text.trim().to_owned())
}

/// `run` with this actuator, or `serve` on x86-64, which isn't to start: its one line.
pub fn vm_refused() -> Result<String> {
    let mut command = Command::new(PROGRAM);
    match cfg!(target_arch = "aarch64") {
        true => command.args(["run", "--kernel", KERNEL]),
        false => command.args(["serve", "--socket", SOCKET, "--cpus", "1"]),
    };
    command.args(["--actuator", "scx"]);
    command.stdin(Stdio::null()).stdout(Stdio::null());
    // One that starts all the same is killed.
    let process = ServiceProcess(command.stderr(Stdio::piped()).spawn()?);
    let (code, text) = process.ended().context("a VM is not refused")?;
    ensure!(code == Some(2) && text.lines().count() == 1, "{text}");
    Ok(text.trim().to_owned())
}

/// The service, running.
pub struct ServiceProcess(Child);

impl ServiceProcess {
    /// Starts it and waits until it reports that it runs.
    pub fn start() -> Result<Self> {
        let mut command = Command::new(PROGRAM);
        command.args(["scx", "start"]);
        let child = command.stderr(Stdio::piped()).spawn()?;
        let mut service = Self(child);
        wait_until("a status of the service's", PATIENCE, || {
            if let Some(status) = service.0.try_wait()? {
                bail!("the service ended with {status}: {}", service.text());
            }
            Ok(said(&scx(&["status"])?).0 == Some(0))
        })?;
        Ok(service)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// kill -9.
    pub fn kill(mut self) -> Result<()> {
        self.0.kill()?;
        self.0.wait()?;
        Ok(())
    }

    /// Waits for its end; exit code, and what it wrote.
    pub fn ended(mut self) -> Result<(Option<i32>, String)> {
        let status = wait_for("the process' end", PATIENCE, || Ok(self.0.try_wait()?))?;
        Ok((status.code(), self.text()))
    }

    fn text(&mut self) -> String {
        let text = self.0.stderr.take().map(std::io::read_to_string);
        text.and_then(Result::ok).unwrap_or_default()
    }
}

/// Of a scenario that fails, too.
impl Drop for ServiceProcess {
    fn drop(&mut self) {
        // Fails for one that has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether its scheduler is the kernel's now.
pub fn in_force() -> bool {
    let is = |file, text: &str| sysfs::text(file).is_ok_and(|now| now == text);
    is(STATE, "enabled") && is(OPS, "vcpufreq")
}

/// Waits until the kernel has no scheduler; virtual ms that it took.
pub fn disabled() -> Result<u128> {
    let start = Instant::now();
    until("disabled")?;
    Ok(start.elapsed().as_millis())
}

/// What a pCPU's runnable vCPUs add to its utilization, as the service counts it.
pub fn sum_of(cpu: u32) -> Result<u32> {
    Ok(sum_and_target(cpu)?.0)
}

/// The same, and what the kernel was given.
pub fn sum_and_target(cpu: u32) -> Result<(u32, u32)> {
    let cpus = MapHandle::from_pinned_path(format!("{PINS}/scx_cpus"))?;
    let entry = cpus.lookup(&cpu.to_ne_bytes(), MapFlags::ANY)?;
    let entry = entry.as_deref().context("no such pCPU")?;
    let mut words = entry.chunks_exact(4).filter_map(<[u8]>::first_chunk);
    let mut word = || words.next().copied().map(u32::from_ne_bytes);
    word().zip(word()).context("a short entry")
}

/// What a service that has ended has left.
pub fn left() -> Result<Vec<String>> {
    let mut left = Vec::new();
    for path in [PINS, LOCK] {
        if fs::exists(path)? {
            left.push(path.to_owned());
        }
    }
    // The kernel frees them a moment later.
    left.extend(settled(2 * SOON, || Ok(programs()), Vec::is_empty)?);
    Ok(left)
}

fn programs() -> Vec<String> {
    let names = ProgInfoIter::default().filter_map(|program| program.name.into_string().ok());
    names
        .filter(|name| name.starts_with("vcpufreq_scx"))
        .collect()
}

/// SysRq-S, by which an administrator ends any scheduler.
pub fn sysrq() -> Result<()> {
    let path = Path::new("/proc/sysrq-trigger");
    fs::write(path, "S").with_context(|| path.display().to_string())
}
