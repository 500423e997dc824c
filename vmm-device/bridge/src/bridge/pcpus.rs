// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A bridge learns of pCPUs that come online or go offline while its guest runs.

use super::inner::BridgeInner;

impl BridgeInner {
    /// Learns what is new of pCPUs that have come or gone.
    pub(super) fn follow_pcpus(&self, changed: &[u32]) {
        if changed.is_empty() {
            return;
        }
        self.device.source().refresh();
        let active = self.active();
        if let Some(path) = &active.ioeventfd {
            path.follow_pcpus(changed);
        }
        let Some((name, path)) = &active.backend else {
            return;
        };
        if let Err(error) = path.follow_pcpus(changed) {
            self.guest.embedder.warn(&format!(
                "the path {name} doesn't know pCPUs that came online since its start ({error}): \
                 cur_perf isn't true on them; restart the guest"
            ));
        }
    }
}
