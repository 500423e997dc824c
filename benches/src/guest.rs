// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest with the load program as its first process.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::BenchArgs;
use crate::load_client::LoadClient;
use crate::machine::Machine;

/// A guest and the threads of its vCPUs, by the pCPU that each is pinned to.
#[derive(Debug)]
pub struct Guest {
    /// The line to the load program in it.
    pub console: LoadClient,
    /// pCPU and thread of each vCPU.
    pub vcpus: Vec<(u32, i32)>,
}

impl Guest {
    /// Boots it, with more words for its command line.
    pub fn boot(machine: &Machine, bridge: bool, words: &str, args: &BenchArgs) -> Result<Self> {
        let words = format!("{} {words}", args.guest_cmdline);
        let mut console = LoadClient::start(command(machine, bridge, words.trim(), args)?)?;
        for module in &args.guest_module {
            console.ask(&format!("insmod {module}"))?;
        }
        let threads = threads(console.pid())?;
        let vcpu = |(number, cpu): (usize, u32)| -> Result<(u32, i32)> {
            let name = format!("vcpu{number}");
            let found = threads.iter().find(|(_, own)| *own == name);
            Ok((
                cpu,
                found
                    .with_context(|| format!("the VMM has no thread {name}"))?
                    .0,
            ))
        };
        let vcpus = machine
            .cpus()
            .into_iter()
            .enumerate()
            .map(vcpu)
            .collect::<Result<_>>()?;
        let mut guest = Self { console, vcpus };
        guest.reserve_as_host();
        if bridge {
            guest.console.ask("read /sys/devices/system/cpu/cpufreq/policy0/scaling_governor")
                .context("the guest has no cpufreq driver; its kernel needs CONFIG_CPUFREQ_VIRT, or name the driver with --guest-module")?;
        }
        Ok(guest)
    }

    /// The guest's fair servers reserve what its pCPUs' do: with a floor on one side alone,
    /// that would be measured. A guest's kernel without them has no floor to lower.
    fn reserve_as_host(&mut self) {
        for (vcpu, (pcpu, _)) in self.vcpus.iter().enumerate() {
            let Ok(ns) = fs::read_to_string(fair_server(pcpu)) else {
                continue;
            };
            let (ns, file) = (ns.trim(), fair_server(vcpu));
            let own = self.console.ask(&format!("read {file}"));
            if own.is_ok_and(|own| own != ns)
                && let Err(error) = self.console.ask(&format!("write {file} {ns}"))
            {
                eprintln!("vcpufreq: the guest's fair server isn't as the host's: {error:#}");
            }
        }
    }
}

/// Where a CPU's fair server is: its reservation is a floor beneath the frequencies of a
/// small CPU.
fn fair_server(cpu: impl std::fmt::Display) -> String {
    format!("/sys/kernel/debug/sched/fair_server/cpu{cpu}/runtime")
}

/// `vcpufreq run` with a vCPU pinned to each pCPU, mirroring it.
fn command(machine: &Machine, bridge: bool, cmdline: &str, args: &BenchArgs) -> Result<Command> {
    let program: PathBuf = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(program);
    let cpus = machine.cpus();
    command
        .args(["run", "--mem", "256", "--host-topology", "--kernel"])
        .arg(&machine.guest.kernel)
        .arg("--initrd")
        .arg(&machine.guest.initrd)
        .arg("--cmdline")
        .arg(format!(
            "console=ttyS0 quiet panic=-1 rdinit=/bin/vcpufreq-load {cmdline}"
        ))
        .args(["--cpus", &cpus.len().to_string()]);
    for (vcpu, pcpu) in cpus.iter().enumerate() {
        command.arg("--pin").arg(format!("{vcpu}={pcpu}"));
    }
    if bridge {
        command.args(["--path", &args.path, "--clamp", &args.clamp]);
        if let Some(parent) = &args.cgroup_parent {
            command.arg("--cgroup-parent").arg(parent);
        }
    } else {
        command.arg("--no-bridge");
    }
    Ok(command)
}

/// Whether a thread of this name runs a vCPU: `vcpu` and its number. The VMM's own
/// first thread is called `vcpufreq`.
pub fn runs_vcpu(name: &str) -> bool {
    let number = name.strip_prefix("vcpu");
    number.is_some_and(|number| number.parse::<u16>().is_ok())
}

/// The threads of a process, with their names.
pub fn threads(pid: u32) -> Result<Vec<(i32, String)>> {
    let tasks = format!("/proc/{pid}/task");
    let mut found = Vec::new();
    for entry in fs::read_dir(&tasks)
        .with_context(|| tasks.clone())?
        .flatten()
    {
        let tid = entry.file_name().to_string_lossy().parse()?;
        // A thread that ends meanwhile has no name any more.
        let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
        found.push((tid, name.trim().to_owned()));
    }
    found.sort_unstable();
    Ok(found)
}

#[cfg(test)]
mod tests {
    //! Threads are told apart by their names.

    use super::runs_vcpu;

    #[test]
    fn the_program_is_no_vcpu() {
        let rows = [("vcpu0", true), ("vcpu17", true), ("vcpufreq", false)];
        for (name, runs) in rows {
            assert_eq!(runs_vcpu(name), runs, "{name}");
        }
        assert!(!runs_vcpu("vcpu") && !runs_vcpu("requests"));
    }
}
