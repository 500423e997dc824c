// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest with the load program as its first process.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use vcpufreq_host::SCHED_DEBUG;
use vcpufreq_load::IO_DEVICE;
use vcpufreq_load::work::pin_thread;

use crate::args::GuestArgs;
use crate::load_client::{LoadClient, QEMU};
use crate::machine::BenchMachine;
use crate::piped::{child, threads};
use crate::variant::{GuestShape, VcpuPins};

/// What a guest can't have on this architecture, above a table.
pub const LIMITS: &str = match cfg!(target_arch = "aarch64") {
    true => "",
    false => {
        "An x86-64 guest has neither frequency invariance nor capacities: it takes its CPUs for equal, and \
         always at full speed\n"
    }
};

/// A guest and the threads of its vCPUs, by the pCPU that each is pinned to.
#[derive(Debug)]
pub struct Guest {
    /// The line to the load program in it.
    pub console: LoadClient,
    /// pCPU and thread of each vCPU.
    pub vcpus: Vec<(u32, i32)>,
    /// The VMM, and QEMU's prefix if there is one.
    pub processes: Vec<u32>,
    /// From the start of those to the load program's first line.
    pub first_process_after: Duration,
    /// Whether it is QEMU's.
    pub qemu: bool,
}

impl Guest {
    /// Boots it, with the options of the bridge for all guests, and more words for its command line.
    pub fn boot(
        machine: &BenchMachine,
        (shape, for_all): (GuestShape, &[&str]),
        words: &str,
        args: &GuestArgs,
    ) -> Result<Self> {
        let words = format!("{} {words}", args.guest_cmdline);
        let shaped = (shape, for_all);
        let command = command(machine, shaped, words.trim(), args)?;
        let started = Instant::now();
        let mut console = LoadClient::start(command)?;
        let first_process_after = started.elapsed();
        for module in &args.guest_module {
            console.ask(&format!("insmod {module}"))?;
        }
        let program = console.pid();
        let qemu = machine.guest.qemu.as_deref();
        let behind = qemu.and_then(|_| child(program, QEMU));
        let processes = behind.into_iter().chain([program]).collect::<Vec<_>>();
        let threads = threads(behind.unwrap_or(program))?;
        let vcpu = |(number, cpu): (usize, u32)| -> Result<(u32, i32)> {
            let name = match qemu {
                Some(_) => format!("CPU {number}/KVM"),
                None => format!("vcpu{number}"),
            };
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
            .collect::<Result<Vec<_>>>()?;
        if qemu.is_some() && shape.bridge.is_none() && shape.pins == VcpuPins::Own {
            // Nothing else binds them.
            for (pcpu, tid) in &vcpus {
                pin_thread(*tid, &[*pcpu])?;
            }
        }
        let mut guest = Self {
            console,
            vcpus,
            processes,
            first_process_after,
            qemu: qemu.is_some(),
        };
        guest.reserve_as_host();
        if shape.bridge.is_some() {
            guest.console.ask("read /sys/devices/system/cpu/cpufreq/policy0/scaling_governor")
                .context("the guest has no cpufreq driver; its kernel needs CONFIG_CPUFREQ_VIRT, or name --kernel, --initrd and the driver's --guest-module")?;
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
            if !own.is_ok_and(|own| own != ns) {
                continue;
            }
            if let Err(error) = self.console.ask(&format!("write {file} {ns}")) {
                eprintln!("vcpufreq: the guest's fair server isn't as the host's: {error:#}");
            }
        }
    }
}

/// Where a CPU's fair server is: its reservation is a floor beneath the frequencies of a
/// small CPU.
fn fair_server(cpu: impl std::fmt::Display) -> String {
    format!("{SCHED_DEBUG}/fair_server/cpu{cpu}/runtime")
}

/// `vcpufreq run`, or `vcpufreq qemu`, with as many vCPUs as there are pCPUs.
fn command(
    machine: &BenchMachine,
    (shape, for_all): (GuestShape, &[&str]),
    cmdline: &str,
    args: &GuestArgs,
) -> Result<Command> {
    let program: PathBuf = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(program);
    let cpus = machine.cpus();
    let cmdline = format!(
        "quiet panic=-1 rdinit=/bin/{} {cmdline}",
        vcpufreq_load::NAME
    );
    let qemu = machine.guest.qemu.as_deref();
    let qemu = qemu.map(|qemu| qemu_command(qemu, machine, &cmdline));
    match qemu {
        Some(qemu) if shape.bridge.is_none() => return Ok(qemu),
        Some(_) => {
            command.arg("qemu");
        }
        None => {
            command
                .args(["run", "--mem", mem_mib(machine), "--kernel"])
                .arg(&machine.guest.kernel)
                .arg("--initrd")
                .arg(&machine.guest.initrd)
                .args(["--cmdline", &format!("console=ttyS0 {cmdline}")]);
            if args.protected {
                command.arg("--protected");
            }
            if machine.guest.disk {
                command.args(["--disk", IO_DEVICE]);
            }
        }
    }
    command.arg(format!("--host-topology={}", shape.topology));
    command.args(["--cpus", &cpus.len().to_string()]);
    for (vcpu, pcpu) in cpus.iter().enumerate() {
        if let Some(pcpus) = pins(machine, shape.pins, *pcpu) {
            command.arg("--pin").arg(format!("{vcpu}={pcpus}"));
        }
        if shape.topology {
            command.args(table(machine, vcpu, *pcpu));
        }
    }
    if let Some(own) = shape.bridge {
        let path = ["--path", &args.path];
        let path = if qemu.is_none() { &path[..] } else { &[] };
        command.args(with_own(own, &[for_all, path].concat()));
        if let Some(parent) = &args.cgroup_parent {
            command.arg("--cgroup-parent").arg(parent);
        }
    } else {
        command.arg("--no-bridge");
    }
    if let Some(qemu) = qemu {
        command
            .arg("--")
            .arg(qemu.get_program())
            .args(qemu.get_args());
    }
    Ok(command)
}

/// The pCPUs that the vCPU of a pCPU may run on; `None` for all.
fn pins(machine: &BenchMachine, pins: VcpuPins, pcpu: u32) -> Option<String> {
    match pins {
        VcpuPins::Anywhere => None,
        VcpuPins::Own => Some(pcpu.to_string()),
        VcpuPins::Cluster => {
            let cpus = machine.cluster_of(pcpu)?.cpus.iter();
            Some(cpus.map(u32::to_string).collect::<Vec<_>>().join(","))
        }
    }
}

/// A guest's own options, and those for all guests that it has not itself; each has a value.
fn with_own<'a>(own: &[&'a str], for_all: &[&'a str]) -> Vec<&'a str> {
    let others = for_all.chunks(2).filter(|option| !own.contains(&option[0]));
    own.iter()
        .copied()
        .chain(others.flatten().copied())
        .collect()
}

/// The option for a vCPU's table where its pCPU's is made up: `run` finds none on the host.
fn table(machine: &BenchMachine, vcpu: usize, pcpu: u32) -> Option<String> {
    let cluster = machine.cluster_of(pcpu).filter(|one| one.made_up)?;
    let khz: Vec<_> = cluster.opps_khz.iter().map(u32::to_string).collect();
    Some(format!("--table={vcpu}={}", khz.join(",")))
}

/// QEMU with as many vCPUs as there are pCPUs.
fn qemu_command(program: &Path, machine: &BenchMachine, cmdline: &str) -> Command {
    let (kind, console, disk) = match cfg!(target_arch = "aarch64") {
        true => ("virt,gic-version=3", "ttyAMA0", "virtio-blk-device"),
        false => ("q35", "ttyS0", "virtio-blk-pci"),
    };
    let mut command = Command::new(program);
    command
        .args(["-accel", "kvm", "-machine", kind])
        .args(["-cpu", "host", "-smp", &machine.cpus().len().to_string()])
        .args(["-m", mem_mib(machine), "-nodefaults", "-display", "none"])
        .arg("-kernel")
        .arg(&machine.guest.kernel)
        .arg("-initrd")
        .arg(&machine.guest.initrd)
        .args(["-append", &format!("console={console} {cmdline}")])
        .args(["-serial", "stdio", "-name", "debug-threads=on"])
        // A kernel that panics reboots.
        .arg("-no-reboot");
    if machine.guest.disk {
        let drive = format!("if=none,id=disk,format=raw,cache=none,file={IO_DEVICE}");
        command.args(["-drive", &drive, "-device", &format!("{disk},drive=disk")]);
    }
    command
}

/// fio's libraries are in the ramdisk, too.
fn mem_mib(machine: &BenchMachine) -> &'static str {
    if machine.guest.disk { "512" } else { "256" }
}

