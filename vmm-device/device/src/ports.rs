// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The device's interfaces to its host: [`Actuator`] puts clamps into force, [`Source`] reads a
//! pCPU's state, [`Events`] records what happens.
//!
//! The device calls all three on vCPU threads, during a guest's access. An implementation returns
//! after a few bounded host calls. It neither panics nor blocks on another vCPU.

#![forbid(unsafe_code)]

use std::sync::Arc;

use crate::policy::{Clamp, PcpuPerf};
use crate::units::{DomainId, Khz, VcpuId};

/// Makes the host honour a domain's clamp. No method has a default: an actuator that wraps another
/// one would lose what it doesn't forward.
pub trait Actuator: Send + Sync {
    /// Puts `clamp` into force for the threads of `domain`. Never called for one domain from two
    /// threads at once, nor with the clamp that is already in force.
    ///
    /// # Errors
    /// [`ActuateError::Refused`] with the host's errno; [`ActuateError::NoThread`] or
    /// [`ActuateError::NotApplicable`] when there is nothing to clamp. A part of the clamp may be
    /// in force. The device counts the error and calls again at the next request.
    fn apply(&self, domain: DomainId, clamp: Clamp) -> Result<(), ActuateError>;

    /// True if any vCPU may write set_perf of any domain; announced once through
    /// [`FEATURE_ANY_CPU`](crate::FEATURE_ANY_CPU). False if `apply` can clamp the calling thread
    /// instead of the domain's.
    fn serves_any_vcpu(&self) -> bool;
}

/// Reads the state of the pCPU that a vCPU is on.
pub trait Source: Send + Sync {
    /// The state of the pCPU that the thread of `vcpu` is on.
    ///
    /// # Errors
    /// What could not be read. The device counts the failure and shows the guest the last good
    /// value.
    fn sample(&self, vcpu: VcpuId) -> Result<PcpuPerf, SourceError>;
}

/// Receives every event. The guest decides how often events come: an implementation that stores or
/// prints them bounds what it keeps.
pub trait Events: Send + Sync {
    /// `event` has happened, on the calling thread.
    fn record(&self, event: &Event);
}

/// Why a clamp is not in force. Plain values, so that a flood of refusals allocates nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ActuateError {
    /// The host refused a call.
    #[error("the host refused {call} for domain {domain}: errno {errno}")]
    Refused {
        /// The domain.
        domain: DomainId,
        /// What was called.
        call: &'static str,
        /// The error number that it returned.
        errno: i32,
    },
    /// No thread of the domain is registered, or the domain isn't known at all.
    #[error("no thread is registered for domain {domain}")]
    NoThread {
        /// The domain.
        domain: DomainId,
    },
    /// Clamps mean nothing to this domain's threads.
    #[error("clamps don't apply to domain {domain}: {reason}")]
    NotApplicable {
        /// The domain.
        domain: DomainId,
        /// Why not.
        reason: &'static str,
    },
}

/// Why a pCPU's state is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SourceError {
    /// The vCPU's thread has not been registered.
    #[error("no thread is registered for vCPU {vcpu}")]
    NoThread {
        /// The vCPU.
        vcpu: VcpuId,
    },
    /// Where the thread runs could not be read.
    #[error("can't find which pCPU vCPU {vcpu} is on: errno {errno}")]
    NoPlace {
        /// The vCPU.
        vcpu: VcpuId,
        /// Error number, 0 when the text made no sense.
        errno: i32,
    },
    /// The pCPU has no frequency to read: no cpufreq, or it is offline.
    #[error("pCPU {pcpu} has no readable frequency: errno {errno}")]
    NoFrequency {
        /// The pCPU.
        pcpu: u32,
        /// Error number, 0 when there is no file or its text made no sense.
        errno: i32,
    },
    /// The figures contradict each other: a frequency or maximum of 0.
    #[error("pCPU {pcpu} reports {khz}, and {reference} for its capacity")]
    Implausible {
        /// The pCPU.
        pcpu: u32,
        /// Its frequency.
        khz: Khz,
        /// Its maximum.
        reference: Khz,
    },
}

