// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! perf events of the kernel's own: their system calls, rings and tracepoints, and nothing
//! of what they are for.
//!
//! A ring is written backward and never full: the newest record is at its
//! head, and the oldest ones are overwritten (perf_event_open(2), "Overwritable
//! ring buffers").
#![expect(unsafe_code, reason = "perf events are system calls and mapped rings")]

use std::ffi::{CString, c_int, c_ulong};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Acquire};

use vcpufreq_host::{HostRoot, Tid};

const TYPE_SOFTWARE: u32 = 1;
const TYPE_TRACEPOINT: u32 = 2;
const SW_TASK_CLOCK: u64 = 1;
const SW_CPU_MIGRATIONS: u64 = 4;
const SAMPLE_TIME: u64 = 1 << 2;
const SAMPLE_RAW: u64 = 1 << 10;
const FLAG_DISABLED: u64 = 1;
const FLAG_USE_CLOCKID: u64 = 1 << 25;
const FLAG_WRITE_BACKWARD: u64 = 1 << 27;
const OPEN_CLOEXEC: c_ulong = 8;
/// `PERF_EVENT_IOC_SET_FILTER`
const SET_FILTER: c_ulong = 0x4008_2406;
/// `PERF_EVENT_IOC_REFRESH`
const REFRESH: c_ulong = 0x2402;
/// How long a thread runs until [`PerfEvent::run_time`] wakes its poller, ns.
const RUN_NS: u64 = 250_000;
/// Bytes of a ring that are read: the newest records, at most half of the ring.
const LAST: usize = 2048;
/// Records begin at multiples of this.
const WORD: usize = size_of::<u64>();
/// Where the head is in the first page of a ring (`data_head`).
const DATA_HEAD: usize = 1024;

/// `F_SETOWN_EX`, `F_OWNER_TID` and `F_SETSIG` of `include/uapi/asm-generic/fcntl.h`.
const SET_OWNER: c_int = 15;
const OWNER_TID: c_int = 0;
const SET_SIGNAL: c_int = 10;

/// `struct f_owner_ex`
#[repr(C)]
struct FOwnerEx {
    kind: c_int,
    id: c_int,
}

/// `struct perf_event_attr` of `include/uapi/linux/perf_event.h`, version 5.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Attr {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    bp_type: u32,
    config1: u64,
    config2: u64,
    branch_sample_type: u64,
    sample_regs_user: u64,
    sample_stack_user: u32,
    clockid: i32,
    sample_regs_intr: u64,
    aux_watermark: u32,
    sample_max_stack: u16,
    reserved: u16,
}

const ATTR_SIZE: u32 = 112;
const _: () = assert!(size_of::<Attr>() == 112);

/// The kernel's file of a tracepoint (`group/event`), if it can be read.
pub fn tracepoint_text(host: &HostRoot, tracepoint: &str, file: &str) -> Option<String> {
    let path = format!("sys/kernel/tracing/events/{tracepoint}/{file}");
    host.text(path)
}

/// Whose events.
#[derive(Clone, Copy, Debug)]
pub enum Whose {
    /// A thread's.
    Thread(Tid),
    /// A pCPU's.
    Pcpu(u32),
}

/// An event and its ring.
#[derive(Debug)]
pub struct PerfEvent {
    fd: OwnedFd,
    ring: NonNull<u8>,
    page: usize,
}

/// How far a ring has been read, and the newest record that was wanted.
#[derive(Clone, Copy, Debug)]
pub struct Read<T> {
    /// Where it ended then. A ring starts at 0, and grows downward.
    head: u64,
    /// Time (CLOCK_MONOTONIC, ns), and the content of that record.
    pub newest: Option<(u64, T)>,
    /// More was written since than is read, and what was read wasn't wanted: a newer one
    /// may be among the rest.
    pub lost: bool,
}

impl<T> Default for Read<T> {
    fn default() -> Self {
        Self {
            head: 0,
            newest: None,
            lost: false,
        }
    }
}

// SAFETY: the ring is the kernel's to write; here it is only read, through
// atomics and volatile loads.
unsafe impl Send for PerfEvent {}
// SAFETY: as above.
unsafe impl Sync for PerfEvent {}

impl PerfEvent {
    /// Wakes its poller when `thread` runs on another pCPU than before.
    ///
    /// # Errors
    /// As perf_event_open(2): `EACCES` or `EPERM` without CAP_PERFMON
    /// (`kernel.perf_event_paranoid`), `ESRCH` when the thread has ended, `EMFILE`; as mmap(2) of a
    /// ring: `ENOMEM`, `EPERM` over `kernel.perf_event_mlock_kb`. No event is left then.
    pub fn migrations(thread: Tid) -> io::Result<Self> {
        let attr = Attr {
            kind: TYPE_SOFTWARE,
            config: SW_CPU_MIGRATIONS,
            wakeup_events: 1,
            ..Attr::default()
        };
        Self::of_file(Self::open(attr, Whose::Thread(thread))?)
    }

