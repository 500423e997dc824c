// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! An object file, from its bytes to attached programs. A VM has one at a time, or two for the
//! moment in which one takes the other's place.

#![forbid(unsafe_code)]

use std::ffi::OsStr;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::path::Path;

use libbpf_rs::ProgramInput;
use libbpf_rs::libbpf_sys::bpf_map_create_opts;
use libbpf_rs::{
    Link, Map, MapCore as _, MapFlags, MapHandle, MapType, Object, ObjectBuilder, OpenObject,
    ProgramMut,
};

use crate::error::BpfError;
use crate::layout::{CALL_SIZE, LAYOUT};
use crate::libbpf_log::explained;

/// The programs that are attached as they are; the stub only once for a VM.
const ATTACHED: [&str; 2] = ["vcpufreq_switch", "vcpufreq_frequency"];
const STUB: &str = "vcpufreq_stub";
const WRITE: &str = "vcpufreq_write";
const SLOTS: &str = "slots";

/// How many entries the maps get.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub cpus: u32,
    pub vcpus: u32,
    pub pages: u32,
    pub domains: u32,
    /// Bytes of the ring of events; `None`: the object's own.
    pub events: Option<u32>,
}

/// The kernel's numbers of an object's programs and maps.
#[derive(Debug, Default)]
pub(crate) struct Ids {
    pub programs: Vec<u32>,
    pub maps: Vec<u32>,
}

/// A loaded object. Dropping it detaches its programs.
#[derive(Debug)]
pub(crate) struct Loaded {
    // Detached before the object that they are of goes.
    links: Vec<Link>,
    object: Object,
}

impl Loaded {
    /// Reads and loads an object file; with `shared`, on the maps of that one.
    pub(crate) fn load(
        path: &Path,
        sizes: Sizes,
        generation: u32,
        shared: Option<&Self>,
    ) -> Result<Self, BpfError> {
        let wrong = |why: String| BpfError::Object {
            path: path.to_path_buf(),
            why,
        };
        let bytes = std::fs::read(path).map_err(|error| wrong(error.to_string()))?;
        let mut open = ObjectBuilder::default()
            .open_memory(&bytes)
            .map_err(|error| wrong(format!("{error:#}")))?;
        set_up(&mut open, sizes, generation)?;
        for mut program in open.progs_mut() {
            program.set_autoattach(false);
            if shared.is_some() && program.name() == STUB {
                program.set_autoload(false);
            }
        }
        if let Some(other) = shared {
            for mut map in open.maps_mut() {
                let name = map.name().to_owned();
                if let Some(theirs) = other.map_named(&name) {
                    let reused = map.reuse_fd(theirs.as_fd());
                    reused.map_err(refused("sharing the maps of the running programs"))?;
                }
            }
        }
        let object = explained("loading the BPF programs", || open.load())?;
        Ok(Self {
            links: Vec::new(),
            object,
        })
    }

    /// Attaches what keeps pages true; and the stub, if it hasn't one yet.
    pub(crate) fn attach(&mut self, stub: bool) -> Result<(), BpfError> {
        let more = stub.then_some(STUB);
        for name in ATTACHED.into_iter().chain(more) {
            let link = self.program(name)?.attach_trace();
            self.links
                .push(link.map_err(refused("attaching a BPF program"))?);
        }
        Ok(())
    }

    /// Detaches its programs; the maps stay.
    pub(crate) fn detach(&mut self) {
        self.links.clear();
    }

    /// The kernel's number of the stub.
    pub(crate) fn stub_id(&self) -> Option<u32> {
        let stub = self.program(STUB).ok()?;
        libbpf_rs::Program::id_from_fd(stub.as_fd()).ok()
    }

    /// The kernel's numbers of all that it has.
    pub(crate) fn ids(&self) -> Ids {
        let programs = self.object.progs();
        let programs = programs.filter_map(|one| libbpf_rs::Program::id_from_fd(one.as_fd()).ok());
        let own = self.object.maps();
        let own = own.filter_map(|map| Some(map.info().ok()?.info.id));
        // A map of maps shows their numbers.
        let policies = self.map_named("policies".as_ref());
        let inner = policies.iter().flat_map(|policies| {
            policies.keys().filter_map(move |key| {
                let id = policies.lookup(&key, MapFlags::ANY).ok()??;
                Some(u32::from_ne_bytes(*id.first_chunk()?))
            })
        });
        Ids {
            programs: programs.collect(),
            maps: own.chain(inner).collect(),
        }
    }