/// Binds the threads of processes to these CPUs, but for those of vCPUs. A thread that ends meanwhile,
/// as that of a stats request, does nothing more.
pub fn keep_on(processes: impl IntoIterator<Item = u32>, cpus: &[u32]) -> Result<()> {
    for pid in processes {
        for (tid, name) in threads(pid)? {
            if !runs_vcpu(&name) {
                pin_living(tid, cpus)?;
            }
        }
    }
    Ok(())
}

fn pin_living(tid: i32, cpus: &[u32]) -> Result<()> {
    match pin_thread(tid, cpus) {
        Err(error) if error.downcast_ref() == Some(&Errno::ESRCH) => Ok(()),
        bound => bound,
    }
}

/// Whether a thread of this name runs a vCPU: `vcpu` and its number, or QEMU's `CPU 0/KVM`. The
/// VMM's own first thread is called `vcpufreq`.
fn runs_vcpu(name: &str) -> bool {
    let of_qemu = name.strip_prefix("CPU ");
    let of_qemu = of_qemu.and_then(|name| name.strip_suffix("/KVM"));
    let number = of_qemu.or(name.strip_prefix("vcpu"));
    number.is_some_and(|number| number.parse::<u16>().is_ok())
}

#[cfg(test)]
mod tests {
    //! Threads are distinguished by their names, and one that has ended is no error; a made-up table
    //! is an option.