    /// Wakes its poller when `thread` has run for 250 µs since [`Self::fire_once`].
    ///
    /// # Errors
    /// As [`Self::migrations`].
    pub(super) fn run_time(thread: Tid) -> io::Result<Self> {
        let attr = Attr {
            kind: TYPE_SOFTWARE,
            config: SW_TASK_CLOCK,
            sample_period: RUN_NS,
            flags: FLAG_DISABLED,
            wakeup_events: 1,
            ..Attr::default()
        };
        Self::of_file(Self::open(attr, Whose::Thread(thread))?)
    }

    /// Lets an event that is off, or has fired, fire once more.
    ///
    /// # Errors
    /// As ioctl(2).
    pub(super) fn fire_once(&self) -> io::Result<()> {
        // SAFETY: takes an open file and two numbers.
        check(unsafe { libc::ioctl(self.fd(), REFRESH, 1) })
    }

    /// Wakes its poller at tracepoint `id`.
    ///
    /// # Errors
    /// As [`Self::migrations`]; `ENODEV` while the pCPU is offline, `EINVAL` when no tracepoint has
    /// this number.
    pub fn waking(id: u64, whose: Whose) -> io::Result<OwnedFd> {
        let attr = Attr {
            kind: TYPE_TRACEPOINT,
            config: id,
            wakeup_events: 1,
            ..Attr::default()
        };
        Self::open(attr, whose)
    }

