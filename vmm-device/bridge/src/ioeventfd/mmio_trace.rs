// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Records the last writes of vCPUs to set_perf, by the kernel's tracepoint `kvm:kvm_mmio`. Decides
//! for [`super::DomainWrites`] which write was last if the eventfds don't.
//!
//! A perf event on each vCPU thread records its writes to the registers in a ring that keeps the
//! newest and wakes no thread. The record is there before the eventfd is signalled, because KVM
//! passes the tracepoint first (`io_mem_abort`, arm64). Needs CAP_PERFMON and tracefs, not BPF.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use vcpufreq_device::{REG_SET_PERF, VcpuId, page_of};
use vcpufreq_host::{HostRoot, Tid};

use super::perf::{PerfEvent, Read, Whose, tracepoint_text};
use crate::error::{Context, PathError};

/// Knows which value was written last.
pub trait WriteOrder: Send + Sync {
    /// The newest write to the set_perf of one of `vcpus`. `None` if there is none, if it may be
    /// missing from the record, or if a thread isn't recorded. `known` is the state of the last
    /// call for the same `vcpus`, empty at first.
    fn newest(&self, vcpus: &[VcpuId], known: &mut TraceProgress) -> Option<LastWrite>;
}

/// How far each thread's records have been read for some vCPUs, and their newest. A look then reads
/// new records only.
pub type TraceProgress = Vec<Read<(VcpuId, u32)>>;

/// A write to set_perf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastWrite {
    /// Whose register.
    pub vcpu: VcpuId,
    /// The value in kHz, unchecked: any that a guest writes.
    pub khz: u32,
    /// When, in ns of CLOCK_MONOTONIC.
    pub at_ns: u64,
}

/// Knows no order.
#[derive(Debug)]
pub struct Unknown;

impl WriteOrder for Unknown {
    fn newest(&self, _vcpus: &[VcpuId], _known: &mut TraceProgress) -> Option<LastWrite> {
        None
    }
}

const TRACEPOINT: &str = "kvm/kvm_mmio";

/// The recorders of all vCPU threads.
#[derive(Debug)]
pub struct MmioTrace {
    id: u64,
    fields: Fields,
    filter: String,
    threads: Box<[OnceLock<PerfEvent>]>,
    /// A vCPU that was plugged again runs on a thread without a recorder.
    lacks_a_thread: AtomicBool,
}

/// Offsets in the tracepoint's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fields {
    gpa: usize,
    value: usize,
    /// Where the registers begin.
    base: u64,
}

impl MmioTrace {
    /// For the threads of `vcpus` vCPUs, whose registers are the `size` bytes from `base` on.
    ///
    /// # Errors
    /// [`PathError::Missing`] without tracefs or a field of the tracepoint; [`PathError::Refused`]
    /// when perf_event_open(2) refuses the calling thread: `EACCES` or `EPERM` without CAP_PERFMON.
    pub fn new(host: &HostRoot, vcpus: u16, (base, size): (u64, u64)) -> Result<Self, PathError> {
        let text = |name| tracepoint_text(host, TRACEPOINT, name);
        let id = text("id").context("the tracepoint kvm:kvm_mmio can't be read (tracefs)")?;
        let fields = Fields::parse(&text("format").unwrap_or_default(), base)?;
        let end = base + size;
        let trace = Self {
            id: id.parse().ok().context("kvm:kvm_mmio has no number")?,
            fields,
            // KVM_TRACE_MMIO_WRITE
            filter: format!("type == 2 && len == 4 && gpa >= {base:#x} && gpa < {end:#x}"),
            threads: (0..vcpus).map(|_| OnceLock::new()).collect(),
            lacks_a_thread: AtomicBool::new(false),
        };
        // Whether it is permitted; taken back at once.
        trace.open(Tid::current())?;
        Ok(trace)
    }

    fn open(&self, tid: Tid) -> Result<PerfEvent, PathError> {
        PerfEvent::recording(self.id, Whose::Thread(tid), &self.filter)
            .context("perf events aren't permitted (CAP_PERFMON)")
    }

