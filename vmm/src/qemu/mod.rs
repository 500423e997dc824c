// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq qemu`: a prefix for a QEMU command line, which gives the VM the bridge.
//!
//! ```text
//! command line ─▶ QEMU's own device tree (dumpdtb) ─▶ with capacities and OPPs ─▶ -dtb
//!      └────────▶ QEMU with ivshmem-doorbell ◀─ pair of sockets ─▶ server ─▶ QEMU's exit code
//!                 or with RAM that the server has, too ◀────────────┘
//! ```
//! QEMU inherits its end of the pair, or its RAM, and the tree as open files: a killed program leaves
//! no file.

mod alike;
mod inherited;
mod ram;
mod tree;

use std::{
    os::{
        fd::AsFd,
        unix::{net::UnixStream, process::ExitStatusExt},
    },
    path::Path,
    process::{Child, Command, ExitStatus},
};

use anyhow::{Context, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use vcpufreq_host::{CpuList, HostRoot, Tid};

use crate::{
    config::rt_pcpus,
    message::{chain, warn},
    options::serve::{QemuArgs, QemuPath},
    qemu_command::QemuCommand,
    serve::{
        Connection, LeftVmm, PendingVmms, Refusals, Served, ServedVm, ServedVmm, VmChange, forget,
        forget_process,
    },
    signals::{EndSignals, Ready, is_told_to_end, wait},
    sys,
};
use alike::{pcpus_alike, start_on};
use inherited::device;
use ram::GuestRam;
use tree::Tree;

const WORKER_DIED: &str =
    "the process that carries out requests has died; the guest goes on without clamps";

/// The exit code when a guest was refused that is a real-time one, or has registers in its RAM.
const REFUSED: u8 = 2;

/// What a shell reports for a program that a signal ended.
const SIGNALLED: i32 = 128;

/// Runs QEMU with the bridge; returns its exit code.
///
/// # Errors
/// Whatever keeps QEMU from starting, in one line.
pub fn qemu(mut options: QemuArgs) -> anyhow::Result<u8> {
    let command = QemuCommand::read(&options.command)?;
    if !options.served.vcpus.rt.is_empty() && !command.locks_memory() {
        bail!("a real-time guest's memory has to be locked; give QEMU -overcommit mem-lock=on");
    }
    let cpus = &mut options.served.vcpus.cpus;
    if cpus.is_none() {
        *cpus = Some(command.cpus()?);
    }
    if options.path == QemuPath::Ram {
        ram::check(&command)?;
    }
    let mut served = Served::check(options.served, HostRoot::default())?;
    served.check_unused()?;
    let alike = start_pcpus(&served).filter(|_| command.has_kvm());
    let tree = start_on(alike.as_ref(), || {
        Tree::make(&command, &served, options.path)
    })??;
    served.create_events()?;
    let carrier = Carrier::make(&command, &tree, &served)?;
    let mut qemu = with_bridge(&command, &tree, &carrier, (&served, alike.as_ref()))?;
    let mut qemu = start_on(alike.as_ref(), || qemu.spawn())?
        .with_context(|| format!("can't start {}", Path::new(command.program()).display()))?;
    // After QEMU is started, which would inherit that they are blocked, and before any thread is
    // made, so that all of them leave the signals alone.
    let signals = EndSignals::take_with_children().context("can't wait for signals")?;
    // From here on it is QEMU's alone.
    drop(tree);
    let mut waiting = PendingVmms::default();
    let in_ram = matches!(carrier, Carrier::Ram(_));
    let vmm = carrier.of_started(&mut qemu, &served);
    let added = vmm.and_then(|vmm| vmm.map_or(Ok(()), |vmm| waiting.add(vmm, &served)));
    let mut refusals = Refusals::default();
    added.unwrap_or_else(|error| not_served(&mut refusals, &error));
    let supervisor = Supervisor {
        served: &served,
        signals: &signals,
        waiting,
        machine: None,
        was_served: false,
        in_ram,
        is_told_to_end: false,
        refusals,
    };
    let (status, was_refused) = supervisor.run(&mut qemu)?;
    // QEMU ends by itself when it is refused, and doesn't know why. By a signal it ends with 0.
    match was_refused && (in_ram || served.rt().is_real_time()) {
        true => Ok(REFUSED),
        false => Ok(exit_code(status)),
    }
}

/// pCPUs of one type for QEMU's start, if not all are. Real-time vCPUs' are theirs from the start.
fn start_pcpus(served: &Served) -> Option<CpuList> {
    let (rt, others): (Vec<_>, Vec<_>) = served.vcpus.iter().partition(|vcpu| vcpu.rt.is_some());
    let pins = others.iter().chain(&rt).map(|vcpu| &*vcpu.pin);
    let alike = pcpus_alike(&HostRoot::default(), pins)?;
    let alike = alike.without(&rt_pcpus(&served.vcpus).into_iter().collect());
    (!alike.is_empty()).then_some(alike)
}

/// What carries the bridge.
enum Carrier {
    /// A device: the server's end of its connection, and QEMU's.
    Device {
        stream: UnixStream,
        of_qemu: UnixStream,
    },
    /// The guest's RAM.
    Ram(GuestRam),
}

impl Carrier {
    fn make(command: &QemuCommand<'_>, tree: &Tree, served: &Served) -> anyhow::Result<Self> {
        if let Some(place) = tree.in_ram() {
            return GuestRam::make(command, place, served).map(Self::Ram);
        }
        let (stream, of_qemu) = UnixStream::pair().context("can't make a pair of sockets")?;
        Ok(Self::Device { stream, of_qemu })
    }

    /// The options that give it to QEMU.
    fn arguments(&self, vcpus: usize) -> anyhow::Result<Vec<String>> {
        match self {
            Self::Device { of_qemu, .. } => device(of_qemu, vcpus),
            Self::Ram(ram) => ram.arguments(),
        }
    }

    /// The VMM that `qemu` is; none if it has ended. QEMU's connection ends with it.
    fn of_started(self, qemu: &mut Child, served: &Served) -> anyhow::Result<Option<ServedVmm>> {
        match self {
            Self::Device { stream, .. } => {
                ServedVmm::child(Connection::new(stream), qemu.id()).map(Some)
            }
            Self::Ram(ram) => {
                let pid = qemu.id();
                let process = sys::pidfd_open(pid).context("it can't be watched")?;
                let shared = ram.of_started((qemu, process.as_fd()), served)?;
                Ok(shared.map(|shared| ServedVmm::with_ram(shared, (pid, process), false)))
            }
        }
    }
}

/// QEMU with what carries the bridge; a line says what that is, and what the guest will see.
fn with_bridge(
    command: &QemuCommand<'_>,
    tree: &Tree,
    carrier: &Carrier,
    (served, alike): (&Served, Option<&CpuList>),
) -> anyhow::Result<Command> {
    let added = [tree.arguments()?, carrier.arguments(served.vcpus.len())?].concat();
    let names = added.iter().map(String::as_str);
    let names: Vec<_> = names.filter(|word| word.starts_with('-')).collect();
    let (topology_source, summary, names) =
        (&served.topology_source, tree.summary(), names.join(" "));
    let place = alike.map(|pcpus| format!(", and starts on pCPUs {pcpus}, which are of one type"));
    let place = place.unwrap_or_default();
    warn(&format!(
        "{topology_source}; {summary}; QEMU gets {names} too{place}"
    ));
    let mut qemu = command.start();
    qemu.args(command.arguments()).args(&added);
    Ok(qemu)
}

fn not_served(refusals: &mut Refusals, error: &anyhow::Error) {
    refusals.refuse(|| format!("the VM isn't served: {}", chain(error)));
}

/// What is done while QEMU runs.
struct Supervisor<'a> {
    served: &'a Served,
    signals: &'a EndSignals,
    /// Until QEMU has its vCPUs.
    waiting: PendingVmms,
    /// From then on, unless it can't be served.
    machine: Option<ServedVm>,
    /// Whether it was.
    was_served: bool,
    /// Whether QEMU has no device, by which it would end when it is refused.
    in_ram: bool,
    is_told_to_end: bool,
    refusals: Refusals,
}

