// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM's side: the pinned maps of the service, and whether its scheduler is in force.

#![forbid(unsafe_code)]

use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;

use libbpf_rs::{MapCore, MapHandle};

use super::error::{ScxError, pin_error};
use crate::layout::ControlEntry;
use crate::libbpf_log::refused;
use crate::mapped::Mapped;
use crate::object::Loaded;
use crate::pins::{CONTROL, OTHERS, pin_of};

/// What sched_ext does now.
pub(super) const STATE: &str = "/sys/kernel/sched_ext/state";
/// VCPUFREQ_SCX_LAYOUT of `bpf/scx.h`.
pub(super) const LAYOUT: u32 = 2;
pub(super) const OFF: u32 = 0;
pub(super) const STARTING: u32 = 1;
pub(super) const ON: u32 = 2;

/// The maps of the service that runs.
#[derive(Debug)]
pub struct ScxPins {
    control: Mapped<ControlEntry>,
}

impl ScxPins {
    /// Opens them.
    ///
    /// # Errors
    /// [`ScxError::NotRunning`] when no service runs, [`ScxError::NoSchedExt`] when the kernel has
    /// none, [`ScxError::OtherVersion`], [`ScxError::Pin`] when the pin can't be opened (`EACCES`).
    pub fn open() -> Result<Self, ScxError> {
        let path = pin_of(CONTROL);
        let there = path.try_exists();
        if !there.map_err(|error| pin_error(&path, error))? {
            let there = Path::new(STATE).exists();
            return Err(match there {
                true => ScxError::NotRunning,
                false => ScxError::NoSchedExt,
            });
        }
        let map = MapHandle::from_pinned_path(&path);
        let map = map.map_err(|error| pin_error(&path, error))?;
        Self::read(&map)
    }

    /// Those that a VM's programs have.
    pub(crate) fn of_loaded(loaded: &Loaded) -> Result<Self, ScxError> {
        let pins = Self::read(&loaded.map(CONTROL)?)?;
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

    fn read(map: &impl MapCore) -> Result<Self, ScxError> {
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

pub(super) fn control(map: &impl MapCore) -> Option<Mapped<ControlEntry>> {
    let size = usize::try_from(map.value_size()).ok()?;
    (size == size_of::<ControlEntry>()).then_some(())?;
    Mapped::new(map.as_fd(), 1).ok()
}
