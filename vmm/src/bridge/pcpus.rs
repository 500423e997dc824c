// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A bridge learns of pCPUs that come online or go offline while its guest runs.

use super::{BpfPath, Joint};
use crate::run::warn;

impl Joint {
    /// Learns what is new of pCPUs that have come or gone.
    pub(super) fn follow_pcpus(&self, changed: &[u32]) {
        if changed.is_empty() {
            return;
        }
        self.device.source().refresh();
        let active = self.active();
        if let Some(path) = &active.kernel {
            path.follow_pcpus(changed);
        }
        let followed = active.bpf.as_ref().map(BpfPath::follow_pcpus);
        if let Some(Err(error)) = followed {
            warn(&format!(
                "the path bpf doesn't know pCPUs that came online since its start ({error:#}): \
                 cur_perf isn't true on them; restart the guest"
            ));
        }
    }
}
