// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command line.

use std::{ffi::OsString, path::PathBuf};

use anyhow::anyhow;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum};
use vcpufreq_bench::{BenchArgs, DemoArgs};
pub use vcpufreq_rt::cli as rt;

use crate::{
    message::usage,
    options::{
        RunArgs, VcpuArgs,
        file::{self, Flag},
        serve::{QemuArgs, ServeArgs},
    },
    policy::PolicyCommand,
    scx::ScxCommand,
    trace::TraceArgs,
    tune::{Lasts, TuneArgs},
};

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  done, with findings: something is missing, was refused or is left over
  2  error: one line on stderr with the cause and the next step";

const RUN_HELP: &str = "\
A vCPU is modelled on one pCPU: the one of the largest capacity that --pin
allows it, or of all online ones without --pin. By default the vCPU has that
pCPU's capacity and may request any frequency up to its maximum. With
--host-topology it also has the pCPU's frequency table and cluster, and vCPUs
pinned within one cpufreq policy share a domain. This is the default if each
vCPU is pinned within one policy and none has a --table, --domain or
--capacity; the first line on stderr names the choice.

VCPUS is a number or a list, as in --pin 0-1=2-3.

On the console, Ctrl-A x quits.

Exit codes:
  0  the guest has turned itself off, or Ctrl-A x
  1  the same, but the host refused requests, or events were dropped
  2  error: the guest couldn't start, or crashed; one line on stderr with the
     cause and the next step
  128 and a signal's number: the program was ended by that signal";

const SERVE_HELP: &str = "\
Exit codes:
  0  done
  2  error: one line on stderr with the cause and the next step
  3  a VM with registers in its RAM is refused";

const QEMU_HELP: &str = "\
The exit code is QEMU's, or 128 and the signal that ended it; 2, with one line
on stderr, when QEMU was not started, or when a guest that is real-time or has
registers in its RAM is refused.";

const SCX_HELP: &str = "\
Exit codes:
  0  done
  1  no service runs, or it is not in force
  2  error: one line on stderr with the cause and the next step
  3  the kernel, or an administrator, has ended the scheduler of start";

const TUNE_HELP: &str = "\
The highest floor of a domain counts, and the lowest ceiling. A floor above the
ceiling is lowered to it. All of them end with their time, with untune, and when
tune ends, also by kill -9.

Exit codes:
  0  done: the time is over, or untune has ended it
  2  error: one line on stderr with the cause and the next step; nothing was set
  CMD's, or 128 and the number of the signal that ended it";

const POLICY_HELP: &str = "\
A policy is a BPF program. It is tried before it is in force, and bounded by the
guest's own limits then. Its guest is on the path bpf.

Exit codes:
  0  done
  2  error: one line on stderr with the cause and the next step; each guest has
     the policy that it had";

const DOCTOR_HELP: &str = "\
Exit codes:
  0  everything that the bridge uses is there
  1  findings: guests run, with limits that the report names
  2  no guest can run here, or the report couldn't be made

