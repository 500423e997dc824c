// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A set of programs on the kernel's hooks, with its maps: attached here, or found.

#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::sleep;
use std::time::Duration;

use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::{Link, MapCore as _, MapHandle, Object, Program};

use super::names::{BY_PCPU, MAPS, PROGRAMS, SET, SLOTS};
use super::trusted::{are_ours, call_ours};
use crate::error::BpfError;
use crate::hooks;
use crate::layout::{DISPATCH_LAYOUT, SlotsEntry};
use crate::libbpf_log::{explained, refused};
use crate::mapped::{Mapped, link_by_id};
use crate::objects::{self, DISPATCH};

/// The layout of a set that others don't join.
const PRIVATE: u32 = u32::MAX;
/// How often to look for a set that another VMM is about to attach, and how many times.
const PAUSE: Duration = Duration::from_millis(5);
const LOOKS: u32 = 200;

/// The kernel's numbers of an object's programs and maps.
#[derive(Debug, Default)]
pub(crate) struct Ids {
    pub programs: Vec<u32>,
    pub maps: Vec<u32>,
}

impl Ids {
    /// Those of a set whose map of slots has the number `id`.
    pub(super) fn add(&mut self, entry: &SlotsEntry, id: u32) {
        let numbers = |ids: &[AtomicU32]| ids.iter().map(|id| id.load(SeqCst)).collect::<Vec<_>>();
        self.programs.extend(numbers(&entry.programs));
        self.maps.extend(numbers(&entry.maps));
        self.maps.push(id);
    }
}

/// What a search has found.
pub(super) enum FoundSet {
    Nothing,
    /// A set that isn't attached yet.
    Unready,
    Ready(HookSet),
}

/// A set without a slot.
pub(super) struct HookSet {
    pub slots: Mapped<SlotsEntry>,
    pub id: u32,
    pub maps: Vec<MapHandle>,
    pub own: Vec<Link>,
    /// The program [`SET`], and links that another process has attached.
    pub held: Vec<OwnedFd>,
}

/// The kernel's numbers of a set's program [`SET`] and map of slots.
#[derive(Clone, Copy)]
pub(super) struct SetIds {
    program: u32,
    slots: u32,
}

/// The sets on this host, as far as a process holds them.
pub(super) fn all_sets() -> impl Iterator<Item = SetIds> {
    let options = ProgInfoQueryOptions::default().include_map_ids(true);
    let programs = ProgInfoIter::with_query_opts(options);
    programs.filter_map(|program| {
        let named = program.name.as_bytes() == SET.as_bytes();
        Some(SetIds {
            program: program.id,
            slots: *program.map_ids.first().filter(|_| named)?,
        })
    })
}

