// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest under `vcpufreq run`, and the line over its console.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;

use crate::harness::crosvm::{self, vcpu_name};
use crate::harness::thread_facts::{allowed, scheduling, stat_field};

/// Boot of the guest, in the host's (virtual) time.
pub const BOOT: Duration = Duration::from_secs(120);
/// Any one deed.
const ANSWER: Duration = Duration::from_secs(60);
/// Waiting for a guest to settle: it took 3 s when measured.
const SETTLE_STEP: Duration = Duration::from_millis(100);
const SETTLE_TRIES: u32 = 300;
/// Utilization of a vCPU's thread that only its guest's ticks and timers use.
const IDLE_UTIL: u32 = 30;
/// Memory of a guest.
const MEM_MIB: u32 = 256;
/// Its event lines.
const EVENTS: &str = "/run/events.jsonl";
/// What every guest is booted with: the console, and /dev/mem on the
/// registers that a driver has claimed.
const CMDLINE: &str = "console=ttyS0 quiet nokaslr panic=-1 iomem=relaxed rdinit=/init";

/// What differs from guest to guest.
#[derive(Debug, Default, Clone)]
pub struct Setup {
    /// The pCPUs of each vCPU, as `--pin` takes them; empty: not pinned.
    pub pins: Vec<String>,
    /// More options of `vcpufreq run`.
    pub options: Vec<String>,
    /// More words for the guest's command line.
    pub cmdline: String,
    /// Without `--events`: writing the file is work on the host too.
    pub silent: bool,
    /// Memory in MiB, when the usual isn't enough.
    pub mem_mib: Option<u32>,
    /// crosvm in place of vcpufreq: by the options alone, the usual memory.
    pub crosvm: bool,
}

impl Setup {
    /// vCPUs pinned to these pCPUs, mirroring them.
    pub fn mirroring(pcpus: &[u32]) -> Self {
        Self {
            pins: pcpus.iter().map(u32::to_string).collect(),
            options: vec!["--host-topology".into()],
            ..Self::default()
        }
    }

    /// With more options.
    pub fn with(mut self, options: &[&str]) -> Self {
        self.options
            .extend(options.iter().map(|&option| option.to_owned()));
        self
    }
}

/// A running guest. Dropping it kills it.
#[derive(Debug)]
pub struct Vm {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    /// Console lines that weren't answers, for the case of failure.
    heard: Vec<String>,
    /// The VMM, where that isn't the child: a service's.
    vmm: Option<u32>,
}

impl Vm {
    /// Starts a guest, and waits until it can be talked to and has settled.
    pub fn boot(setup: &Setup) -> Result<Self> {
        Self::boot_prepared(setup, |_| ())
    }

    /// The same, with a VMM whose start `prepare` has a say in.
    pub fn boot_prepared(setup: &Setup, prepare: impl FnOnce(&mut Command)) -> Result<Self> {
        let mut vm = Self::start_prepared(setup, prepare)?;
        vm.expect("@ready", BOOT)?;
        vm.settle(setup.pins.len())?;
        Ok(vm)
    }

    /// Waits until the work that the guest's boot left behind is done: all
    /// vCPUs idle, as the host sees them, for half a second.
    pub fn settle(&self, vcpus: usize) -> Result<()> {
        let mut idle = 0;
        for _ in 0..SETTLE_TRIES {
            sleep(SETTLE_STEP);
            let busiest = (0..vcpus)
                .map(|vcpu| self.util_avg(vcpu))
                .try_fold(0, |max, util| Ok::<_, anyhow::Error>(u32::max(max, util?)))?;
            idle = if busiest <= IDLE_UTIL { idle + 1 } else { 0 };
            if idle == 5 {
                return Ok(());
            }
        }
        bail!("the guest did not settle: a vCPU is still busy")
    }

    /// Starts a guest; it has not booted when this returns.
    pub fn start(setup: &Setup) -> Result<Self> {
        Self::start_prepared(setup, |_| ())
    }

    fn start_prepared(setup: &Setup, prepare: impl FnOnce(&mut Command)) -> Result<Self> {
        // A file of an earlier guest would be taken for this one's.
        let _ = fs::remove_file(EVENTS);
        let mut command = command(setup);
        prepare(&mut command);
        Self::spawn(&mut command)
    }

