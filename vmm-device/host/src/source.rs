// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Frequencies from cpufreq's files in sysfs.
//!
//! The read path opens no file: each pCPU's `scaling_cur_freq` and each vCPU thread's
//! `/proc/<pid>/task/<tid>/stat` stay open. Called on the vCPU's own thread, as a read of cur_perf
//! usually is, it asks the vDSO for the pCPU and makes one `pread`; on another thread, two.
//! No governor, limit or affinity is looked at: what counts is the pCPU that the thread is on and
//! the frequency that it has.
//!
//! That is one open file per pCPU and one per vCPU: a VMM on a big host raises its soft limit of
//! open files (RLIMIT_NOFILE) to the hard one first.
//!
//! pCPUs that come and go, and cpufreq drivers that are loaded again, are followed by
//! [`SysfsSource::refresh`], which belongs on a housekeeping thread. A pCPU that was offline at the
//! last one is unknown: a sample there fails.

#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::RwLock;

use vcpufreq_device::{Khz, PcpuPerf, Source, SourceError, Util, VcpuId};

use super::cpu_list::CpuList;
use super::root::CPUS;
use super::sync::unpoisoned;
use super::sys::{self, Tid};
use super::text::{errno, read_u32};
use super::{HostRoot, ReferenceRule};

/// `/proc/<pid>/stat` has 52 numbers and a name of at most 64 bytes; the pCPU is the 39th.
const STAT_LEN: usize = 1024;

/// Reads where a vCPU's thread is and how fast that pCPU runs.
#[derive(Debug)]
pub struct SysfsSource {
    root: HostRoot,
    /// Found once: a confined thread can't read the kernel's version.
    rule: ReferenceRule,
    /// The directory in procfs of the process that runs the vCPUs.
    process: PathBuf,
    /// Its threads' directory, open: a process that has entered a chroot since finds no procfs.
    tasks: Option<File>,
    /// By pCPU number.
    pcpus: Box<[RwLock<Option<PcpuFrequency>>]>,
    /// By vCPU number.
    threads: Box<[RwLock<Option<Thread>>]>,
}

#[derive(Debug)]
struct PcpuFrequency {
    frequency: File,
    reference: Khz,
    capacity: Util,
}

#[derive(Debug)]
struct Thread {
    tid: Tid,
    stat: File,
}

/// What a pCPU can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PcpuCapacity {
    /// Its number.
    pub pcpu: u32,
    /// The frequency that `capacity` refers to. Boost can be above it.
    pub reference: Khz,
    /// Its `cpu_capacity`.
    pub capacity: Util,
}

/// Why frequencies can't be read on this host.
#[derive(Debug, thiserror::Error)]
pub enum SourceSetupError {
    /// The kernel's list of CPUs.
    #[error("can't read the list of CPUs in {}: {error}", path.display())]
    NoCpuList {
        /// The file.
        path: PathBuf,
        /// What was wrong.
        error: io::Error,
    },
    /// cpufreq is absent on all CPUs.
    #[error(
        "no CPU below {} has cpufreq/scaling_cur_freq; load the host's cpufreq driver",
        path.display()
    )]
    NoCpufreq {
        /// The directory of the CPUs.
        path: PathBuf,
    },
    /// A vCPU that the source wasn't made for.
    #[error("vCPU {vcpu} is not one of this source's")]
    NoSuchVcpu {
        /// The vCPU.
        vcpu: VcpuId,
    },
    /// A thread's place can't be read.
    #[error("can't open {}: {error}", path.display())]
    NoThread {
        /// The file.
        path: PathBuf,
        /// What was wrong.
        error: io::Error,
    },
}

