// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The life of a virtual machine, seen from its main thread: start, wait for
//! something to happen, stop, and perhaps start again.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use kvm_ioctls::Kvm;
use vcpufreq_bridge::{Attachment, GuestPages, KvmSlot, budget::Budget};
use vcpufreq_host::thread_cpu_time;
use vmm_sys_util::eventfd::EventFd;

use super::backoff::Backoff;
use super::bus::Bus;
use super::console::{Console, Input};
use super::console_output::{ConsoleEnd, ConsoleOutput, WarningHandler, Writer};
use super::disk::DiskThread;
use super::environment::{Hooks, VmEnvironment, attach_cpufreq};
use super::machine::Bootable;
use super::memory::Memory;
use super::run_report::{ExitReason, RunReport};
use super::vcpu::{VcpuEnd, VcpuStart, VcpuThreads};
use super::{layout, sys};

/// Why the vCPUs were stopped.
enum Ended {
    ForGood(ExitReason),
    Reset,
}

/// Runs the guest until it ends for good.
///
/// Standard input and output become the guest's console meanwhile, unless it has another one.
///
/// # Errors
/// What KVM or the host refused while the guest was made.
pub fn supervise(
    guest: &mut dyn Bootable,
    kvm: &Kvm,
    (threads, disk): (VcpuThreads, Option<DiskThread>),
    host: &VmEnvironment,
) -> anyhow::Result<RunReport> {
    let hooks = host.hooks.clone();
    let warn: WarningHandler = Box::new(move |text| hooks.on_warning(text));
    let output = ConsoleOutput::new(&host.console, threads.stopping(), warn)?;
    let mut life = Life {
        kvm,
        host,
        user: User::attend(&host.console)?,
        threads,
        output: Arc::new(output),
        disk,
        resets: 0,
        unclaimed: 0,
    };
    host.hooks.on_set_up()?;
    let reason = life.run(guest)?;
    Ok(RunReport {
        reason,
        resets: life.resets,
        unclaimed: life.unclaimed,
        console_dropped: life.output.dropped(),
    })
}

/// A virtual machine over all its boots.
struct Life<'a> {
    kvm: &'a Kvm,
    host: &'a VmEnvironment,
    user: User,
    threads: VcpuThreads,
    output: Arc<ConsoleOutput>,
    disk: Option<DiskThread>,
    resets: u64,
    unclaimed: u64,
}

impl Life<'_> {
    fn run(&mut self, guest: &mut dyn Bootable) -> anyhow::Result<ExitReason> {
        let mut backoff = Backoff::default();
        loop {
            let booted = Instant::now();
            if let Ended::ForGood(reason) = self.once(guest)? {
                return Ok(reason);
            }
            self.resets += 1;
            let pause = backoff.after(booted.elapsed());
            if let Some(reason) = self.user.ends_within(pause)? {
                self.host.hooks.on_end();
                return Ok(reason);
            }
        }
    }

    /// The bus of one boot, and the console on it.
    fn devices(&self, interrupt: EventFd) -> anyhow::Result<(Arc<Console>, Arc<Bus>)> {
        let output = Box::new(Writer(self.output.clone()));
        let console = Console::new(interrupt, output).context("can't make the console")?;
        let console = Arc::new(console);
        let mut bus = Bus::new();
        bus.insert(layout::UART_BASE, layout::UART_SIZE, console.clone())?;
        if let Some(disk) = &self.disk {
            bus.insert(layout::DISK_BASE, layout::DISK_SIZE, disk.device())?;
        }
        attach_cpufreq(&mut bus, self.host)?;
        Ok((console, Arc::new(bus)))
    }

    /// From a boot to the next reset or the end.
    fn once(&mut self, guest: &mut dyn Bootable) -> anyhow::Result<Ended> {
        let interrupt = event()?;
        let machine = guest.boot(self.kvm, &interrupt)?;
        let (console, bus) = self.devices(interrupt)?;
        let path = self.host.cpufreq.as_ref().map(|cpufreq| {
            (cpufreq.attach)(KvmSlot {
                vm: machine.vm.clone(),
                slot: machine.memory.next_slot(),
            })
        });
        let hooks = &*self.host.hooks;
        let starts = machine.vcpus.into_iter().map(|fd| VcpuStart {
            fd,
            bus: bus.clone(),
        });
        let pages = self.host.cpufreq.as_ref();
        let pages = pages.and_then(|cpufreq| cpufreq.guest_pages.as_deref());
        let _sharing = pages.map(|pages| Sharing::new(pages, &machine.memory));
        let disk = self.disk.as_ref();
        let disk = disk.map(|disk| disk.power_on(&machine.vm, &machine.memory));
        let _disk = disk.transpose()?;
        let running = RunningVcpus(&mut self.threads);
        running.0.start(starts.collect())?;
        let mut watch = Watch {
            threads: running.0,
            console: &console,
            user: &mut self.user,
            path,
            hooks,
        };
        let ended = watch.until_end();
        drop(watch);
        drop(running);
        self.unclaimed += bus.unclaimed();
        match ended {
            Ok(Ended::Reset) => self.host.hooks.on_reset(),
            Ok(Ended::ForGood(_)) => self.host.hooks.on_end(),
            Err(_) => {}
        }
        ended
    }
}