Of a domain, 2 means that libvirt or its server refuses it as it is.";

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
    /// Serve the VM of another program, as QEMU's with ivshmem-doorbell
    #[command(after_help = SERVE_HELP)]
    Serve(Box<ServeArgs>),
    /// Run QEMU with the bridge: name it and its options behind --
    #[command(after_help = QEMU_HELP)]
    Qemu(Box<QemuArgs>),
    /// Say what this host can do, what it can't, and what to change
    #[command(after_help = DOCTOR_HELP)]
    Doctor {
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// Check a libvirt domain instead of the host: what of its XML spoils latency or the bridge, and
        /// the line to write instead. A value with / or that ends in .xml is an XML file
        #[arg(long, value_name = "NAME|FILE")]
        domain: Option<String>,
    },
    /// Show the loop on this host: a guest requests each frequency, the host runs at it
    #[command(after_help = EXIT_CODES)]
    Demo(Box<DemoArgs>),
    /// Measure what a load gets on the host, in a guest, and in one with the bridge
    #[command(after_help = EXIT_CODES)]
    Bench(Box<BenchArgs>),
    /// Put doctor, demo and bench of this host into a page, vcpufreq-report.html, to send to others
    #[command(after_help = EXIT_CODES)]
    Report(Box<BenchArgs>),
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
        /// Print OpenMetrics text, for Prometheus; without PID of all VMMs of this user
        #[arg(long, conflicts_with = "json")]
        openmetrics: bool,
        /// Answer one HTTP request on stdin, for a socket unit with Accept=yes
        #[arg(long, requires = "openmetrics")]
        http: bool,
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
    /// Set a floor or a ceiling of a running guest's vCPU, for a time
    #[command(after_help = TUNE_HELP)]
    Tune(TuneArgs),
    /// Set the remaining time of a floor or a ceiling
    #[command(after_help = EXIT_CODES)]
    Retune {
        /// The VMM's process
        pid: u32,
        /// What tune has printed, or stats shows
        handle: u64,
        /// For so long, as 200ms or 5s; at most 1 hour
        #[arg(long = "for", value_name = "TIME")]
        lasts: Lasts,
    },
    /// End a floor or a ceiling
    #[command(after_help = EXIT_CODES)]
    Untune {
        /// The VMM's process
        pid: u32,
        /// What tune has printed, or stats shows
        handle: u64,
    },
    /// Have a policy of your own decide what a running guest's requests become: load, show, reset
    #[command(subcommand, after_help = POLICY_HELP)]
    Policy(PolicyCommand),
    /// Record a running guest's requests, clamps, frequencies, threads and exits, for ui.perfetto.dev
    #[command(after_help = EXIT_CODES)]
    Trace(TraceArgs),
    /// Tune this host for real-time guests: plan, apply, check, restore; measure it: report
    #[command(subcommand, after_help = EXIT_CODES)]
    Rt(rt::RtCommand),
    /// Let requests of --actuator scx add up with what a CPU's tasks use: the host's service
    #[command(subcommand, after_help = SCX_HELP)]
    Scx(ScxCommand),
    /// Remove what killed runs left behind, and nothing else
    #[command(after_help = EXIT_CODES)]
    Cleanup,
    /// Outlive a VMM and clean up after it; started by `run`
    #[command(hide = true)]
    Guardian {
        /// The VMM's process, whose record is in this user's directory.
        pid: u32,
    },
}

/// Form of a device tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DtFormat {
    /// Source text.
    Dts,
    /// Flattened, as a VMM loads it.
    Dtb,
    /// An overlay with the registers of --in-ram alone, for a VMM that makes its guest's tree itself.
    Dtbo,
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
    /// Put it into the tree that a VMM made (QEMU: -machine dumpdtb=FILE) and
    /// print that one in the binary form, without registers unless --base is
    /// given, and without kaslr-seed and rng-seed
    #[arg(long, value_name = "DTB")]
    pub merge: Option<PathBuf>,
    /// Have the guest of --merge have its registers in its RAM, which serve --dtb
    /// finds by this tree
    #[arg(long, requires = "merge", conflicts_with = "base")]
    pub in_ram: bool,
    /// Source text, the binary form, or an overlay with the registers of --in-ram
    /// alone [default: dts, with --merge dtb]
    #[arg(long, value_name = "FORM")]
    pub format: Option<DtFormat>,
    /// Address of the cpufreq registers, a multiple of 64 KiB [default: 0xa000000]
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    pub base: Option<u64>,
}

fn address(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| "write a number, as 167772160 or 0xa000000".to_owned())
}

impl Cli {
    /// The options of a command line, after the file that its `--config` names.
    ///
    /// # Errors
    /// One line: what is wrong with the line or the file, and what to do. The text that `--help`
    /// asks for is a [`clap::Error`].
    pub fn read(line: Vec<OsString>) -> anyhow::Result<Self> {
        let usage_error = |error: clap::Error| match error.use_stderr() {
            true => anyhow!("{}; see {} --help", usage(&error), named_command(&line)),
            false => error.into(),
        };
        let cli = Self::try_parse_from(&line).map_err(usage_error)?;
        let (config, taken) = match &cli.command {
            Command::Run(args) => (
                &args.config,
                RunArgs::augment_args(clap::Command::new("run")),
            ),
            Command::Serve(args) => (
                &args.config,
                ServeArgs::augment_args(clap::Command::new("serve")),
            ),
            Command::Qemu(args) => (
                &args.config,
                QemuArgs::augment_args(clap::Command::new("qemu")),
            ),
            Command::Dt(args) => (&args.config, DtArgs::augment_args(clap::Command::new("dt"))),
            _ => return Ok(cli),
        };
        let Some(config) = config else { return Ok(cli) };
        let takes = |flag: &Flag| {
            taken
                .get_arguments()
                .any(|arg| arg.get_long() == Some(&flag.name))
        };
        let flags = file::read(config)?.into_iter().filter(takes);
        let mut completed = line.clone();
        // Behind the program and the command.
        completed.splice(2..2, flags.map(|flag| flag.text.into()));
        let command = Self::command().args_override_self(true);
        let matches = command.try_get_matches_from(completed);
        matches
            .and_then(|matches| Self::from_arg_matches(&matches))
            .map_err(usage_error)
    }
}

