// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The virtual machine's system calls that have no safe wrapper elsewhere.
#![expect(unsafe_code, reason = "system calls that no safe crate has")]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::time::Duration;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use libc::{c_int, c_void, pollfd, siginfo_t};
use nix::errno::Errno;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use vm_memory::{
    GuestMemory as _, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, VolatileSlice,
};

/// Host address of a mapped region.
pub fn address_of(region: &GuestRegionMmap) -> u64 {
    region
        .get_host_address(vm_memory::MemoryRegionAddress(0))
        .map_or(0, |pointer| pointer.expose_provenance() as u64)
}

/// Gives `slot` to the guest.
pub fn set_slot(vm: &VmFd, slot: kvm_userspace_memory_region) -> Result<(), kvm_ioctls::Error> {
    // SAFETY: `slot` was made from a mapping of that size by `Memory::add`, which
    // keeps it mapped and whose only other user is the guest, or by `probe`, which
    // has no guest.
    unsafe { vm.set_user_memory_region(slot) }
}

/// Which way bytes of a file go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// From the file into memory.
    Read,
    /// From memory into the file.
    Write,
}

/// Transfers all of these pieces of a guest's memory at once, at a place of `file`; whether that was done.
/// The kernel refuses memory that a protected guest doesn't share.
pub fn transfer(
    way: Transfer,
    file: BorrowedFd<'_>,
    at: libc::off_t,
    pieces: &[VolatileSlice<'_>],
) -> bool {
    let vector = |piece: &VolatileSlice<'_>| libc::iovec {
        iov_base: piece.ptr_guard_mut().as_ptr().cast(),
        iov_len: piece.len(),
    };
    let vectors: Vec<_> = pieces.iter().map(vector).collect();
    let Ok(count) = c_int::try_from(vectors.len()) else {
        return false;
    };
    let wanted: usize = pieces.iter().map(VolatileSlice::len).sum();
    let (file, first) = (file.as_raw_fd(), vectors.as_ptr());
    let done = match way {
        // SAFETY: each vector is memory that stays mapped as long as `pieces`; this process has no
        // reference to it.
        Transfer::Read => unsafe { libc::preadv(file, first, count, at) },
        // SAFETY: the same.
        Transfer::Write => unsafe { libc::pwritev(file, first, count, at) },
    };
    usize::try_from(done) == Ok(wanted)
}

/// Waits until one of `fds` is ready; returns which are. A signal ends the wait
/// with nothing ready, and so does `limit`.
pub fn poll<const N: usize>(
    fds: [Option<RawFd>; N],
    limit: Option<Duration>,
) -> io::Result<[bool; N]> {
    let mut polled = fds.map(|fd| pollfd {
        // poll skips entries with a negative descriptor.
        fd: fd.unwrap_or(-1),
        events: libc::POLLIN,
        revents: 0,
    });
    let count = libc::nfds_t::try_from(N).map_err(io::Error::other)?;
    // Rounded up: a wait of 0 ms would be none.
    let ms = |limit: Duration| c_int::try_from(limit.as_micros().div_ceil(1000));
    let limit_ms = limit.map_or(-1, |limit| ms(limit).unwrap_or(c_int::MAX));
    // SAFETY: the kernel writes to `N` entries, which `polled` has.
    let result = unsafe { libc::poll(polled.as_mut_ptr(), count, limit_ms) };
    match Errno::result(result) {
        Err(Errno::EINTR) => Ok([false; N]),
        Err(error) => Err(error.into()),
        Ok(_) => Ok(polled.map(|entry| entry.revents != 0)),
    }
}

/// Descriptor that the signal handler writes to; -1 when none.
static SIGNAL_FD: AtomicI32 = AtomicI32::new(-1);
/// The last signal that asked the program to end; 0 when none.
static LAST_SIGNAL: AtomicI32 = AtomicI32::new(0);

extern "C" fn note_signal(signal: c_int) {
    LAST_SIGNAL.store(signal, Ordering::Relaxed);
    let one = 1u64;
    // SAFETY: write is async-signal-safe; `one` has the 8 bytes that an eventfd
    // takes. A descriptor of -1 makes it fail without effect.
    unsafe {
        libc::write(
            SIGNAL_FD.load(Ordering::Relaxed),
            (&raw const one).cast(),
            size_of::<u64>(),
        )
    };
}

/// Signals that ask the program to end.
const ENDING: [Signal; 4] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];
/// Signals that end the program where it is.
const FATAL: [Signal; 5] = [
    Signal::SIGSEGV,
    Signal::SIGBUS,
    Signal::SIGILL,
    Signal::SIGFPE,
    Signal::SIGABRT,
];

/// Actions of signals, to be in force again when it is dropped.
#[derive(Default)]
struct OldActions(Vec<(Signal, SigAction)>);

impl OldActions {
    /// Replaces the action of `signal`; returns what it was. The handler calls async-signal-safe
    /// functions only.
    fn replace(&mut self, signal: Signal, action: SigAction) -> io::Result<SigAction> {
        // SAFETY: the handlers given in this module call async-signal-safe functions only.
        let old = unsafe { sigaction(signal, &action) }?;
        self.0.push((signal, old));
        Ok(old)
    }
}

impl Drop for OldActions {
    fn drop(&mut self) {
        for (signal, old) in &self.0 {
            // What was in force before can't be refused.
            // SAFETY: it was in force before.
            let _ = unsafe { sigaction(*signal, old) };
        }
    }
}