/// Something that happened. `vcpu` is the one whose register was accessed, which need not be the
/// one that ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The guest wrote set_perf.
    Request {
        /// Whose register.
        vcpu: VcpuId,
        /// Its domain.
        domain: DomainId,
        /// The value written, unchecked; 0 takes the domain's request back.
        khz: Khz,
    },
    /// A clamp is in force on the host.
    Applied {
        /// Whose request.
        vcpu: VcpuId,
        /// Its domain.
        domain: DomainId,
        /// The clamp.
        clamp: Clamp,
    },
    /// The clamp was in force already; the host was not called.
    Unchanged {
        /// Whose request.
        vcpu: VcpuId,
        /// Its domain.
        domain: DomainId,
        /// The clamp.
        clamp: Clamp,
    },
    /// A newer request of the domain came before this one reached the host.
    Superseded {
        /// Whose request.
        vcpu: VcpuId,
        /// Its domain.
        domain: DomainId,
    },
    /// Requests of a vCPU were overtaken by a newer one of the domain before the device saw them.
    Coalesced {
        /// Whose register.
        vcpu: VcpuId,
        /// Its domain.
        domain: DomainId,
        /// How many.
        count: u64,
    },
    /// The vCPU's requests come faster than the limit allows: this one waits for a token, unless
    /// a newer one of the domain comes first.
    Limited {
        /// Whose request.
        vcpu: VcpuId,
        /// Its domain.
        domain: DomainId,
    },
    /// A domain's request is a ceiling too, which none was before:
    /// [`Device::lift_ceilings`](crate::Device::lift_ceilings) ends it.
    Ceiling {
        /// The domain.
        domain: DomainId,
    },
    /// The host did not put the clamp into force.
    Refused {
        /// Whose request.
        vcpu: VcpuId,
        /// Its domain.
        domain: DomainId,
        /// The clamp.
        clamp: Clamp,
        /// The host's error.
        error: ActuateError,
    },
    /// Clamps mean nothing to the domain's threads.
    NotApplicable {
        /// Whose request.
        vcpu: VcpuId,
        /// Its domain.
        domain: DomainId,
        /// Why not.
        reason: &'static str,
    },
    /// The vCPU's next request was made earlier, at this time.
    Written {
        /// Whose register.
        vcpu: VcpuId,
        /// In ns of CLOCK_MONOTONIC.
        at_ns: u64,
    },
    /// The device has read a new value of cur_perf.
    Moved {
        /// Whose.
        vcpu: VcpuId,
        /// The value that the guest reads.
        khz: Khz,
    },
    /// An access that the contract doesn't have. Read as 0, or dropped.
    IllegalAccess {
        /// Whose page; `None` in the padding after the last one.
        vcpu: Option<VcpuId>,
        /// Offset in the region, bytes.
        offset: u64,
        /// Width, bytes.
        len: usize,
        /// Whether it was a write.
        write: bool,
    },
    /// The pCPU's state could not be learned; the guest was shown the last good value.
    SourceFailed {
        /// Whose register.
        vcpu: VcpuId,
        /// What failed.
        error: SourceError,
    },
}

impl Event {
    /// What came of putting `clamp` into force for a request.
    #[must_use]
    pub fn outcome(
        vcpu: VcpuId,
        domain: DomainId,
        clamp: Clamp,
        applied: Result<(), ActuateError>,
    ) -> Self {
        match applied {
            Ok(()) => Self::Applied {
                vcpu,
                domain,
                clamp,
            },
            Err(ActuateError::NotApplicable { reason, .. }) => Self::NotApplicable {
                vcpu,
                domain,
                reason,
            },
            Err(error) => Self::Refused {
                vcpu,
                domain,
                clamp,
                error,
            },
        }
    }
}

impl<T: Actuator + ?Sized> Actuator for Arc<T> {
    fn apply(&self, domain: DomainId, clamp: Clamp) -> Result<(), ActuateError> {
        (**self).apply(domain, clamp)
    }

    fn serves_any_vcpu(&self) -> bool {
        (**self).serves_any_vcpu()
    }
}

impl<T: Source + ?Sized> Source for Arc<T> {
    fn sample(&self, vcpu: VcpuId) -> Result<PcpuPerf, SourceError> {
        (**self).sample(vcpu)
    }
}

impl<T: Events + ?Sized> Events for Arc<T> {
    fn record(&self, event: &Event) {
        (**self).record(event);
    }
}

/// Discards all events.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoEvents;

impl Events for NoEvents {
    fn record(&self, _event: &Event) {}
}
