// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether the set that a name has led to is one of this program's.

#![forbid(unsafe_code)]

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;

use libbpf_rs::query::{LinkInfo, LinkTypeInfo, ProgInfoIter};
use libbpf_rs::{MapCore as _, MapHandle, MapType};

use super::names::{MAPS, PROGRAMS};
use crate::layout::SlotsEntry;

/// Of [`MAPS`].
const TYPES: [MapType; 6] = [
    MapType::Array,
    MapType::Array,
    MapType::TaskStorage,
    MapType::ProgArray,
    MapType::ProgArray,
    MapType::ProgArray,
];
/// `BPF_OBJ_NAME_LEN` without the zero behind it.
const NAME_LEN: usize = 15;

/// Whether maps match their names. A name is all that a VMM finds them by, and anybody with
/// CAP_BPF can take it.
pub(super) fn are_ours(slots: &MapHandle, maps: &[MapHandle]) -> bool {
    slots.map_type() == MapType::Array
        && maps.iter().map(MapHandle::name).eq(MAPS)
        && maps.iter().map(MapHandle::map_type).eq(TYPES)
}

/// Whether the links attach the programs that the entry lists, by their names. A program of type
/// `tp_btf` has a link of a raw tracepoint (`bpf_raw_tp_link_attach` in kernel/bpf/syscall.c).
pub(super) fn call_ours(entry: &SlotsEntry, links: &[OwnedFd]) -> bool {
    let attached = links
        .iter()
        .map(|link| LinkInfo::from_fd(link.as_fd()).ok());
    let listed: Vec<_> = entry.programs.iter().map(|id| id.load(SeqCst)).collect();
    let same = attached.zip(&listed).all(|(link, id)| {
        link.is_some_and(|link| {
            matches!(link.info, LinkTypeInfo::RawTracepoint(_)) && link.prog_id == *id
        })
    });
    let named = |(id, name): (&u32, &str)| {
        let mut all = ProgInfoIter::default();
        let found = all.find(|program| program.id == *id);
        // The kernel keeps the beginning of a name.
        found.is_some_and(|program| {
            let kept = program.name.to_string_lossy();
            name.starts_with(&*kept) && kept.len() >= name.len().min(NAME_LEN)
        })
    };
    same && links.len() == PROGRAMS.len() && listed.iter().zip(PROGRAMS).all(named)
}
