// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The service's scheduler as long as it is in force, and clamps in its place from then on.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use vcpufreq_bridge::{Embedder, PcpuTarget};
use vcpufreq_device::ActuateError;

use super::{Scx, Shared};

/// How often to look whether the scheduler is gone. The kernel takes some 50 ms to end it (emulated),
/// and clamps are to be in force within 100 ms of when it begins to.
pub(super) const LOOK: Duration = Duration::from_millis(25);

/// How often the program is run at most, while vCPUs ask at the same time.
pub(super) const TRIES: u32 = 16;

impl Scx {
    /// Whether the scheduler is in force.
    pub(super) fn is_on(&self) -> bool {
        self.pins.is_on()
    }

    /// Whether the scheduler is gone, once: what the domains want has to become clamps.
    pub(super) fn has_left(&self, embedder: &dyn Embedder) -> bool {
        let has_left = !self.pins.is_on() && !self.left.swap(true, SeqCst);
        if has_left {
            embedder
                .warn("the scheduler of vcpufreq scx is gone: requests become clamps from now on");
        }
        has_left
    }
}

impl Shared {
    /// Puts what a domain wants into force by the scheduler; `None`: that is for clamps. While the
    /// scheduler is in force, no clamp is set beside its target, which nothing would lower.
    pub(super) fn by_scx(&self, domain: u32) -> Option<Result<(), ActuateError>> {
        for _ in 0..TRIES {
            if !self.scx_is_on() {
                return None;
            }
            if self.host.ask_scx(domain).is_ok() {
                return Some(Ok(()));
            }
        }
        Some(Err(ActuateError::Refused {
            domain: self.id_of(domain)?,
            call: "a target of vcpufreq scx",
            errno: libc::EAGAIN,
        }))
    }

    /// Whether requests are targets of the scheduler.
    pub(super) fn scx_is_on(&self) -> bool {
        self.scx.as_ref().is_some_and(Scx::is_on)
    }

    /// What it has of a pCPU.
    pub(super) fn target(&self, pcpu: u32) -> Option<PcpuTarget> {
        self.scx_is_on().then(|| self.host.target(pcpu)).flatten()
    }

    /// Whether [`Self::look_at_scx`] may find it gone.
    pub(super) fn looks_at_scx(&self) -> bool {
        self.scx.as_ref().is_some_and(|scx| !scx.left.load(SeqCst))
    }

    /// When the scheduler is gone, has what the domains want put into force by clamps, once: the
    /// programs leave later requests to the worker.
    pub(super) fn look_at_scx(&self) {
        let Some(scx) = &self.scx else { return };
        if !scx.has_left(&*self.embedder) {
            return;
        }
        let asks = |domain: &u32| self.host.asked(*domain).is_some();
        self.all_domains()
            .filter(asks)
            .for_each(|domain| self.apply_again(domain));
    }
}
