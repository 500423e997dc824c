// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The options of `serve` and `qemu`.

use std::{ffi::OsString, path::PathBuf};

use anyhow::bail;
use clap::Args;

use vcpufreq_host::ActuatorChoice;

use super::{ActuatorWish, BoundArgs, BridgeArgs, SandboxArgs, VcpuArgs, values::one_of};
use crate::path;

/// Options of `serve`.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct ServeArgs {
    /// Read options from a TOML file, as run does; flags win
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where the VMM connects.
    #[command(flatten)]
    pub listen: ListenArgs,
    /// The VM.
    #[command(flatten)]
    pub served: ServedArgs,
}

/// What `serve` takes beside a VM: where it waits for a VMM, and for whose.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct ListenArgs {
    /// The socket that the VMM's ivshmem-doorbell connects to
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// A user whose VMM may connect, as libvirt-qemu [default: the one that the
    /// service manager gave the socket to, else this one]
    #[arg(long, value_name = "NAME")]
    pub user: Option<String>,
    /// The process that is served; others are refused
    #[arg(long, value_name = "PID")]
    pub pid: Option<u32>,
    /// The guest's device tree, of vcpufreq dt --in-ram: its registers are in
    /// its RAM, and no VMM connects. The process is that of --pid or --pid-file
    #[arg(long, value_name = "DTB")]
    pub dtb: Option<PathBuf>,
    /// A file with the process that is served by --dtb, which may be made later
    /// (libvirt: /run/libvirt/qemu/NAME.pid)
    #[arg(long, value_name = "PATH")]
    pub pid_file: Option<PathBuf>,
    /// QEMU's control socket (-qmp), which tells the vCPUs' threads, pauses
    /// and resets [default: by the threads' names]
    #[arg(long, value_name = "PATH")]
    pub qmp: Option<PathBuf>,
    /// Put the host back without a guardian; after kill -9 it stays changed
    /// until vcpufreq cleanup, which a unit runs by ExecStopPost=
    #[arg(long)]
    pub no_guardian: bool,
}

impl ListenArgs {
    /// Checks that they tell one way to a VMM.
    ///
    /// # Errors
    /// Names the option that doesn't suit another one, and what to do.
    pub fn check(&self) -> anyhow::Result<()> {
        let by_ram = self.dtb.is_some();
        let at_socket = self.socket.is_some() || self.user.is_some();
        let processes = [self.pid.is_some(), self.pid_file.is_some()];
        match processes.map(usize::from).iter().sum() {
            _ if by_ram && at_socket => {
                bail!("by --dtb no VMM connects; leave --socket and --user out")
            }
            0 if by_ram => bail!("--dtb needs the VMM's process; give --pid or --pid-file"),
            2 => bail!("--pid and --pid-file name one process; leave one out"),
            _ if self.pid_file.is_some() && !by_ram => {
                bail!("--pid-file needs the guest's --dtb; give that, or --pid")
            }
            _ => Ok(()),
        }
    }
}

/// Options of `qemu`.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct QemuArgs {
    /// Read options from a TOML file, as run does; flags win
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The VM.
    #[command(flatten)]
    pub served: ServedArgs,
    /// Where the guest has its registers: in a device, for this project's
    /// driver; in its RAM, for the kernel's own driver too
    #[arg(long, value_name = "shm|ram", default_value = "shm", value_parser = one_of(&QEMU_PATHS))]
    pub path: QemuPath,
    /// QEMU and its options
    #[arg(last = true, required = true, value_name = "QEMU")]
    pub command: Vec<OsString>,
}

/// Where a guest of `qemu` has its registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QemuPath {
    /// In the memory of the device ivshmem-doorbell.
    Shm,
    /// In its RAM.
    Ram,
}

const QEMU_PATHS: [(&str, QemuPath); 2] = [("shm", QemuPath::Shm), ("ram", QemuPath::Ram)];

/// What `serve` and `qemu` take of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct ServedArgs {
    /// The vCPUs.
    #[command(flatten)]
    pub vcpus: VcpuArgs,
    /// Bounds that hold while it runs.
    #[command(flatten)]
    pub bounds: BoundArgs,
    /// The bridge.
    #[command(flatten)]
    pub bridge: BridgeArgs,
    /// The sandbox.
    #[command(flatten)]
    pub sandbox: SandboxArgs,
}

impl ServedArgs {
    /// Checks that the options suit a VM of another program, and that none weakens
    /// `--multi-tenant`.
    ///
    /// # Errors
    /// Names the option that doesn't, and what to do.
    pub fn check(&self) -> anyhow::Result<()> {
        if self.vcpus.no_bridge {
            bail!("a VM of another program is served by its bridge; leave --no-bridge out");
        }
        self.bridge.check_sums()?;
        let unclamped = [ActuatorChoice::Thread, ActuatorChoice::Nothing];
        let unclamped = unclamped.map(ActuatorWish::Clamps);
        if self.bridge.sum == Some(true) && unclamped.contains(&self.bridge.actuator) {
            bail!("--sum needs cgroups for its clamps; take another --actuator");
        }
        self.bridge.check_multi_tenant()?;
        let multi_tenant = self.bridge.multi_tenant;
        self.sandbox.check_multi_tenant(multi_tenant)
    }

    /// Checks that this process can add requests up on this host, if that is wanted.
    ///
    /// # Errors
    /// What is missing, and what to do.
    pub fn check_offered(&self) -> anyhow::Result<()> {
        if self.bridge.actuator == ActuatorWish::Scx {
            path::check_scx().map_err(|why| anyhow::anyhow!("--actuator scx: {why}"))?;
        }
        if self.bridge.sum != Some(true) {
            return Ok(());
        }
        let offered = path::offer_bpf();
        offered.map_err(|why| anyhow::anyhow!("--sum isn't possible: {why}"))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    //! `serve` is told one way to a VMM.
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        listen: ListenArgs,
    }

    #[test]
    fn there_is_one_way_to_a_vmm() {
        for (line, said) in [
            ("--socket s", ""),
            ("--socket s --pid 7", ""),
            ("--dtb t --pid 7", ""),
            ("--dtb t --pid-file f --qmp q", ""),
            ("--dtb t", "give --pid or --pid-file"),
            ("--dtb t --pid 7 --pid-file f", "leave one out"),
            (
                "--dtb t --pid 7 --socket s",
                "leave --socket and --user out",
            ),
            ("--dtb t --pid 7 --user u", "leave --socket and --user out"),
            ("--pid-file f", "give that, or --pid"),
        ] {
            let words = ["serve"].into_iter().chain(line.split(' '));
            let checked = Line::try_parse_from(words).unwrap().listen.check();
            let line = checked.err().map(|error| error.to_string());
            let line = line.unwrap_or_default();
            assert!(
                line.ends_with(said) && line.is_empty() == said.is_empty(),
                "{line}"
            );
        }
    }
}