    /// Records the writes of the thread of `vcpu`.
    ///
    /// # Errors
    /// [`PathError::Refused`] with `EACCES` or `EPERM` (without CAP_PERFMON), `ESRCH` (the thread
    /// has ended) or `EMFILE`; [`PathError::NotRecorded`] when the vCPU has a recorder already, that
    /// of a thread before it was unplugged, or isn't there. As long as a vCPU's thread has no
    /// recorder, [`WriteOrder::newest`] is `None`.
    pub fn register_thread(&self, vcpu: VcpuId, tid: Tid) -> Result<(), PathError> {
        let event = self.open(tid)?;
        match self.threads.get(vcpu.index()) {
            Some(slot) if slot.set(event).is_ok() => Ok(()),
            _ => {
                self.lacks_a_thread.store(true, Relaxed);
                Err(PathError::NotRecorded { vcpu })
            }
        }
    }
}

impl WriteOrder for MmioTrace {
    fn newest(&self, vcpus: &[VcpuId], known: &mut TraceProgress) -> Option<LastWrite> {
        let wanted = |record: &[u8]| {
            let (vcpu, khz) = self.fields.set_perf(record)?;
            vcpus.contains(&vcpu).then_some((vcpu, khz))
        };
        known.resize_with(self.threads.len(), Read::default);
        if self.lacks_a_thread.load(Relaxed) {
            return None;
        }
        for (thread, read) in self.threads.iter().zip(known.iter_mut()) {
            // A thread that isn't recorded may have written last, in any vCPU's register.
            thread.get()?.catch_up(read, wanted);
        }
        // A thread may have written for other domains since, more than is kept of it.
        if known.iter().any(|read| read.lost) {
            return None;
        }
        let newest = known.iter().filter_map(|read| {
            let (at_ns, (vcpu, khz)) = read.newest?;
            Some(LastWrite { vcpu, khz, at_ns })
        });
        newest.max_by_key(|write| write.at_ns)
    }
}

/// Recorders of no threads, whose rings a fuzz target fills.
#[cfg(feature = "fuzzing")]
#[derive(Debug)]
pub struct FakeTrace {
    trace: MmioTrace,
    /// Where each ring ends.
    heads: Vec<u64>,
}

#[cfg(feature = "fuzzing")]
impl FakeTrace {
    /// For so many threads, of a tracepoint with fields as in `format`, and registers from `base` on.
    ///
    /// # Errors
    /// As [`MmioTrace::new`].
    pub fn new(threads: u16, format: &str, base: u64) -> Result<Self, PathError> {
        let event = |_| Ok(OnceLock::from(PerfEvent::of_no_event().context("no ring")?));
        let rings: Result<Vec<_>, PathError> = (0..threads).map(event).collect();
        Ok(Self {
            trace: MmioTrace {
                id: 0,
                fields: Fields::parse(format, base)?,
                filter: String::new(),
                threads: rings?.into(),
                lacks_a_thread: AtomicBool::new(false),
            },
            heads: vec![0; threads.into()],
        })
    }

    /// Writes a record, a multiple of 8 bytes, into the ring of `thread`.
    pub fn write(&mut self, thread: usize, record: &[u8]) {
        let event = self.trace.threads.get_mut(thread);
        if let Some(event) = event.and_then(OnceLock::get_mut) {
            self.heads[thread] = event.write(self.heads[thread], record);
        }
    }

    /// What is recorded.
    pub fn order(&self) -> &dyn WriteOrder {
        &self.trace
    }
}

impl Fields {
    /// As the tracepoint's file `format` has them.
    fn parse(format: &str, base: u64) -> Result<Self, PathError> {
        Ok(Self {
            gpa: offset(format, "gpa").context("kvm:kvm_mmio has no gpa")?,
            value: offset(format, "val").context("kvm:kvm_mmio has no val")?,
            base,
        })
    }

