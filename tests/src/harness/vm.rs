// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A running guest, and the line over its console.

use std::fs;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use vcpufreq_bench::piped::{Piped, child, threads};
use vcpufreq_host::{CpuList, Tid, effective_clamp, proc_field, stat_field};
use vcpufreq_load::answer::{self, READY};

use crate::harness::kernel_log;
use crate::harness::sysfs;
use crate::harness::thread_facts::{allowed, scheduling};
use crate::harness::vmm::{EVENTS, Vmm, behind, vcpu_name};
use crate::harness::wait::{SOON, settled};

pub use crate::harness::vmm::{Setup, command};

/// Boot of the guest, in the host's (virtual) time.
pub const BOOT: Duration = Duration::from_secs(120);
/// Any one deed.
const ANSWER: Duration = Duration::from_secs(60);
/// In which a VMM has made the threads of its vCPUs.
const THREADS: Duration = Duration::from_secs(10);
/// Waiting for a guest to settle: it took 3 s when measured.
const SETTLE_STEP: Duration = Duration::from_millis(100);
const SETTLE_TRIES: u32 = 300;
/// After this time it has.
pub const SETTLED: Duration = Duration::from_secs(4);
/// Utilization of a vCPU's thread that only its guest's ticks and timers use.
const IDLE_UTIL: u32 = 30;

/// A running guest. Dropping it kills it.
#[derive(Debug)]
pub struct Vm {
    child: Piped,
    /// Console lines that weren't answers, for the case of failure.
    heard: Vec<String>,
    /// The VMM, where that isn't the child: a service's.
    vmm: Option<u32>,
    /// Behind the child, which is `vcpufreq qemu`.
    behind_prefix: bool,
}

impl Vm {
    /// Starts a guest, and waits until it can be talked to and has settled.
    pub fn boot(setup: &Setup) -> Result<Self> {
        Self::boot_prepared(setup, |_| ())
    }

    /// The same, with a VMM whose start `prepare` can change.
    pub fn boot_prepared(setup: &Setup, prepare: impl FnOnce(&mut Command)) -> Result<Self> {
        let mut vm = Self::start_prepared(setup, prepare)?;
        vm.expect("@ready", BOOT)?;
        vm.settle(setup.pins.len())?;
        Ok(vm)
    }

    /// The same for a guest with real-time vCPUs, whose threads have no utilization to settle by.
    pub fn boot_real_time(setup: &Setup) -> Result<Self> {
        Self::boot_real_time_prepared(setup, |_| ())
    }

