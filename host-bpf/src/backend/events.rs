// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What became of requests, as events.

use std::sync::atomic::Ordering::Relaxed;

use vcpufreq_device::{ActuateError, Clamp, DomainId, Event, VcpuId};

use super::Shared;
use crate::{Outcome, Told};

impl Shared {
    /// Passes a request that the programs tell of to the events file.
    pub(super) fn told(&self, told: &Told) {
        let Told { vcpu, clamp, .. } = *told;
        let (Some(domain), Some(known)) = (self.id_of(told.domain), self.vcpus.get(vcpu.index()))
        else {
            return;
        };
        let khz = told.khz;
        let request = Event::Request { vcpu, domain, khz };
        let outcome = match told.outcome {
            Outcome::InKernel => Some(applied_event(vcpu, domain, clamp)),
            Outcome::Unchanged => Some(Event::Unchanged {
                vcpu,
                domain,
                clamp,
            }),
            Outcome::Limited => Some(Event::Limited { vcpu, domain }),
            // The worker says what becomes of it.
            Outcome::LeftToWorker => None,
            Outcome::Refused => Some(refused(vcpu, domain, clamp, refusal(domain, None))),
            Outcome::NotApplicable => Some(not_applicable(
                vcpu,
                domain,
                "clamps mean nothing to SCHED_DEADLINE",
            )),
        };
        let events = [Some(request), outcome];
        let events: Vec<_> = events.into_iter().flatten().collect();
        let tid = known.tid.load(Relaxed);
        self.device.events().told(&events, told.at_ns, tid);
    }
}

pub(super) fn applied_event(vcpu: VcpuId, domain: DomainId, clamp: Clamp) -> Event {
    Event::Applied {
        vcpu,
        domain,
        clamp,
    }
}

pub(super) fn not_applicable(vcpu: VcpuId, domain: DomainId, reason: &'static str) -> Event {
    Event::NotApplicable {
        vcpu,
        domain,
        reason,
    }
}

pub(super) fn refused(vcpu: VcpuId, domain: DomainId, clamp: Clamp, error: ActuateError) -> Event {
    Event::Refused {
        vcpu,
        domain,
        clamp,
        error,
    }
}

pub(super) fn refusal(domain: DomainId, errno: Option<i32>) -> ActuateError {
    ActuateError::Refused {
        domain,
        call: "the clamp of the module vcpufreq_host",
        errno: errno.unwrap_or(0),
    }
}
