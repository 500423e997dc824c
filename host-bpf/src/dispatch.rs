// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The programs on the kernel's hooks, which all VMs of a host share (`bpf/dispatch.bpf.c`), and a
//! VM's slot among them.
//!
//! The first VMM loads them. A later one finds them by the name of a program. Nothing is pinned: each
//! VMM holds links and maps open, and the kernel frees them with the last one, whatever ends that.
//! What a killed VMM has left in its slot is freed by those that live ([`Dispatcher::sweep`]).
//!
//! Only CAP_SYS_ADMIN may find programs. A VMM without it has a set of its own, as one of another
//! version has; it doesn't sweep, and others don't join it.

#![forbid(unsafe_code)]

mod names;
mod set;
mod sweep;
mod trusted;

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicUsize};

use libbpf_rs::{Link, MapCore as _, MapFlags, MapHandle, Program};

use crate::error::BpfError;
use crate::layout::SlotsEntry;
use crate::libbpf_log::refused;
use crate::mapped::{Mapped, recursion_misses};

use names::{BY_SLOT, MAPS};
pub(crate) use set::Ids;
use set::{HookSet, map_id, older_than, owners};
use sweep::has_ended;
pub(crate) use sweep::sweep;

/// Slots that a sweep looks at, and as many again as long as it finds one of a dead VMM: without
/// those it costs the same with any number of VMs.
const SWEPT: usize = 16;

/// The programs on the hooks, and this VM's slot. Dropping it gives the slot back.
#[derive(Debug)]
pub(crate) struct Dispatcher {
    /// `None`: it was confined.
    slots: Option<Mapped<SlotsEntry>>,
    /// The kernel's number of the map of slots.
    id: u32,
    maps: Vec<MapHandle>,
    /// Where this process has attached them.
    _own: Vec<Link>,
    /// See [`HookSet::held`].
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
                let own = HookSet::attach()?;
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
        let HookSet {
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
