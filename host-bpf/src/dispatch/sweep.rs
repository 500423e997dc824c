// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Gives back the slots of VMMs that have ended.

use std::os::unix::ffi::OsStrExt as _;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;

use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions};
use libbpf_rs::{ErrorKind, MapCore as _, MapHandle, MapType, libbpf_sys};

use super::names::{BY_SLOT, PROGRAMS};
use super::set::{FoundSet, HookSet, Ids, all_sets, map_id};
use crate::error::BpfError;
use crate::libbpf_log::refused;

/// Bytes of a name that the kernel keeps (`BPF_OBJ_NAME_LEN`, with its end).
const KEPT: usize = 15;

/// Gives all slots of VMMs that have ended back, of each set on this host. If that was the last set,
/// returns what the kernel still frees of it.
pub(crate) fn sweep() -> Ids {
    let mut none = true;
    for set in all_sets() {
        none = false;
        let FoundSet::Ready(hooks) = HookSet::open(set) else {
            continue;
        };
        // While this process frees a slot, no other one takes it.
        let Ok(own) = own_map() else { break };
        let Ok(number) = map_id(&own) else { break };
        for slot in 0..hooks.owners().len() {
            free_ended((hooks.owners(), &hooks.maps), slot, number);
        }
    }
    match none {
        true => ended_programs(),
        false => Ids::default(),
    }
}

/// The programs that were on the hooks, and their maps. The map of slots isn't among these.
fn ended_programs() -> Ids {
    let options = ProgInfoQueryOptions::default().include_map_ids(true);
    let programs = ProgInfoIter::with_query_opts(options).filter(|program| {
        let name = program.name.as_bytes();
        let ours = PROGRAMS.map(|name| &name.as_bytes()[..name.len().min(KEPT)]);
        ours.contains(&name)
    });
    let mut ids = Ids::default();
    for program in programs {
        ids.programs.push(program.id);
        ids.maps.extend(program.map_ids);
    }
    ids
}

/// Gives a slot back if its VMM has ended. It is `number`'s until it is empty.
pub(super) fn free_ended(
    (owners, maps): (&[AtomicU32], &[MapHandle]),
    slot: usize,
    number: u32,
) -> bool {
    let Ok(key) = u16::try_from(slot) else {
        return false;
    };
    let before = owners[slot].load(SeqCst);
    let taken = before != 0
        && has_ended(before)
        && owners[slot]
            .compare_exchange(before, number, SeqCst, SeqCst)
            .is_ok();
    if taken {
        clear(maps, key);
        owners[slot].store(0, SeqCst);
    }
    taken
}

/// Whether the VMM has ended whose own map has this number.
pub(super) fn has_ended(number: u32) -> bool {
    MapHandle::from_map_id(number).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// Has the hooks call none of the programs of a slot.
pub(super) fn clear(maps: &[MapHandle], slot: u16) {
    let key = u32::from(slot).to_ne_bytes();
    for map in maps.get(BY_SLOT).unwrap_or_default() {
        // There may be none.
        let _ = map.delete(&key);
    }
}

/// A map that the kernel lists as long as this process lives.
pub(super) fn own_map() -> Result<MapHandle, BpfError> {
    let options = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    MapHandle::create(MapType::Array, Some("vcpufreq_vmm"), 4, 4, 1, &options)
        .map_err(refused("making a map"))
}
