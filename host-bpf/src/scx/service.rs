// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The service's side: the scheduler, its programs and the pins, from start to end.

#![forbid(unsafe_code)]

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use libbpf_rs::{Link, MapCore as _, Object};
use vcpufreq_host::proc_field;

use super::error::{BPFFS, ScxError, pin_error};
use super::pins::{LAYOUT, OFF, ON, STARTING, STATE, control};
use crate::error::BpfError;
use crate::hooks;
use crate::layout::{ControlEntry, PINS};
use crate::libbpf_log::{explained, refused};
use crate::mapped::Mapped;
use crate::objects::{self, SCX};
use crate::pins::{CONTROL, OTHERS, SHARED, pin_of};
use crate::probe::probe;

/// The scheduler that it does it with.
const OPS: &str = "/sys/kernel/sched_ext/root/ops";
/// The scheduler's name, in the object and in `OPS`.
const NAME: &str = "vcpufreq";
/// The programs that are attached beside it, in this order.
const ATTACHED: [&str; 4] = [
    "vcpufreq_scx_switch",
    "vcpufreq_scx_switched",
    "vcpufreq_scx_waking",
    "vcpufreq_scx_timer",
];
/// The kernel enables within a tenth of a second; emulated ones take longer.
const LOOKS: u32 = 200;
const BETWEEN: Duration = Duration::from_millis(10);

/// The scheduler, in force as long as this lives. Dropping it removes all that it has made.
#[derive(Debug)]
pub struct ScxService {
    control: Mapped<ControlEntry>,
    links: Vec<Link>,
    _object: Object,
}

impl ScxService {
    /// Loads the scheduler and its programs. Pins of a service that was killed are replaced; VMs
    /// that have them stay with clamps.
    ///
    /// # Errors
    /// What is missing, in the way, or refused; then nothing is left behind.
    pub fn start() -> Result<Self, ScxError> {
        let object = load()?;
        let map = object.maps().find(|map| map.name() == OsStr::new(CONTROL));
        let control = map.and_then(|map| control(&map));
        let mut service = Self {
            control: control.ok_or(ScxError::OtherVersion)?,
            links: Vec::new(),
            _object: object,
        };
        service.publish()?;
        service.enable()?;
        service.attach()?;
        service.pin()?;
        let on = service.control.get(0).map(|entry| {
            let from_to = entry.state.compare_exchange(STARTING, ON, SeqCst, SeqCst);
            from_to.is_ok()
        });
        match on {
            Some(true) => Ok(service),
            _ => Err(ScxError::NotEnabled(service.exit_text())),
        }
    }

    /// Looks for what a host lacks for good.
    ///
    /// # Errors
    /// The first thing that is missing: [`ScxError::NotRoot`], [`ScxError::NoSchedExt`],
    /// [`ScxError::Bpf`] as [`probe`], or [`ScxError::NoBpffs`].
    pub fn check_host() -> Result<(), ScxError> {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let users = proc_field(&status, "Uid");
        let effective = users.and_then(|users| users.split_whitespace().nth(1));
        if effective != Some("0") {
            return Err(ScxError::NotRoot);
        }
        if !Path::new(STATE).exists() {
            return Err(ScxError::NoSchedExt);
        }
        probe(Path::new("/"))?;
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let mut mounts = mounts.lines().map(|line| line.split(' '));
        if !mounts.any(|mut mount| mount.nth(1) == Some(BPFFS) && mount.next() == Some("bpf")) {
            return Err(ScxError::NoBpffs);
        }
        Ok(())
    }

    /// Looks for another scheduler.
    ///
    /// # Errors
    /// [`ScxError::Another`] with its name and state.
    pub fn check_no_other() -> Result<(), ScxError> {
        another().map_or(Ok(()), Err)
    }

    /// Why the kernel has ended the scheduler; `None` while it is in force.
    #[must_use]
    pub fn ended(&self) -> Option<String> {
        let entry = self.control.get(0)?;
        let ours = || text(OPS).is_some_and(|name| name == NAME);
        if entry.state.load(SeqCst) == ON
            && text(STATE).is_some_and(|now| now == "enabled")
            && ours()
        {
            return None;
        }
        Some(self.exit_text())
    }

