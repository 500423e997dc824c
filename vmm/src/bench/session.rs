// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One variant, from the start of its load programs to their end, and each
//! repeat from the settled state to what was observed.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use vcpufreq_load::work::{now_ns, pin_thread};

use super::BenchArgs;
use super::machine::{Cluster, Machine};
use super::peer::Peer;
use super::scenario::{CALM, Scenario};
use super::trace::{Seen, Trace};

/// Where the load runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// On the host: the reference.
    Host,
    /// In a guest that has the host's topology and no bridge.
    Vm,
    /// In one with both.
    VmBridge,
}

impl Variant {
    /// In the order in which they are measured.
    pub const ALL: [Self; 3] = [Self::Host, Self::Vm, Self::VmBridge];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Vm => "vm",
            Self::VmBridge => "vm+bridge",
        }
    }
}

/// Rounds of wake-ups until the governors are given up on.
const SETTLE_ROUNDS: u32 = 12;
/// Wake-ups of each CPU in a round, and µs between them: 0.4 s, in which load
/// tracking halves 12 times, and util_est loses a quarter at each.
const WAKES: &str = "20 20000";
/// Questions for the other clock; the tightest answers count.
const CLOCK_QUESTIONS: u32 = 12;

/// Load programs that are running.
#[derive(Debug)]
pub struct Session<'a> {
    machine: &'a Machine,
    host: Peer,
    guest: Option<Guest>,
}

/// A guest and the threads of its vCPUs, by the pCPU that each is pinned to.
#[derive(Debug)]
struct Guest {
    console: Peer,
    vcpus: Vec<(u32, i32)>,
}

/// A mark of the load's, in the host's time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// Its name.
    pub name: String,
    /// When, in µs of CLOCK_MONOTONIC.
    pub us: u64,
    /// The pCPU that the load was on.
    pub cpu: u32,
}

/// What a thread of the load noted.
#[derive(Debug, Default)]
struct Notes {
    tid: i32,
    turns: u64,
    marks: Vec<Mark>,
}

/// One repeat.
#[derive(Debug)]
pub struct Observed {
    /// From the host's trace.
    pub seen: Seen,
    /// The load's own.
    pub marks: Vec<Mark>,
    /// Turns of work that its first thread did.
    pub turns: u64,
    /// The threads that carried it: the load's own, or the vCPUs'.
    pub threads: Vec<i32>,
    /// Each cluster's frequency when the trace began, in kHz.
    pub khz_before: Vec<u32>,
    /// How far the marks can be off, in µs: the guest's clock is another.
    pub clock_error_us: u64,
    /// Why the state before wasn't the settled one.
    pub unsettled: Option<String>,
}

impl<'a> Session<'a> {
    /// Starts the load program on the host, and the guest if there is one.
    pub fn start(machine: &'a Machine, variant: Variant, args: &BenchArgs) -> Result<Self> {
        let host = Peer::start(Command::new(&machine.guest.load))?;
        let guest = match variant {
            Variant::Host => None,
            _ => Some(Guest::boot(machine, variant, args)?),
        };
        Ok(Self {
            machine,
            host,
            guest,
        })
    }

    /// Repeats a scenario.
    pub fn measure(
        &mut self,
        scenario: &Scenario,
        trace: &Trace,
        repeats: u32,
    ) -> Result<Vec<Observed>> {
        self.keep_aside(scenario.aside(self.machine))?;
        (0..repeats).map(|_| self.once(scenario, trace)).collect()
    }

    /// Ends it all.
    pub fn end(self) -> Result<()> {
        if let Some(guest) = self.guest {
            guest.console.end()?;
        }
        self.host.end()
    }

    fn once(&mut self, scenario: &Scenario, trace: &Trace) -> Result<Observed> {
        let unsettled = self.settle()?;
        trace.start()?;
        let khz_before = self
            .machine
            .clusters
            .iter()
            .filter_map(Cluster::now_khz)
            .collect();
        if let Some(beside) = scenario.beside {
            let first = scenario.first(self.machine).to_string();
            self.host.ask(&format!(
                "start beside {}",
                beside.replace("{first}", &first)
            ))?;
        }
        let all_notes = self.carry_out(scenario)?;
        let seen = trace.stop()?;
        if scenario.beside.is_some() {
            self.host.ask("join beside")?;
        }
        let (offset, clock_error_us) = self.clock()?;
        let notes = all_notes.iter().map(|notes| self.notes(notes, offset));
        let notes = notes.collect::<Result<Vec<_>>>()?;
        let threads = match &self.guest {
            Some(guest) => guest.vcpus.iter().map(|(_, tid)| *tid).collect(),
            None => notes.iter().map(|notes| notes.tid).collect(),
        };
        let Notes { marks, turns, .. } = notes
            .into_iter()
            .next()
            .context("a scenario without a thread")?;
        Ok(Observed {
            seen,
            marks,
            turns,
            threads,
            khz_before,
            clock_error_us,
            unsettled,
        })
    }

    /// Starts the scenario's threads, and waits for all; their notes.
    fn carry_out(&mut self, scenario: &Scenario) -> Result<Vec<String>> {
        let rows: Vec<String> = scenario
            .steps
            .iter()
            .map(|steps| self.steps(scenario, steps))
            .collect();
        let peer = self.peer();
        let names: Vec<String> = (0..rows.len())
            .map(|number| format!("{}{number}", scenario.name))
            .collect();
        for (name, steps) in names.iter().zip(rows) {
            peer.ask(&format!("start {name} {steps}"))?;
        }
        names
            .iter()
            .map(|name| peer.ask(&format!("join {name}")))
            .collect()
    }

