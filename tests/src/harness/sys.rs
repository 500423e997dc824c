// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The system calls that have no safe wrapper, and nothing else.
#![expect(unsafe_code, reason = "system calls, and registers in mapped memory")]

use std::fs::File;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::NonNull;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use vcpufreq_host::{SchedAttr, Tid};

/// Whether children of the thread start without its scheduling and clamp.
pub fn resets_on_fork(tid: i32) -> Result<bool> {
    // SAFETY: takes and returns plain numbers.
    let policy = unsafe { libc::sched_getscheduler(tid) };
    ensure!(
        policy >= 0,
        "sched_getscheduler: {}",
        std::io::Error::last_os_error()
    );
    Ok(policy & libc::SCHED_RESET_ON_FORK != 0)
}

/// Makes the calling thread SCHED_FIFO, or SCHED_OTHER with priority 0.
pub fn set_fifo_priority(priority: i32) -> Result<()> {
    set_fifo_priority_of(0, priority)
}

/// The same for the thread `tid`; 0 is the calling one.
pub fn set_fifo_priority_of(tid: i32, priority: i32) -> Result<()> {
    let policy = if priority > 0 {
        libc::SCHED_FIFO
    } else {
        libc::SCHED_OTHER
    };
    let param = libc::sched_param {
        sched_priority: priority,
    };
    // SAFETY: `param` lives over the call, which only reads it.
    let result = unsafe { libc::sched_setscheduler(tid, policy, &raw const param) };
    ensure!(
        result == 0,
        "SCHED_FIFO {priority}: {}",
        std::io::Error::last_os_error()
    );
    Ok(())
}

/// Clamps the calling thread; its policy and parameters stay.
#[cfg_attr(
    not(feature = "bpf"),
    expect(dead_code, reason = "for those scenarios")
)]
pub fn set_clamp(min: u32, max: u32) -> Result<()> {
    let clamped = SchedAttr::clamp(min, max).set(Tid::current());
    clamped.context("sched_setattr")
}

/// Sets a thread's policy with a priority of its range, and its nice value.
#[cfg_attr(
    not(feature = "bpf"),
    expect(dead_code, reason = "for those scenarios")
)]
pub fn set_policy_of(tid: i32, (policy, priority, nice): (i32, i32, i32)) -> Result<()> {
    let param = libc::sched_param {
        sched_priority: priority,
    };
    let policy = policy | libc::SCHED_RESET_ON_FORK;
    // SAFETY: `param` lives over the call, which only reads it.
    let set = unsafe { libc::sched_setscheduler(tid, policy, &raw const param) };
    ensure!(
        set == 0,
        "sched_setscheduler: {}",
        std::io::Error::last_os_error()
    );
    let who = tid.try_into()?;
    // SAFETY: takes plain numbers.
    let set = unsafe { libc::setpriority(libc::PRIO_PROCESS, who, nice) };
    ensure!(set == 0, "setpriority: {}", std::io::Error::last_os_error());
    Ok(())
}

/// Sets an open file of the host module up, for so many vCPUs and domains.
#[cfg_attr(
    not(feature = "bpf"),
    expect(dead_code, reason = "for those scenarios")
)]
pub fn set_up_host_module(file: &File, vcpus: u32, domains: u32) -> std::io::Result<()> {
    call_module(file, SET_UP, &mut module_words(&[vcpus, domains]))
}

/// Binds a domain of the host module to a group's files.
#[cfg_attr(
    not(feature = "bpf"),
    expect(dead_code, reason = "for those scenarios")
)]
pub fn bind_group(file: &File, domain: u32, min: &File, max: &File) -> std::io::Result<()> {
    let fds = [min, max].map(|file| u32::try_from(file.as_raw_fd()).unwrap_or(u32::MAX));
    call_module(file, BIND, &mut module_words(&[domain, fds[0], fds[1]]))
}

/// Numbers of the host module's calls (abi/vcpufreq-module.h).
pub const SET_UP: libc::Ioctl = 0x4008_cf00;
pub const BIND: libc::Ioctl = 0x400c_cf01;

fn module_words(words: &[u32]) -> [u32; 64] {
    std::array::from_fn(|n| words.get(n).copied().unwrap_or_default())
}

/// Any call of the host module. None of its arguments is longer than `words`, nor has a pointer.
pub fn call_module(file: &File, number: libc::Ioctl, words: &mut [u32; 64]) -> std::io::Result<()> {
    // SAFETY: the driver reads and writes `words`, which outlive the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), number, words.as_mut_ptr()) };
    Ok(Errno::result(result).map(drop)?)
}