    /// Sets which process the VMM is, where the child is between its console and this process.
    pub fn set_vmm(&mut self, pid: u32) {
        self.vmm = Some(pid);
    }

    /// Starts what a guest's console is the input and output of.
    pub fn spawn(command: &mut Command) -> Result<Self> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {:?}", command.get_program()))?;
        let input = child.stdin.take();
        let output = child.stdout.take().context("no console")?;
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Ok(Self {
            child,
            input,
            lines,
            heard: Vec::new(),
            vmm: None,
        })
    }

    /// Process id of the VMM.
    pub fn pid(&self) -> u32 {
        self.vmm.unwrap_or_else(|| self.child.id())
    }

    /// Asks the guest to do something; its answer.
    pub fn ask(&mut self, line: impl AsRef<str>) -> Result<String> {
        self.tell(line.as_ref())?;
        let answer = self
            .expect("@", ANSWER)
            .with_context(|| format!("guest: {}", line.as_ref()))?;
        match answer.split_once(' ') {
            Some(("@ok", answer)) => Ok(answer.trim_end().to_owned()),
            None if answer == "@ok" => Ok(String::new()),
            _ => bail!("guest: {}: {answer}", line.as_ref()),
        }
    }

    /// Asks for a number.
    pub fn number(&mut self, line: impl AsRef<str>) -> Result<u64> {
        let answer = self.ask(line.as_ref())?;
        answer
            .parse()
            .with_context(|| format!("guest: {}: '{answer}'", line.as_ref()))
    }

    /// Sends a line without waiting for an answer.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        let input = self.input.as_mut().context("the console is closed")?;
        writeln!(input, "{line}")
            .and_then(|()| input.flush())
            .context("writing to the console")
    }

    /// Powers the guest off; the VMM's stderr.
    pub fn quit(self) -> Result<String> {
        self.quit_with(0)
    }

    /// The same, when the VMM is to end with another exit code: 1 after
    /// requests that the host refused.
    pub fn quit_with(mut self, code: i32) -> Result<String> {
        self.tell("quit")?;
        self.finish(code)
    }

    /// Waits for the VMM to end with this exit code; its stderr.
    pub fn finish(mut self, code: i32) -> Result<String> {
        loop {
            match self.lines.recv_timeout(ANSWER) {
                Ok(line) => self.heard.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => bail!("the VMM did not end"),
            }
        }
        let status = self.child.wait()?;
        let errors = self.child.stderr.take().map(read_all).unwrap_or_default();
        ensure!(
            status.code() == Some(code),
            "the VMM ended with {status}: {errors}"
        );
        Ok(errors)
    }

    /// SIGKILL, and waits for the process to be gone.
    pub fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Waits for a console line with this beginning.
    pub fn expect(&mut self, prefix: &str, limit: Duration) -> Result<String> {
        loop {
            match self.lines.recv_timeout(limit) {
                Ok(line) => match line.find(prefix) {
                    Some(at) => return Ok(line[at..].trim_end().to_owned()),
                    None => self.heard.push(line),
                },
                Err(error) => {
                    // So that its last words can be read to the end.
                    let _ = self.child.kill();
                    let errors = self.child.stderr.take().map(read_all).unwrap_or_default();
                    let heard = self
                        .heard
                        .split_off(self.heard.len().saturating_sub(20))
                        .join(" | ");
                    return Err(anyhow!(
                        "{error}: no '{prefix}' from the guest; stderr: {errors}; console: {heard}"
                    ));
                }
            }
        }
    }

    /// The thread of a vCPU.
    pub fn vcpu_tid(&self, vcpu: usize) -> Result<i32> {
        let wanted = format!("vcpu{vcpu}");
        let mut threads = threads(self.pid())?.into_iter();
        let found = threads.find(|(_, name)| vcpu_name(name) == Some(&wanted));
        found
            .map(|(tid, _)| tid)
            .with_context(|| format!("the VMM has no thread {wanted}"))
    }

    /// The clamp in force for a vCPU's thread, as the kernel reports it.
    pub fn clamp(&self, vcpu: usize) -> Result<(u32, u32)> {
        let text = self.sched(vcpu)?;
        Ok((
            field(&text, "effective uclamp.min")?,
            field(&text, "effective uclamp.max")?,
        ))
    }

    /// The utilization that the host sees of a vCPU's thread now.
    pub fn util_avg(&self, vcpu: usize) -> Result<u32> {
        field(&self.sched(vcpu)?, "se.avg.util_avg")
    }

    /// The utilization that the host's governor reckons with: the larger of
    /// what it sees now and what it remembers from earlier activations
    /// (util_est; its highest bit is a flag of the kernel's own).
    pub fn util(&self, vcpu: usize) -> Result<u32> {
        let text = self.sched(vcpu)?;
        let remembered = field(&text, "se.avg.util_est")? & !(1 << 31);
        Ok(remembered.max(field(&text, "se.avg.util_avg")?))
    }

    fn sched(&self, vcpu: usize) -> Result<String> {
        let path = format!("/proc/{}/task/{}/sched", self.pid(), self.vcpu_tid(vcpu)?);
        fs::read_to_string(&path).with_context(|| path.clone())
    }

    /// Resident memory of the VMM in KiB.
    pub fn resident_kib(&self) -> Result<u64> {
        let path = format!("/proc/{}/status", self.pid());
        let text = fs::read_to_string(&path).with_context(|| path.clone())?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .context("no VmRSS")?;
        Ok(line.trim().trim_end_matches(" kB").parse()?)
    }

    /// The pCPUs that a vCPU's thread may run on, as the kernel lists them.
    pub fn allowed(&self, vcpu: usize) -> Result<String> {
        allowed(self.pid(), self.vcpu_tid(vcpu)?)
    }

    /// The pCPU that a vCPU's thread was last on.
    pub fn pcpu(&self, vcpu: usize) -> Result<u32> {
        Ok(stat_field(&self.stat(vcpu)?, 39)?.parse()?)
    }

    /// Priority and policy of a vCPU's thread, as `1 2`.
    pub fn scheduling(&self, vcpu: usize) -> Result<String> {
        scheduling(&self.stat(vcpu)?)
    }

    fn stat(&self, vcpu: usize) -> Result<String> {
        let path = format!("/proc/{}/task/{}/stat", self.pid(), self.vcpu_tid(vcpu)?);
        fs::read_to_string(&path).with_context(|| path.clone())
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // Both fail when it has ended already, which is as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
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
    Ok(found)
}

