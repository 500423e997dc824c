// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command line: what can be said, and from there to options.

use std::path::PathBuf;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use vcpufreq_device::host::CpuList;
use vcpufreq_rt::cli::RtCommand;

use crate::{
    bench::BenchArgs,
    config::ConfigError,
    console_choice::ConsoleChoice,
    options::{Actuator, ClampArg, CurPerfArg, RunOptions, one_line},
    parse::{IpcRatio, MemSize, PerVcpu, Rate, Table},
    path::PathChoice,
    rt_options::{PageSize, ResumeLatency, RtPolicy},
};

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  done, with findings: something is missing, was refused or is left over
  2  error: one line on stderr with the cause and the next step";

const RUN_HELP: &str = "\
A vCPU is like one pCPU: the largest of those that it may run on (--pin; all
online ones without). Unless told otherwise it has that pCPU's capacity and may
ask for any frequency up to that pCPU's maximum. With --host-topology it has
the pCPU's whole table and cluster too, and vCPUs that are pinned within one
cpufreq policy share a domain. That is the default where each vCPU is pinned
within one policy and none has a --table, --domain or --capacity; the first
line on stderr names what was chosen.

VCPUS is a number or a list, as in --pin 0-1=2-3.

On the console, Ctrl-A x quits.

Exit codes:
  0  the guest has turned itself off, or Ctrl-A x
  1  the same, but the host refused requests, or events were dropped
  2  error: the guest couldn't start, or crashed, or was ended by a signal;
     one line on stderr with the cause and the next step";

const DOCTOR_HELP: &str = "\
Exit codes:
  0  everything that the bridge uses is there
  1  findings: guests run, with limits that the report names
  2  no guest can run here, or the report couldn't be made";

/// The guest's frequency requests drive the host's frequency.
#[derive(Debug, Parser)]
#[command(name = "vcpufreq", version, after_help = EXIT_CODES, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What the program can do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Boot an arm64 Linux guest
    #[command(after_help = RUN_HELP)]
    Run(Box<RunArgs>),
    /// Say what this host can do, what it can't, and what to change
    #[command(after_help = DOCTOR_HELP)]
    Doctor {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Measure what a load gets on the host, in a guest, and in one with the bridge
    #[command(after_help = EXIT_CODES)]
    Bench(Box<BenchArgs>),
    /// Print the device-tree part alone, for use with other VMMs
    #[command(after_help = EXIT_CODES)]
    Dt(Box<DtArgs>),
    /// Print what a running VMM counts
    #[command(after_help = EXIT_CODES)]
    Stats {
        /// The VMM's process; not needed when only one runs
        pid: Option<u32>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Show what a running VMM counts, alive; q ends
    #[command(after_help = EXIT_CODES)]
    Top {
        /// The VMM's process; not needed when only one runs
        pid: Option<u32>,
        /// Time between two looks, ms
        #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u64).range(50..=60_000))]
        every: u64,
    },
    /// Tune this host for real-time guests: plan, apply, check, restore; measure it: report
    #[command(subcommand, after_help = EXIT_CODES)]
    Rt(RtCommand),
    /// Remove what killed runs left behind, and nothing else
    #[command(after_help = EXIT_CODES)]
    Cleanup,
    /// Outlive a VMM and clean up after it; started by `run`
    #[command(hide = true)]
    Guardian {
        /// The record of what the VMM makes.
        record: PathBuf,
    },
}

/// Options of `run`.
#[derive(Debug, Default, Args)]
pub struct RunArgs {
    /// Read options from a TOML file; its keys are the long options, per vCPU
    /// under [vcpu.VCPUS]; flags win
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Kernel: an uncompressed arm64 Image
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Initial ramdisk
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// Kernel command line [default: console=ttyS0]
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub cmdline: Option<String>,
    /// Memory in MiB, or with M or G [default: 512]
    #[arg(long, value_name = "SIZE")]
    pub mem: Option<MemSize>,
    /// The vCPUs.
    #[command(flatten)]
    pub vcpus: VcpuArgs,
    /// Real-time vCPUs, each pinned to a pCPU of its own: fifo:PRIORITY,
    /// rr:PRIORITY or deadline:RUNTIME/PERIOD in µs; memory is locked then
    #[arg(long, value_name = "VCPUS=POLICY")]
    pub rt: Vec<PerVcpu<RtPolicy>>,
    /// Performance in kHz that requests can't undercut
    #[arg(long, value_name = "VCPUS=KHZ")]
    pub floor: Vec<PerVcpu<u32>>,
    /// Wake-up latency of the real-time vCPUs' pCPUs: µs, or n/a for none
    #[arg(long, value_name = "US")]
    pub resume_latency_us: Option<ResumeLatency>,
    /// Guest memory of huge pages: 2M or 1G
    #[arg(long, value_name = "SIZE")]
    pub hugepages: Option<PageSize>,
    /// What a request sets: the floor alone, or the ceiling too [default: floor]
    #[arg(long, value_name = "MODE")]
    pub clamp: Option<ClampArg>,
    /// How requests reach the host's scheduler [default: auto]
    #[arg(long, value_name = "HOW")]
    pub actuator: Option<Actuator>,
    /// The cgroup in which the VM's are made, by its whole path [default: the
    /// VMM's own, or the one around it, if delegated]
    #[arg(long, value_name = "DIR")]
    pub cgroup_parent: Option<PathBuf>,
    /// How accesses reach the device: the best that the host offers, or this
    /// one [default: auto]
    #[arg(long, value_name = "PATH")]
    pub path: Option<PathChoice>,
    /// The programs of the path bpf [default: /usr/lib/vcpufreq/vcpufreq.bpf.o]
    #[arg(long, value_name = "FILE")]
    pub bpf_object: Option<PathBuf>,
    /// Say on stderr why each path is taken or not
    #[arg(long)]
    pub explain: bool,
    /// What the guest reads of its frequency [default: table]
    #[arg(long, alias = "report", value_name = "WHAT")]
    pub cur_perf: Option<CurPerfArg>,
    /// Requests that a vCPU writes, and of the VM for each domain, that reach
    /// the host, a second and at once; 0: all
    /// [default: 1000:100]
    #[arg(long, value_name = "N[:BURST]")]
    pub rate_limit: Option<Rate>,
    /// Write one JSON line per request, actuation and refusal
    #[arg(long, value_name = "FILE")]
    pub events: Option<PathBuf>,
    /// Write the guest's device tree
    #[arg(long, value_name = "FILE")]
    pub dump_dtb: Option<PathBuf>,
    /// The guest's console: stdio, none, or a file that takes output up to a
    /// size in MiB, or with M or G; the rest is dropped [default: stdio]
    #[arg(long, value_name = "stdio|none|file:PATH,max=SIZE")]
    pub console: Option<ConsoleChoice>,
    /// KVM device [default: /dev/kvm]
    #[arg(long, value_name = "PATH")]
    pub kvm_device: Option<PathBuf>,
}

/// What `run` and `dt` take of the vCPUs.
#[derive(Debug, Default, Args)]
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
}

