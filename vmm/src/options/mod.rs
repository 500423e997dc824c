// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The options of `run` and `dt`, before they are checked against host and files: flags of the
//! command line, after those that a TOML file stands for ([`mod@file`]).

mod console;
pub mod file;
pub mod rt_values;
pub mod serve;
pub mod values;

use std::num::NonZeroU32;
use std::path::PathBuf;

use anyhow::bail;
use clap::Args;
use vcpufreq_device::{ClampMode, CurPerfVisibility, RateLimit};
use vcpufreq_host::{ActuatorChoice, CpuList};

use crate::path::PathChoice;
use console::console_end;
use rt_values::{ResumeLatency, RtPolicy, page_size};
use values::{IpcRatio, MemSize, PerVcpu, Rate, Table, largest, one_of};
use vcpufreq_vm::{console_output::ConsoleEnd, memory::PageSize};

/// The default KVM device.
pub const KVM_DEVICE: &str = "/dev/kvm";

/// The default limit of requests.
const RATE_TEXT: &str = "1000:100";
const RATE: RateLimit = RateLimit {
    per_second: NonZeroU32::new(1000).expect("not 0"),
    burst: NonZeroU32::new(100).expect("not 0"),
};

const CLAMPS: [(&str, ClampMode); 3] = [
    ("ceilings", ClampMode::Ceilings),
    ("floor", ClampMode::Floor),
    ("exact", ClampMode::Exact),
];

const ACTUATORS: [(&str, ActuatorWish); 5] = [
    ("auto", ActuatorWish::Clamps(ActuatorChoice::Auto)),
    ("cgroup", ActuatorWish::Clamps(ActuatorChoice::Cgroup)),
    ("thread", ActuatorWish::Clamps(ActuatorChoice::Thread)),
    ("none", ActuatorWish::Clamps(ActuatorChoice::Nothing)),
    ("scx", ActuatorWish::Scx),
];

/// How requests are to reach the host's scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActuatorWish {
    /// By clamps.
    Clamps(ActuatorChoice),
    /// By the service `vcpufreq scx`, and by clamps when that is gone.
    Scx,
}

const SANDBOXES: [(&str, bool); 2] = [("on", true), ("off", false)];

const VISIBILITIES: [(&str, CurPerfVisibility); 3] = [
    ("exact", CurPerfVisibility::Exact),
    ("table", CurPerfVisibility::Table),
    ("request", CurPerfVisibility::Request),
];

/// Options of `run`.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct RunArgs {
    /// Read options from a TOML file; its keys are the long options, per vCPU
    /// under [vcpu.VCPUS]; flags win
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Kernel for arm64: Image, Image.gz, Image.zst, or EFI zboot of either
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Initial ramdisk
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// A disk for the guest, as a virtio block device: a raw image or a block device, which it reads
    /// and writes
    #[arg(long, value_name = "FILE")]
    pub disk: Option<PathBuf>,
    /// Kernel command line
    #[arg(
        long,
        value_name = "TEXT",
        allow_hyphen_values = true,
        default_value = "console=ttyS0"
    )]
    pub cmdline: String,
    /// Memory in MiB, or with M or G
    #[arg(long, value_name = "SIZE", default_value = "512")]
    pub mem: MemSize,
    /// The vCPUs.
    #[command(flatten)]
    pub vcpus: VcpuArgs,
    /// Bounds that hold while the guest runs.
    #[command(flatten)]
    pub bounds: BoundArgs,
    /// Run a protected guest: the host can read only the memory that it shares; needs a host booted
    /// with kvm-arm.mode=protected
    #[arg(long)]
    pub protected: bool,
    /// Guest memory of huge pages: 2M or 1G
    #[arg(long, value_name = "SIZE", value_parser = page_size)]
    pub hugepages: Option<PageSize>,
    /// The bridge.
    #[command(flatten)]
    pub bridge: BridgeArgs,
    /// How accesses reach the device: the best that the host offers, or this
    /// one
    #[arg(long, value_name = "PATH", default_value = "auto")]
    pub path: PathChoice,
    /// Write the guest's device tree
    #[arg(long, value_name = "FILE")]
    pub dump_dtb: Option<PathBuf>,
    /// The guest's console: stdio, none, or a file that takes output up to a
    /// size in MiB, or with M or G; the rest is dropped
    #[arg(
        long,
        value_name = "stdio|none|file:PATH,max=SIZE",
        value_parser = console_end,
        default_value = "stdio",
        default_value_if("multi_tenant", "true", "none")
    )]
    pub console: ConsoleEnd,
    /// KVM device
    #[arg(long, value_name = "PATH", default_value = KVM_DEVICE)]
    pub kvm_device: PathBuf,
    /// The sandbox.
    #[command(flatten)]
    pub sandbox: SandboxArgs,
}

