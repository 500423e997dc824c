// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The programs on the kernel's hooks, which all VMs of a host share (`bpf/dispatch.bpf.c`), and a
//! VM's slot among them.
//!
//! The first VMM loads them. A later one finds them by the name of a map. Nothing is pinned: each
//! VMM holds links and maps open, and the kernel frees them with the last one, whatever ends that.
//! What a killed VMM has left in its slot is freed by those that live ([`Dispatcher::sweep`]).
//!
//! Only CAP_SYS_ADMIN may find maps. A VMM without it has a set of its own, as one of another
//! version has; it doesn't sweep, and others don't join it.

#![forbid(unsafe_code)]

mod sweep;
mod trusted;

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::thread::sleep;
use std::time::Duration;

use libbpf_rs::query::MapInfoIter;
use libbpf_rs::{ErrorKind, Link, MapCore as _, MapFlags, MapHandle, Object, Program};

use crate::error::BpfError;
use crate::hooks;
use crate::layout::{DISPATCH_LAYOUT, SlotsEntry};
use crate::libbpf_log::{explained, refused};
use crate::mapped::{Mapped, link_by_id, recursion_misses};
use crate::objects::{self, DISPATCH};

pub(crate) use sweep::sweep;
use trusted::{are_ours, call_ours};

/// The map by which a VMM finds the others.
const SLOTS: &str = "dispatch_slots";
/// The others, in the order of their numbers in that one.
const MAPS: [&str; 5] = [
    "dispatch_cpus",
    "threads",
    "on_switch",
    "on_frequency",
    "on_write",
];
/// Those of them that are a VM's programs by slot, in the order of [`PROGRAMS`].
const BY_SLOT: std::ops::Range<usize> = 2..5;
const PROGRAMS: [&str; 3] = ["dispatch_switch", "dispatch_frequency", "dispatch_write"];
/// The layout of a set that others don't join.
const PRIVATE: u32 = u32::MAX;
/// Slots that a sweep looks at, and as many again as long as it finds one of a dead VMM: without
/// those it costs the same with any number of VMs.
const SWEPT: usize = 16;
/// How often to look for a set that another VMM is about to attach, and how many times.
const PAUSE: Duration = Duration::from_millis(5);
const LOOKS: u32 = 200;

/// The programs on the hooks, and this VM's slot. Dropping it gives the slot back.
#[derive(Debug)]
pub(crate) struct Dispatcher {
    /// `None`: it was confined.
    slots: Option<Mapped<SlotsEntry>>,
    /// The kernel's number of the map of slots.
    id: u32,
    maps: Vec<MapHandle>,
    /// Of this process, where it has attached them; else of another one's.
    _own: Vec<Link>,
    _held: Vec<OwnedFd>,
    /// The program that sees the accesses of all VMs.
    write: Option<OwnedFd>,
    slot: u16,
    /// The number of the map below.
    number: u32,
    /// The kernel lists it as long as this process lives.
    _owner: MapHandle,
    /// How many slots were swept.
    swept: AtomicUsize,
}

/// The kernel's numbers of an object's programs and maps.
#[derive(Debug, Default)]
pub(crate) struct Ids {
    pub programs: Vec<u32>,
    pub maps: Vec<u32>,
}

impl Ids {
    /// Those of a set whose map of slots has the number `id`.
    fn add(&mut self, entry: &SlotsEntry, id: u32) {
        let numbers = |ids: &[AtomicU32]| ids.iter().map(|id| id.load(SeqCst)).collect::<Vec<_>>();
        self.programs.extend(numbers(&entry.programs));
        self.maps.extend(numbers(&entry.maps));
        self.maps.push(id);
    }
}

/// What a search has found.
enum Found {
    Nothing,
    /// A set that isn't attached yet.
    Unready,
    Ready(Hooks),
}

/// A set without a slot.
struct Hooks {
    slots: Mapped<SlotsEntry>,
    id: u32,
    maps: Vec<MapHandle>,
    own: Vec<Link>,
    held: Vec<OwnedFd>,
}

