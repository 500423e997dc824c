// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The system calls on the host that no safe crate has.

#![expect(unsafe_code, reason = "system calls that no safe crate has")]

use std::cell::Cell;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::mem::{size_of, zeroed};
use std::num::NonZeroI32;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Once;
use std::time::Duration;

use super::cpu_list::CpuList;

/// A thread's number, as the kernel counts them. Never 0, which system calls take for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tid(NonZeroI32);

/// Scheduling attributes of a thread: `struct sched_attr` of `include/uapi/linux/sched/types.h`,
/// version 1 (with the clamps). Linux before 5.3 takes it too, as long as the clamps are 0.
///
/// All zeros is SCHED_OTHER with nice value 0 and no flag.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedAttr {
    /// Bytes of this structure; [`SchedAttr::set`] fills it in.
    pub size: u32,
    /// `SCHED_*` of sched(7).
    pub policy: u32,
    /// `SCHED_FLAG_*`, see the constants here.
    pub flags: u64,
    /// -20 to 19, of SCHED_OTHER and SCHED_BATCH.
    pub nice: i32,
    /// 1 to 99, of SCHED_FIFO and SCHED_RR.
    pub priority: u32,
    /// Of SCHED_DEADLINE, in ns.
    pub runtime_ns: u64,
    /// Of SCHED_DEADLINE, in ns from the start of a period.
    pub deadline_ns: u64,
    /// Of SCHED_DEADLINE, in ns.
    pub period_ns: u64,
    /// uclamp.min, 0 to 1024; counts with [`SchedAttr::UTIL_CLAMP_MIN`].
    pub util_min: u32,
    /// uclamp.max, 0 to 1024; counts with [`SchedAttr::UTIL_CLAMP_MAX`].
    pub util_max: u32,
}

/// MFD_NOEXEC_SEAL of `include/uapi/linux/memfd.h`.
const MFD_NOEXEC_SEAL: u32 = 0x0008;

/// An empty, sealable file in memory that can't be executed. A host with `vm.memfd_noexec = 2`
/// allows no other. Before Linux 6.3 that seal does not exist.
///
/// # Errors
/// As memfd_create(2): `EMFILE` or `ENFILE` (no more open files), `ENOMEM`, `EINVAL` for a name of
/// more than 249 bytes.
pub fn memory_file(name: &CStr) -> io::Result<File> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    let made = |flags| {
        // SAFETY: the name is a C string; the call makes a new file.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), flags) };
        // SAFETY: the file is new, and has no other owner.
        (fd >= 0).then(|| unsafe { File::from_raw_fd(fd) })
    };
    let file = made(flags | MFD_NOEXEC_SEAL).or_else(|| made(flags));
    file.ok_or_else(io::Error::last_os_error)
}

const ATTR_SIZE: u32 = 56;
const _: () = assert!(size_of::<SchedAttr>() == 56);

impl SchedAttr {
    /// Children of the thread start as SCHED_OTHER, without a clamp.
    pub const RESET_ON_FORK: u64 = 0x01;
    /// `policy` doesn't count; the thread keeps its own.
    const KEEP_POLICY: u64 = 0x08;
    /// Nice value, priority and the values of SCHED_DEADLINE don't count.
    const KEEP_PARAMS: u64 = 0x10;
    /// `util_min` counts.
    pub const UTIL_CLAMP_MIN: u64 = 0x20;
    /// `util_max` counts.
    pub const UTIL_CLAMP_MAX: u64 = 0x40;
    /// The policy SCHED_FIFO.
    pub const FIFO: u32 = 1;
    /// The policy SCHED_RR.
    pub const RR: u32 = 2;
    /// The policy SCHED_DEADLINE.
    pub const DEADLINE: u32 = 6;

    /// A clamp alone, each bound 0 to 1024: policy and parameters stay.
    #[must_use]
    pub fn clamp(min: u32, max: u32) -> Self {
        Self {
            flags: Self::KEEP_POLICY
                | Self::KEEP_PARAMS
                | Self::UTIL_CLAMP_MIN
                | Self::UTIL_CLAMP_MAX,
            util_min: min,
            util_max: max,
            ..Self::default()
        }
    }

    /// SCHED_DEADLINE with `runtime_ns` in each `period_ns`; the deadline is the period's end.
    #[must_use]
    pub fn deadline(runtime_ns: u64, period_ns: u64) -> Self {
        Self {
            policy: Self::DEADLINE,
            runtime_ns,
            deadline_ns: period_ns,
            period_ns,
            ..Self::default()
        }
    }