/// Whether a page of the file can be mapped; it is unmapped again.
#[cfg_attr(
    not(feature = "bpf"),
    expect(dead_code, reason = "for those scenarios")
)]
pub fn can_map(file: &File) -> bool {
    let (fd, flags) = (file.as_raw_fd(), libc::MAP_SHARED);
    // SAFETY: the kernel chooses the place; nothing uses it.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, flags, fd, 0) };
    if page == libc::MAP_FAILED {
        return false;
    }
    // SAFETY: mapped above, and unused.
    unsafe { libc::munmap(page, 4096) };
    true
}

/// Makes the calling thread SCHED_DEADLINE with this share of its time.
#[cfg_attr(
    not(feature = "bpf"),
    expect(dead_code, reason = "for those scenarios")
)]
pub fn set_deadline(runtime: Duration, period: Duration) -> Result<()> {
    let ns = |time: Duration| u64::try_from(time.as_nanos());
    // Else it may start no thread, which KVM does at the first run of a VM on x86-64.
    let attr = SchedAttr {
        flags: SchedAttr::RESET_ON_FORK,
        ..SchedAttr::deadline(ns(runtime)?, ns(period)?)
    };
    attr.set(Tid::current()).context("sched_setattr")
}

/// Forks a process that ends at once, and waits for that.
#[cfg_attr(
    not(feature = "bpf"),
    expect(dead_code, reason = "for those scenarios")
)]
pub fn fork_and_wait() -> Result<()> {
    // SAFETY: the child only ends.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: nothing of this process' runs at its end.
        unsafe { libc::_exit(0) };
    }
    let pid = nix::unistd::Pid::from_raw(Errno::result(pid).context("fork")?);
    nix::sys::wait::waitpid(pid, None).context("waitpid")?;
    Ok(())
}

/// What a real-time policy needs, or the limit rtprio.
pub const CAP_SYS_NICE: &[libc::c_ulong] = &[23];

/// Has `command` start without what BPF needs: CAP_SYS_ADMIN, CAP_PERFMON and CAP_BPF.
pub fn drop_bpf_capabilities(command: &mut std::process::Command) {
    drop_capabilities(command, &[21, 38, 39]);
}

/// Has `command` start without these capabilities: they leave its bounding set, and with that root's
/// set at the next exec.
pub fn drop_capabilities(command: &mut std::process::Command, caps: &'static [libc::c_ulong]) {
    use std::os::unix::process::CommandExt as _;
    let drop = move || {
        for cap in caps {
            // SAFETY: takes plain numbers.
            if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, *cap, 0, 0, 0) } != 0 {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec it makes system calls only.
    unsafe { command.pre_exec(drop) };
}

/// Bytes for a physical address; behind them come zeros.
pub struct Segment<'a> {
    pub bytes: &'a [u8],
    pub at: u64,
    pub size: u64,
}

/// Has the kernel put these into place, and enter `at`, when it restarts by kexec.
pub fn load_kernel(at: u64, segments: &[Segment<'_>]) -> Result<()> {
    /// `KEXEC_ARCH_AARCH64`
    const AARCH64: libc::c_ulong = 183 << 16;
    let raw = |segment: &Segment<'_>| {
        let size = usize::try_from(segment.size)?.next_multiple_of(PAGE);
        let at = usize::try_from(segment.at)?;
        let address = segment.bytes.as_ptr().expose_provenance();
        Ok([address, segment.bytes.len(), at, size])
    };
    let raw: Vec<[usize; 4]> = segments.iter().map(raw).collect::<Result<_>>()?;
    // SAFETY: the kernel reads the list and the bytes that it points to, which outlive the call.
    let result =
        unsafe { libc::syscall(libc::SYS_kexec_load, at, raw.len(), raw.as_ptr(), AARCH64) };
    Errno::result(result).map(drop).context("kexec_load")
}

/// Has `command` be the parent of what its descendants leave behind, and reap that, as an init
/// system does.
pub fn adopt_orphans(command: &mut std::process::Command) {
    use std::os::unix::process::CommandExt as _;
    let adopt = || Ok(nix::sys::prctl::set_child_subreaper(true)?);
    // SAFETY: between fork and exec it makes one system call.
    unsafe { command.pre_exec(adopt) };
}

/// A page of device registers, through /dev/mem.
#[derive(Debug)]
pub struct Registers {
    page: NonNull<u32>,
}

// SAFETY: the mapping is the process's, and accesses are single volatile
// 32-bit loads and stores.
unsafe impl Send for Registers {}

const PAGE: usize = 4096;

/// One of its registers, whose reads are loads and nothing else.
#[derive(Clone, Copy)]
pub struct Register<'a> {
    at: NonNull<u32>,
    _of: PhantomData<&'a Registers>,
}