/// Bounds on the host that `run`, `serve` and `qemu` keep while a guest runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct BoundArgs {
    /// Performance in kHz that requests can't undercut
    #[arg(long, value_name = "VCPUS=KHZ")]
    pub floor: Vec<PerVcpu<u32>>,
    /// Wake-up latency of the real-time vCPUs' pCPUs: µs, or n/a for none
    #[arg(long, value_name = "US")]
    pub resume_latency_us: Option<ResumeLatency>,
}

/// What `run`, `serve` and `qemu` give up before a guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Args)]
pub struct SandboxArgs {
    /// Drop privileges before the guest runs; off: a guest that compromises what serves it has all
    /// of them
    #[arg(long = "sandbox", value_name = "on|off", default_value = "on", value_parser = one_of(&SANDBOXES), action = clap::ArgAction::Set)]
    pub is_on: bool,
    /// Don't run where the kernel can't give all of the sandbox
    #[arg(
        long = "require-sandbox",
        default_value_if("multi_tenant", "true", "true")
    )]
    pub is_required: bool,
}

impl SandboxArgs {
    /// Whether `--multi-tenant`, if it is given, has its sandbox.
    ///
    /// # Errors
    /// The option that takes it away, and what to do.
    pub fn check_multi_tenant(self, multi_tenant: bool) -> anyhow::Result<()> {
        if multi_tenant && !self.is_on {
            bail!("--multi-tenant needs the sandbox; leave --sandbox off out");
        }
        Ok(())
    }
}

/// What `run`, `serve` and `qemu` take of the bridge.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
pub struct BridgeArgs {
    /// What a request sets: the floor, and the ceiling too while the guest limits itself; always the
    /// floor alone; always both
    #[arg(long, value_name = "MODE", default_value = "ceilings", value_parser = one_of(&CLAMPS))]
    pub clamp: ClampMode,
    /// How requests reach the host's scheduler; none: requests change nothing;
    /// scx: by the service vcpufreq scx, they add up with other load
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = one_of(&ACTUATORS))]
    pub actuator: ActuatorWish,
    /// Add the utilization by other tasks of a vCPU's pCPU to its request; uclamp alone takes the
    /// larger of the two [default: true for run on the path bpf without --clamp exact]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub sum: Option<bool>,
    /// The cgroup in which the VM's are made, by its whole path [default: the
    /// VMM's own, or the one around it, if delegated]
    #[arg(long, value_name = "DIR")]
    pub cgroup_parent: Option<PathBuf>,
    /// Say on stderr why each path is taken or not, and how true cur_perf is
    #[arg(long)]
    pub explain: bool,
    /// What the guest reads of its frequency
    #[arg(long, value_name = "WHAT", default_value = "table", default_value_if("multi_tenant", "true", "request"), value_parser = one_of(&VISIBILITIES))]
    pub cur_perf: CurPerfVisibility,
    /// Requests a second, and in a burst, that reach the host from one vCPU; the
    /// VM's limit is this times its domains, at most 8; 0: no limit
    // schedutil in a guest makes 1,000 a second for a domain at most, unless its rate_limit_us is
    // set.
    #[arg(long, value_name = "N[:BURST]", default_value = RATE_TEXT)]
    pub rate_limit: Rate,
    /// Write one JSON line per request, actuation and refusal
    #[arg(long, value_name = "FILE")]
    pub events: Option<PathBuf>,
    /// For a host whose guests don't trust each other: --cur-perf request,
    /// --require-sandbox, and for run --console none; options that grant a guest more are refused
    #[arg(long)]
    pub multi_tenant: bool,
}

