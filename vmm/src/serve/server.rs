// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The server at work: VMMs come to its socket, the first that has its vCPUs is served, and others
//! are refused until that one ends. Without a socket it serves one VMM.

use std::{
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use anyhow::Context;
use vcpufreq_host::Tid;

use super::{
    PendingVmms, Refusals, Served, ServedVm, ServedVmm, Socket, VmChange, machine::ENDING,
    vm_process::ERROR,
};
use crate::{
    message::{chain, warn},
    signals::{EndSignals, Ready, is_ready, is_told_to_end, wait},
};

/// The message when no process answers the doorbells any more.
const WORKER_DIED: &str = "the process that carries out requests has died; start the server again";

/// The exit code when the only VMM is refused: it would be refused again.
pub const REFUSED: u8 = 3;

/// How often QEMU is heard at most: one that writes without an end neither keeps the server busy nor
/// lets others wait.
const HEAR_EVERY: Duration = Duration::from_millis(10);

/// What is there as long as the server.
pub struct Server {
    pub served: Served,
    /// None by a guest's RAM, for one VMM.
    pub socket: Option<Socket>,
    pub signals: EndSignals,
}

/// Why a VM isn't served any longer.
enum End {
    /// It has ended, or has other vCPUs.
    Vm(VmChange),
    /// It is to be served in other cgroups.
    Moved,
    /// The server ends, with this exit code.
    Server(u8),
}

impl Server {
    /// Serves one VMM after another, those that are known first, until a signal ends it; returns the
    /// exit code. Without a socket it ends with the VMM.
    ///
    /// # Errors
    /// When poll(2) fails (`ENOMEM`). A VMM that can't be served is a refusal, and no error.
    pub fn run(&self, known: Vec<ServedVmm>, mut waiting: PendingVmms) -> anyhow::Result<u8> {
        let mut refusals = Refusals::default();
        for vmm in known {
            if vmm.was_served() {
                warn(&format!("takes process {} over", vmm.pid()));
            }
            if let Err(error) = waiting.add(vmm, &self.served) {
                refusals.add(|| not_served(&error));
            }
        }
        let mut is_said = false;
        loop {
            while let Some((vmm, threads)) = waiting.ready(&self.served, &mut refusals) {
                for pid in waiting.refuse() {
                    refusals.add(|| other_is_served(pid, vmm.pid()));
                }
                if let Some(code) = self.serve_until_end(vmm, threads, &mut refusals) {
                    return Ok(code);
                }
            }
            match &self.socket {
                None if waiting.next_look().is_none() => {
                    return Ok(if refusals.has_refused() { REFUSED } else { 0 });
                }
                Some(socket) if !is_said && waiting.next_look().is_none() => {
                    let (path, vcpus) = (socket.path().display(), self.served.vcpus.len());
                    warn(&format!("waits at {path} for a VMM with {vcpus} vCPUs"));
                    is_said = true;
                }
                _ => {}
            }
            let socket: Vec<_> = self.socket.iter().map(AsFd::as_fd).collect();
            match wait(&self.signals, &socket, waiting.next_look())? {
                Ready::Signal(_) => {
                    // It was never served: no later server is to take it over.
                    if self.socket.is_none() {
                        waiting.refuse();
                    }
                    return Ok(0);
                }
                Ready::Nothing => {}
                Ready::File(_) => {
                    let added = self.accept();
                    let added = added.and_then(|vmm| waiting.add(vmm, &self.served));
                    if let Err(error) = added {
                        refusals.add(|| not_served(&error));
                    }
                }
            }
        }
    }

    /// Takes the VMM that has connected.
    fn accept(&self) -> anyhow::Result<ServedVmm> {
        let socket = self.socket.as_ref().context("there is no socket")?;
        socket.accept()
    }

    /// Serves a VMM until it ends. The exit code, if the server ends too.
    fn serve_until_end(
        &self,
        mut vmm: ServedVmm,
        mut threads: Vec<Option<Tid>>,
        refusals: &mut Refusals,
    ) -> Option<u8> {
        let pid = vmm.pid();
        let process = vmm.process().try_clone_to_owned().ok();
        let failed = |error| {
            if has_ended(&process) {
                return None;
            }
            if is_told_to_end() {
                // What was waited for has ended by that.
                return Some(0);
            }
            warn(&format!("process {pid} isn't served: {}", chain(&error)));
            self.socket.is_none().then_some(REFUSED)
        };
        loop {
            let mut machine = match ServedVm::start(&self.served, vmm, &threads) {
                Ok(machine) => machine,
                Err(error) => return failed(error),
            };
            let why = self.until_end(&mut machine, refusals);
            let (left, undone) = machine.end();
            // The record has what is left, for the guardian or for `vcpufreq cleanup`.
            if let Err(error) = undone {
                warn(&format!("process {pid}: {}", chain(&error)));
                return Some(ERROR);
            }
            let goes_on = matches!(why, Ok(End::Vm(why)) if left.goes_on(why));
            (vmm, threads) = (left.vmm, left.threads);
            match why {
                // With the vCPUs that it has now.
                Ok(End::Vm(_)) if goes_on => {}
                Ok(End::Vm(_)) => return None,
                Ok(End::Server(code)) => return Some(code),
                Ok(End::Moved) => warn(&format!("process {pid}: its vCPUs have other cgroups now")),
                Err(error) => return failed(error.into()),
            }
        }
    }

    /// Waits for the end of a VMM, and refuses others meanwhile.
    fn until_end(&self, machine: &mut ServedVm, refusals: &mut Refusals) -> nix::Result<End> {
        // What came with the answer about threads.
        machine.hear();
        let mut next_hearing = Instant::now();
        loop {
            match machine.look(&self.served) {
                VmChange::Same => {}
                VmChange::Moved => return Ok(End::Moved),
                why @ (VmChange::Ended | VmChange::Plugged) => return Ok(End::Vm(why)),
            }
            let now = Instant::now();
            let until = match next_hearing > now {
                true => machine.look_within().min(next_hearing - now),
                false => machine.look_within(),
            };
            let control = machine.control().filter(|_| now >= next_hearing);
            let mut files = vec![machine.lost()];
            files.extend(machine.ends());
            let ends = files.len();
            files.extend(control);
            let controls = files.len();
            files.extend(machine.guardian_ended());
            let guardian = files.len();
            files.extend(self.socket.as_ref().map(AsFd::as_fd));
            match wait(&self.signals, &files, Some(until))? {
                Ready::Nothing => {}
                Ready::File(0) => {
                    warn(WORKER_DIED);
                    return Ok(End::Server(ERROR));
                }
                Ready::File(index) if index >= guardian => {
                    let other = self.accept();
                    refusals.add(|| match &other {
                        Ok(other) => other_is_served(other.pid(), machine.pid()),
                        Err(error) => not_served(error),
                    });
                }
                Ready::File(index) if index >= controls => machine.guard_again(),
                Ready::File(index) if index >= ends => {
                    machine.hear();
                    next_hearing = now + HEAR_EVERY;
                }
                // A VMM sends nothing: it has closed the connection, or has ended.
                Ready::File(_) => return Ok(End::Vm(VmChange::Ended)),
                Ready::Signal(_) => return Ok(End::Server(0)),
            }
        }
    }
}

/// Whether the process that a file watches has ended, or ends soon after its vCPUs' threads.
fn has_ended(process: &Option<OwnedFd>) -> bool {
    let files: Vec<_> = process.iter().map(AsFd::as_fd).collect();
    is_ready(&files, Duration::from_millis(ENDING.into()), false).is_ok_and(|ended| ended)
}

fn not_served(error: &anyhow::Error) -> String {
    format!("a VMM isn't served: {}", chain(error))
}

fn other_is_served(pid: u32, served: u32) -> String {
    format!(
        "process {pid} isn't served: process {served} is, at the same socket; give each VM its own"
    )
}