/// Form of a device tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DtFormat {
    /// Source text.
    Dts,
    /// Flattened, as a VMM loads it.
    Dtb,
}

/// Options of `dt`.
#[derive(Debug, Args)]
pub struct DtArgs {
    /// Read options from a TOML file, as run does; flags win
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The vCPUs; without any option, one for each online pCPU that mirrors it.
    #[command(flatten)]
    pub vcpus: VcpuArgs,
    /// Source text or the binary form
    #[arg(long, value_name = "FORM", default_value = "dts")]
    pub format: DtFormat,
    /// Address of the cpufreq registers, a multiple of 64 KiB
    #[arg(long, value_name = "ADDRESS", value_parser = address, default_value = "0xa000000")]
    pub base: u64,
}

impl RunArgs {
    /// The flags, completed from the config file.
    pub fn options(&self) -> Result<RunOptions, ConfigError> {
        let mut flags = RunOptions {
            kernel: self.kernel.clone(),
            initrd: self.initrd.clone(),
            cmdline: self.cmdline.clone(),
            mem: self.mem,
            clamp: self.clamp,
            actuator: self.actuator,
            cgroup_parent: self.cgroup_parent.clone(),
            path: self.path,
            bpf_object: self.bpf_object.clone(),
            explain: self.explain.then_some(true),
            cur_perf: self.cur_perf,
            rate_limit: self.rate_limit,
            events: self.events.clone(),
            dump_dtb: self.dump_dtb.clone(),
            console: self.console.clone(),
            kvm_device: self.kvm_device.clone(),
            resume_latency_us: self.resume_latency_us,
            hugepages: self.hugepages,
            ..self.vcpus.options()
        };
        flags.set(&self.rt, |vcpu| &mut vcpu.rt);
        flags.set(&self.floor, |vcpu| &mut vcpu.floor);
        completed(flags, self.config.as_ref())
    }
}

impl DtArgs {
    /// The flags, completed from the config file.
    pub fn options(&self) -> Result<RunOptions, ConfigError> {
        completed(self.vcpus.options(), self.config.as_ref())
    }
}

impl VcpuArgs {
    fn options(&self) -> RunOptions {
        let mut options = RunOptions {
            cpus: self.cpus,
            host_topology: self.host_topology,
            no_bridge: self.no_bridge.then_some(true),
            ..RunOptions::default()
        };
        options.set(&self.pin, |vcpu| &mut vcpu.pin);
        options.set(&self.table, |vcpu| &mut vcpu.table);
        options.set(&self.domain, |vcpu| &mut vcpu.domain);
        options.set(&self.ipc_ratio, |vcpu| &mut vcpu.ipc_ratio);
        options.set(&self.capacity, |vcpu| &mut vcpu.capacity);
        options
    }
}