impl SysfsSource {
    /// A source for `vcpus` vCPUs on the host below `root`.
    ///
    /// # Errors
    /// [`SourceSetupError::NoCpuList`] when the CPUs can't be listed;
    /// [`SourceSetupError::NoCpufreq`] when none of them has cpufreq.
    pub fn new(root: &HostRoot, vcpus: u16) -> Result<Self, SourceSetupError> {
        let path = root.cpus().join("possible");
        let list = fs::read_to_string(&path).and_then(|text| {
            let list: Result<CpuList, _> = text.parse();
            list.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
        });
        let list = list.map_err(|error| SourceSetupError::NoCpuList { path, error })?;
        let count = list.iter().last().map_or(0, |last| last + 1);
        let source = Self {
            root: root.clone(),
            rule: ReferenceRule::of_host(root),
            tasks: File::open(root.own_process().join("task")).ok(),
            process: root.own_process(),
            pcpus: (0..count).map(|_| RwLock::default()).collect(),
            threads: (0..vcpus).map(|_| RwLock::default()).collect(),
        };
        if source.refresh() == 0 {
            let path = root.cpus();
            return Err(SourceSetupError::NoCpufreq { path });
        }
        Ok(source)
    }

    /// Opens every pCPU's files anew and reads its capacity and reference again; returns how many
    /// pCPUs have a frequency. A read of cur_perf that meets it shows the last value.
    pub fn refresh(&self) -> usize {
        let cpus = self.root.cpus();
        if !cpus.is_dir() {
            // In a chroot; what is open stays.
            return self.pcpus().len();
        }
        let online = fs::read_to_string(cpus.join("online"));
        let online: Option<CpuList> = online.ok().and_then(|text| text.parse().ok());
        let mut readable = 0;
        for (number, slot) in (0_u32..).zip(self.pcpus.iter()) {
            let online = online.as_ref().is_none_or(|list| list.contains(number));
            let pcpu = self.open(number, online).ok();
            readable += usize::from(pcpu.is_some());
            *unpoisoned(slot.write()) = pcpu;
        }
        readable
    }

    /// The same for vCPUs that are threads of process `pid`, not of this one.
    #[must_use]
    pub fn for_process(self, pid: u32) -> Self {
        let process = self.root.path(format!("proc/{pid}"));
        let tasks = File::open(process.join("task")).ok();
        Self {
            process,
            tasks,
            ..self
        }
    }

    /// Where `/sys` and `/proc` are.
    #[must_use]
    pub fn root(&self) -> &HostRoot {
        &self.root
    }

    /// The pCPUs that had a frequency at the last [`Self::refresh`].
    #[must_use]
    pub fn pcpus(&self) -> Vec<PcpuCapacity> {
        let numbers = (0_u32..).zip(self.pcpus.iter());
        let known = numbers.filter_map(|(pcpu, slot)| {
            let slot = unpoisoned(slot.read());
            let known = slot.as_ref()?;
            Some(PcpuCapacity {
                pcpu,
                reference: known.reference,
                capacity: known.capacity,
            })
        });
        known.collect()
    }

    /// What a pCPU runs at now, if that is known.
    #[must_use]
    pub fn khz(&self, pcpu: u32) -> Option<Khz> {
        self.frequency(pcpu).ok().map(|perf| perf.khz)
    }

    /// Registers `tid` as the thread of `vcpu`: one of this process, or of that of
    /// [`Self::for_process`].
    ///
    /// # Errors
    /// [`SourceSetupError::NoSuchVcpu`]; [`SourceSetupError::NoThread`] when procfs doesn't show
    /// the thread (`ENOENT`) or has no more open files for it (`EMFILE`). The vCPU keeps the thread
    /// that it had.
    pub fn register_thread(&self, vcpu: VcpuId, tid: Tid) -> Result<(), SourceSetupError> {
        let slot = self.threads.get(vcpu.index());
        let slot = slot.ok_or(SourceSetupError::NoSuchVcpu { vcpu })?;
        let name = format!("{tid}/stat");
        let stat = match &self.tasks {
            Some(tasks) => sys::open_below(tasks, &name),
            None => File::open(self.process.join("task").join(&name)),
        };
        let path = self.process.join("task").join(name);
        let stat = stat.map_err(|error| SourceSetupError::NoThread { path, error })?;
        *unpoisoned(slot.write()) = Some(Thread { tid, stat });
        Ok(())
    }