impl Supervisor<'_> {
    /// Serves QEMU's machine until QEMU ends; and whether it was refused, and never served.
    fn run(mut self, qemu: &mut Child) -> anyhow::Result<(ExitStatus, bool)> {
        let status = loop {
            // QEMU may have ended before the signals were taken. This question comes first, so that
            // `ready` names a QEMU that has ended unserved.
            let status = qemu.try_wait().context("can't wait for QEMU")?;
            if let Some((vmm, threads)) = self.waiting.ready(self.served, &mut self.refusals) {
                self.start(vmm, &threads);
            }
            if let Some(status) = status {
                break status;
            }
            if self.in_ram && self.is_refused() && !self.is_told_to_end {
                forward(Signal::SIGTERM, qemu);
                self.is_told_to_end = true;
            }
            if let Some(why) = self.machine_ends(qemu)? {
                self.go_on(why);
            }
        };
        self.machine.map(end);
        // While it was ending, serving what it had left may have failed.
        forget_process(qemu.id());
        // QEMU has last words of its own only with the device.
        let words = self.refusals.last_words();
        let to_say = words.iter().filter(|_| !self.in_ram);
        to_say.for_each(|words| warn(words));
        Ok((status, words.is_some() && !self.was_served))
    }

    /// Whether it is not served, and never was.
    fn is_refused(&self) -> bool {
        self.machine.is_none() && !self.was_served && self.waiting.next_look().is_none()
    }

    fn start(&mut self, vmm: ServedVmm, threads: &[Option<Tid>]) {
        let started = ServedVm::start(self.served, vmm, threads);
        let failed = |error: &anyhow::Error| {
            // Else what was waited for has ended by that, and is no refusal.
            if !is_told_to_end() {
                not_served(&mut self.refusals, error);
            }
        };
        self.machine = started.inspect_err(failed).ok();
        self.was_served |= self.machine.is_some();
    }

    /// Serves the vCPUs that QEMU has now, if they are others. Else QEMU goes on alone: this program
    /// waits for it, and no other server takes it over.
    fn go_on(&mut self, why: VmChange) {
        if let Some(left) = self.machine.take().and_then(end) {
            match left.goes_on(why) {
                true => self.start(left.vmm, &left.threads),
                false => forget(&left.vmm),
            }
        }
    }

    /// Waits for something to do; what ends the machine, if something does.
    fn machine_ends(&mut self, qemu: &Child) -> anyhow::Result<Option<VmChange>> {
        let machine = self.machine.as_ref();
        let lost = machine.map(ServedVm::lost);
        let of_lost = usize::from(lost.is_some());
        let ends = machine.into_iter().flat_map(ServedVm::ends);
        let mut files: Vec<_> = lost.into_iter().chain(ends).collect();
        let guardian = files.len();
        files.extend(machine.and_then(ServedVm::guardian_ended));
        let look = self.waiting.next_look();
        let look = look.or(machine.map(ServedVm::look_within));
        match wait(self.signals, &files, look)? {
            Ready::Signal(Signal::SIGCHLD) => {}
            Ready::Signal(signal) => forward(signal, qemu),
            Ready::File(index) if index < of_lost => {
                warn(WORKER_DIED);
                return Ok(Some(VmChange::Ended));
            }
            Ready::File(index) if index >= guardian => {
                self.machine.iter_mut().for_each(ServedVm::guard_again);
            }
            Ready::File(_) => return Ok(Some(VmChange::Ended)),
            Ready::Nothing => {
                let served = self.served;
                let seen = self.machine.as_mut().map(|machine| machine.look(served));
                return Ok(seen.filter(|seen| matches!(seen, VmChange::Ended | VmChange::Plugged)));
            }
        }
        Ok(None)
    }
}

/// What is left of it; nothing that can be served again, if not all can be put back. A warning names
/// that: the exit code is QEMU's all the same, and the guardian tries again when this process ends.
fn end(machine: ServedVm) -> Option<LeftVmm> {
    let (left, undone) = machine.end();
    if let Err(error) = undone {
        warn(&format!("process {}: {}", left.vmm.pid(), chain(&error)));
        forget(&left.vmm);
        return None;
    }
    Some(left)
}

/// A terminal sends its signals to QEMU too; twice does no harm.
fn forward(signal: Signal, qemu: &Child) {
    if let Ok(pid) = i32::try_from(qemu.id()) {
        // It may have ended; then SIGCHLD comes next.
        let _ = kill(Pid::from_raw(pid), signal);
    }
}

fn exit_code(status: ExitStatus) -> u8 {
    let signalled = status.signal().map(|signal| SIGNALLED + signal);
    let code = status.code().or(signalled).unwrap_or(SIGNALLED);
    u8::try_from(code).unwrap_or(u8::MAX)
}