/// The events that the last guest's VMM wrote.
pub fn events() -> Result<Vec<Value>> {
    let text = fs::read_to_string(EVENTS).context(EVENTS)?;
    text.lines()
        .map(|line| serde_json::from_str(line).with_context(|| line.to_owned()))
        .collect()
}

/// `vcpufreq run` with the lab's guest.
pub fn command(setup: &Setup) -> Command {
    let kernel = ["/lab/guest-kernel", "/lab/guest-initramfs"];
    if setup.crosvm {
        return crosvm::command(kernel, MEM_MIB, CMDLINE, &setup.options);
    }
    let mut command = Command::new("/bin/vcpufreq");
    command
        .args(["run", "--kernel", kernel[0], "--initrd", kernel[1]])
        .arg("--mem")
        .arg(setup.mem_mib.unwrap_or(MEM_MIB).to_string())
        .arg("--cmdline")
        .arg(format!("{CMDLINE} {}", setup.cmdline))
        .arg("--cpus")
        .arg(setup.pins.len().to_string());
    for (vcpu, pcpus) in setup
        .pins
        .iter()
        .enumerate()
        .filter(|(_, pcpus)| !pcpus.is_empty())
    {
        command.arg("--pin").arg(format!("{vcpu}={pcpus}"));
    }
    if !setup.silent {
        command.args(["--events", EVENTS]);
    }
    command.args(&setup.options);
    command
}

/// A number of a thread's sched file.
pub fn field(text: &str, name: &str) -> Result<u32> {
    let line = text
        .lines()
        .find(|line| line.split(':').next().is_some_and(|key| key.trim() == name))
        .with_context(|| format!("no '{name}' in the thread's sched file"))?;
    let value = line.rsplit(':').next().unwrap_or_default().trim();
    value.parse().with_context(|| format!("{name}: '{value}'"))
}

fn read_all(mut stream: ChildStderr) -> String {
    let mut bytes = Vec::new();
    // What could be read until an error is what there is to show.
    let _ = std::io::Read::read_to_end(&mut stream, &mut bytes);
    String::from_utf8_lossy(&bytes).trim().to_owned()
}