    use std::process::Command;

    use super::{VcpuPins, pin_living, pins, runs_vcpu, table, with_own};
    use crate::measure_tests::machine;

    #[test]
    fn a_made_up_table_alone_is_an_option() {
        let mut machine = machine();
        assert_eq!(table(&machine, 0, 1), None);
        machine.clusters[1].made_up = true;
        let option = table(&machine, 0, 1);
        assert_eq!(option.as_deref(), Some("--table=0=700,2800"));
    }

    #[test]
    fn a_guests_own_option_goes_before_that_of_all() {
        let for_all = ["--clamp", "exact", "--path", "auto"];
        assert_eq!(with_own(&[], &for_all), for_all);
        let own = ["--path", "exit", "--sum=false"];
        let both = ["--path", "exit", "--sum=false", "--clamp", "exact"];
        assert_eq!(with_own(&own, &for_all), both);
    }

    #[test]
    fn vcpus_are_pinned_to_a_pcpu_or_a_cluster_or_not() {
        let mut machine = machine();
        machine.clusters[1].cpus = vec![1, 2];
        let of = |how| pins(&machine, how, 2);
        assert_eq!(of(VcpuPins::Own).as_deref(), Some("2"));
        assert_eq!(of(VcpuPins::Cluster).as_deref(), Some("1,2"));
        assert_eq!(of(VcpuPins::Anywhere), None);
    }

    #[test]
    fn a_thread_that_has_ended_is_no_error() {
        let mut child = Command::new("true").spawn().unwrap();
        let tid = i32::try_from(child.id()).unwrap();
        child.wait().unwrap();
        pin_living(tid, &[0]).unwrap();
        assert!(pin_living(0, &[1023]).is_err());
    }

    #[test]
    fn the_program_is_no_vcpu() {
        let rows = [
            ("vcpu0", true),
            ("vcpu17", true),
            ("CPU 3/KVM", true),
            ("vcpufreq", false),
        ];
        for (name, runs) in rows {
            assert_eq!(runs_vcpu(name), runs, "{name}");
        }
        assert!(!runs_vcpu("vcpu") && !runs_vcpu("requests"));
    }
}