    /// The load program that carries the scenario's load.
    fn peer(&mut self) -> &mut Peer {
        match &mut self.guest {
            Some(guest) => &mut guest.console,
            None => &mut self.host,
        }
    }

    /// The steps with this machine's CPUs in them; vCPU n is pinned to the
    /// n-th CPU.
    fn steps(&self, scenario: &Scenario, steps: &str) -> String {
        let cpus = self.machine.cpus();
        let first = scenario.first(self.machine);
        let number = |cpu: u32| match &self.guest {
            Some(_) => cpus
                .iter()
                .position(|one| *one == cpu)
                .unwrap_or_default()
                .to_string(),
            None => cpu.to_string(),
        };
        let all: Vec<String> = cpus.iter().map(|cpu| number(*cpu)).collect();
        steps
            .replace("{first}", &number(first))
            .replace("{all}", &all.join(","))
            .replace("{calm}", CALM)
    }

    /// Brings every governor to its minimum, and lets all load decay; why
    /// not, if they don't get there.
    fn settle(&mut self) -> Result<Option<String>> {
        let mut above = String::new();
        for _ in 0..SETTLE_ROUNDS {
            let mut parts = Vec::new();
            if let Some(guest) = &mut self.guest {
                parts.push(guest.console.ask(&format!("settle {WAKES}"))?);
            }
            parts.push(self.host.ask(&format!("settle {WAKES}"))?);
            above = parts.join(" ").trim().to_owned();
            if above.is_empty() {
                return Ok(None);
            }
        }
        Ok(Some(above))
    }

    /// Binds this program, the VMM but its vCPUs, and the load programs'
    /// first threads to a CPU: what they do is a load that governors answer.
    fn keep_aside(&self, cpu: u32) -> Result<()> {
        let guest = self.guest.iter().map(|guest| guest.console.pid());
        for pid in guest.chain([std::process::id(), self.host.pid()]) {
            for (tid, name) in threads(pid)? {
                if !name.starts_with("vcpu") {
                    pin_thread(tid, &[cpu])?;
                }
            }
        }
        Ok(())
    }

    /// What to add to the load's clock for the host's, and how far that can
    /// be off, in ns and µs. Both run on one counter; a question's time lies
    /// between those of asking and of the answer.
    fn clock(&mut self) -> Result<(i64, u64)> {
        let Some(guest) = &mut self.guest else {
            return Ok((0, 0));
        };
        let (mut least, mut most) = (i64::MIN, i64::MAX);
        for _ in 0..CLOCK_QUESTIONS {
            let before = i64::try_from(now_ns())?;
            let there: i64 = guest.console.ask("now")?.parse()?;
            let after = i64::try_from(now_ns())?;
            least = least.max(before - there);
            most = most.min(after - there);
        }
        if least > most {
            bail!("the guest's clock does not run with the host's");
        }
        Ok((
            i64::midpoint(least, most),
            u64::try_from((most - least) / 2000)?,
        ))
    }

    /// `tid=T turns=N NAME=NS@CPU ...`; what a new thread notes comes last.
    fn notes(&self, notes: &str, offset_ns: i64) -> Result<Notes> {
        let mut noted = Notes::default();
        for word in notes.split_whitespace() {
            let wrong = || format!("note '{word}' of the load program");
            let (name, value) = word.split_once('=').with_context(wrong)?;
            if name == "tid" {
                noted.tid = value.parse().with_context(wrong)?;
            } else if name == "turns" {
                noted.turns = value.parse().with_context(wrong)?;
            } else if let Some((ns, cpu)) = value.split_once('@') {
                let ns: i64 = ns.parse().with_context(wrong)?;
                let cpu: u32 = cpu.parse().with_context(wrong)?;
                let cpu = match &self.guest {
                    Some(guest) => {
                        guest
                            .vcpus
                            .get(usize::try_from(cpu)?)
                            .with_context(wrong)?
                            .0
                    }
                    None => cpu,
                };
                let us = u64::try_from((ns + offset_ns) / 1000)?;
                noted.marks.push(Mark {
                    name: name.to_owned(),
                    us,
                    cpu,
                });
            }
        }
        Ok(noted)
    }
}

impl Guest {
    fn boot(machine: &Machine, variant: Variant, args: &BenchArgs) -> Result<Self> {
        let bridge = variant == Variant::VmBridge;
        let mut console = Peer::start(command(machine, bridge, &args.guest_cmdline)?)?;
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
        if bridge {
            guest.console.ask("read /sys/devices/system/cpu/cpufreq/policy0/scaling_governor")
                .context("the guest has no cpufreq driver; its kernel needs CONFIG_CPUFREQ_VIRT, or name the driver with --guest-module")?;
        }
        Ok(guest)
    }
}

/// `vcpufreq run` with a vCPU pinned to each pCPU, mirroring it.
fn command(machine: &Machine, bridge: bool, cmdline: &str) -> Result<Command> {
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
    if !bridge {
        command.arg("--no-bridge");
    }
    Ok(command)
}

/// The threads of a process, with their names.
fn threads(pid: u32) -> Result<Vec<(i32, String)>> {
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