fn completed(flags: RunOptions, config: Option<&PathBuf>) -> Result<RunOptions, ConfigError> {
    match config {
        Some(path) => Ok(flags.or(RunOptions::from_file(path)?)),
        None => Ok(flags),
    }
}

fn address(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| "write a number, as 167772160 or 0xa000000".to_owned())
}

/// A usage error in one line: what clap says, without the usage text.
pub fn usage_error(error: &clap::Error, line: impl Iterator<Item = String>) -> String {
    let text = error.to_string();
    let said = text.split("\n\nUsage:").next().unwrap_or(&text);
    let said = said
        .split("\n\nFor more information")
        .next()
        .unwrap_or(said);
    let said = one_line(said.trim_start_matches("error: "));
    format!("{said}; see {} --help", named_command(line))
}

/// The command that a line names, as far as there is one.
fn named_command(line: impl Iterator<Item = String>) -> String {
    let program = Cli::command();
    let mut names = program.get_name().to_owned();
    let mut command = &program;
    for word in line.skip(1) {
        let Some(found) = command.find_subcommand(&word) else {
            break;
        };
        names = format!("{names} {word}");
        command = found;
    }
    names
}

#[cfg(test)]
mod tests {
    //! Flags become the options they name; usage errors are one line.

    use super::*;

    fn run_options(flags: &[&str]) -> RunOptions {
        let line = ["vcpufreq", "run"].iter().chain(flags);
        match Cli::try_parse_from(line).unwrap().command {
            Command::Run(args) => args.options().unwrap(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn flags_say_what_toml_says() {
        let flags = run_options(&[
            "--kernel=Image",
            "--cpus=4",
            "--mem=1G",
            "--no-bridge",
            "--clamp=exact",
            "--pin=0-1=0",
            "--table=0-1=600000,1000000",
            "--pin=2=2-3",
            "--ipc-ratio=2=0.75",
            "--table=2=700000:600000",
            "--capacity=2=512",
            "--domain=3=9",
            "--host-topology",
            "--path=exit",
            "--explain",
            "--cur-perf=request",
            "--rate-limit=100:3",
            "--rt=2=fifo:3",
            "--floor=2=600000",
            "--resume-latency-us=50",
            "--hugepages=2M",
            "--console=file:log,max=2M",
        ]);
        let toml = "kernel='Image'\ncpus=4\nmem=1024\nno-bridge=true\nclamp='exact'\n\
            host-topology=true\npath='exit'\nexplain=true\nreport='request'\n\
            rate-limit='100:3'\nresume-latency-us='50'\nhugepages='2M'\n\
            console='file:log,max=2'\n\
            [vcpu.0-1]\npin=0\ntable=[600000, 1000000]\n[vcpu.2]\npin='2-3'\n\
            ipc-ratio=0.75\ntable=[{khz=700000,uv=600000}]\ncapacity=512\n\
            rt='fifo:3'\nfloor=600000\n[vcpu.3]\ndomain=9\n";
        assert_eq!(flags, RunOptions::from_toml(toml).unwrap());
    }

    #[test]
    fn the_hosts_topology_can_be_refused() {
        let said = |flags: &[&str]| run_options(flags).host_topology;
        assert_eq!(said(&[]), None);
        assert_eq!(said(&["--host-topology"]), Some(true));
        assert_eq!(said(&["--host-topology=true"]), Some(true));
        assert_eq!(said(&["--host-topology=false"]), Some(false));
        let toml = RunOptions::from_toml("host-topology = false").unwrap();
        assert_eq!(toml.host_topology, Some(false));
    }

    #[test]
    fn usage_errors_are_one_line() {
        for (flags, help) in [
            (&["run", "--nope"][..], "vcpufreq run --help"),
            (&["run", "--pin", "0"], "vcpufreq run --help"),
            (&["run", "--console", "file:log"], "vcpufreq run --help"),
            (&["rt", "plan", "--nope"], "vcpufreq rt plan --help"),
            (
                &["rt", "report", "--time", "soon"],
                "vcpufreq rt report --help",
            ),
            (&["rt"], "vcpufreq rt --help"),
            (&["--clamp"], "vcpufreq --help"),
            (&[], "vcpufreq --help"),
            (&["go"], "vcpufreq --help"),
        ] {
            let line = || {
                ["vcpufreq"]
                    .iter()
                    .chain(flags)
                    .map(|word| (*word).to_owned())
            };
            let text = usage_error(&Cli::try_parse_from(line()).unwrap_err(), line());
            let ends = text.ends_with(&format!("; see {help}"));
            assert!(!text.contains('\n') && ends, "{text}");
        }
    }

    #[test]
    fn help_lists_the_exit_codes() {
        for name in ["run", "bench", "doctor", "dt", "cleanup"] {
            let mut command = Cli::command();
            let sub = command.find_subcommand_mut(name).unwrap();
            let help = sub.render_long_help().to_string();
            assert!(help.contains("Exit codes:"), "{name}: {help}");
        }
    }
}
