// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The kernel module's device (`abi/vcpufreq-module.h`).

#![forbid(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::path::Path;

use vcpufreq_device::Clamp;

use crate::error::BpfError;
use crate::layout::BUCKETS;
use crate::mapped::ioctl;

/// Where the module's device is.
pub const DEVICE: &str = "/dev/vcpufreq_host";

/// `struct vcpufreq_host_vm`.
#[repr(C)]
struct ModuleVm {
    vcpus: u32,
    domains: u32,
}

/// `struct vcpufreq_host_bind`.
#[repr(C)]
struct Bind {
    domain: u32,
    min_fd: i32,
    max_fd: i32,
}

/// `struct vcpufreq_host_apply`.
#[repr(C)]
struct Apply {
    domain: u32,
    min: u32,
    max: u32,
    flags: u32,
}

/// `VCPUFREQ_HOST_UNCOUNTED`.
const UNCOUNTED: u32 = 1;

/// `struct vcpufreq_host_stats`.
#[repr(C)]
struct ModuleStats {
    domain: u32,
    last_error: i32,
    applied: u64,
    refused: u64,
    after_ns: [u32; BUCKETS],
}

const VM: u32 = number(WRITE, 0, size_of::<ModuleVm>());
const BIND: u32 = number(WRITE, 1, size_of::<Bind>());
const APPLY: u32 = number(WRITE, 2, size_of::<Apply>());
const STATS: u32 = number(WRITE | READ, 3, size_of::<ModuleStats>());
const WRITE: u32 = 1;
const READ: u32 = 2;

/// `_IOC` of `<asm-generic/ioctl.h>`, which arm64 and x86-64 use.
const fn number(direction: u32, number: u32, size: usize) -> u32 {
    assert!(size < 1 << 14);
    #[expect(clippy::cast_possible_truncation, reason = "below 2^14")]
    let size = size as u32;
    (direction << 30) | (size << 16) | (0xcf << 8) | number
}

/// What the module did for a domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModuleDomainStats {
    /// Clamps put into force.
    pub applied: u64,
    /// Clamps that the scheduler refused.
    pub refused: u64,
    /// Error number of the last refusal; 0 when there was none.
    pub last_errno: i32,
    /// Histogram of the time from a request to its clamp in force. Entry *n* counts times from 2^n
    /// ns to less than 2^(n+1) ns; the first also counts 0 ns, and the last all times from 2^31 ns.
    pub after_ns: [u32; BUCKETS],
}

/// The module, opened for a VM: one for a process. Closing it unbinds all.
#[derive(Debug)]
pub struct HostModule {
    file: File,
}

impl HostModule {
    /// Opens the device for a VM with this many vCPUs and domains.
    ///
    /// # Errors
    /// [`BpfError::NoModule`] without the device; [`BpfError::Refused`] with `EACCES` without the
    /// right to open it, `EINVAL` unless there are 1 to 512 vCPUs and 1 to as many domains, `EBUSY`
    /// when this process has a VM there already, `ENOMEM`. The device is closed then.
    pub fn open(vcpus: u16, domains: u16) -> Result<Self, BpfError> {
        let opened = OpenOptions::new().read(true).write(true).open(DEVICE);
        let file = opened.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => BpfError::NoModule,
            _ => failed("opening the module's device", &error),
        })?;
        let vm = ModuleVm {
            vcpus: vcpus.into(),
            domains: domains.into(),
        };
        let module = Self { file };
        module.call("setting up the module", VM, vm)?;
        Ok(module)
    }

    /// Whether the module is loaded.
    #[must_use]
    pub fn is_loaded() -> bool {
        Path::new(DEVICE).exists()
    }

    /// Binds a domain, counted from 0, to a cgroup's files `cpu.uclamp.min` and `cpu.uclamp.max`,
    /// open for writing; once. As long as the path is in use the module is their only writer; before
    /// it (floors of real-time vCPUs) and after it (a lost path) the device writes them.
    ///
    /// # Errors
    /// [`BpfError::Refused`] with `EINVAL` when there is no such domain, or for other files than a
    /// cgroup's clamps, open for writing; `EBUSY` when the domain is bound already. Its binding
    /// stays as it was.
    pub fn bind(
        &self,
        domain: u16,
        min: BorrowedFd<'_>,
        max: BorrowedFd<'_>,
    ) -> Result<(), BpfError> {
        let bind = Bind {
            domain: domain.into(),
            min_fd: min.as_raw_fd(),
            max_fd: max.as_raw_fd(),
        };
        self.call("binding a domain", BIND, bind)
    }

    /// Puts a clamp into force from the VMM, after whatever a vCPU has asked for until now.
    ///
    /// # Errors
    /// `EINVAL` when there is no such domain or the minimum is above the maximum, `ENOENT` when the
    /// domain isn't bound, `ENODEV` when its cgroup is gone, or another errno of a write to its
    /// files. One bound of the clamp may be in force; [`Self::applied`] counts a refused write.
    pub fn apply(&self, domain: u32, clamp: Clamp) -> io::Result<()> {
        self.put(domain, clamp, 0)
    }

    /// The same for what is no request: [`Self::applied`] has none of it, unless the module is older
    /// than this program.
    ///
    /// # Errors
    /// As [`Self::apply`], uncounted.
    pub fn refresh(&self, domain: u32, clamp: Clamp) -> io::Result<()> {
        self.put(domain, clamp, UNCOUNTED)
    }

    fn put(&self, domain: u32, clamp: Clamp, flags: u32) -> io::Result<()> {
        let mut apply = Apply {
            domain,
            min: clamp.min.get().into(),
            max: clamp.max.get().into(),
            flags,
        };
        ioctl(self.file.as_fd(), APPLY, &mut apply)
    }

    /// What was done for a domain.
    ///
    /// # Errors
    /// [`BpfError::Refused`] with `EINVAL` when there is no such domain.
    pub fn applied(&self, domain: u32) -> Result<ModuleDomainStats, BpfError> {
        let mut stats = ModuleStats {
            domain,
            last_error: 0,
            applied: 0,
            refused: 0,
            after_ns: [0; BUCKETS],
        };
        ioctl(self.file.as_fd(), STATS, &mut stats)
            .map_err(|error| failed("asking the module", &error))?;
        Ok(ModuleDomainStats {
            applied: stats.applied,
            refused: stats.refused,
            last_errno: stats.last_error.saturating_neg(),
            after_ns: stats.after_ns,
        })
    }

    fn call<T>(&self, what: &'static str, number: u32, mut argument: T) -> Result<(), BpfError> {
        ioctl(self.file.as_fd(), number, &mut argument).map_err(|error| failed(what, &error))
    }
}

fn failed(what: &'static str, error: &io::Error) -> BpfError {
    BpfError::Refused {
        what,
        why: error.to_string(),
    }
}