impl Dispatcher {
    /// Joins the VMs of this host, or is the first one.
    ///
    /// # Errors
    /// [`BpfError::TooManyVms`] when each slot is taken; [`BpfError::Layout`] or [`BpfError::Hook`]
    /// for an object of another build; [`BpfError::Refused`] when kernel or libbpf refuses a map, a
    /// program or a link. What it has attached is detached then.
    pub(crate) fn join() -> Result<Self, BpfError> {
        let hooks = match older_than(u32::MAX) {
            Some(hooks) => hooks,
            None => {
                let own = Hooks::attach()?;
                // Of two that were attached at the same time, the older one stays.
                older_than(own.id).unwrap_or(own)
            }
        };
        let owner = sweep::own_map()?;
        let number = map_id(&owner)?;
        let slot = (0..=u16::MAX)
            .zip(hooks.owners())
            .find(|(_, taken)| {
                let before = taken.load(SeqCst);
                (before == 0 || has_ended(before))
                    && taken
                        .compare_exchange(before, number, SeqCst, SeqCst)
                        .is_ok()
            })
            .map(|(slot, _)| slot)
            .ok_or(BpfError::TooManyVms)?;
        let Hooks {
            slots,
            id,
            maps,
            own,
            held,
        } = hooks;
        let write = slots.get(0).and_then(|entry| {
            let [.., write] = &entry.programs;
            Program::fd_from_id(write.load(SeqCst)).ok()
        });
        let this = Self {
            slots: Some(slots),
            id,
            maps,
            _own: own,
            _held: held,
            write,
            slot,
            number,
            _owner: owner,
            swept: AtomicUsize::new(0),
        };
        // Another's, that has ended.
        this.clear(slot);
        Ok(this)
    }

    /// The VM's number on this host.
    pub(crate) fn slot(&self) -> u16 {
        self.slot
    }

    /// Whether a map of this name is the hooks', of those that a VM's programs use too.
    pub(crate) fn is_shared(name: &str) -> bool {
        MAPS[..BY_SLOT.start].contains(&name)
    }

    /// Such a map.
    pub(crate) fn shared(&self, name: &str) -> Option<BorrowedFd<'_>> {
        let maps = MAPS.iter().zip(&self.maps).take(BY_SLOT.start);
        let mut found = maps.filter(|(one, _)| **one == name);
        found.next().map(|(_, map)| map.as_fd())
    }

    /// Has the hooks call a VM's programs on a switch, a change of frequency and an access.
    pub(crate) fn call(&self, programs: [BorrowedFd<'_>; 3]) -> Result<(), BpfError> {
        let key = u32::from(self.slot).to_ne_bytes();
        for (map, program) in self.maps[BY_SLOT].iter().zip(programs) {
            let program = program.as_raw_fd().to_ne_bytes();
            map.update(&key, &program, MapFlags::ANY)
                .map_err(refused("attaching a BPF program"))?;
        }
        Ok(())
    }

    /// Has the hooks call none of the VM's programs any more.
    pub(crate) fn call_none(&self) {
        self.clear(self.slot);
    }

    /// Whether it is one of the VMs.
    pub(crate) fn is_joined(&self) -> bool {
        self.slots.is_some() && !self.maps.is_empty()
    }

    /// Gives slots of VMMs that were killed back: of the next ones, at each call.
    pub(crate) fn sweep(&self) {
        if !self.is_joined() {
            return;
        }
        let owners = self.owners();
        let from = self.swept.load(Relaxed);
        let slots = (0..owners.len()).map(|n| (from + n) % owners.len());
        let slots = slots.filter(|slot| owners[*slot].load(SeqCst) != 0);
        let mut left = SWEPT;
        for slot in slots {
            if left == 0 {
                return;
            }
            left -= 1;
            self.swept.store(slot + 1, Relaxed);
            if sweep::free_ended((owners, &self.maps), slot, self.number) {
                left = SWEPT;
            }
        }
    }

    /// Lets go of the slots of all VMs. The maps stay open, for the kernel empties an array of programs
    /// that no process has open; they are not written any more.
    pub(crate) fn confine(&mut self) {
        self.slots = None;
    }

    /// Gives the slot back and lets go of the hooks: this VM frees nothing for others from now on,
    /// and has nothing that they would have to free.
    pub(crate) fn let_go(&mut self) {
        self.give_back();
        self.maps.clear();
        self.write = None;
        self._own.clear();
        self._held.clear();
    }

    fn give_back(&self) {
        self.call_none();
        if let Some(owner) = self.owners().get(usize::from(self.slot)) {
            // It may be another VM's by now.
            let _ = owner.compare_exchange(self.number, 0, SeqCst, SeqCst);
        }
    }

    /// Accesses of any VM that no VM's programs saw: the kernel doesn't run a program that it has
    /// preempted on the same CPU. `None` when the kernel doesn't report it.
    pub(crate) fn missed(&self) -> Option<u64> {
        recursion_misses(self.write.as_ref()?.as_fd()).ok()
    }

    /// What the kernel frees with this VM, when it is the last one.
    pub(crate) fn ids_of_last(&self) -> Ids {
        let mut owners = self.owners().iter();
        let alone = !owners.any(|owner| {
            let number = owner.load(SeqCst);
            number != self.number && number != 0 && !has_ended(number)
        });
        let mut ids = Ids::default();
        let entry = self.slots.as_ref().and_then(|slots| slots.get(0));
        if let Some(entry) = entry.filter(|_| alone) {
            ids.add(entry, self.id);
        }
        ids
    }

    fn owners(&self) -> &[AtomicU32] {
        self.slots.as_ref().map_or(&[], owners)
    }

    fn clear(&self, slot: u16) {
        if self.slots.is_some() {
            sweep::clear(&self.maps, slot);
        }
    }
}