impl BridgeArgs {
    /// Checks that no option weakens `--multi-tenant`.
    ///
    /// # Errors
    /// Names that option, and what to do.
    pub fn check_multi_tenant(&self) -> anyhow::Result<()> {
        if !self.multi_tenant {
            return Ok(());
        }
        if self.cur_perf != CurPerfVisibility::Request {
            bail!("--multi-tenant hides the frequency of a shared pCPU; leave --cur-perf out");
        }
        let more =
            |limit: RateLimit| limit.per_second > RATE.per_second || limit.burst > RATE.burst;
        if self.rate_limit.0.is_none_or(more) {
            bail!("--multi-tenant grants no more requests than by default; leave --rate-limit out");
        }
        if self.actuator == ActuatorWish::Scx {
            bail!("scx trusts every VMM, which --multi-tenant doesn't; leave --actuator scx out");
        }
        if self.events.is_some() {
            bail!("--multi-tenant keeps no file that a guest makes grow; leave --events out");
        }
        Ok(())
    }

    /// Checks that what adds requests up suits the other options.
    ///
    /// # Errors
    /// Names what doesn't, and what to leave out.
    pub fn check_sums(&self) -> anyhow::Result<()> {
        let (scx, exact) = (
            self.actuator == ActuatorWish::Scx,
            self.clamp == ClampMode::Exact,
        );
        match (self.sum == Some(true), scx) {
            (true, true) => bail!("--actuator scx adds up by itself; leave --sum out"),
            (true, false) if exact => {
                bail!("--sum can't be kept with --clamp exact; leave one of them out")
            }
            (false, true) if exact => {
                bail!("--actuator scx sets no ceiling; leave --clamp exact out")
            }
            _ => Ok(()),
        }
    }
}

impl RunArgs {
    /// As [`BridgeArgs::check_multi_tenant`], for the other options of `run`.
    ///
    /// # Errors
    /// The option that takes something back, and what to do.
    pub fn check_multi_tenant(&self) -> anyhow::Result<()> {
        self.bridge.check_multi_tenant()?;
        self.sandbox.check_multi_tenant(self.bridge.multi_tenant)?;
        if self.bridge.multi_tenant && self.console == ConsoleEnd::Stdio {
            bail!(
                "--multi-tenant keeps a guest's output off the terminal; give --console \
                 file:PATH,max=SIZE, or leave --console out"
            );
        }
        Ok(())
    }
}

/// What `run` and `dt` take of the vCPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub struct VcpuArgs {
    /// vCPUs, 1 to 512 [default: 1]
    #[arg(long, value_name = "N")]
    pub cpus: Option<u32>,
    /// Leave the virtual cpufreq device out
    #[arg(long)]
    pub no_bridge: bool,
    /// Mirror the tables, clusters and domains of the pCPUs, or don't [default: true
    /// where each vCPU is pinned within one cpufreq policy]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub host_topology: Option<bool>,
    /// pCPUs that vCPUs may run on, as 0=2-3; may be repeated, like those below
    #[arg(long, value_name = "VCPUS=PCPUS")]
    pub pin: Vec<PerVcpu<CpuList>>,
    /// A performance table: 1 to 64 rising kHz, with µV and µW if known
    #[arg(long, value_name = "VCPUS=KHZ[:UV[:UW]],...")]
    pub table: Vec<PerVcpu<Table>>,
    /// Performance domain: its vCPUs have one frequency
    #[arg(long, value_name = "VCPUS=N")]
    pub domain: Vec<PerVcpu<u32>>,
    /// Work per cycle against the pCPU's, as 0=0.75
    #[arg(long, value_name = "VCPUS=RATIO")]
    pub ipc_ratio: Vec<PerVcpu<IpcRatio>>,
    /// Capacity, 1 to 1024, in the host's scale
    #[arg(long, value_name = "VCPUS=N")]
    pub capacity: Vec<PerVcpu<u16>>,
    /// Real-time vCPUs, each pinned to a pCPU of its own: fifo:PRIORITY,
    /// rr:PRIORITY or deadline:RUNTIME/PERIOD in µs; memory is locked then
    #[arg(long, value_name = "VCPUS=POLICY")]
    pub rt: Vec<PerVcpu<RtPolicy>>,
}

impl VcpuArgs {
    /// The largest number of a vCPU that an option of this kind is for.
    #[must_use]
    pub fn largest_named(&self) -> Option<u32> {
        let named = [
            largest(&self.pin),
            largest(&self.table),
            largest(&self.domain),
            largest(&self.ipc_ratio),
            largest(&self.capacity),
            largest(&self.rt),
        ];
        named.into_iter().flatten().max()
    }
}
