// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! vCPU threads and their run loop.
//!
//! A thread lives as long as the virtual machine, over resets of the guest too:
//! its pinning, clamp and place in a cgroup belong to the thread, and would
//! be lost with it. What it runs on it is given anew at each start of the guest.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Once};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use kvm_ioctls::{VcpuExit, VcpuFd};
use libc::{c_int, c_void, siginfo_t};
use vcpufreq_device::VcpuId;
use vcpufreq_host::{Tid, pin};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use super::arch;
use super::bus::{Bus, accesses_are_of};
use super::environment::Hooks;
pub use super::vcpu_end::VcpuEnd;

/// What a vCPU thread is given at each start of the guest.
pub struct VcpuStart {
    /// The vCPU, ready to run.
    pub fd: VcpuFd,
    /// Where its MMIO exits go.
    pub bus: Arc<Bus>,
}

struct VcpuThread {
    handle: JoinHandle<()>,
    start: Sender<VcpuStart>,
    running: bool,
}

/// The threads of all vCPUs.
pub struct VcpuThreads {
    threads: Vec<VcpuThread>,
    ends: Receiver<(usize, VcpuEnd)>,
    wake: Arc<EventFd>,
    stop: Arc<AtomicBool>,
}

/// How long a kick may take before it is repeated. A kick that arrives between
/// a thread's look at the stop flag and its entry into KVM is lost.
const KICK_AGAIN: Duration = Duration::from_millis(2);

extern "C" fn kick(_: c_int, _: *mut siginfo_t, _: *mut c_void) {}

/// The signal that makes KVM_RUN return; its handler has nothing to do.
pub fn kick_signal() -> c_int {
    static HANDLER: Once = Once::new();
    let signal = SIGRTMIN();
    HANDLER.call_once(|| {
        // SIGIO comes in its place where no more signals can be queued (fcntl(2), F_SETSIG).
        for signal in [signal, libc::SIGIO] {
            // Fails for signal numbers that don't exist only, and these do.
            let _ = register_signal_handler(signal, kick);
        }
    });
    signal
}

impl VcpuThreads {
    /// Starts a thread for each of `pins`: the pCPUs it may run on, all if empty.
    ///
    /// When this returns, each thread is pinned and has called
    /// [`Hooks::on_vcpu_thread`]. None has run guest code.
    pub fn spawn(pins: &[Vec<u32>], hooks: &Arc<dyn Hooks>) -> anyhow::Result<Self> {
        let (end, ends) = channel();
        let wake = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
        let wake = Arc::new(wake.context("can't make an eventfd")?);
        let mut this = Self {
            threads: Vec::new(),
            ends,
            wake,
            stop: Arc::default(),
        };
        kick_signal();
        for (index, pin) in pins.iter().enumerate() {
            let (start, starts) = channel();
            let thread = ThreadBody {
                index,
                vcpu: VcpuId(u16::try_from(index).context("too many vCPUs")?),
                pin: pin.clone(),
                hooks: hooks.clone(),
                starts,
                end: end.clone(),
                wake: this.wake.clone(),
                stop: this.stop.clone(),
            };
            // Its own: a thread that dies before it is ready hangs up.
            let (ready, readied) = channel();
            let handle = Builder::new()
                .name(format!("vcpu{index}"))
                .spawn(move || thread.live(&ready))
                .with_context(|| format!("can't start the thread of vCPU {index}"))?;
            this.threads.push(VcpuThread {
                handle,
                start,
                running: false,
            });
            readied
                .recv()
                .unwrap_or_else(|_| Err(anyhow!("the thread of vCPU {index} died")))?;
        }
        Ok(this)
    }

    /// Lets the vCPUs run, one for each thread.
    pub fn start(&mut self, starts: Vec<VcpuStart>) -> anyhow::Result<()> {
        if starts.len() != self.threads.len() {
            bail!("{} vCPUs for {} threads", starts.len(), self.threads.len());
        }
        self.stop.store(false, Ordering::Release);
        for (index, (thread, start)) in self.threads.iter_mut().zip(starts).enumerate() {
            thread.running = true;
            if thread.start.send(start).is_err() {
                thread.running = false;
                bail!("the thread of vCPU {index} has died");
            }
        }
        Ok(())
    }

    /// Readable when a vCPU has ended and [`Self::take_end`] has something.
    pub fn wake(&self) -> &EventFd {
        &self.wake
    }

    /// Set while the vCPUs are being stopped: what keeps a vCPU's thread waiting is to be given
    /// up at the next signal then.
    pub fn stopping(&self) -> Arc<AtomicBool> {
        self.stop.clone()
    }

    /// A vCPU that has ended since the last call, and why.
    pub fn take_end(&mut self) -> Option<(usize, VcpuEnd)> {
        // Nothing to read means that the ends were taken before: no error.
        let _ = self.wake.read();
        let (index, end) = self.ends.try_recv().ok()?;
        self.threads[index].running = false;
        Some((index, end))
    }

    /// Whether any vCPU may still run guest code.
    pub fn any_running(&self) -> bool {
        self.threads.iter().any(|thread| thread.running)
    }

    /// Stops all vCPUs; when it returns, none runs guest code.
    pub fn stop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let signal = kick_signal();
        while self.any_running() {
            for thread in self.threads.iter_mut().filter(|thread| thread.running) {
                if thread.handle.is_finished() {
                    thread.running = false;
                } else {
                    // A thread that has just ended can't be signalled; the next
                    // round sees that.
                    let _ = thread.handle.kill(signal);
                }
            }
            while self.any_running() {
                let Ok((index, _)) = self.ends.recv_timeout(KICK_AGAIN) else {
                    break;
                };
                self.threads[index].running = false;
            }
        }
    }
}