    /// Whether it comes before every thread of a normal policy.
    #[must_use]
    pub fn is_real_time(&self) -> bool {
        [Self::FIFO, Self::RR, Self::DEADLINE].contains(&self.policy)
    }

    /// Those of `tid` now.
    ///
    /// # Errors
    /// ESRCH when there is no such thread.
    pub fn read(tid: Tid) -> io::Result<Self> {
        let mut attr = Self::default();
        // SAFETY: the kernel writes at most the given `ATTR_SIZE` bytes, the size of `attr`. Every
        // bit pattern is a value of its fields.
        let ret = unsafe {
            libc::syscall(
                libc::SYS_sched_getattr,
                tid.get(),
                &raw mut attr,
                ATTR_SIZE,
                0u32,
            )
        };
        check(ret).map(|()| attr)
    }

    /// The nice value that `tid` has or, under another policy than SCHED_OTHER and SCHED_BATCH, goes
    /// back to: sched_getattr has 0 for that.
    ///
    /// # Errors
    /// ESRCH when there is no such thread.
    pub fn nice_of(tid: Tid) -> io::Result<i32> {
        // SAFETY: getpriority touches no memory. The system call returns 20 less the nice value.
        let ret = unsafe { libc::syscall(libc::SYS_getpriority, libc::PRIO_PROCESS, tid.get()) };
        check(ret)?;
        Ok(20 - i32::try_from(ret).map_err(io::Error::other)?)
    }

    /// Gives them to `tid`.
    ///
    /// # Errors
    /// ESRCH when there is no such thread; EPERM without CAP_SYS_NICE for another user's thread or
    /// a higher priority, or for a SCHED_DEADLINE thread that isn't allowed on all CPUs of its root
    /// domain; EBUSY when there is no bandwidth left for it; EINVAL for values that don't fit the
    /// policy; EOPNOTSUPP for clamps on a kernel without uclamp. The attributes stay as they were.
    pub fn set(&self, tid: Tid) -> io::Result<()> {
        let attr = Self {
            size: ATTR_SIZE,
            ..*self
        };
        // SAFETY: the kernel reads `attr.size` bytes, which is the size of `attr`.
        let ret =
            unsafe { libc::syscall(libc::SYS_sched_setattr, tid.get(), &raw const attr, 0u32) };
        check(ret)
    }
}

thread_local! {
    static CURRENT: Cell<Option<Tid>> = const { Cell::new(None) };
}

/// In the child of a fork: its thread has another number than the one that it is a copy of.
extern "C" fn forget_current() {
    CURRENT.set(None);
}

impl Tid {
    /// Thread `tid`, if that is the number of one (above 0).
    #[must_use]
    pub fn new(tid: i32) -> Option<Self> {
        NonZeroI32::new(tid).filter(|t| t.get() > 0).map(Self)
    }

    /// The calling thread. Asks the kernel once per thread, and again after fork(3).
    ///
    /// # Panics
    /// Never: the kernel gives every thread a number above 0.
    #[must_use]
    pub fn current() -> Self {
        CURRENT.with(|cell| {
            cell.get().unwrap_or_else(|| {
                static AT_FORK: Once = Once::new();
                // It fails without memory only.
                // SAFETY: the handler writes a thread-local without destructor.
                AT_FORK.call_once(|| unsafe {
                    libc::pthread_atfork(None, None, Some(forget_current));
                });
                // SAFETY: gettid has no arguments and can't fail.
                let tid = unsafe { libc::gettid() };
                let tid = Self::new(tid).expect("a thread's number is above 0");
                cell.set(Some(tid));
                tid
            })
        })
    }

    /// Its number.
    #[must_use]
    pub fn get(self) -> i32 {
        self.0.get()
    }
}

impl std::fmt::Display for Tid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Scheduling policy of `tid`, without SCHED_RESET_ON_FORK.
pub(super) fn sched_policy(tid: Tid) -> io::Result<i32> {
    // SAFETY: takes and returns plain numbers.
    let ret = unsafe { libc::sched_getscheduler(tid.get()) };
    if ret < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(ret & !libc::SCHED_RESET_ON_FORK)
}

/// The user whose rights the caller has.
pub(super) fn effective_user() -> u32 {
    // SAFETY: has no arguments and can't fail.
    unsafe { libc::geteuid() }
}