    /// Records time and fields at tracepoint `id`, and wakes no thread.
    ///
    /// # Errors
    /// As [`Self::waking`]; `EINVAL` when `filter` names a field that the tracepoint doesn't have.
    pub fn recording(id: u64, whose: Whose, filter: &str) -> io::Result<Self> {
        let attr = Attr {
            kind: TYPE_TRACEPOINT,
            config: id,
            sample_type: SAMPLE_TIME | SAMPLE_RAW,
            ..Attr::default()
        };
        let event = Self::of_file(Self::open(attr, whose)?)?;
        let filter = CString::new(filter)?;
        // SAFETY: the kernel reads a text that ends in NUL.
        let result = unsafe { libc::ioctl(event.fd(), SET_FILTER, filter.as_ptr()) };
        match result {
            0 => Ok(event),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// An event's ring.
    ///
    /// # Errors
    /// As mmap(2): `EPERM` over the user's limit of locked memory (`perf_event_mlock_kb` and
    /// RLIMIT_MEMLOCK).
    pub fn of_file(fd: OwnedFd) -> io::Result<Self> {
        // SAFETY: takes and returns plain numbers.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let page = usize::try_from(page).map_err(io::Error::other)?;
        // Not writable: that is what makes it one that overwrites.
        // SAFETY: a fresh mapping at an address that the kernel chooses.
        let ring = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                2 * page,
                libc::PROT_READ,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if ring == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let ring = NonNull::new(ring.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { fd, ring, page })
    }

    fn open(attr: Attr, whose: Whose) -> io::Result<OwnedFd> {
        let attr = Attr {
            size: ATTR_SIZE,
            sample_period: attr.sample_period.max(1),
            flags: attr.flags | FLAG_USE_CLOCKID | FLAG_WRITE_BACKWARD,
            clockid: libc::CLOCK_MONOTONIC,
            ..attr
        };
        let (pid, cpu): (c_int, c_int) = match whose {
            Whose::Thread(tid) => (tid.get(), -1),
            Whose::Pcpu(cpu) => (-1, c_int::try_from(cpu).map_err(io::Error::other)?),
        };
        // SAFETY: the kernel reads `attr.size` bytes, which `attr` has.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_perf_event_open,
                &raw const attr,
                pid,
                cpu,
                -1 as c_int,
                OPEN_CLOEXEC,
            )
        };
        let fd = c_int::try_from(fd).map_err(io::Error::other)?;
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that was just made, with no other owner.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// Sends `signal` to `thread`, too, whenever the poller is woken.
    ///
    /// # Errors
    /// As fcntl(2): `ESRCH` when the thread has ended, `EINVAL` when no signal has this number,
    /// `ENOMEM`. The poller is woken all the same.
    pub fn signal(&self, thread: Tid, signal: c_int) -> io::Result<()> {
        let owner = FOwnerEx {
            kind: OWNER_TID,
            id: thread.get(),
        };
        // SAFETY: the kernel reads one such struct.
        check(unsafe { libc::fcntl(self.fd(), SET_OWNER, &raw const owner) })?;
        // SAFETY: plain numbers.
        check(unsafe { libc::fcntl(self.fd(), SET_SIGNAL, signal) })?;
        // SAFETY: plain numbers.
        check(unsafe { libc::fcntl(self.fd(), libc::F_SETFL, libc::O_ASYNC) })
    }

    /// For polling only.
    pub fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Reads the records since `read`. The newest one for which `wanted` returns a value becomes
    /// `read.newest`.
    pub fn catch_up<T>(&self, read: &mut Read<T>, wanted: impl Fn(&[u8]) -> Option<T>) {
        let Some((head, bytes, all)) = self.news(read.head) else {
            return;
        };
        read.head = head;
        let mut rest = &bytes[..];
        while let Some((record, after)) = split_record(rest) {
            let found =
                time_and_fields(record).and_then(|(time, fields)| Some((time, wanted(fields)?)));
            if found.is_some() {
                read.newest = found;
                read.lost = false;
                return;
            }
            rest = after;
        }
        read.lost |= !all;
    }

    /// Where the ring ends, and the bytes that were written since it ended at
    /// `since`, [`LAST`] of them at most, and whether that is all; `None` where there are none.
    fn news(&self, since: u64) -> Option<(u64, Vec<u8>, bool)> {
        for _ in 0..4 {
            let head = self.head();
            let len = usize::try_from(since.wrapping_sub(head)).unwrap_or(LAST);
            if len == 0 {
                return None;
            }
            let start = usize::try_from(head % self.page as u64).ok()?;
            let mut bytes = Vec::with_capacity(len.min(LAST));
            for i in (0..len.min(LAST)).step_by(WORD) {
                // SAFETY: in the second page of the mapping, a multiple of 8 from its start.
                let word = unsafe { self.ring.add(self.page + (start + i) % self.page) };
                // SAFETY: mapped for reading as long as `self` lives, and aligned.
                let word = unsafe { word.cast::<u64>().read_volatile() };
                bytes.extend_from_slice(&word.to_ne_bytes());
            }
            // As long as it hasn't gone half round, what was copied is whole.
            if head.wrapping_sub(self.head()) <= LAST as u64 {
                return Some((head, bytes, len <= LAST));
            }
        }
        None
    }

    fn head(&self) -> u64 {
        // SAFETY: within the first page of the mapping.
        let head = unsafe { self.ring.add(DATA_HEAD) };
        // SAFETY: an aligned u64 there, which the kernel stores as a whole.
        unsafe { AtomicU64::from_ptr(head.cast().as_ptr()) }.load(Acquire)
    }
}

/// A ring that a test writes as the kernel does.
#[cfg(any(test, feature = "fuzzing"))]
impl PerfEvent {
    /// The ring alone, empty.
    pub fn of_no_event() -> io::Result<Self> {
        const PAGE: usize = 4096;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        // SAFETY: a fresh mapping where the kernel chooses.
        let ring = unsafe { libc::mmap(std::ptr::null_mut(), 2 * PAGE, access, flags, -1, 0) };
        if ring == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            fd: std::fs::File::open("/dev/null")?.into(),
            ring: NonNull::new(ring.cast()).ok_or(io::ErrorKind::OutOfMemory)?,
            page: PAGE,
        })
    }

    /// Writes a record, a multiple of 8 bytes, into one [of no event](Self::of_no_event) that ends at
    /// `head`; where it ends then.
    pub fn write(&mut self, head: u64, record: &[u8]) -> u64 {
        let head = head.wrapping_sub(record.len() as u64);
        for (i, byte) in (0..).zip(record) {
            let at = head.wrapping_add(i) % self.page as u64;
            let at = self.page + usize::try_from(at).unwrap_or_default();
            // SAFETY: in the second page of the mapping.
            let at = unsafe { self.ring.add(at) };
            // SAFETY: the same, and no thread reads it meanwhile.
            unsafe { at.write(*byte) };
        }
        // SAFETY: in the first page of the mapping.
        let end = unsafe { self.ring.add(DATA_HEAD) };
        // SAFETY: an aligned u64 there.
        unsafe { end.cast::<u64>().write(head) };
        head
    }
}

impl Drop for PerfEvent {
    fn drop(&mut self) {
        // SAFETY: the mapping of `open`, unmapped once.
        unsafe { libc::munmap(self.ring.as_ptr().cast(), 2 * self.page) };
    }
}

