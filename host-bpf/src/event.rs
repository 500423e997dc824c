// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Events from the programs to the VMM: requests that the kernel did not apply itself, and the
//! outcome of each request if the vCPU's policy enables that.

#![forbid(unsafe_code)]
// Without the loader they have no receiver.
#![cfg_attr(not(feature = "load"), allow(dead_code))]

use vcpufreq_device::{Clamp, Khz, SET_PERF_KHZ, VcpuId};

use crate::layout::{self, EVENT_SIZE};
use crate::policy::VcpuPolicy;

/// An event of the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BpfEvent {
    /// A request waits for the worker.
    Waiting(WorkerRequest),
    /// A request and its outcome, if the vCPU's policy enables these events.
    Handled(HandledRequest),
    /// Other load on the pCPUs of this domain has changed: apply its clamp again.
    Refresh(u32),
    /// This domain's request is a ceiling too, which the worker is to end by
    /// `HostBpf::lift_ceiling`.
    Ceiling(u32),
}

/// A request that waits for the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerRequest {
    /// Whose register was written.
    pub vcpu: VcpuId,
    /// Index of its domain.
    pub domain: u32,
    /// The vCPU that wrote it, which pays for it.
    pub by: VcpuId,
    /// Over the rate limit: not before this time, in ns of CLOCK_MONOTONIC.
    pub not_before_ns: Option<u64>,
}

/// A request, and what became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandledRequest {
    /// Whose register was written.
    pub vcpu: VcpuId,
    /// Index of its domain.
    pub domain: u32,
    /// The value written, unchecked.
    pub khz: Khz,
    /// When, in ns of CLOCK_MONOTONIC.
    pub at_ns: u64,
    /// The clamp of that value.
    pub clamp: Clamp,
    /// What became of it.
    pub outcome: RequestOutcome,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestOutcome {
    /// The kernel module puts it into force before the guest goes on.
    InKernel,
    /// It was in force.
    Unchanged,
    /// It is over the rate limit, and waits.
    Limited,
    /// It waits for the worker.
    LeftToWorker,
    /// The kernel module could not put it into force.
    Refused,
    /// No clamp serves it.
    NotApplicable,
}

/// A `struct vcpufreq_bpf_event`, unless it is none.
#[must_use]
pub fn parse(bytes: &[u8]) -> Option<BpfEvent> {
    let bytes: &[u8; EVENT_SIZE] = bytes.try_into().ok()?;
    let word = |at: usize| {
        let end = bytes.get(at..)?.first_chunk()?;
        Some(u32::from_ne_bytes(*end))
    };
    let ns = u64::from_ne_bytes(*bytes.get(16..)?.first_chunk()?);
    let vcpu = VcpuId(u16::try_from(word(0)?).ok()?);
    let domain = word(4)?;
    let by = VcpuId(u16::try_from(word(32)?).ok()?);
    let waiting = |not_before_ns| {
        BpfEvent::Waiting(WorkerRequest {
            vcpu,
            domain,
            by,
            not_before_ns,
        })
    };
    Some(match word(8)? {
        layout::APPLY => waiting(None),
        layout::DEFERRED => waiting(Some(ns)),
        layout::HANDLED => BpfEvent::Handled(HandledRequest {
            vcpu,
            domain,
            khz: Khz(word(12)? & SET_PERF_KHZ),
            at_ns: ns,
            clamp: Clamp::from_bits(word(24)?)?,
            outcome: *OUTCOMES.get(usize::try_from(word(28)?).ok()?)?,
        }),
        layout::REFRESH => BpfEvent::Refresh(domain),
        layout::FIRST_CEILING => BpfEvent::Ceiling(domain),
        _ => return None,
    })
}

/// What the kernel puts before an event in the ring, in bytes.
const HEADER: usize = 8;