    /// The register and the value, if the record is of a set_perf.
    fn set_perf(self, record: &[u8]) -> Option<(VcpuId, u32)> {
        let gpa = u64::from_ne_bytes(*record.get(self.gpa..)?.first_chunk()?);
        let value = u64::from_ne_bytes(*record.get(self.value..)?.first_chunk()?);
        match page_of(gpa.checked_sub(self.base)?)? {
            (vcpu, REG_SET_PERF) => Some((vcpu, u32::try_from(value).ok()?)),
            _ => None,
        }
    }
}

/// `\tfield:u64 gpa;\toffset:16;\tsize:8;\tsigned:0;`
fn offset(format: &str, name: &str) -> Option<usize> {
    let end = format!(" {name};");
    let line = format.lines().find(|line| line.contains(&end))?;
    let offset = line.split("offset:").nth(1)?;
    offset.split(';').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    //! A record's fields are at the kernel's offsets. Writes to other registers don't count.
    //! Without the record of one thread, none counts.
    use std::sync::Arc;

    use vcpufreq_device::REGION_STRIDE;
    use vmm_sys_util::eventfd::EventFd;

    use super::super::perf::tests::{Ring, record_of};
    use super::super::{DomainWrites, EntryBell};
    use super::*;

    const BASE: u64 = 0x0a00_0000;
    const FORMAT: &str = "name: kvm_mmio\nID: 300\nformat:\n\
        \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\n\
        \tfield:u32 type;\toffset:8;\tsize:4;\tsigned:0;\n\
        \tfield:u64 gpa;\toffset:16;\tsize:8;\tsigned:0;\n\
        \tfield:u64 val;\toffset:24;\tsize:8;\tsigned:0;\n";

    fn record(gpa: u64, value: u64) -> Vec<u8> {
        let mut record = vec![0; 16];
        record.extend(gpa.to_ne_bytes());
        record.extend(value.to_ne_bytes());
        record
    }

    #[test]
    fn a_record_says_which_register_and_value() {
        let fields = Fields::parse(FORMAT, BASE).unwrap();
        let vcpu = BASE + 2 * REGION_STRIDE;
        let written = fields.set_perf(&record(vcpu + REG_SET_PERF, 600_000));
        assert_eq!(written, Some((VcpuId(2), 600_000)));
        assert_eq!(fields.set_perf(&record(vcpu + 0x0c, 3)), None);
        assert_eq!(fields.set_perf(&record(4, 3)), None);
        assert_eq!(fields.set_perf(&[0; 20]), None);
        assert_eq!(offset(FORMAT, "len"), None);
    }

    /// Of two threads, of which the second has written 2, 3, 2 and the first is recorded as having
    /// written 1 before; the second one's record is there or isn't.
    fn after_three_writes(second_is_recorded: bool) -> (u32, bool) {
        let gpa = BASE + REG_SET_PERF;
        let trace = MmioTrace {
            id: 0,
            fields: Fields {
                gpa: 16,
                value: 24,
                base: BASE,
            },
            filter: String::new(),
            threads: [OnceLock::new(), OnceLock::new()].into(),
            lacks_a_thread: AtomicBool::new(false),
        };
        let (mut first, mut second) = (Ring::new(), Ring::new());
        first.write(&record_of(10, &record(gpa, 1)));
        for (time, khz) in [(20, 2), (21, 3), (22, 2)] {
            second.write(&record_of(time, &record(gpa, khz)));
        }
        trace.threads[0].set(first.event).unwrap();
        if second_is_recorded {
            trace.threads[1].set(second.event).unwrap();
        }
        let event = || Arc::new(EventFd::new(libc::EFD_NONBLOCK).unwrap());
        let bells = [1, 2, 3].map(|khz| EntryBell {
            vcpu: VcpuId(0),
            khz,
            event: event(),
        });
        for khz in [1, 2, 3, 2] {
            bells[khz - 1].event.write(1).unwrap();
        }
        let mut writes = DomainWrites::new(bells.to_vec(), Arc::new(trace)).unwrap();
        let latest = writes.take().unwrap();
        (latest.khz, latest.certain)
    }

    #[test]
    fn without_one_threads_record_the_last_write_is_unknown() {
        assert_eq!(after_three_writes(true), (2, true));
        // The highest of those that can have been the last.
        assert_eq!(after_three_writes(false), (3, false));
    }
}
