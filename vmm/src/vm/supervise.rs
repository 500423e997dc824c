// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The life of a virtual machine, seen from its main thread: start, wait for
//! something to happen, stop, and perhaps start again.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use anyhow::Context;
use kvm_ioctls::{Kvm, VmFd};
use vmm_sys_util::eventfd::EventFd;

use super::bus::Bus;
use super::console::{Console, Input, Stdout};
use super::in_kernel::{Attached, InKernel};
use super::machine::Boot;
use super::vcpu::{VcpuEnd, VcpuStart, VcpuThreads};
use super::{ExitReason, Hooks, Host, RunReport, attach_cpufreq, layout, sys};

/// Why the vCPUs were stopped.
enum Ended {
    ForGood(ExitReason),
    Reset,
}

/// Runs the guest until it ends for good.
///
/// Standard input and output become the guest's console meanwhile.
///
/// # Errors
/// What KVM or the host refused while the guest was made.
pub fn supervise(
    guest: &mut dyn Boot,
    kvm: &Kvm,
    mut threads: VcpuThreads,
    host: &Host,
) -> anyhow::Result<RunReport> {
    let signalled =
        EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).context("can't make an eventfd")?;
    let signals = sys::EndingSignals::divert_to(signalled.as_raw_fd())
        .context("can't take over the signals that end a program")?;
    let mut input = Input::open().context("can't set up the terminal")?;
    let (mut resets, mut unclaimed) = (0, 0);
    // What KVM does not do any more in this run it does in no later one.
    let mut in_kernel = host.cpufreq.as_ref().and_then(|c| c.in_kernel.clone());
    loop {
        let interrupt = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)
            .context("can't make an eventfd")?;
        let machine = guest.boot(kvm, &interrupt)?;
        let console =
            Arc::new(Console::new(interrupt, Box::new(Stdout)).context("can't make the console")?);
        let mut bus = Bus::new();
        bus.insert(layout::UART_BASE, layout::UART_SIZE, console.clone())?;
        attach_cpufreq(&mut bus, host)?;
        let bus = Arc::new(bus);
        let mut path = KernelPart {
            attached: None,
            in_kernel: &mut in_kernel,
            vm: &machine.vm,
            slot: machine.memory.next_slot(),
            hooks: &*host.hooks,
        };
        path.attach();
        let starts = machine.vcpus.into_iter().map(|fd| VcpuStart {
            fd,
            bus: bus.clone(),
        });
        let running = Running(&mut threads);
        running.0.start(starts.collect())?;
        let mut watch = Watch {
            threads: running.0,
            console: &console,
            input: &mut input,
            signals: (&signals, &signalled),
            path,
        };
        let ended = watch.until_end();
        drop(watch);
        drop(running);
        unclaimed += bus.unclaimed();
        match ended? {
            Ended::Reset => resets += 1,
            Ended::ForGood(reason) => {
                host.hooks.on_end();
                return Ok(RunReport {
                    reason,
                    resets,
                    unclaimed,
                });
            }
        }
        host.hooks.on_reset();
    }
}

/// Stops the vCPUs when dropped. Declared after the machine that they run, so
/// that on every path its memory is there until none of them runs.
struct Running<'a>(&'a mut VcpuThreads);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// What KVM does of the registers, and in whose place.
struct KernelPart<'a, 'm> {
    attached: Option<Attached<'m>>,
    in_kernel: &'a mut Option<Arc<InKernel>>,
    vm: &'m VmFd,
    slot: u32,
    hooks: &'a dyn Hooks,
}

impl KernelPart<'_, '_> {
    fn attach(&mut self) {
        let attach = |path: &Arc<InKernel>| path.attach(self.vm, self.slot, self.hooks);
        self.attached = self.in_kernel.as_ref().map(attach);
    }

    /// Falls back on what comes next.
    fn lost(&mut self) {
        if let Some(mut attached) = self.attached.take() {
            attached.detach();
            *self.in_kernel = self.hooks.on_path_lost();
            self.in_kernel.iter().for_each(|next| next.succeed());
            self.attach();
        }
    }
}

/// What is watched while the guest runs.
struct Watch<'a, 'm> {
    threads: &'a mut VcpuThreads,
    console: &'a Console,
    input: &'a mut Input,
    signals: (&'a sys::EndingSignals, &'a EventFd),
    path: KernelPart<'a, 'm>,
}

impl Watch<'_, '_> {
    fn until_end(&mut self) -> anyhow::Result<Ended> {
        loop {
            let (signals, signalled) = self.signals;
            self.input.feed(self.console);
            let ready = sys::poll([
                Some(self.threads.wake().as_raw_fd()),
                Some(signalled.as_raw_fd()),
                Some(self.console.room_event().as_raw_fd()),
                self.input.source(),
                self.path.attached.as_ref().map(|a| a.lost().as_raw_fd()),
            ]);
            let [ended, ending, room, typed, lost] = ready.context("can't wait for the guest")?;
            // The user before the guest: one that does nothing but reset must
            // not keep signals and keys from being seen.
            if ending && let Some(signal) = signals.last() {
                return Ok(Ended::ForGood(ExitReason::Signal(signal)));
            }
            if typed && self.input.read() {
                return Ok(Ended::ForGood(ExitReason::Quit));
            }
            if ended && let Some(end) = self.first_end() {
                return Ok(end);
            }
            if room {
                // Nothing to read means that it was read before: no error.
                let _ = self.console.room_event().read();
            }
            if lost {
                self.path.lost();
            }
        }
    }

    /// What the ends of vCPUs since the last look mean for the machine.
    fn first_end(&mut self) -> Option<Ended> {
        while let Some((vcpu, end)) = self.threads.take_end() {
            let reason = match end {
                VcpuEnd::Stopped => continue,
                VcpuEnd::Halted if self.threads.any_running() => continue,
                VcpuEnd::Halted | VcpuEnd::PowerOff => ExitReason::PowerOff,
                VcpuEnd::Reset => return Some(Ended::Reset),
                VcpuEnd::Crashed => ExitReason::Crashed,
                VcpuEnd::Failed(what) => ExitReason::Failed { vcpu, what },
            };
            return Some(Ended::ForGood(reason));
        }
        None
    }
}