    /// The thread of `vcpu` has ended, or ends next.
    pub fn unregister_thread(&self, vcpu: VcpuId) {
        let slot = self.threads.get(vcpu.index());
        if let Some(mut thread) = slot.and_then(|slot| slot.write().ok()) {
            *thread = None;
        }
    }

    /// An offline pCPU has the frequency of its policy while other CPUs of that are online, but
    /// Linux removes its `cpu_capacity` (`drivers/base/arch_topology.c`): then it isn't known.
    fn open(&self, pcpu: u32, online: bool) -> io::Result<PcpuFrequency> {
        let dir = self.root.cpus().join(format!("cpu{pcpu}"));
        let frequency = File::open(dir.join("cpufreq/scaling_cur_freq"))?;
        let reference = self
            .rule
            .khz(&self.root, pcpu, &format!("{CPUS}/cpu{pcpu}/cpufreq"));
        // Machines whose CPUs are all alike need not have the file.
        let capacity = match File::open(dir.join("cpu_capacity")) {
            Ok(file) => Util::saturating(read_u32(&file)?.into()),
            Err(error) if !online => return Err(error),
            Err(_) => Util::MAX,
        };
        Ok(PcpuFrequency {
            frequency,
            reference: Khz(reference.ok_or(io::ErrorKind::InvalidData)?),
            capacity,
        })
    }

    /// The pCPU that the thread of `vcpu` is on now.
    fn place(&self, vcpu: VcpuId) -> Result<u32, SourceError> {
        let no_thread = SourceError::NoThread { vcpu };
        let slot = self.threads.get(vcpu.index()).ok_or(no_thread)?;
        let slot = slot.try_read().map_err(|_| no_thread)?;
        let thread = slot.as_ref().ok_or(no_thread)?;
        let pcpu = if thread.tid == Tid::current() {
            sys::current_cpu()
        } else {
            last_cpu(&thread.stat)
        };
        pcpu.map_err(|error| SourceError::NoPlace {
            vcpu,
            errno: errno(&error),
        })
    }

    fn frequency(&self, number: u32) -> Result<PcpuPerf, SourceError> {
        let unreadable = |errno| SourceError::NoFrequency {
            pcpu: number,
            errno,
        };
        let index = usize::try_from(number).map_err(|_| unreadable(0))?;
        let slot = self.pcpus.get(index).ok_or(unreadable(0))?;
        let slot = slot.try_read().map_err(|_| unreadable(libc::EBUSY))?;
        let pcpu = slot.as_ref().ok_or(unreadable(0))?;
        pcpu.now(number)
    }
}

impl Source for SysfsSource {
    fn sample(&self, vcpu: VcpuId) -> Result<PcpuPerf, SourceError> {
        self.frequency(self.place(vcpu)?)
    }
}

impl PcpuFrequency {
    /// What pCPU `number` is and runs at.
    fn now(&self, number: u32) -> Result<PcpuPerf, SourceError> {
        let khz = read_u32(&self.frequency).map_err(|error| SourceError::NoFrequency {
            pcpu: number,
            errno: errno(&error),
        })?;
        Ok(PcpuPerf {
            pcpu: number,
            khz: Khz(khz),
            reference: self.reference,
            capacity: self.capacity,
        })
    }
}

/// Field 39 of proc_pid_stat(5), the pCPU that the thread was last on. Counted from behind the
/// name's closing bracket, since the name may have brackets and blanks of its own.
fn last_cpu(stat: &File) -> io::Result<u32> {
    let mut buffer = [0; STAT_LEN];
    let len = stat.read_at(&mut buffer, 0)?;
    let text = &buffer[..len];
    let after_name = text.iter().rposition(|b| *b == b')').map(|i| i + 1);
    let rest = after_name.and_then(|start| std::str::from_utf8(&text[start..]).ok());
    let field = rest.and_then(|rest| rest.split_ascii_whitespace().nth(39 - 3));
    field
        .and_then(|field| field.parse().ok())
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}
