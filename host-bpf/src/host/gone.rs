// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The end: what was closed isn't gone yet. A link is detached at once, but the kernel lets go of
//! its program after a grace period, frees that after another one, and then its maps. Until then
//! it lists them, charges their memory, and the module that a program calls can't be removed.
//!
//! Only CAP_SYS_ADMIN may list. Without it nothing is found and the end doesn't wait. That is
//! harmless: the programs are detached, and the kernel frees them without this process.

#![forbid(unsafe_code)]

use std::thread::sleep;
use std::time::Duration;

use super::{HostBpf, Warn};
use crate::mapped::{lists_map, lists_program};
use crate::object::Ids;

/// How often to look, and how many times: grace periods take tens of ms.
const PAUSE: Duration = Duration::from_millis(5);
const LOOKS: u32 = 400;

/// Waits for these when it is dropped, which is after all else of its [`HostBpf`].
#[derive(Debug)]
pub(super) struct Gone {
    ids: Ids,
    warn: Warn,
}

impl Gone {
    pub fn new(warn: Warn) -> Self {
        let ids = Ids::default();
        Self { ids, warn }
    }

    /// How many programs and maps are still there. By number alone: to open a PROG_ARRAY and close
    /// it again has the kernel clear it by work that takes a reference, and where that work is
    /// pending already, the reference is never given back: by reading `prog_array_map_clear()`, not
    /// traced. Looks that opened the maps had this one stay listed.
    fn listed(&self) -> (usize, usize) {
        let programs = self.ids.programs.iter().filter(|id| lists_program(**id));
        let maps = self.ids.maps.iter().filter(|id| lists_map(**id));
        (programs.count(), maps.count())
    }
}

impl Drop for Gone {
    fn drop(&mut self) {
        for _ in 0..LOOKS {
            if self.listed() == (0, 0) {
                return;
            }
            sleep(PAUSE);
        }
        let (programs, maps) = self.listed();
        (self.warn.0)(&format!(
            "the kernel still lists {programs} BPF programs and {maps} maps of this guest; they are \
             detached, and nothing of the guest runs in them"
        ));
    }
}

impl Drop for HostBpf {
    fn drop(&mut self) {
        let ids = self.programs().loaded.ids();
        self.gone.ids = ids;
    }
}
