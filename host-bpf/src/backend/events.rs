// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What became of requests, as events.

use std::sync::atomic::Ordering::Relaxed;

use vcpufreq_bridge::HostEvent;
use vcpufreq_device::{ActuateError, Clamp, DomainId, Event, VcpuId};

use super::Shared;
use crate::{HandledRequest, RequestOutcome};

impl Shared {
    /// Passes a request that the programs report to the events file.
    pub(super) fn handled(&self, handled: &HandledRequest) {
        let HandledRequest { vcpu, clamp, .. } = *handled;
        let (Some(domain), Some(known)) =
            (self.id_of(handled.domain), self.vcpus.get(vcpu.index()))
        else {
            return;
        };
        let khz = handled.khz;
        let request = Event::Request { vcpu, domain, khz };
        let outcome = match handled.outcome {
            RequestOutcome::InKernel => Some(Event::outcome(vcpu, domain, clamp, Ok(()))),
            RequestOutcome::Unchanged => Some(Event::Unchanged {
                vcpu,
                domain,
                clamp,
            }),
            RequestOutcome::Limited => Some(Event::Limited { vcpu, domain }),
            // The worker reports the outcome.
            RequestOutcome::LeftToWorker => None,
            RequestOutcome::Refused => {
                let refused = Err(refusal(domain, None));
                Some(Event::outcome(vcpu, domain, clamp, refused))
            }
            RequestOutcome::NotApplicable => Some(Event::NotApplicable {
                vcpu,
                domain,
                reason: "clamps mean nothing to SCHED_DEADLINE",
            }),
        };
        let events = [Some(request), outcome];
        let events: Vec<_> = events.into_iter().flatten().collect();
        let tid = known.tid.load(Relaxed);
        self.device
            .events()
            .record_all_at(&events, handled.at_ns, tid);
        self.tell_load(vcpu);
    }

    /// Passes what is known of a vCPU's pCPU to the events file.
    pub(super) fn tell_load(&self, vcpu: VcpuId) {
        let Some(known) = self.vcpus.get(vcpu.index()) else {
            return;
        };
        let (pcpu, load) = (self.host.pcpu(vcpu), self.host.load(vcpu));
        let target = pcpu.and_then(|(pcpu, _)| self.target(pcpu));
        if !self.device.events().has_sink() || (load.is_none() && target.is_none()) {
            return;
        }
        self.device.events().host_changed(HostEvent::Load {
            vcpu,
            pcpu,
            clamp: self.host.wanted(known.domain).unwrap_or(Clamp::NONE),
            load,
            target,
        });
    }
}

pub(super) fn refusal(domain: DomainId, errno: Option<i32>) -> ActuateError {
    ActuateError::Refused {
        domain,
        call: "the clamp of the module vcpufreq_host",
        errno: errno.unwrap_or(0),
    }
}