/// Whether the extended attribute `name` of `path` is `1`.
pub(super) fn attribute_is_one(path: &Path, name: &CStr) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    let mut value = [0u8; 2];
    // SAFETY: both strings end with a zero; the kernel writes at most the length of `value`.
    let len = unsafe {
        libc::getxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_mut_ptr().cast(),
            value.len(),
        )
    };
    len == 1 && value[0] == b'1'
}

/// Whether `dir` is a directory of the kernel's cgroup v2, not one that stands for it.
pub(super) fn is_cgroup(dir: &File) -> io::Result<bool> {
    // SAFETY: plain numbers, of which all zeros is a value.
    let mut stat: libc::statfs = unsafe { zeroed() };
    // SAFETY: the kernel writes one `statfs` to `stat`, which outlives the call.
    let ret = unsafe { libc::fstatfs(dir.as_raw_fd(), &raw mut stat) };
    check(ret.into())?;
    Ok(stat.f_type == libc::CGROUP2_SUPER_MAGIC)
}

/// The part of `union bpf_attr` that BPF_PROG_QUERY uses, and zeros.
#[repr(C)]
#[derive(Default)]
struct ProgQuery {
    target_fd: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    prog_cnt: u32,
    zeros: [u32; 9],
}

/// How many BPF programs of `attach_type` are attached to the group `dir` itself. Needs
/// CAP_NET_ADMIN.
pub(super) fn attached_programs(dir: &File, attach_type: u32) -> io::Result<u32> {
    const BPF_PROG_QUERY: libc::c_long = 16;
    let mut query = ProgQuery {
        target_fd: dir.as_raw_fd().unsigned_abs(),
        attach_type,
        ..ProgQuery::default()
    };
    // SAFETY: the kernel reads and writes at most the given size, that of `query`. Without room for
    // programs it writes no further.
    let ret = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_PROG_QUERY,
            &raw mut query,
            size_of::<ProgQuery>(),
        )
    };
    check(ret).map(|()| query.prog_cnt)
}

/// The pCPU that the calling thread is on.
///
/// # Errors
/// `ENOSYS`, from a kernel without getcpu(2).
pub fn current_cpu() -> io::Result<u32> {
    // SAFETY: has no arguments.
    let cpu = unsafe { libc::sched_getcpu() };
    u32::try_from(cpu).map_err(|_| io::Error::last_os_error())
}