impl HookSet {
    /// Loads and attaches a set, and makes it known.
    pub(super) fn attach() -> Result<Self, BpfError> {
        let mut open = objects::open(DISPATCH)?;
        let possible = libbpf_rs::num_possible_cpus().map_err(refused("counting the pCPUs"))?;
        for mut map in open.maps_mut() {
            if MAPS[BY_PCPU].iter().any(|name| map.name() == *name) {
                map.set_max_entries(u32::try_from(possible).unwrap_or(1))
                    .map_err(refused("sizing the maps"))?;
            }
        }
        let object = explained("loading the BPF programs", || open.load())?;
        hooks::check(&object)?;
        let map = |name: &'static str| -> Result<MapHandle, BpfError> {
            let found = object.maps().find(|map| map.name() == name);
            let missing = BpfError::Refused {
                what: name,
                why: "the object has no such map".into(),
            };
            MapHandle::try_from(&found.ok_or(missing)?).map_err(refused("opening a map"))
        };
        let slots = map(SLOTS)?;
        let held = program(&object, SET)?.as_fd().try_clone_to_owned();
        let held = held.map_err(|error| refused("opening a program")(error.into()))?;
        let this = Self {
            id: map_id(&slots)?,
            slots: mapped(&slots)?.ok_or(BpfError::Layout {
                found: 0,
                wanted: DISPATCH_LAYOUT,
            })?,
            maps: MAPS
                .iter()
                .map(|name| map(name))
                .collect::<Result<_, _>>()?,
            own: attach(&object)?,
            held: vec![held],
        };
        this.publish(&object)?;
        Ok(this)
    }

    fn publish(&self, object: &Object) -> Result<(), BpfError> {
        let Some(entry) = self.slots.get(0) else {
            return Ok(());
        };
        for (to, map) in entry.maps.iter().zip(&self.maps) {
            to.store(map_id(map)?, SeqCst);
        }
        for (to, link) in entry.links.iter().zip(&self.own) {
            let info = link.info().map_err(refused("asking for a link"))?;
            to.store(info.id, SeqCst);
        }
        for (to, name) in entry.programs.iter().zip(PROGRAMS) {
            let id = Program::id_from_fd(program(object, name)?.as_fd());
            to.store(id.map_err(refused("asking for a program"))?, SeqCst);
        }
        // Without the right to list programs, other users of the set are unknown.
        let shared = all_sets().next().is_some();
        let layout = if shared { DISPATCH_LAYOUT } else { PRIVATE };
        entry.layout.store(layout, SeqCst);
        Ok(())
    }

    pub(super) fn owners(&self) -> &[AtomicU32] {
        owners(&self.slots)
    }

    /// Joins a set, which stays as long as this lives.
    pub(super) fn open(ids: SetIds) -> FoundSet {
        let found = Program::fd_from_id(ids.program);
        let (Ok(program), Ok(map)) = (found, MapHandle::from_map_id(ids.slots)) else {
            return FoundSet::Nothing;
        };
        let Ok(Some(slots)) = mapped(&map) else {
            return FoundSet::Nothing;
        };
        let Some(entry) = slots.get(0) else {
            return FoundSet::Nothing;
        };
        match entry.layout.load(SeqCst) {
            0 => return FoundSet::Unready,
            DISPATCH_LAYOUT => (),
            // It goes on beside this one's.
            _ => return FoundSet::Nothing,
        }
        let maps = entry.maps.iter();
        let maps = maps.map(|id| MapHandle::from_map_id(id.load(SeqCst)));
        let held = entry.links.iter().map(|id| link_by_id(id.load(SeqCst)));
        // Else its last VM ends just now.
        match (
            maps.collect::<Result<Vec<_>, _>>(),
            held.collect::<Result<Vec<_>, _>>(),
        ) {
            (Ok(maps), Ok(mut held)) if are_ours(&map, &maps) && call_ours(entry, &held) => {
                held.push(program);
                FoundSet::Ready(Self {
                    slots,
                    id: ids.slots,
                    maps,
                    own: Vec::new(),
                    held,
                })
            }
            _ => FoundSet::Nothing,
        }
    }
}

fn attach(object: &Object) -> Result<Vec<Link>, BpfError> {
    let attach = |name: &&'static str| {
        let mut programs = object.progs_mut();
        let program = programs.find(|program| program.name() == *name);
        let link = program.ok_or(missing_program(name))?.attach_trace();
        link.map_err(refused("attaching a BPF program"))
    };
    PROGRAMS.iter().map(attach).collect()
}

fn program<'a>(object: &'a Object, name: &'static str) -> Result<Program<'a>, BpfError> {
    let mut programs = object.progs();
    let found = programs.find(|program| program.name() == name);
    found.ok_or_else(|| missing_program(name))
}

fn missing_program(name: &'static str) -> BpfError {
    BpfError::Refused {
        what: name,
        why: "the object has no such program".into(),
    }
}

/// The oldest set of this version, of those whose number is lower. One that isn't attached yet is
/// waited for, but not for ever.
pub(super) fn older_than(id: u32) -> Option<HookSet> {
    for look in 1..=LOOKS {
        let mut sets: Vec<_> = all_sets().filter(|set| set.slots < id).collect();
        sets.sort_unstable_by_key(|set| set.slots);
        let mut found = sets.into_iter().map(HookSet::open);
        let first = found.find(|one| match one {
            FoundSet::Nothing => false,
            FoundSet::Unready => look < LOOKS,
            FoundSet::Ready(_) => true,
        });
        match first {
            Some(FoundSet::Ready(hooks)) => return Some(hooks),
            Some(FoundSet::Unready) => sleep(PAUSE),
            Some(FoundSet::Nothing) | None => return None,
        }
    }
    None
}

pub(super) fn owners(slots: &Mapped<SlotsEntry>) -> &[AtomicU32] {
    slots.get(0).map_or(&[], |entry| &entry.owners)
}

pub(super) fn map_id(map: &MapHandle) -> Result<u32, BpfError> {
    let info = map.info().map_err(refused("asking for a map"))?;
    Ok(info.info.id)
}

/// The slots; `None` when they are of another size.
fn mapped(map: &MapHandle) -> Result<Option<Mapped<SlotsEntry>>, BpfError> {
    let same = usize::try_from(map.value_size()).is_ok_and(|size| size == size_of::<SlotsEntry>());
    if !same {
        return Ok(None);
    }
    let mapped = Mapped::new(map.as_fd(), 1);
    let mapped = mapped.map_err(|error: io::Error| BpfError::Refused {
        what: "mapping the memory of the BPF programs",
        why: error.to_string(),
    });
    mapped.map(Some)
}