/// While it lives, a signal that asks the program to end makes an eventfd
/// readable instead. Signals that are ignored stay so.
pub struct EndingSignals(OldActions);

impl EndingSignals {
    /// Takes the signals over; one at a time in a process.
    pub fn divert_to(eventfd: RawFd) -> io::Result<Self> {
        LAST_SIGNAL.store(0, Ordering::Relaxed);
        SIGNAL_FD.store(eventfd, Ordering::Relaxed);
        let mut signals = Self(OldActions::default());
        let handler = SigHandler::Handler(note_signal);
        let action = SigAction::new(handler, SaFlags::empty(), SigSet::empty());
        for signal in ENDING {
            let old = signals.0.replace(signal, action)?;
            if matches!(old.handler(), SigHandler::SigIgn) {
                // SAFETY: no function of ours.
                unsafe { sigaction(signal, &old) }?;
            }
        }
        Ok(signals)
    }

    /// The signal that came last, if any did.
    pub fn last(&self) -> Option<i32> {
        match LAST_SIGNAL.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(signal),
        }
    }
}

impl Drop for EndingSignals {
    fn drop(&mut self) {
        self.0 = OldActions::default();
        SIGNAL_FD.store(-1, Ordering::Relaxed);
    }
}

/// Whether `CRASH_SETTINGS` is to be put back by a fatal signal.
static CRASH_ARMED: AtomicBool = AtomicBool::new(false);
/// Descriptor and settings of the terminal, for the handler of fatal signals.
static CRASH_SETTINGS: OnceLock<(RawFd, libc::termios)> = OnceLock::new();

/// Where the memory of a guest with a disk is: its first address, and the one after its last.
static DISK_MEMORY: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
const NOT_SHARED: &str = "vcpufreq: the guest gave its disk memory that it doesn't share; build its \
                          kernel with CONFIG_ARM_PKVM_GUEST and CONFIG_DMA_RESTRICTED_POOL\n";

/// Whether the address that an access had no right to is in the memory of a guest with a disk.
fn is_of_disk(info: *const siginfo_t) -> bool {
    let [first, end] = DISK_MEMORY.each_ref().map(|at| at.load(Ordering::Relaxed));
    // SAFETY: the kernel gives the handler of a signal a siginfo.
    let info = unsafe { &*info };
    // SAFETY: that of SIGSEGV has an address.
    let at = unsafe { info.si_addr() };
    (first..end).contains(&at.addr())
}

extern "C" fn on_fatal(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
    if CRASH_ARMED.load(Ordering::Relaxed) {
        if let Some((fd, settings)) = CRASH_SETTINGS.get() {
            // SAFETY: tcsetattr is async-signal-safe and reads one termios.
            unsafe { libc::tcsetattr(*fd, libc::TCSANOW, settings) };
        }
    }
    if signal == libc::SIGSEGV && is_of_disk(info) {
        let (text, len) = (NOT_SHARED.as_ptr().cast(), NOT_SHARED.len());
        // SAFETY: write is async-signal-safe; `text` has `len` bytes.
        unsafe { libc::write(libc::STDERR_FILENO, text, len) };
        // SAFETY: _exit is async-signal-safe.
        unsafe { libc::_exit(2) };
    }
    // SAFETY: raise is async-signal-safe. The action was reset when this handler
    // was entered, so the signal ends the process when it returns.
    unsafe { libc::raise(signal) };
}

/// The action of a fatal signal.
fn fatal() -> SigAction {
    let flags = SaFlags::SA_RESETHAND | SaFlags::SA_ONSTACK;
    SigAction::new(SigHandler::SigAction(on_fatal), flags, SigSet::empty())
}

/// While it lives, an access to memory that a protected guest doesn't share ends the process by a line
/// and exit code 2. The kernel answers such an access by SIGSEGV.
pub struct UnsharedMemoryGuard(OldActions);

impl UnsharedMemoryGuard {
    /// For all memory of a guest; one at a time in a process.
    pub fn watch(memory: &GuestMemoryMmap) -> io::Result<Self> {
        let ends = memory.iter().map(|region| {
            let (first, len) = (address_of(region), region.len());
            (first, first + len)
        });
        let all = ends.reduce(|(first, end), one| (first.min(one.0), end.max(one.1)));
        let (first, end) = all.unwrap_or_default();
        for (to, at) in DISK_MEMORY.iter().zip([first, end]) {
            let at = usize::try_from(at).map_err(io::Error::other)?;
            to.store(at, Ordering::Relaxed);
        }
        let mut guard = Self(OldActions::default());
        guard.0.replace(Signal::SIGSEGV, fatal())?;
        Ok(guard)
    }
}

impl Drop for UnsharedMemoryGuard {
    fn drop(&mut self) {
        DISK_MEMORY
            .iter()
            .for_each(|at| at.store(0, Ordering::Relaxed));
    }
}

/// While it lives, a crash puts the terminal back before the process dies.
pub struct RestoreOnCrash(OldActions);

impl RestoreOnCrash {
    /// Remembers `settings` of `fd` for a crash.
    pub fn arm(fd: RawFd, settings: libc::termios) -> io::Result<Self> {
        CRASH_SETTINGS.get_or_init(|| (fd, settings));
        CRASH_ARMED.store(true, Ordering::Relaxed);
        let mut guard = Self(OldActions::default());
        for signal in FATAL {
            guard.0.replace(signal, fatal())?;
        }
        Ok(guard)
    }
}

impl Drop for RestoreOnCrash {
    fn drop(&mut self) {
        CRASH_ARMED.store(false, Ordering::Relaxed);
    }
}