/// Bytes of the ring of events; `None` is the object's default, for a VM that reports each
/// request: a guest makes any number of these. Other events are bounded: at most one of each kind per
/// domain and one per vCPU are in the ring. The ring is mapped twice, and both count as this process'
/// memory.
#[cfg_attr(not(feature = "load"), allow(dead_code))]
pub(crate) fn room(vcpus: &[VcpuPolicy], domains: u32) -> Option<u32> {
    if vcpus.iter().any(|vcpu| vcpu.tell) {
        return None;
    }
    // An operator's policy refreshes clamps too.
    let each = 3;
    // One more, for the kernel fills no ring to the last byte.
    let events = vcpus.len() + usize::try_from(each * domains).ok()? + 1;
    u32::try_from(events * (HEADER + EVENT_SIZE)).ok()
}

/// In the order of `enum vcpufreq_bpf_outcome`.
const OUTCOMES: [RequestOutcome; 6] = [
    RequestOutcome::InKernel,
    RequestOutcome::Unchanged,
    RequestOutcome::Limited,
    RequestOutcome::LeftToWorker,
    RequestOutcome::Refused,
    RequestOutcome::NotApplicable,
];

#[cfg(test)]
mod tests {
    //! Promises: an event is read as the programs write it; there is room for all that can be
    //! under way.
    use vcpufreq_device::{
        ClampMode, CurPerfVisibility, DomainId, Headroom, PerfTable, Util, VcpuSpec,
    };

    use super::*;
    use crate::policy::ActuateBy;

    fn policy(tell: bool) -> VcpuPolicy {
        VcpuPolicy {
            spec: VcpuSpec {
                table: PerfTable::try_from(vec![Khz(600_000)]).unwrap(),
                capacity: Util::MAX,
                domain: DomainId(0),
            },
            domain: 0,
            clamp: ClampMode::Floor,
            headroom: Headroom::None,
            visibility: CurPerfVisibility::Exact,
            actuate: ActuateBy::Kfunc,
            limit: None,
            sum: false,
            floor: Util::ZERO,
            tell,
        }
    }

    #[test]
    fn there_is_room_for_what_can_be_under_way() {
        let quiet = vec![policy(false); 2];
        // 8 and one more, of 48 bytes each: a page.
        assert_eq!(room(&quiet, 2), Some(432));
        assert_eq!(room(&vec![policy(false); 512], 512), Some(98_352));
        assert_eq!(room(&[policy(false), policy(true)], 2), None);
    }

    fn event(words: [u32; 4], ns: u64, clamp: u32, outcome: u32) -> Vec<u8> {
        let mut bytes: Vec<u8> = words.map(u32::to_ne_bytes).concat();
        bytes.extend(ns.to_ne_bytes());
        bytes.extend([clamp, outcome, 5, 0].map(u32::to_ne_bytes).concat());
        bytes
    }

    #[test]
    fn requests_that_wait() {
        let waiting = |not_before_ns| {
            Some(BpfEvent::Waiting(WorkerRequest {
                vcpu: VcpuId(3),
                domain: 2,
                by: VcpuId(5),
                not_before_ns,
            }))
        };
        let bytes = event([3, 2, 1, 600_000], 77, 0, 0);
        assert_eq!(parse(&bytes), waiting(Some(77)));
        assert_eq!(parse(&bytes[1..]), None);
        assert_eq!(parse(&event([3, 2, 0, 0], 77, 0, 0)), waiting(None));
        let refresh = event([3, 2, 3, 0], 77, 0, 0);
        assert_eq!(parse(&refresh), Some(BpfEvent::Refresh(2)));
        let ceiling = event([3, 2, 4, 0], 77, 0, 0);
        assert_eq!(parse(&ceiling), Some(BpfEvent::Ceiling(2)));
        assert_eq!(parse(&event([3, 2, 9, 0], 77, 0, 0)), None);
    }

    #[test]
    fn a_request_that_is_told() {
        let bytes = event([3, 2, 2, 600_000], 77, 109 | (1024 << 16), 3);
        let Some(BpfEvent::Handled(told)) = parse(&bytes) else {
            panic!("not reported")
        };
        assert_eq!((told.khz, told.at_ns), (Khz(600_000), 77));
        assert_eq!(told.clamp.min, Util::saturating(109));
        assert_eq!(told.clamp.max, Util::MAX);
        assert_eq!(told.outcome, RequestOutcome::LeftToWorker);
        assert_eq!(parse(&event([3, 2, 2, 1], 77, 0, 6)), None);
    }
}
