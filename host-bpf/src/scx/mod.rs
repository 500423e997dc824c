// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The actuator `scx`: requests as targets of an empty sched_ext scheduler, which add up with what
//! a CPU's tasks use.
//!
//! A service of the host's loads the scheduler ([`ScxService`]) and pins its maps. The programs of a
//! VM take these maps in the place of their own ([`ScxPins`]).
//!
//! ```text
//! guest writes ─▶ VM's program on kvm_mmio ─▶ pinned maps ◀─ service's programs (switch, wake, tick)
//!                         └──────── scx_bpf_cpuperf_set ────────┘
//! ```
//!
//! When the kernel ends the scheduler, for whatever reason, its last call switches `state` in the
//! pinned map: a VM's requests go to its worker from then on.

#![forbid(unsafe_code)]

mod service;

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::SeqCst;

use libbpf_rs::{MapCore, MapHandle};

use crate::error::BpfError;
use crate::layout::ControlEntry;
use crate::libbpf_log::refused;
use crate::mapped::Mapped;
use crate::object::Loaded;
use crate::pins::{CONTROL, OTHERS, pin_of};
pub use service::ScxService;

/// The file system where maps are pinned.
const BPFFS: &str = "/sys/fs/bpf";
/// VCPUFREQ_SCX_LAYOUT of `bpf/scx.h`.
const LAYOUT: u32 = 2;
const OFF: u32 = 0;
const STARTING: u32 = 1;
const ON: u32 = 2;

/// Why there is no such actuator: each with what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum ScxError {
    /// Somebody else's rights.
    #[error("loading a scheduler takes root; run it as root or as a unit of the system's")]
    NotRoot,
    /// The kernel is without sched_ext.
    #[error(
        "this kernel has no sched_ext; it needs CONFIG_SCHED_CLASS_EXT=y (Linux 7.0 or later); use \
         another --actuator"
    )]
    NoSchedExt,
    /// There is nowhere to pin maps.
    #[error("{BPFFS} is no BPF file system; mount it: mount -t bpf -o mode=700 bpf {BPFFS}")]
    NoBpffs,
    /// Another scheduler is loaded, or was just now.
    #[error("sched_ext is {state} with the scheduler {ops}; end that one first")]
    Another {
        /// `/sys/kernel/sched_ext/state`.
        state: String,
        /// Its name.
        ops: String,
    },
    /// The kernel has taken the scheduler and not enabled it.
    #[error(
        "the kernel did not enable the scheduler ({0}); SCHED_DEADLINE threads have to leave 5 % of \
         each CPU, see dmesg"
    )]
    NotEnabled(String),
    /// No service runs.
    #[error(
        "no vcpufreq scx service runs; start it (vcpufreq scx start) or use another --actuator"
    )]
    NotRunning,
    /// Maps of another version.
    #[error("the vcpufreq scx service is of another version; start it again from this one")]
    OtherVersion,
    /// It was started anew between two looks at its pins.
    #[error("the vcpufreq scx service has just been started again; start the guest again")]
    Restarted,
    /// The pinned maps.
    #[error("{}: {why}", .path.display())]
    Pin {
        /// What was pinned or opened.
        path: PathBuf,
        /// The kernel's error.
        why: String,
    },
    /// All that can be wrong with an object.
    #[error(transparent)]
    Bpf(#[from] BpfError),
}

/// The maps of the service that runs.
#[derive(Debug)]
pub struct ScxPins {
    control: Mapped<ControlEntry>,
}

impl ScxPins {
    /// Opens them.
    ///
    /// # Errors
    /// That no service runs, or one of another version.
    pub fn open() -> Result<Self, ScxError> {
        let path = pin_of(CONTROL);
        let there = path.try_exists();
        if !there.map_err(|error| pin_error(&path, error))? {
            let there = Path::new(service::STATE).exists();
            return Err(match there {
                true => ScxError::NotRunning,
                false => ScxError::NoSchedExt,
            });
        }
        let map = MapHandle::from_pinned_path(&path);
        let map = map.map_err(|error| pin_error(&path, error))?;
        Self::of(&map)
    }

    /// Those that a VM's programs have.
    pub(crate) fn of_loaded(loaded: &Loaded) -> Result<Self, ScxError> {
        let pins = Self::of(&loaded.map(CONTROL)?)?;
        let maps = pins.entry().map(|entry| &entry.maps);
        for (name, id) in OTHERS.into_iter().zip(maps.into_iter().flatten()) {
            let info = loaded.map(name)?.info();
            let info = info.map_err(refused("asking for a map"))?;
            if info.info.id != id.load(SeqCst) {
                return Err(ScxError::Restarted);
            }
        }
        Ok(pins)
    }

    fn of(map: &impl MapCore) -> Result<Self, ScxError> {
        let control = control(map).ok_or(ScxError::OtherVersion)?;
        let pins = Self { control };
        let entry = pins.entry();
        if entry.is_none_or(|entry| entry.layout.load(SeqCst) != LAYOUT) {
            return Err(ScxError::OtherVersion);
        }
        match pins.is_on() {
            true => Ok(pins),
            // The kernel has ended its scheduler, or it was killed.
            false => Err(ScxError::NotRunning),
        }
    }

    /// Whether the scheduler is in force.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.entry()
            .is_some_and(|entry| entry.state.load(SeqCst) == ON)
    }

    /// How many threads are vCPUs of VMs that use it.
    #[must_use]
    pub fn vcpus(&self) -> u32 {
        self.entry().map_or(0, |entry| entry.vcpus.load(SeqCst))
    }

    fn entry(&self) -> Option<&ControlEntry> {
        self.control.get(0)
    }
}

fn control(map: &impl MapCore) -> Option<Mapped<ControlEntry>> {
    let size = usize::try_from(map.value_size()).ok()?;
    (size == size_of::<ControlEntry>()).then_some(())?;
    Mapped::new(map.as_fd(), 1).ok()
}

fn pin_error(path: &Path, why: impl std::fmt::Display) -> ScxError {
    ScxError::Pin {
        path: path.to_owned(),
        why: format!("{why:#}"),
    }
}
