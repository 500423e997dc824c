// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM's programs, from the object's bytes to attached ones.

#![forbid(unsafe_code)]

use std::ffi::OsStr;
use std::os::fd::AsFd as _;

use libbpf_rs::ProgramInput;
use libbpf_rs::{Map, MapCore as _, MapFlags, Object, OpenObject, ProgramMut};

use crate::dispatch::{Dispatcher, Ids};
use crate::error::BpfError;
use crate::hooks;
use crate::layout::{CALL_SIZE, LAYOUT};
use crate::libbpf_log::{explained, refused};
use crate::objects::{self, VCPUFREQ};
use crate::pins::shared_pin;

/// The programs that the hooks call, in this order.
const CALLED: [&str; 3] = ["vcpufreq_switch", "vcpufreq_frequency", "vcpufreq_write"];

/// How many entries the maps get.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub cpus: u32,
    pub vcpus: u32,
    pub pages: u32,
    pub domains: u32,
    /// Bytes of the ring of events; `None`: the object's own.
    pub events: Option<u32>,
    /// Whether the programs set targets of `scx`, whose maps are the service's then; else they are empty.
    pub scx: bool,
}

/// A loaded object. Dropping it detaches its programs.
#[derive(Debug)]
pub(crate) struct Loaded {
    // They are not called any more before the object that they are of goes.
    dispatcher: Dispatcher,
    object: Object,
    /// Some of its maps are the service's, which stay.
    scx: bool,
}

impl Loaded {
    /// Loads the programs, for hooks that the VMs of the host share.
    pub(crate) fn load(sizes: Sizes) -> Result<Self, BpfError> {
        let dispatcher = Dispatcher::join()?;
        let mut open = objects::open(VCPUFREQ)?;
        set_up(&mut open, sizes, &dispatcher)?;
        let object = explained("loading the BPF programs", || open.load())?;
        hooks::check(&object)?;
        Ok(Self {
            dispatcher,
            object,
            scx: sizes.scx,
        })
    }

    /// Has its programs called.
    pub(crate) fn attach(&self) -> Result<(), BpfError> {
        let [switch, frequency, write] = CALLED.map(|name| self.program(name));
        let (switch, frequency, write) = (switch?, frequency?, write?);
        self.dispatcher
            .call([switch.as_fd(), frequency.as_fd(), write.as_fd()])
    }

    /// Has its programs called no more; the maps stay.
    pub(crate) fn detach(&self) {
        self.dispatcher.call_none();
    }

    /// The same for good.
    pub(crate) fn let_go(&mut self) {
        self.dispatcher.let_go();
    }

    /// Lets go of the slots of all VMs.
    pub(crate) fn confine(&mut self) {
        self.dispatcher.confine();
    }

    /// The hooks.
    pub(crate) fn dispatcher(&self) -> &Dispatcher {
        &self.dispatcher
    }

    /// The kernel's numbers of all that it alone has.
    pub(crate) fn ids(&self) -> Ids {
        let programs = self.object.progs();
        let programs = programs.filter_map(|one| libbpf_rs::Program::id_from_fd(one.as_fd()).ok());
        let shared = |name: &OsStr| {
            let name = name.to_str().unwrap_or_default();
            (self.scx && shared_pin(name).is_some()) || Dispatcher::is_shared(name)
        };
        let own = self.object.maps().filter(|map| !shared(map.name()));
        let own = own.filter_map(|map| Some(map.info().ok()?.info.id));
        Ids {
            programs: programs.collect(),
            maps: own.collect(),
        }
    }

    /// Runs a program that is called and not attached.
    pub(crate) fn call(&self, name: &'static str, number: impl Into<u32>) -> Result<(), BpfError> {
        self.call_for(name, number, 0)
    }

    /// The same for thread `tid`.
    pub(crate) fn call_for(
        &self,
        name: &'static str,
        number: impl Into<u32>,
        tid: i32,
    ) -> Result<(), BpfError> {
        let mut context = [0_u8; CALL_SIZE];
        context[..4].copy_from_slice(&number.into().to_ne_bytes());
        context[4..].copy_from_slice(&tid.to_ne_bytes());
        let input = ProgramInput {
            context_in: Some(&mut context),
            ..ProgramInput::default()
        };
        let output = self.program(name)?.test_run(input);
        let output = output.map_err(refused("running a BPF program"))?;
        let result = i32::from_ne_bytes(output.return_value.to_ne_bytes());
        if result == 0 {
            return Ok(());
        }
        let error = std::io::Error::from_raw_os_error(result.saturating_neg());
        Err(BpfError::Refused {
            what: name,
            why: error.to_string(),
        })
    }

    pub(crate) fn map(&self, name: &'static str) -> Result<Map<'_>, BpfError> {
        let found = self.object.maps().find(|map| map.name() == name);
        found.ok_or(BpfError::Refused {
            what: name,
            why: "the object has no such map".into(),
        })
    }

    /// Stores a vCPU's policy.
    pub(crate) fn store_policy(&self, vcpu: u16, value: &[u8]) -> Result<(), BpfError> {
        let policies = self.map("policies")?;
        let stored = policies.update(&u32::from(vcpu).to_ne_bytes(), value, MapFlags::ANY);
        stored.map_err(refused("storing a policy"))
    }

    pub(crate) fn program(&self, name: &'static str) -> Result<ProgramMut<'_>, BpfError> {
        let found = self
            .object
            .progs_mut()
            .find(|program| program.name() == name);
        found.ok_or(BpfError::Refused {
            what: name,
            why: "the object has no such program".into(),
        })
    }
}

/// Sizes the maps or takes those that are there, and checks the layout.
fn set_up(open: &mut OpenObject, sizes: Sizes, hooks: &Dispatcher) -> Result<(), BpfError> {
    let mut layout = 0;
    for mut map in open.maps_mut() {
        if let Some(shared) = map.name().to_str().and_then(|name| hooks.shared(name)) {
            map.reuse_fd(shared)
                .map_err(refused("using the maps of the host's VMs"))?;
            continue;
        }
        let pin = map.name().to_str().and_then(shared_pin);
        if let Some(pin) = pin.filter(|_| sizes.scx) {
            map.reuse_pinned_map(pin)
                .map_err(refused("opening the maps of vcpufreq scx"))?;
            continue;
        }
        let entries = match map.name().to_str() {
            Some(".rodata.scx") => {
                if let Some([by_scx, ..]) = map.initial_value_mut() {
                    *by_scx = sizes.scx.into();
                }
                continue;
            }
            Some("cpus") => sizes.cpus,
            Some("vcpus" | "policies" | "tids") => sizes.vcpus,
            Some("policy_calls") => 2 * sizes.vcpus + 1,
            Some("pages") => sizes.pages,
            Some("domains") => sizes.domains,
            Some("events") => match sizes.events {
                // libbpf makes it a power of two and whole pages.
                Some(bytes) => bytes,
                None => continue,
            },
            Some(".rodata.setup") => {
                let number = map.initial_value().and_then(|bytes| bytes.first_chunk());
                layout = number.copied().map_or(0, u32::from_ne_bytes);
                continue;
            }
            _ => continue,
        };
        map.set_max_entries(entries)
            .map_err(refused("sizing the maps"))?;
    }
    match layout {
        LAYOUT => Ok(()),
        // Also one that doesn't tell.
        found => Err(BpfError::Layout {
            found,
            wanted: LAYOUT,
        }),
    }
}