fn check(result: c_int) -> io::Result<()> {
    match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The first record and what follows it. A ring that isn't full ends in zeroes.
fn split_record(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let size = u16::from_ne_bytes(*bytes.get(6..)?.first_chunk()?);
    let size = usize::from(size);
    (size >= 8 && size <= bytes.len()).then(|| bytes.split_at(size))
}

/// `PERF_RECORD_SAMPLE` with TIME and RAW.
fn time_and_fields(record: &[u8]) -> Option<(u64, &[u8])> {
    const SAMPLE: u32 = 9;
    if u32::from_ne_bytes(*record.first_chunk()?) != SAMPLE {
        return None;
    }
    let time = u64::from_ne_bytes(*record.get(8..)?.first_chunk()?);
    let len = u32::from_ne_bytes(*record.get(16..)?.first_chunk()?);
    let fields = record.get(20..)?.get(..usize::try_from(len).ok()?)?;
    Some((time, fields))
}

#[cfg(test)]
pub(super) mod tests {
    //! A record's fields are read as written; of a ring only what is new is read, round its end
    //! too.
    use super::*;

    /// Of one byte for its fields, at that time; 32 bytes long.
    fn record(time: u64, field: u8) -> Vec<u8> {
        let mut fields = [0; 12];
        fields[0] = field;
        record_of(time, &fields)
    }

    /// Of these fields, at that time; the kernel pads it to a multiple of 8 bytes.
    pub fn record_of(time: u64, fields: &[u8]) -> Vec<u8> {
        let len = (20 + fields.len()).next_multiple_of(WORD);
        let mut record = Vec::new();
        record.extend(9_u32.to_ne_bytes());
        record.extend([0, 0]);
        record.extend(u16::try_from(len).unwrap().to_ne_bytes());
        record.extend(time.to_ne_bytes());
        record.extend(u32::try_from(fields.len()).unwrap().to_ne_bytes());
        record.extend(fields);
        record.resize(len, 0);
        record
    }

    /// A ring of no event's, which the test writes as the kernel does.
    pub struct Ring {
        pub event: PerfEvent,
        head: u64,
    }

    impl Ring {
        pub fn new() -> Self {
            let event = PerfEvent::of_no_event().unwrap();
            Self { event, head: 0 }
        }

        pub fn write(&mut self, record: &[u8]) {
            self.head = self.event.write(self.head, record);
        }
    }

    #[test]
    fn only_what_is_new_is_read() {
        let (mut ring, mut read) = (Ring::new(), Read::default());
        let odd = |fields: &[u8]| (fields[0] % 2 == 1).then_some(fields[0]);
        ring.event.catch_up(&mut read, odd);
        assert_eq!(read.newest, None);
        for time in 0..1000_u64 {
            ring.write(&record(time, 1));
            ring.write(&record(time, 2));
            ring.event.catch_up(&mut read, odd);
            // Also when all that is new isn't wanted.
            assert_eq!(read.newest, Some((time, 1)));
            ring.write(&record(time, 4));
            let looked_at = std::cell::Cell::new(0);
            ring.event.catch_up(&mut read, |fields| {
                looked_at.set(looked_at.get() + 1);
                odd(fields)
            });
            assert_eq!((read.newest, looked_at.get()), (Some((time, 1)), 1));
        }
        // More than is kept: the newest, which is there.
        for time in 0..1000 {
            ring.write(&record(time, 3));
        }
        ring.event.catch_up(&mut read, odd);
        assert_eq!(read.newest, Some((999, 3)));
        assert!(!read.lost);
    }

    #[test]
    fn what_may_have_gone_by_is_lost() {
        let (mut ring, mut read) = (Ring::new(), Read::default());
        let odd = |fields: &[u8]| (fields[0] % 2 == 1).then_some(fields[0]);
        let most = u64::try_from(LAST / 32).unwrap();
        ring.write(&record(0, 1));
        ring.event.catch_up(&mut read, odd);
        for time in 1..=most {
            ring.write(&record(time, 2));
        }
        ring.event.catch_up(&mut read, odd);
        assert_eq!((read.newest, read.lost), (Some((0, 1)), false));
        ring.write(&record(100, 3));
        for time in 101..=101 + most {
            ring.write(&record(time, 2));
        }
        ring.event.catch_up(&mut read, odd);
        assert!(read.lost, "the 3 was not read");
        ring.write(&record(200, 5));
        ring.event.catch_up(&mut read, odd);
        assert_eq!((read.newest, read.lost), (Some((200, 5)), false));
    }

    #[test]
    fn records_are_taken_apart() {
        let mut record = Vec::new();
        record.extend(9_u32.to_ne_bytes());
        record.extend([0, 0]);
        record.extend(28_u16.to_ne_bytes());
        record.extend(77_u64.to_ne_bytes());
        record.extend(4_u32.to_ne_bytes());
        record.extend(5_u32.to_ne_bytes());
        record.resize(28, 0);
        let mut bytes = record.clone();
        bytes.resize(64, 0);
        let (first, rest) = split_record(&bytes).unwrap();
        assert_eq!(first, record);
        assert_eq!(time_and_fields(first), Some((77, &5_u32.to_ne_bytes()[..])));
        assert!(split_record(rest).is_none());
    }
}