impl Drop for VcpuThreads {
    fn drop(&mut self) {
        self.stop();
        for VcpuThread { handle, start, .. } in self.threads.drain(..) {
            drop(start);
            // A panic of that thread was reported when it happened.
            let _ = handle.join();
        }
    }
}

/// What a vCPU thread owns.
struct ThreadBody {
    index: usize,
    vcpu: VcpuId,
    pin: Vec<u32>,
    hooks: Arc<dyn Hooks>,
    starts: Receiver<VcpuStart>,
    end: Sender<(usize, VcpuEnd)>,
    wake: Arc<EventFd>,
    stop: Arc<AtomicBool>,
}

/// Reports the end of a vCPU when dropped, so that a panic is an end too.
struct EndReport<'a> {
    thread: &'a ThreadBody,
    end: VcpuEnd,
}

impl Drop for EndReport<'_> {
    fn drop(&mut self) {
        let end = std::mem::replace(&mut self.end, VcpuEnd::Stopped);
        // Without a receiver the virtual machine is gone.
        let _ = self.thread.end.send((self.thread.index, end));
        // Fails when the counter is full only, and then it is readable anyway.
        let _ = self.thread.wake.write(1);
    }
}

impl ThreadBody {
    fn live(self, ready: &Sender<anyhow::Result<()>>) {
        let prepared = self.prepare();
        let failed = prepared.is_err();
        if ready.send(prepared).is_err() || failed {
            return;
        }
        while let Ok(VcpuStart { mut fd, bus }) = self.starts.recv() {
            let mut report = EndReport {
                thread: &self,
                end: VcpuEnd::Failed("the thread panicked".to_owned()),
            };
            report.end = self.run_vcpu(&mut fd, &bus);
            // The guest's resources go before its end is reported.
            drop(fd);
            drop(bus);
        }
    }

    /// Runs guest code until there is a reason to end.
    fn run_vcpu(&self, fd: &mut VcpuFd, bus: &Bus) -> VcpuEnd {
        while !self.stop.load(Ordering::Acquire) {
            self.hooks.before_run();
            let end = match fd.run() {
                Ok(VcpuExit::Unsupported(reason)) => arch::handle_exit(fd, reason, bus),
                Ok(exit) => handle_exit(exit, bus),
                Err(error) => handle_error(error),
            };
            if let Some(end) = end {
                return end;
            }
        }
        VcpuEnd::Stopped
    }

    fn prepare(&self) -> anyhow::Result<()> {
        let index = self.index;
        accesses_are_of(self.vcpu);
        let tid = Tid::current();
        self.hooks.on_vcpu_thread_start(self.vcpu, tid)?;
        if !self.pin.is_empty() {
            pin(tid, &self.pin).with_context(|| {
                format!(
                    "can't pin vCPU {index} to CPUs {:?}; choose CPUs that are online and allowed",
                    self.pin
                )
            })?;
        }
        self.hooks.on_vcpu_thread(self.vcpu, tid)
    }
}

fn handle_exit(exit: VcpuExit<'_>, bus: &Bus) -> Option<VcpuEnd> {
    match exit {
        VcpuExit::MmioRead(address, data) => bus.read(address, data),
        VcpuExit::MmioWrite(address, data) => bus.write(address, data),
        VcpuExit::IoIn(_, data) => {
            data.fill(0);
            bus.count_unclaimed();
        }
        VcpuExit::IoOut(..) => bus.count_unclaimed(),
        VcpuExit::Intr => {}
        VcpuExit::Hlt => return Some(VcpuEnd::Halted),
        VcpuExit::SystemEvent(kind, _) => return Some(system_event(kind)),
        VcpuExit::FailEntry(reason, cpu) => {
            return Some(VcpuEnd::Failed(format!(
                "KVM can't enter the guest on CPU {cpu}: hardware reason {reason:#x}"
            )));
        }
        VcpuExit::InternalError => {
            return Some(VcpuEnd::Failed("KVM reports an internal error".to_owned()));
        }
        // An x86 triple fault.
        VcpuExit::Shutdown => return Some(VcpuEnd::Reset),
        other => {
            return Some(VcpuEnd::Failed(format!(
                "KVM exits for a reason that isn't handled: {other:?}"
            )));
        }
    }
    None
}

fn system_event(kind: u32) -> VcpuEnd {
    match kind {
        kvm_bindings::KVM_SYSTEM_EVENT_SHUTDOWN => VcpuEnd::PowerOff,
        kvm_bindings::KVM_SYSTEM_EVENT_RESET => VcpuEnd::Reset,
        kvm_bindings::KVM_SYSTEM_EVENT_CRASH => VcpuEnd::Crashed,
        other => VcpuEnd::Failed(format!("KVM reports system event {other}")),
    }
}

fn handle_error(error: kvm_ioctls::Error) -> Option<VcpuEnd> {
    match error.errno() {
        // A kick, or any other signal: the loop looks at the stop flag and the pCPU.
        libc::EINTR | libc::EAGAIN => None,
        errno => Some(VcpuEnd::Failed(format!(
            "KVM can't run the guest: {}",
            io::Error::from_raw_os_error(errno)
        ))),
    }
}