fn event() -> anyhow::Result<EventFd> {
    EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).context("can't make an eventfd")
}

/// What may end the machine: a signal, or Ctrl-A x.
struct User {
    input: Input,
    signals: sys::EndingSignals,
    signalled: EventFd,
}

impl User {
    fn attend(console: &ConsoleEnd) -> anyhow::Result<Self> {
        let signalled = event()?;
        let signals = sys::EndingSignals::divert_to(signalled.as_raw_fd())
            .context("can't take over the signals that end a program")?;
        let input = match console {
            ConsoleEnd::Stdio => Input::open().context("can't set up the terminal")?,
            ConsoleEnd::Nothing | ConsoleEnd::File { .. } => Input::default(),
        };
        Ok(Self {
            input,
            signals,
            signalled,
        })
    }

    /// What to wait for: signals and keys.
    fn sources(&self) -> [Option<RawFd>; 2] {
        [Some(self.signalled.as_raw_fd()), self.input.source()]
    }

    /// Whether the machine shall end, by which of the sources are ready.
    fn ends(&mut self, [signalled, typed]: [bool; 2]) -> Option<ExitReason> {
        if signalled {
            if let Some(signal) = self.signals.last() {
                return Some(ExitReason::Signal(signal));
            }
        }
        (typed && self.input.read()).then_some(ExitReason::Quit)
    }

    /// Waits for `pause`, or until the machine shall end.
    fn ends_within(&mut self, pause: Duration) -> anyhow::Result<Option<ExitReason>> {
        let over = Instant::now() + pause;
        loop {
            let left = over.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let ready = sys::poll(self.sources(), Some(left));
            if let Some(reason) = self.ends(ready.context("can't wait for the user")?) {
                return Ok(Some(reason));
            }
        }
    }
}

/// Stops the vCPUs when dropped. Declared after the machine, and so dropped before it: the guest's
/// memory stays mapped until no vCPU runs.
struct RunningVcpus<'a>(&'a mut VcpuThreads);

impl Drop for RunningVcpus<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// A guest may share its memory until this is dropped, before the memory is unmapped.
struct Sharing<'a>(&'a GuestPages);

impl<'a> Sharing<'a> {
    fn new(pages: &'a GuestPages, memory: &Memory) -> Self {
        pages.attach(memory.map().clone());
        Self(pages)
    }
}

impl Drop for Sharing<'_> {
    fn drop(&mut self) {
        self.0.forget();
    }
}

/// What is watched while the guest runs.
struct Watch<'a> {
    threads: &'a mut VcpuThreads,
    console: &'a Console,
    user: &'a mut User,
    path: Option<Attachment>,
    hooks: &'a dyn Hooks,
}

/// The main thread's share of the time: one part in so many. A guest can wake it as fast as it
/// accesses its console.
const SHARE: u32 = 20;

impl Watch<'_> {
    fn until_end(&mut self) -> anyhow::Result<Ended> {
        let mut budget = Budget::new(SHARE, Instant::now());
        let mut cpu_before = thread_cpu_time();
        loop {
            self.user.input.feed(self.console);
            let [signalled, typed] = self.user.sources();
            let waited = sys::poll(
                [
                    Some(self.threads.wake().as_raw_fd()),
                    signalled,
                    Some(self.console.room_event().as_raw_fd()),
                    typed,
                    self.path
                        .as_ref()
                        .and_then(Attachment::lost)
                        .map(AsRawFd::as_raw_fd),
                    self.hooks.helper_end().map(|file| file.as_raw_fd()),
                ],
                None,
            );
            let [ended, signalled, room, typed, lost, alone] =
                waited.context("can't wait for the guest")?;
            // The user before the guest: one that does nothing but reset must
            // not keep signals and keys from being seen.
            if let Some(reason) = self.user.ends([signalled, typed]) {
                return Ok(Ended::ForGood(reason));
            }
            if ended {
                if let Some(end) = self.first_end() {
                    return Ok(end);
                }
            }
            if room {
                // Nothing to read means that it was read before: no error.
                let _ = self.console.room_event().read();
            }
            if lost {
                self.path.iter_mut().for_each(Attachment::fall_back);
            }
            if alone {
                self.hooks.on_helper_end();
            }
            let cpu = thread_cpu_time();
            let used = cpu.saturating_sub(std::mem::replace(&mut cpu_before, cpu));
            std::thread::sleep(budget.after(used, Instant::now()));
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