/// A word of memory, which is read as a register is.
impl<'a> From<&'a mut u32> for Register<'a> {
    fn from(word: &'a mut u32) -> Self {
        Self {
            at: word.into(),
            _of: PhantomData,
        }
    }
}

impl Register<'_> {
    /// Reads it.
    #[inline(always)]
    pub fn read(&self) -> u32 {
        // SAFETY: mapped as long as the page is, and aligned.
        unsafe { self.at.read_volatile() }
    }
}

impl Registers {
    /// Maps the page at a physical address.
    pub fn map(address: u64) -> Result<Self> {
        let mem = File::options()
            .read(true)
            .write(true)
            .open("/dev/mem")
            .context("/dev/mem")?;
        let offset = libc::off_t::try_from(address)?;
        let page = Self::mapped(libc::MAP_SHARED, (mem.as_raw_fd(), offset));
        page.with_context(|| format!("of {address:#x}"))
    }

    /// A page of this process' own memory, which nothing else looks at.
    pub fn own_memory() -> Result<Self> {
        Self::mapped(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, (-1, 0))
    }

    fn mapped(flags: i32, (file, offset): (RawFd, libc::off_t)) -> Result<Self> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping at an address that the kernel chooses.
        let page = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, rights, flags, file, offset) };
        let error = std::io::Error::last_os_error();
        ensure!(page != libc::MAP_FAILED, "mmap: {error}");
        Ok(Self {
            page: NonNull::new(page.cast()).context("mmap gave null")?,
        })
    }

    /// Reads the register at a byte offset.
    pub fn read(&self, offset: usize) -> u32 {
        self.at(offset).read()
    }

    /// The register at a byte offset.
    pub fn at(&self, offset: usize) -> Register<'_> {
        assert!(offset < PAGE && offset % 4 == 0);
        // SAFETY: within the page, as asserted.
        let at = unsafe { self.page.add(offset / 4) };
        Register {
            at,
            _of: PhantomData,
        }
    }

    /// Reads a device's register of one byte.
    pub fn read_byte(&self, offset: usize) -> u8 {
        // SAFETY: within the page, by its bound, and mapped.
        unsafe { self.byte(offset).read_volatile() }
    }

    /// Writes a device's register of one byte.
    pub fn write_byte(&self, offset: usize, value: u8) {
        // SAFETY: within the page, by its bound, and mapped.
        unsafe { self.byte(offset).write_volatile(value) };
    }

    fn byte(&self, offset: usize) -> *mut u8 {
        assert!(offset < PAGE);
        // SAFETY: within the page, as asserted.
        unsafe { self.page.as_ptr().cast::<u8>().add(offset) }
    }

    /// Writes a byte, and eight, where a register has four.
    pub fn write_of_other_widths(&self, offset: usize, value: u32) {
        assert!(offset < PAGE && offset % 8 == 0);
        // SAFETY: within the page, as asserted.
        let register = unsafe { self.page.add(offset / 4) };
        // SAFETY: mapped; a byte is always aligned.
        unsafe { register.cast::<u8>().write_volatile(1) };
        // SAFETY: mapped and aligned to eight, as asserted.
        unsafe { register.cast::<u64>().write_volatile(value.into()) };
    }

    /// Writes two registers by one instruction that KVM gets no description of,
    /// on arm64; elsewhere it is two writes.
    pub fn write_pair(&self, offset: usize) {
        assert!(offset < PAGE - 4 && offset % 4 == 0);
        // SAFETY: within the page, as asserted.
        let register = unsafe { self.page.add(offset / 4) };
        #[cfg(target_arch = "aarch64")]
        // SAFETY: two words of the page; the registers are devices', not memory.
        unsafe {
            std::arch::asm!(
                "stp wzr, wzr, [{register}]",
                register = in(reg) register.as_ptr(),
                options(nostack, preserves_flags)
            );
        }
        #[cfg(not(target_arch = "aarch64"))]
        for word in 0..2 {
            // SAFETY: within the page, as asserted.
            let register = unsafe { register.add(word) };
            // SAFETY: mapped and aligned.
            unsafe { register.write_volatile(0) };
        }
    }

    /// Writes the register at a byte offset.
    pub fn write(&self, offset: usize, value: u32) {
        assert!(offset < PAGE && offset % 4 == 0);
        // SAFETY: within the page, as asserted.
        let register = unsafe { self.page.add(offset / 4) };
        // SAFETY: mapped and aligned.
        unsafe { register.write_volatile(value) };
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: the mapping of `map`, unmapped once.
        unsafe { libc::munmap(self.page.as_ptr().cast(), PAGE) };
    }
}
