// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The virtual machine's system calls that have no safe wrapper elsewhere.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use libc::{c_int, c_void, pollfd, siginfo_t, termios};
use vcpufreq_device::host::{self, Tid};
use vm_memory::{GuestMemoryRegion, GuestRegionMmap};

/// Host address of a mapped region.
pub fn address_of(region: &GuestRegionMmap) -> u64 {
    region
        .get_host_address(vm_memory::MemoryRegionAddress(0))
        .map_or(0, |pointer| pointer.expose_provenance() as u64)
}

/// Gives `slot` to the guest.
pub fn set_slot(vm: &VmFd, slot: kvm_userspace_memory_region) -> Result<(), kvm_ioctls::Error> {
    // SAFETY: `slot` was made from a mapping of that size by `Memory::add` or of
    // a `ReadOnlySlot`, and is kept mapped by `Memory` or `KvmOffload`. Of the
    // former the guest is the only other user; the latter it can only read.
    unsafe { vm.set_user_memory_region(slot) }
}

/// The calling thread's id in the kernel.
pub fn gettid() -> i32 {
    // SAFETY: gettid has no arguments and can't fail.
    unsafe { libc::gettid() }
}

/// The pCPU that the calling thread is on.
pub fn current_cpu() -> i32 {
    // SAFETY: has no arguments.
    unsafe { libc::sched_getcpu() }
}

/// Lets the calling thread run on `pcpus` only.
pub fn pin_thread(pcpus: &[u32]) -> io::Result<()> {
    host::pin(Tid::current(), pcpus)
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
    match check(result) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok([false; N]),
        Err(error) => Err(error),
        Ok(()) => Ok(polled.map(|entry| entry.revents != 0)),
    }
}

/// Terminal settings of `fd`; an error when it isn't a terminal.
pub fn terminal_settings(fd: BorrowedFd<'_>) -> io::Result<termios> {
    // SAFETY: termios is plain data, for which all zeroes is a value.
    let mut settings: termios = unsafe { std::mem::zeroed() };
    // SAFETY: the C library writes one termios at the pointer.
    let result = unsafe { libc::tcgetattr(fd.as_raw_fd(), &raw mut settings) };
    check(result)?;
    Ok(settings)
}

/// `settings` without line editing, echo and signal keys.
pub fn raw_settings(settings: &termios) -> termios {
    let mut raw = *settings;
    // SAFETY: the C library changes the one termios at the pointer.
    unsafe { libc::cfmakeraw(&raw mut raw) };
    raw
}

/// Sets the terminal of `fd`.
pub fn set_terminal(fd: BorrowedFd<'_>, settings: &termios) -> io::Result<()> {
    // SAFETY: the C library reads one termios at the pointer.
    let result = unsafe { libc::tcsetattr(fd.as_raw_fd(), libc::TCSANOW, settings) };
    check(result)
}

/// Whether this process may read from and set up the terminal of `fd` without
/// being stopped for it. A terminal that doesn't control this session stops
/// nobody.
pub fn in_foreground(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: the call has no memory arguments.
    let group = unsafe { libc::tcgetpgrp(fd.as_raw_fd()) };
    // SAFETY: getpgrp has no arguments and can't fail.
    group < 0 || group == unsafe { libc::getpgrp() }
}