    fn publish(&self) -> Result<(), ScxError> {
        let Some(entry) = self.control.get(0) else {
            return Ok(());
        };
        for (to, name) in entry.maps.iter().zip(OTHERS) {
            let map = self._object.maps().find(|map| map.name() == name);
            let info = map.map(|map| map.info()).transpose();
            let info = info.map_err(refused("asking for a map"))?;
            to.store(info.map_or(0, |info| info.info.id), SeqCst);
        }
        entry.layout.store(LAYOUT, SeqCst);
        entry.state.store(STARTING, SeqCst);
        Ok(())
    }

    fn enable(&mut self) -> Result<(), ScxError> {
        let link = explained("loading the scheduler", || {
            let mut maps = self._object.maps_mut();
            let found = maps.find(|map| map.name() == OsStr::new(NAME));
            let missing = || libbpf_rs::Error::from(std::io::Error::other("the object has none"));
            found.ok_or_else(missing)?.attach_struct_ops()
        });
        let link = match link {
            Ok(link) => link,
            // Another one has come since it was looked at.
            Err(error) => return Err(another().unwrap_or(ScxError::Bpf(error))),
        };
        self.links.push(link);
        for _ in 0..LOOKS {
            let ours = text(OPS).is_some_and(|name| name == NAME);
            if ours && text(STATE).is_some_and(|now| now == "enabled") {
                return Ok(());
            }
            let entry = self.control.get(0);
            if entry.is_none_or(|entry| entry.state.load(SeqCst) == OFF) {
                break;
            }
            std::thread::sleep(BETWEEN);
        }
        Err(ScxError::NotEnabled(self.exit_text()))
    }

    fn attach(&mut self) -> Result<(), ScxError> {
        for name in ATTACHED {
            let mut programs = self._object.progs_mut();
            let program = programs.find(|program| program.name() == OsStr::new(name));
            let program = program.ok_or(BpfError::Refused {
                what: name,
                why: "the object has no such program".into(),
            })?;
            let link = program.attach_trace();
            self.links
                .push(link.map_err(refused("attaching a BPF program"))?);
        }
        Ok(())
    }

    fn pin(&mut self) -> Result<(), ScxError> {
        remove_pins();
        fs::create_dir(PINS).map_err(|error| pin_error(Path::new(PINS), error))?;
        for mut map in self._object.maps_mut() {
            let name = map.name().to_str().unwrap_or_default().to_owned();
            if SHARED.contains(&name.as_str()) {
                let path = pin_of(&name);
                map.pin(&path).map_err(|error| pin_error(&path, error))?;
            }
        }
        Ok(())
    }

    fn exit_text(&self) -> String {
        let Some(entry) = self.control.get(0) else {
            return String::new();
        };
        let bytes = entry.exit_text.iter().map(|byte| byte.load(SeqCst));
        let bytes: Vec<u8> = bytes.take_while(|byte| *byte != 0).collect();
        let text = String::from_utf8_lossy(&bytes).trim().to_owned();
        match text.is_empty() {
            true => "the kernel gives no reason".into(),
            false => text,
        }
    }
}

impl Drop for ScxService {
    fn drop(&mut self) {
        // VMs turn to clamps first.
        if let Some(entry) = self.control.get(0) {
            entry.state.store(OFF, SeqCst);
        }
        remove_pins();
        // The programs, then the scheduler.
        while self.links.pop().is_some() {}
    }
}

/// The scheduler that is loaded.
fn another() -> Option<ScxError> {
    let state = text(STATE).unwrap_or_default();
    let ops = || text(OPS).unwrap_or_else(|| "without a name".into());
    (state != "disabled").then(|| ScxError::Another { ops: ops(), state })
}

fn load() -> Result<Object, ScxError> {
    let mut open = objects::open(SCX)?;
    let possible = libbpf_rs::num_possible_cpus().map_err(refused("counting the pCPUs"))?;
    for mut map in open.maps_mut() {
        if map.name() == OsStr::new("scx_cpus") {
            let entries = u32::try_from(possible).unwrap_or(1);
            map.set_max_entries(entries)
                .map_err(refused("sizing the maps"))?;
        }
    }
    let object = explained("loading the BPF programs", || open.load())?;
    hooks::check(&object)?;
    Ok(object)
}

fn remove_pins() {
    for name in SHARED {
        let _ = fs::remove_file(pin_of(name));
    }
    let _ = fs::remove_dir(PINS);
}

fn text(path: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.trim().to_owned())
}