    /// The same, with a VMM whose start `prepare` can change.
    pub fn boot_real_time_prepared(
        setup: &Setup,
        prepare: impl FnOnce(&mut Command),
    ) -> Result<Self> {
        let mut vm = Self::start_prepared(setup, prepare)?;
        vm.expect("@ready", BOOT)?;
        sleep(SETTLED);
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

    /// The same, with a VMM whose start `prepare` can change.
    pub fn start_prepared(setup: &Setup, prepare: impl FnOnce(&mut Command)) -> Result<Self> {
        // A file of an earlier guest would be taken for this one's.
        let _ = fs::remove_file(EVENTS);
        let mut command = command(setup);
        prepare(&mut command);
        let mut vm = Self::spawn(&mut command)?;
        let qemu = setup.vmm == Vmm::Qemu;
        vm.behind_prefix = qemu && setup.bridge();
        if qemu && !vm.behind_prefix {
            vm.pin(setup)?;
        }
        Ok(vm)
    }

    /// Sets which process the VMM is, where the child is between its console and this process.
    pub fn set_vmm(&mut self, pid: u32) {
        self.vmm = Some(pid);
    }

    /// Starts what a guest's console is the input and output of.
    pub fn spawn(command: &mut Command) -> Result<Self> {
        Ok(Self {
            child: Piped::start(command)?,
            heard: Vec::new(),
            vmm: None,
            behind_prefix: false,
        })
    }

    /// Binds the vCPUs of a VMM that has no option for it, soon after its start.
    fn pin(&self, setup: &Setup) -> Result<()> {
        for (vcpu, pcpus) in setup.pins.iter().enumerate() {
            let tid = settled(THREADS, || Ok(self.vcpu_tid(vcpu)), Result::is_ok)??;
            let tid = Tid::new(tid).context("a thread's number")?;
            let pcpus: Vec<u32> = pcpus.parse::<CpuList>()?.into_iter().collect();
            vcpufreq_host::pin(tid, &pcpus).context("pinning a vCPU")?;
        }
        Ok(())
    }

    /// Process id of the VMM.
    pub fn pid(&self) -> u32 {
        let program = self.program();
        let qemu = self.behind_prefix.then(|| behind(program)).flatten();
        qemu.unwrap_or(program)
    }

    /// Process id of `vcpufreq`.
    pub fn program(&self) -> u32 {
        self.vmm.unwrap_or_else(|| self.child.pid())
    }

    /// Asks the guest to do something; its answer.
    pub fn ask(&mut self, line: impl AsRef<str>) -> Result<String> {
        self.tell(line.as_ref())?;
        let answer = self
            .expect("@", ANSWER)
            .with_context(|| format!("guest: {}", line.as_ref()))?;
        match answer::read(&answer) {
            Some(Ok(text)) if answer != READY => Ok(text),
            // After a second boot the kernel's last lines have the cause.
            _ => bail!(
                "guest: {}: {answer}; console: {}",
                line.as_ref(),
                self.last_heard()
            ),
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
        self.child.tell(line)
    }

    /// Powers the guest off; the VMM's stderr.
    pub fn quit(self) -> Result<String> {
        self.quit_with(0)
    }

    /// The same, when the VMM is to end with another exit code: 1 after
    /// requests that the host refused.
    pub fn quit_with(mut self, code: i32) -> Result<String> {
        if kernel_log::guests_are_watched() {
            let said = self.ask("reports")?;
            ensure!(said.is_empty(), "the guest's kernel: {said}");
        }
        self.tell("quit")?;
        self.finish(code)
    }

    /// Waits for the VMM to end with this exit code; its stderr.
    pub fn finish(mut self, code: i32) -> Result<String> {
        let (status, errors) = self.child.finish(ANSWER).context("waiting for the VMM")?;
        ensure!(
            status.code() == Some(code),
            "the VMM ended with {status}: {errors}"
        );
        Ok(errors)
    }

    /// What the VMM wrote to stderr by now.
    pub fn errors(&self) -> String {
        self.child.errors()
    }

    /// SIGKILL, and waits for the process to be gone.
    pub fn kill(mut self) -> Result<()> {
        if self.behind_prefix {
            self.kill_behind()?;
            return self.child.finish(ANSWER).map(drop);
        }
        self.child.kill()
    }

    /// SIGKILL to `vcpufreq qemu`, and waits for it to be gone. QEMU goes on.
    pub fn kill_prefix(&mut self) -> Result<()> {
        let qemu = behind(self.program());
        self.child.kill()?;
        self.vmm = qemu;
        Ok(())
    }

    /// QEMU for the device tree may have just ended by itself: then one for the guest follows.
    fn kill_behind(&self) -> Result<()> {
        let prefix = format!("/proc/{}/exe", self.child.pid());
        let kill_one = || {
            if let Some(pid) = behind(self.program()).or(self.vmm) {
                // It may have ended.
                let _ = kill(Pid::from_raw(i32::try_from(pid)?), Signal::SIGKILL);
            }
            // One that isn't reaped has none.
            Ok(fs::read_link(&prefix).is_ok())
        };
        settled(ANSWER, kill_one, |lives| !lives).map(drop)
    }

    /// Waits for a console line with this beginning.
    pub fn expect(&mut self, prefix: &str, limit: Duration) -> Result<String> {
        loop {
            match self.child.line(limit) {
                Ok(line) => match line.find(prefix) {
                    Some(at) => return Ok(line[at..].trim_end().to_owned()),
                    None => self.heard.push(line),
                },
                Err(error) => {
                    let errors = self.child.last_words();
                    let heard = self.last_heard();
                    bail!(
                        "{error}: no '{prefix}' from the guest; stderr: {errors}; console: {heard}"
                    );
                }
            }
        }
    }

    /// The last lines that nothing waited for.
    fn last_heard(&self) -> String {
        let last = self.heard.len().saturating_sub(20);
        self.heard[last..].join(" | ")
    }

    /// The thread of a vCPU.
    pub fn vcpu_tid(&self, vcpu: usize) -> Result<i32> {
        let wanted = format!("vcpu{vcpu}");
        let mut threads = threads(self.pid())?.into_iter();
        let found = threads.find(|(_, name)| vcpu_name(name).as_deref() == Some(&wanted));
        found
            .map(|(tid, _)| tid)
            .with_context(|| format!("the VMM has no thread {wanted}"))
    }

    /// The clamp in force for a vCPU's thread, as the kernel reports it.
    pub fn clamp(&self, vcpu: usize) -> Result<(u32, u32)> {
        effective_clamp(&self.sched(vcpu)?).context("the kernel shows no clamp")
    }

    /// The same once it is `wanted`, or what it stays at.
    pub fn settled_clamp(&self, vcpu: usize, wanted: (u32, u32)) -> Result<(u32, u32)> {
        settled(SOON, || self.clamp(vcpu), |now| *now == wanted)
    }

    /// How often a vCPU's thread has slept, as an idle vCPU's does.
    pub fn sleeps(&self, vcpu: usize) -> Result<u32> {
        field(&self.sched(vcpu)?, "nr_voluntary_switches")
    }

    /// The utilization that the host sees of a vCPU's thread now.
    pub fn util_avg(&self, vcpu: usize) -> Result<u32> {
        field(&self.sched(vcpu)?, "se.avg.util_avg")
    }

    /// The utilization that the host's governor uses: the larger of the current one and that of
    /// earlier activations (util_est; its highest bit is a flag of the kernel).
    pub fn util(&self, vcpu: usize) -> Result<u32> {
        let text = self.sched(vcpu)?;
        let remembered = field(&text, "se.avg.util_est")? & !(1 << 31);
        Ok(remembered.max(field(&text, "se.avg.util_avg")?))
    }

    fn sched(&self, vcpu: usize) -> Result<String> {
        let path = format!("/proc/{}/task/{}/sched", self.pid(), self.vcpu_tid(vcpu)?);
        fs::read_to_string(&path).with_context(|| path.clone())
    }

    /// Resident memory in KiB of the VMM, or of what serves QEMU: a server and the VM's process.
    pub fn resident_kib(&self) -> Result<u64> {
        let all = [Some(self.program()), self.vm_process()];
        let kib = |pid| sysfs::field::<u64>(format!("/proc/{pid}/status"), "VmRSS");
        all.into_iter().flatten().map(kib).sum()
    }

    /// The process that carries out the requests of QEMU's guest.
    pub fn vm_process(&self) -> Option<u32> {
        child(self.program(), "vcpufreq")
    }

    /// The pCPUs that a vCPU's thread may run on, as the kernel lists them.
    pub fn allowed(&self, vcpu: usize) -> Result<String> {
        allowed(self.pid(), self.vcpu_tid(vcpu)?)
    }

    /// The pCPU that a vCPU's thread was last on.
    pub fn pcpu(&self, vcpu: usize) -> Result<u32> {
        let stat = self.stat(vcpu)?;
        Ok(stat_field(&stat, 39).context("a short stat")?.parse()?)
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
        if self.behind_prefix {
            let _ = self.kill_behind();
        }
    }
}

/// The events that the last guest's VMM wrote.
pub fn events() -> Result<Vec<Value>> {
    let text = fs::read_to_string(EVENTS).context(EVENTS)?;
    text.lines()
        .map(|line| serde_json::from_str(line).with_context(|| line.to_owned()))
        .collect()
}

/// The requests of a vCPU among them, in order: time in µs and kHz.
pub fn requests_of(vcpu: usize) -> Result<Vec<(u64, u32)>> {
    let mut requests = Vec::new();
    for event in events()? {
        if event["event"] == "request" && event["vcpu"] == vcpu {
            let time = event["t_ns"].as_u64().context("a request without t_ns")? / 1000;
            let khz = event["khz"].as_u64().context("a request without khz")?;
            requests.push((time, u32::try_from(khz)?));
        }
    }
    Ok(requests)
}

/// A number of a thread's sched file.
pub fn field(text: &str, name: &str) -> Result<u32> {
    let number = proc_field(text, name).and_then(|number| number.parse().ok());
    number.with_context(|| format!("no number {name} in the thread's sched file"))
}
