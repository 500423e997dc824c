// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The end: what was closed isn't gone yet. A link is detached at once, but the kernel lets go of
//! its program after a grace period, frees that after another one, and then its maps. Until then
//! it lists them, charges their memory, and the module that a program calls can't be removed.
//!
//! Only CAP_SYS_ADMIN may list. Without it nothing is found and the end doesn't wait. That is
//! harmless: the programs are detached, and the kernel frees them without this process.

#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use libbpf_rs::Program;

use crate::dispatch::{self, Ids};
use crate::mapped::lists_map;

/// How often to look, and how many times: grace periods take tens of ms.
const PAUSE: Duration = Duration::from_millis(5);
const LOOKS: u32 = 400;
/// The same for the hooks, which another VM may have joined since.
const HOOK_LOOKS: u32 = 100;

/// Gets a line for the user.
#[derive(Clone)]
pub struct WarningSink(Arc<dyn Fn(&str) + Send + Sync>);

impl WarningSink {
    /// Calls `warn`.
    pub fn new(warn: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self(Arc::new(warn))
    }
}

impl fmt::Debug for WarningSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WarningSink")
    }
}

/// Waits for these when it is dropped, which is after all else of its [`HostBpf`](super::HostBpf).
#[derive(Debug)]
pub(super) struct Gone {
    pub ids: Ids,
    /// The hooks, when this was the last VM.
    pub hooks: Ids,
    warn: WarningSink,
}

impl Gone {
    pub fn new(warn: WarningSink) -> Self {
        Self {
            ids: Ids::default(),
            hooks: Ids::default(),
            warn,
        }
    }
}

/// Gives back what VMMs that have ended have left of theirs, and waits until the kernel lists none
/// of it. A VMM that was confined leaves that to the process that cleans up after it.
pub fn sweep() {
    let ids = dispatch::sweep();
    for _ in 0..HOOK_LOOKS {
        if listed(&ids) == (0, 0) {
            return;
        }
        sleep(PAUSE);
    }
}

/// How many programs and maps are still there.
fn listed(ids: &Ids) -> (usize, usize) {
    let programs = ids.programs.iter();
    let programs = programs.filter(|id| Program::fd_from_id(**id).is_ok());
    let maps = ids.maps.iter();
    let maps = maps.filter(|id| lists_map(**id));
    (programs.count(), maps.count())
}

impl Drop for Gone {
    fn drop(&mut self) {
        for look in 0..LOOKS {
            let hooks = look < HOOK_LOOKS && listed(&self.hooks) != (0, 0);
            if listed(&self.ids) == (0, 0) && !hooks {
                return;
            }
            sleep(PAUSE);
        }
        let (programs, maps) = listed(&self.ids);
        if (programs, maps) == (0, 0) {
            return;
        }
        (self.warn.0)(&format!(
            "the kernel still lists {programs} BPF programs and {maps} maps of this guest; they are \
             detached, and nothing of the guest runs in them"
        ));
    }
}