    /// Gives away the stub's link, which stays when this goes.
    pub(crate) fn take_stub_link(&mut self) -> Option<Link> {
        self.links.pop()
    }

    /// From the next write of the guest on, this object's program handles them.
    pub(crate) fn take_over(&self) -> Result<(), BpfError> {
        let fd = self.program(WRITE)?.as_fd().as_raw_fd();
        self.map(SLOTS)?
            .update(&0_u32.to_ne_bytes(), &fd.to_ne_bytes(), MapFlags::ANY)
            .map_err(refused("putting the program in its slot"))
    }

    /// Runs a program that is called and not attached.
    pub(crate) fn call(&self, name: &'static str, vcpu: u16) -> Result<(), BpfError> {
        let mut context = [0_u8; CALL_SIZE];
        context[..4].copy_from_slice(&u32::from(vcpu).to_ne_bytes());
        let input = ProgramInput {
            context_in: Some(&mut context),
            ..ProgramInput::default()
        };
        let output = self.program(name)?.test_run(input);
        let output = output.map_err(refused("running a BPF program"))?;
        let result = output.return_value.cast_signed();
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
        self.map_named(name.as_ref()).ok_or(BpfError::Refused {
            what: name,
            why: "the object has no such map".into(),
        })
    }

    /// Stores `value` in an array map of its own, and that as entry `key` of the map of maps
    /// `name`: whoever reads the old one has it to the end.
    pub(crate) fn store_in_new_map(
        &self,
        name: &'static str,
        key: u32,
        value: &[u8],
    ) -> libbpf_rs::Result<()> {
        let size = u32::try_from(value.len()).unwrap_or(u32::MAX);
        let options = bpf_map_create_opts {
            sz: size_of::<bpf_map_create_opts>() as libbpf_rs::libbpf_sys::size_t,
            ..bpf_map_create_opts::default()
        };
        let own = MapHandle::create(MapType::Array, Some("policy"), 4, size, 1, &options)?;
        own.update(&0_u32.to_ne_bytes(), value, MapFlags::ANY)?;
        let outer = self.map_named(name.as_ref());
        let outer = outer.ok_or_else(|| libbpf_rs::Error::from_raw_os_error(libc::ENOENT))?;
        let fd = own.as_fd().as_raw_fd();
        outer.update(&key.to_ne_bytes(), &fd.to_ne_bytes(), MapFlags::ANY)
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

    fn map_named(&self, name: &OsStr) -> Option<Map<'_>> {
        // An object's constants are its own.
        let constants = name.as_encoded_bytes().starts_with(b".rodata");
        let mut maps = self.object.maps();
        maps.find(|map| !constants && map.name() == name)
    }
}

/// Sizes the maps, and checks the layout.
fn set_up(open: &mut OpenObject, sizes: Sizes, generation: u32) -> Result<(), BpfError> {
    for mut map in open.maps_mut() {
        let entries = match map.name().to_str() {
            Some("cpus") => sizes.cpus,
            Some("vcpus" | "policies") => sizes.vcpus,
            Some("pages") => sizes.pages,
            Some("domains") => sizes.domains,
            Some("events") => match sizes.events {
                // libbpf makes it a power of two and whole pages.
                Some(bytes) => bytes,
                None => continue,
            },
            Some(".rodata.setup") => {
                if let Some(bytes) = map.initial_value_mut() {
                    constants(bytes, generation)?;
                }
                continue;
            }
            _ => continue,
        };
        map.set_max_entries(entries)
            .map_err(refused("sizing the maps"))?;
    }
    Ok(())
}

/// `struct vcpufreq_bpf_setup`.
fn constants(bytes: &mut [u8], generation: u32) -> Result<(), BpfError> {
    let (layout, rest) = bytes.split_at_mut_checked(4).unwrap_or_default();
    let found = layout.first_chunk().copied().map_or(0, u32::from_ne_bytes);
    let place = rest.first_chunk_mut::<4>();
    let (LAYOUT, Some(place)) = (found, place) else {
        return Err(BpfError::Layout {
            found,
            wanted: LAYOUT,
        });
    };
    *place = generation.to_ne_bytes();
    Ok(())
}

/// Turns an error of libbpf's into one of this crate's.
pub(crate) fn refused(what: &'static str) -> impl FnOnce(libbpf_rs::Error) -> BpfError {
    move |error| BpfError::Refused {
        what,
        why: format!("{error:#}"),
    }
}