/// The command that a line names, as far as there is one.
fn named_command(line: &[OsString]) -> String {
    let program = Cli::command();
    let mut names = program.get_name().to_owned();
    let mut command = &program;
    for word in line.iter().skip(1) {
        let Some(found) = command.find_subcommand(word) else {
            break;
        };
        names = format!("{names} {}", word.to_string_lossy());
        command = found;
    }
    names
}

#[cfg(test)]
mod tests {
    //! Flags become the options they name, after those of a file; usage errors are one line.

    use super::*;
    use crate::options::values::of_vcpu;

    fn read(line: &[&str]) -> anyhow::Result<Cli> {
        let words = ["vcpufreq"].iter().chain(line);
        Cli::read(words.map(OsString::from).collect())
    }

    fn run_options(flags: &[&str]) -> RunArgs {
        match read(&[&["run"], flags].concat()).unwrap().command {
            Command::Run(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_flag_wins_over_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let toml = "kernel='Image'\ncpus=4\nno-bridge=true\n\
                    [vcpu.0-1]\npin=0\ntable=[600000, 1000000]\nrt='fifo:1'\n";
        std::fs::write(file.path(), toml).unwrap();
        let config = format!("--config={}", file.path().display());
        let both = run_options(&[&config, "--cpus=2", "--pin=0=3", "--mem=1G"]);
        assert_eq!((both.vcpus.cpus, both.mem.0), (Some(2), 1024));
        assert_eq!(both.kernel, Some("Image".into()));
        assert!(both.vcpus.no_bridge);
        let pin = |vcpu| of_vcpu(&both.vcpus.pin, vcpu).unwrap().to_string();
        assert_eq!([pin(0), pin(1)], ["3", "0"]);
        assert_eq!(of_vcpu(&both.vcpus.table, 0).unwrap().0.len(), 2);
        assert!(read(&["run", &config, "--cpus=2", "--cpus=3"]).is_err());
        // dt takes from it what it has options for.
        match read(&["dt", &config, "--cpus=2"]).unwrap().command {
            Command::Dt(args) => assert_eq!(args.vcpus.rt.len(), 1),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_hosts_topology_can_be_refused() {
        for (flags, said) in [
            (&[][..], None),
            (&["--host-topology"], Some(true)),
            (&["--host-topology=true"], Some(true)),
            (&["--host-topology=false"], Some(false)),
        ] {
            assert_eq!(run_options(flags).vcpus.host_topology, said);
        }
        let toml = RunArgs::of_toml("host-topology = false");
        assert_eq!(toml.vcpus.host_topology, Some(false));
    }

    #[test]
    fn usage_errors_are_one_line() {
        for (flags, help) in [
            (&["run", "--nope"][..], "vcpufreq run --help"),
            (&["run", "--pin", "0"], "vcpufreq run --help"),
            (&["run", "--console", "file:log"], "vcpufreq run --help"),
            (&["rt", "plan", "--nope"], "vcpufreq rt plan --help"),
            (&["rt", "exec", "true"], "vcpufreq rt exec --help"),
            (
                &["rt", "report", "--time", "soon"],
                "vcpufreq rt report --help",
            ),
            (&["rt"], "vcpufreq rt --help"),
            (&["--clamp"], "vcpufreq --help"),
            (&[], "vcpufreq --help"),
            (&["go"], "vcpufreq --help"),
        ] {
            let text = read(flags).unwrap_err().to_string();
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
