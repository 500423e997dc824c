// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The server at work: VMMs come to its socket, the first that has its vCPUs is served, and others
//! are refused until that one ends.

use std::{
    os::fd::AsFd,
    time::{Duration, Instant},
};

use vcpufreq_host::Tid;

use super::{
    PendingVmms, Refusals, Served, ServedVm, ServedVmm, Socket, VmChange, vm_process::ERROR,
};
use crate::{
    message::{chain, warn},
    signals::{EndSignals, Ready, wait},
};

/// The message when no process answers the doorbells any more.
const WORKER_DIED: &str = "the process that carries out requests has died; start the server again";

/// How often QEMU is heard at most: one that writes without an end neither keeps the server busy nor
/// lets others wait.
const HEAR_EVERY: Duration = Duration::from_millis(10);

/// What is there as long as the server.
pub struct Server {
    pub served: Served,
    pub socket: Socket,
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
    /// Serves one VMM after another, those that were taken over first, until a signal ends it;
    /// returns the exit code.
    ///
    /// # Errors
    /// When poll(2) fails (`ENOMEM`). A VMM that can't be served is a refusal, and no error.
    pub fn run(&self, taken_over: Vec<ServedVmm>, mut waiting: PendingVmms) -> anyhow::Result<u8> {
        let mut refusals = Refusals::default();
        for vmm in taken_over {
            warn(&format!("takes process {} over", vmm.pid()));
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
                if let Some(code) = self.serve(vmm, threads, &mut refusals) {
                    return Ok(code);
                }
            }
            if !is_said && waiting.next_look().is_none() {
                let (path, vcpus) = (self.socket.path().display(), self.served.vcpus.len());
                warn(&format!("waits at {path} for a VMM with {vcpus} vCPUs"));
                is_said = true;
            }
            match wait(&self.signals, &[self.socket.as_fd()], waiting.next_look())? {
                Ready::Signal(_) => return Ok(0),
                Ready::Nothing => {}
                Ready::File(_) => {
                    let added = self.socket.accept();
                    let added = added.and_then(|vmm| waiting.add(vmm, &self.served));
                    if let Err(error) = added {
                        refusals.add(|| not_served(&error));
                    }
                }
            }
        }
    }

    /// Serves a VMM until it ends. The exit code, if the server ends too.
    fn serve(
        &self,
        mut vmm: ServedVmm,
        mut threads: Vec<Option<Tid>>,
        refusals: &mut Refusals,
    ) -> Option<u8> {
        let pid = vmm.pid();
        let failed = |error| {
            warn(&format!("process {pid} isn't served: {}", chain(&error)));
            None
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
            let mut files = vec![machine.lost(), self.socket.as_fd()];
            files.extend(machine.ends());
            let ends = files.len();
            files.extend(control);
            let controls = files.len();
            files.extend(machine.guardian_ended());
            match wait(&self.signals, &files, Some(until))? {
                Ready::Nothing => {}
                Ready::File(0) => {
                    warn(WORKER_DIED);
                    return Ok(End::Server(ERROR));
                }
                Ready::File(1) => {
                    let other = self.socket.accept();
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

fn not_served(error: &anyhow::Error) -> String {
    format!("a VMM isn't served: {}", chain(error))
}

fn other_is_served(pid: u32, served: u32) -> String {
    format!(
        "process {pid} isn't served: process {served} is, at the same socket; give each VM its own"
    )
}