/// Reads at most `buffer.len()` bytes.
pub fn read(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the kernel writes at most `len` bytes at the pointer.
    let result = unsafe { libc::read(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len()) };
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Writes `bytes` or their beginning.
pub fn write(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: the kernel reads at most `len` bytes at the pointer.
    let result = unsafe { libc::write(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) };
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn check(result: c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Descriptor that the signal handler writes to; -1 when none.
static SIGNAL_FD: AtomicI32 = AtomicI32::new(-1);
/// The last signal that asked the program to end; 0 when none.
static LAST_SIGNAL: AtomicI32 = AtomicI32::new(0);

extern "C" fn note_signal(signal: c_int, _info: *mut siginfo_t, _context: *mut c_void) {
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
const ENDING: [c_int; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];
/// Signals that end the program where it is.
const FATAL: [c_int; 5] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGABRT,
];

/// While it lives, a signal that asks the program to end makes an eventfd
/// readable instead. Signals that are ignored stay so.
pub struct EndingSignals {
    old: Vec<(c_int, libc::sigaction)>,
}

impl EndingSignals {
    /// Takes the signals over; one at a time in a process.
    pub fn divert_to(eventfd: RawFd) -> io::Result<Self> {
        LAST_SIGNAL.store(0, Ordering::Relaxed);
        SIGNAL_FD.store(eventfd, Ordering::Relaxed);
        let mut signals = Self { old: Vec::new() };
        for signal in ENDING {
            let old = set_handler(signal, note_signal, 0)?;
            signals.old.push((signal, old));
            if old.sa_sigaction == libc::SIG_IGN {
                set_action(signal, &old)?;
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
        for (signal, old) in &self.old {
            // An action that was in force before can't be refused.
            let _ = set_action(*signal, old);
        }
        SIGNAL_FD.store(-1, Ordering::Relaxed);
    }
}

/// Whether `CRASH_SETTINGS` is to be put back by a fatal signal.
static CRASH_ARMED: AtomicBool = AtomicBool::new(false);
/// Descriptor and settings of the terminal, for the handler of fatal signals.
static CRASH_SETTINGS: std::sync::OnceLock<(RawFd, termios)> = std::sync::OnceLock::new();

extern "C" fn restore_and_die(signal: c_int, _info: *mut siginfo_t, _context: *mut c_void) {
    if CRASH_ARMED.load(Ordering::Relaxed)
        && let Some((fd, settings)) = CRASH_SETTINGS.get()
    {
        // SAFETY: tcsetattr is async-signal-safe and reads one termios.
        unsafe { libc::tcsetattr(*fd, libc::TCSANOW, settings) };
    }
    // SAFETY: raise is async-signal-safe. The action was reset when this handler
    // was entered, so the signal ends the process when it returns.
    unsafe { libc::raise(signal) };
}

/// While it lives, a crash puts the terminal back before the process dies.
pub struct RestoreOnCrash {
    old: Vec<(c_int, libc::sigaction)>,
}

impl RestoreOnCrash {
    /// Remembers `settings` of `fd` for a crash.
    pub fn arm(fd: BorrowedFd<'_>, settings: termios) -> io::Result<Self> {
        CRASH_SETTINGS.get_or_init(|| (fd.as_raw_fd(), settings));
        CRASH_ARMED.store(true, Ordering::Relaxed);
        let mut guard = Self { old: Vec::new() };
        for signal in FATAL {
            let old = set_handler(
                signal,
                restore_and_die,
                libc::SA_RESETHAND | libc::SA_ONSTACK,
            )?;
            guard.old.push((signal, old));
        }
        Ok(guard)
    }
}

impl Drop for RestoreOnCrash {
    fn drop(&mut self) {
        CRASH_ARMED.store(false, Ordering::Relaxed);
        for (signal, old) in &self.old {
            // An action that was in force before can't be refused.
            let _ = set_action(*signal, old);
        }
    }
}

type Handler = extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

fn set_handler(signal: c_int, handler: Handler, flags: c_int) -> io::Result<libc::sigaction> {
    // SAFETY: sigaction is plain data, for which all zeroes is a value: no
    // flags, no signals blocked.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = (handler as *const ()).expose_provenance();
    action.sa_flags = flags | libc::SA_SIGINFO;
    // SAFETY: as above.
    let mut old: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: both point to one sigaction; the handlers given in this module
    // call async-signal-safe functions only.
    check(unsafe { libc::sigaction(signal, &raw const action, &raw mut old) })?;
    Ok(old)
}

fn set_action(signal: c_int, action: &libc::sigaction) -> io::Result<()> {
    // SAFETY: `action` was in force for this signal before.
    check(unsafe { libc::sigaction(signal, action, std::ptr::null_mut()) })
}