impl Drop for Dispatcher {
    fn drop(&mut self) {
        self.give_back();
    }
}

impl Hooks {
    /// Loads and attaches a set, and makes it known.
    fn attach() -> Result<Self, BpfError> {
        let mut open = objects::open(DISPATCH)?;
        let possible = libbpf_rs::num_possible_cpus().map_err(refused("counting the pCPUs"))?;
        for mut map in open.maps_mut() {
            if map.name() == MAPS[0] {
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
            held: Vec::new(),
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
            let mut programs = object.progs();
            let program = programs.find(|program| program.name() == name);
            let id = program.map(|program| Program::id_from_fd(program.as_fd()));
            let id = id.transpose().map_err(refused("asking for a program"))?;
            to.store(id.unwrap_or(0), SeqCst);
        }
        // Without the right to list maps, other users of the set are unknown.
        let shared = MapInfoIter::default().next().is_some();
        let layout = if shared { DISPATCH_LAYOUT } else { PRIVATE };
        entry.layout.store(layout, SeqCst);
        Ok(())
    }

    fn owners(&self) -> &[AtomicU32] {
        owners(&self.slots)
    }

    /// The set whose map of slots has this number.
    fn open(id: u32) -> Found {
        let Ok(map) = MapHandle::from_map_id(id) else {
            return Found::Nothing;
        };
        let Ok(Some(slots)) = mapped(&map) else {
            return Found::Nothing;
        };
        let Some(entry) = slots.get(0) else {
            return Found::Nothing;
        };
        match entry.layout.load(SeqCst) {
            0 => return Found::Unready,
            DISPATCH_LAYOUT => (),
            // It goes on beside this one's.
            _ => return Found::Nothing,
        }
        let maps = entry.maps.iter();
        let maps = maps.map(|id| MapHandle::from_map_id(id.load(SeqCst)));
        let held = entry.links.iter().map(|id| link_by_id(id.load(SeqCst)));
        // Else its last VM ends just now.
        match (
            maps.collect::<Result<Vec<_>, _>>(),
            held.collect::<Result<Vec<_>, _>>(),
        ) {
            (Ok(maps), Ok(held)) if are_ours(&map, &maps) && call_ours(entry, &held) => {
                Found::Ready(Self {
                    slots,
                    id,
                    maps,
                    own: Vec::new(),
                    held,
                })
            }
            _ => Found::Nothing,
        }
    }
}

fn attach(object: &Object) -> Result<Vec<Link>, BpfError> {
    let attach = |name: &'static str| {
        let mut programs = object.progs_mut();
        let program = programs.find(|program| program.name() == name);
        let missing = BpfError::Refused {
            what: name,
            why: "the object has no such program".into(),
        };
        let link = program.ok_or(missing)?.attach_trace();
        link.map_err(refused("attaching a BPF program"))
    };
    PROGRAMS.iter().map(|name| attach(name)).collect()
}

/// The oldest set of this version, of those whose number is lower. One that isn't attached yet is
/// waited for, but not for ever.
fn older_than(id: u32) -> Option<Hooks> {
    for look in 1..=LOOKS {
        let maps = MapInfoIter::default();
        let maps = maps.filter(|map| map.name == SLOTS && map.id < id);
        let mut numbers: Vec<u32> = maps.map(|map| map.id).collect();
        numbers.sort_unstable();
        let mut found = numbers.into_iter().map(Hooks::open);
        let first = found.find(|one| match one {
            Found::Nothing => false,
            Found::Unready => look < LOOKS,
            Found::Ready(_) => true,
        });
        match first {
            Some(Found::Ready(hooks)) => return Some(hooks),
            Some(Found::Unready) => sleep(PAUSE),
            Some(Found::Nothing) | None => return None,
        }
    }
    None
}

fn owners(slots: &Mapped<SlotsEntry>) -> &[AtomicU32] {
    slots.get(0).map_or(&[], |entry| &entry.owners)
}

/// Whether the VMM has ended whose own map has this number.
fn has_ended(number: u32) -> bool {
    MapHandle::from_map_id(number).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

fn map_id(map: &MapHandle) -> Result<u32, BpfError> {
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