/// CLOCK_MONOTONIC in ns, the clock of the kernel's trace events with `trace_clock=mono`. Through
/// the vDSO: no system call.
#[must_use]
pub fn monotonic_ns() -> u64 {
    let now = clock(libc::CLOCK_MONOTONIC);
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// CPU time of the calling thread.
#[must_use]
pub fn thread_cpu_time() -> Duration {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

fn clock(id: libc::clockid_t) -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a timespec that lives through the call. Every thread of every Linux has
    // the two clocks, so the result has no meaning.
    unsafe { libc::clock_gettime(id, &raw mut time) };
    let second = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(second, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// The most CPUs that Linux can be built for, in words of 64.
const CPU_WORDS: usize = 8192 / 64;

/// The pCPUs that thread `tid` may run on, a bit each; 0 is the calling thread.
fn affinity(tid: i32) -> io::Result<[u64; CPU_WORDS]> {
    let mut set = [0; CPU_WORDS];
    // SAFETY: the kernel writes at most the size of `set` at the pointer.
    let ret = unsafe { libc::sched_getaffinity(tid, size_of_val(&set), set.as_mut_ptr().cast()) };
    check(ret.into()).map(|()| set)
}

/// The pCPUs that thread `tid` may run on.
///
/// # Errors
/// ESRCH when there is no such thread.
pub fn affinity_of(tid: Tid) -> io::Result<CpuList> {
    let set = affinity(tid.get())?;
    let bits = (0..).zip(set).flat_map(|(word, bits)| {
        let set = (0..u64::BITS).filter(move |bit| (bits >> bit) & 1 == 1);
        set.map(move |bit| word * u64::BITS + bit)
    });
    Ok(bits.collect())
}

/// Takes `pcpus` out of `set`; what is left of it.
fn without(mut set: [u64; CPU_WORDS], pcpus: &[u32]) -> [u64; CPU_WORDS] {
    for &pcpu in pcpus {
        let word = usize::try_from(pcpu / u64::BITS).ok();
        if let Some(word) = word.and_then(|word| set.get_mut(word)) {
            *word &= !(1 << (pcpu % u64::BITS));
        }
    }
    set
}

/// Whether thread `tid` may run on no online CPU but `pcpus`.
///
/// # Errors
/// ESRCH when there is no such thread.
pub fn is_within(tid: Tid, pcpus: &[u32]) -> io::Result<bool> {
    let others = without(affinity(tid.get())?, pcpus);
    Ok(others.iter().all(|word| *word == 0))
}

/// Opens a file below an open directory, read only.
///
/// # Errors
/// As openat(2).
pub(crate) fn open_below(dir: &File, name: &str) -> io::Result<File> {
    let name = CString::new(name)?;
    let flags = libc::O_RDONLY | libc::O_CLOEXEC;
    // SAFETY: the name ends with a zero, and the kernel only reads it.
    let fd = unsafe { libc::openat(dir.as_raw_fd(), name.as_ptr(), flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor, which nothing else has.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// Keeps the calling thread off `pcpus`, unless it may run on no others.
///
/// # Errors
/// As sched_setaffinity(2): EINVAL when all other pCPUs have just gone offline or out of its
/// cpuset, EBUSY for a SCHED_DEADLINE thread that would leave pCPUs of its root domain. The thread
/// keeps the pCPUs that it had.
pub fn stay_off(pcpus: &[u32]) -> io::Result<()> {
    let others = without(affinity(0)?, pcpus);
    match others.iter().all(|word| *word == 0) {
        true => Ok(()),
        false => set_affinity(0, &others),
    }
}

/// Lets thread `tid` run on `pcpus` only. Those of them that are offline or not allowed don't
/// count.
///
/// # Errors
/// As sched_setaffinity(2): EINVAL when none of them is left, ESRCH when there is no such thread,
/// EPERM without CAP_SYS_NICE for another user's thread, EBUSY for a SCHED_DEADLINE thread that
/// would leave pCPUs of its root domain. The thread keeps the pCPUs that it had.
pub fn pin(tid: Tid, pcpus: &[u32]) -> io::Result<()> {
    let top = pcpus.iter().copied().max().unwrap_or(0);
    let words = usize::try_from(top / u64::BITS).map_err(io::Error::other)? + 1;
    let mut set = vec![0u64; words];
    for &pcpu in pcpus {
        let word = usize::try_from(pcpu / u64::BITS).map_err(io::Error::other)?;
        set[word] |= 1 << (pcpu % u64::BITS);
    }
    set_affinity(tid.get(), &set)
}

fn set_affinity(tid: i32, set: &[u64]) -> io::Result<()> {
    // SAFETY: the kernel reads the bytes of `set` at the pointer.
    let ret = unsafe { libc::sched_setaffinity(tid, size_of_val(set), set.as_ptr().cast()) };
    check(ret.into())
}

fn check(ret: libc::c_long) -> io::Result<()> {
    if ret < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_thread_has_its_own_number() {
        let parent = Tid::current();
        // SAFETY: the child calls only what is async-signal-safe, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let pid = i32::try_from(std::process::id()).ok();
            let is_own = Tid::current() != parent && Some(Tid::current().get()) == pid;
            // SAFETY: it ends the child at once.
            unsafe { libc::_exit(i32::from(!is_own)) };
        }
        let mut status = 0;
        // SAFETY: it writes one number.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(Tid::current(), parent);
    }

    /// The nice value of a thread that was given -5 and is SCHED_FIFO, as both calls have it.
    fn nice_of_fifo() -> io::Result<(i32, i32)> {
        let tid = Tid::current();
        let nice = SchedAttr {
            nice: -5,
            ..SchedAttr::default()
        };
        nice.set(tid)?;
        let fifo = SchedAttr {
            policy: SchedAttr::FIFO,
            priority: 1,
            ..SchedAttr::default()
        };
        fifo.set(tid)?;
        Ok((SchedAttr::read(tid)?.nice, SchedAttr::nice_of(tid)?))
    }

    #[test]
    fn the_nice_value_of_a_real_time_thread_is_what_it_goes_back_to() {
        match std::thread::spawn(nice_of_fifo).join().unwrap() {
            Err(error) => println!("SKIP: this process may not raise priorities: {error}"),
            Ok(nice) => assert_eq!(nice, (0, -5)),
        }
    }
}
