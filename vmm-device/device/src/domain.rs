// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A performance domain's current request, and the right to put it into force.
//!
//! Promises, whichever vCPUs write at the same time:
//! - the last value written is the last one put into force;
//! - for one domain, only one thread at a time calls the host;
//! - if another thread is already applying a request, the writer queues its value and returns. The
//!   applier makes at most [`MAX_HOST_CALLS`] host calls; a writer that arrives after that waits for the
//!   last of them. Without that bound, a flood by one vCPU would keep another one in the VMM.

#![forbid(unsafe_code)]

use std::sync::TryLockError;
use std::sync::atomic::Ordering::SeqCst;

use crate::limit::Bucket;
use crate::policy::Clamp;
use crate::regs::{CEILING_SHIFT, MAX_VCPUS, SET_PERF_KHZ};
use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, fence, unpoisoned};
use crate::units::{DomainId, Khz, VcpuId};

/// Host calls that one write makes at most: one for itself, the others for members that wrote
/// meanwhile. Workers of other paths use the same bound.
pub const MAX_HOST_CALLS: u32 = 4;

/// A domain's newest request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// The member whose register was written.
    pub vcpu: VcpuId,
    /// The vCPU that wrote it, if that is known: of any domain.
    pub by: Option<VcpuId>,
    /// The frequency; 0 takes the domain's request back.
    pub khz: Khz,
    /// For so long no more than that, either; 0: no ceiling.
    pub ceiling_ms: u32,
}

impl Request {
    /// That of a `value` in set_perf of `vcpu`.
    pub fn written(vcpu: VcpuId, by: Option<VcpuId>, value: u32) -> Self {
        Self {
            vcpu,
            by,
            khz: Khz(value & SET_PERF_KHZ),
            ceiling_ms: value >> CEILING_SHIFT,
        }
    }

    /// One for `khz` that is no ceiling.
    pub fn without_ceiling(vcpu: VcpuId, by: Option<VcpuId>, khz: Khz) -> Self {
        Self::written(vcpu, by, khz.0.min(SET_PERF_KHZ))
    }

    /// Whether it requests a frequency. 0 withdraws the domain's request.
    pub fn wants_frequency(&self) -> bool {
        self.khz != Khz(0)
    }
}

/// What a new request has changed.
#[derive(Debug)]
pub(crate) struct Publication {
    /// The older request that will now never be put into force.
    pub superseded: Option<Request>,
    /// The domain has a ceiling, and had none.
    pub first_ceiling: bool,
}

/// One performance domain.
#[derive(Debug)]
pub(crate) struct Domain {
    id: DomainId,
    newest: Newest,
    /// What is in force on the host, if that is known. The lock is the right to call the host.
    in_force: Mutex<Option<Clamp>>,
    /// The host is to be called although the clamp is in force: what it means there has changed.
    anew: AtomicBool,
    /// The holder of the lock won't look for newer requests again.
    last_round: AtomicBool,
    /// The newest request may be waiting for a token.
    deferred: AtomicBool,
    /// Until when its requests' ceiling holds, in ns of the device's clock; 0: there is none.
    ceiling_until: AtomicU64,
    /// Bits of what its clamps are kept within.
    bounds: AtomicU64,
    /// Pays for requests of unknown writers.
    pub bucket: Bucket,
}

impl Domain {
    pub fn new(id: DomainId) -> Self {
        Self {
            id,
            newest: Newest::default(),
            in_force: Mutex::new(None),
            anew: AtomicBool::new(false),
            last_round: AtomicBool::new(false),
            deferred: AtomicBool::new(false),
            ceiling_until: AtomicU64::new(0),
            bounds: AtomicU64::new(Clamp::NONE.bits().into()),
            bucket: Bucket::default(),
        }
    }

    /// Leaves the newest request to [`Domain::take_deferred`].
    pub fn defer(&self) {
        // Not a store: loom can't tell the order of a store and a swap.
        self.deferred.swap(true, SeqCst);
    }

    /// The request that waits for a token, if one does; it is no longer deferred.
    pub fn take_deferred(&self) -> Option<Request> {
        if !self.deferred.swap(false, SeqCst) {
            return None;
        }
        self.newest.peek().filter(|_| self.newest.is_pending())
    }

    /// Has the ceiling of the newest request hold until then; whether none did before.
    fn hold_ceiling(&self, until_ns: u64) -> bool {
        self.ceiling_until.swap(until_ns.max(1), SeqCst) == 0
    }

    /// When the ceiling ends.
    pub fn ceiling_until(&self) -> Option<u64> {
        let until_ns = self.ceiling_until.load(SeqCst);
        (until_ns != 0).then_some(until_ns)
    }

    /// Takes the ceiling of the newest request away, unless it holds for longer than that by now.
    /// `Ok`: the newest request is to be put into force by [`Domain::apply_pending`], and one that
    /// was in force. A ceiling that is written meanwhile may end too: the guest writes it again.
    pub fn lift_ceiling(&self, until_ns: u64) -> Result<Option<Request>, u64> {
        let ceiling = &self.ceiling_until;
        ceiling.compare_exchange(until_ns, 0, SeqCst, SeqCst)?;
        Ok(self.newest.lift_ceiling())
    }

    /// Keeps clamps that are put into force from now on within `bounds`.
    pub fn set_bounds(&self, bounds: Clamp) {
        self.bounds.swap(bounds.bits().into(), SeqCst);
    }

    /// What its clamps are kept within.
    pub fn bounds(&self) -> Clamp {
        let bits = u32::try_from(self.bounds.load(SeqCst)).ok();
        bits.and_then(Clamp::from_bits).unwrap_or(Clamp::NONE)
    }

    pub fn id(&self) -> DomainId {
        self.id
    }

    /// The newest request, whether in force or not.
    pub fn newest(&self) -> Option<Request> {
        self.newest.peek()
    }

    /// Makes `request`, which arrived at `now_ns` of the device's clock, the newest.
    pub fn publish(&self, request: Request, now_ns: u64) -> Publication {
        let superseded = self.newest.put(request);
        let held_ns = u64::from(request.ceiling_ms) * 1_000_000;
        // Behind the request: the end of an older ceiling would not find it.
        let first_ceiling = held_ns != 0 && self.hold_ceiling(now_ns + held_ns);
        Publication {
            superseded,
            first_ceiling,
        }
    }

    /// Makes `request` the newest unless there has been one; whether it did.
    pub fn adopt_request(&self, request: Request) -> bool {
        self.newest.put_first(request)
    }

    /// Has the newest request put into force once more by [`Domain::apply_pending`], whatever is in
    /// force; the request, unless it is still to be put into force anyway.
    pub fn renew(&self) -> Option<Request> {
        // Before the request: the thread that takes that is to see it.
        self.anew.swap(true, SeqCst);
        self.newest.renew()
    }

    /// As [`Self::renew`]; without a request, applies the clamp of no request, for `vcpu`.
    pub fn renew_or_none(&self, vcpu: VcpuId) -> Option<Request> {
        self.newest
            .renew_or(Request::without_ceiling(vcpu, None, Khz(0)))
    }

    /// Puts the newest request into force, or leaves it to the thread that holds the lock. `apply`
    /// gets a request and the clamp in force, and returns the clamp in force afterwards.
    pub fn apply_pending(&self, mut apply: impl FnMut(Request, Option<Clamp>) -> Option<Clamp>) {
        let mut rounds = 0;
        let mut right = self.enter();
        while let Some(mut in_force) = right.take() {
            let handed_over = loop {
                let last = rounds + 1 >= MAX_HOST_CALLS;
                self.last_round.store(last, SeqCst);
                // Pairs with the fence in `enter`: either the other writer sees `last_round`, or
                // its request is seen here.
                fence(SeqCst);
                let Some(request) = self.newest.take() else {
                    self.last_round.store(false, SeqCst);
                    break false;
                };
                let anew = self.anew.swap(false, SeqCst);
                *in_force = apply(request, in_force.filter(|_| !anew));
                rounds += 1;
                if last {
                    break true;
                }
            };
            drop(in_force);
            // Pairs with the fence in `enter`: a writer that found the lock taken has its request
            // seen here.
            fence(SeqCst);
            if !handed_over && self.newest.is_pending() {
                right = self.enter();
            }
        }
    }

    /// The right to call the host; `None` when another thread has it and will look again.
    fn enter(&self) -> Option<MutexGuard<'_, Option<Clamp>>> {
        fence(SeqCst);
        match self.in_force.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if self.last_round.load(SeqCst) => {
                Some(unpoisoned(self.in_force.lock()))
            }
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// The newest request in one word, so that the last write is the last swap.
#[derive(Debug, Default)]
struct Newest(AtomicU64);

/// There is a request.
const SOME: u64 = 1 << 63;
/// No thread has taken it yet.
const PENDING: u64 = 1 << 62;

impl Newest {
    fn put(&self, request: Request) -> Option<Request> {
        let before = self.0.swap(pack(request) | PENDING, SeqCst);
        (before & PENDING != 0).then(|| unpack(before))
    }

    fn put_first(&self, request: Request) -> bool {
        let first = |word| (word & SOME == 0).then_some(pack(request) | PENDING);
        self.0.fetch_update(SeqCst, SeqCst, first).is_ok()
    }

    fn renew(&self) -> Option<Request> {
        let pending = |word| (word & SOME != 0).then_some(word | PENDING);
        let before = self.0.fetch_update(SeqCst, SeqCst, pending).ok()?;
        (before & PENDING == 0).then(|| unpack(before))
    }

    /// Without a request, applies the clamp of `none`, which is no request afterwards either.
    fn renew_or(&self, none: Request) -> Option<Request> {
        let none = pack(none) & !SOME;
        let pending = |word| Some(if word & SOME != 0 { word } else { none } | PENDING);
        let before = self.0.fetch_update(SeqCst, SeqCst, pending).ok()?;
        let renewed = if before & SOME != 0 { before } else { none };
        (before & PENDING == 0).then(|| unpack(renewed))
    }

    fn lift_ceiling(&self) -> Option<Request> {
        let ceiling = u64::from(!SET_PERF_KHZ);
        let lifted = |word| (word & ceiling != 0).then_some(word & !ceiling | PENDING);
        let before = self.0.fetch_update(SeqCst, SeqCst, lifted).ok()?;
        (before & PENDING == 0).then(|| unpack(before & !ceiling))
    }

    fn take(&self) -> Option<Request> {
        let before = self.0.fetch_and(!PENDING, SeqCst);
        (before & PENDING != 0).then(|| unpack(before))
    }

    fn is_pending(&self) -> bool {
        self.0.load(SeqCst) & PENDING != 0
    }

    fn peek(&self) -> Option<Request> {
        let word = self.0.load(SeqCst);
        (word & SOME != 0).then(|| unpack(word))
    }
}

/// The writer, plus 1: in the 14 bits between `vcpu` and [`PENDING`].
const BY: u32 = 48;
const BY_MASK: u16 = (1 << 14) - 1;
const _: () = assert!(MAX_VCPUS < 1 << 14);

fn pack(request: Request) -> u64 {
    let by = request.by.map_or(0, |by| (by.0 + 1) & BY_MASK);
    let value = (request.khz.0 & SET_PERF_KHZ) | (request.ceiling_ms << CEILING_SHIFT);
    SOME | (u64::from(by) << BY) | (u64::from(request.vcpu.0) << 32) | u64::from(value)
}

fn unpack(word: u64) -> Request {
    let [k0, k1, k2, k3, v0, v1, b0, b1] = word.to_le_bytes();
    let by = u16::from_le_bytes([b0, b1]) & BY_MASK;
    let vcpu = VcpuId(u16::from_le_bytes([v0, v1]));
    let by = by.checked_sub(1).map(VcpuId);
    Request::written(vcpu, by, u32::from_le_bytes([k0, k1, k2, k3]))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::thread;

    use super::*;

    /// Two threads that meet at each round by spinning, so that they write within nanoseconds.
    fn meet(counter: &AtomicU32, round: u32) {
        counter.fetch_add(1, SeqCst);
        let mut spins = 0u32;
        while counter.load(SeqCst) < 2 * round {
            spins += 1;
            if spins % 1000 == 0 {
                thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }

    #[test]
    fn a_request_is_what_was_packed() {
        let last = VcpuId(511);
        for (vcpu, by, value) in [(VcpuId(0), None, 0), (last, Some(last), u32::MAX)] {
            let request = Request::written(vcpu, by, value);
            assert_eq!(unpack(pack(request) | PENDING), request);
        }
    }

    #[test]
    fn bounds_that_change_without_a_request_leave_none_behind() {
        let domain = Domain::new(DomainId(0));
        let vcpu = VcpuId(3);
        let mut applied = Vec::new();
        let mut apply = |domain: &Domain| {
            domain.apply_pending(|request, in_force| {
                applied.push((request.vcpu, request.khz));
                in_force
            });
        };
        assert!(domain.renew_or_none(vcpu).is_some());
        // It is still to be put into force.
        assert!(domain.renew_or_none(vcpu).is_none());
        apply(&domain);
        assert_eq!(domain.newest(), None);
        let request = Request::written(VcpuId(1), None, 700);
        assert!(domain.adopt_request(request));
        apply(&domain);
        assert_eq!(domain.renew_or_none(vcpu), Some(request));
        apply(&domain);
        let again = (VcpuId(1), Khz(700));
        assert_eq!(applied, [(vcpu, Khz(0)), again, again]);
    }

    /// A writer that comes while the other one is about to leave must not be left alone.
    #[test]
    fn nothing_is_pending_when_all_writers_have_returned() {
        let domain = Domain::new(DomainId(0));
        let (writing, checking) = (AtomicU32::new(0), AtomicU32::new(0));
        let left = AtomicU32::new(0);
        thread::scope(|scope| {
            for vcpu in 0..2u16 {
                let (domain, writing, checking, left) = (&domain, &writing, &checking, &left);
                scope.spawn(move || {
                    for round in 1..=100_000 {
                        let vcpu = VcpuId(vcpu);
                        meet(writing, 2 * round - 1);
                        // One of the two comes a little later, each time at another moment.
                        for _ in 0..u32::from(vcpu.0) * (round % 64) {
                            std::hint::spin_loop();
                        }
                        domain.publish(Request::written(vcpu, Some(vcpu), round), 0);
                        domain.apply_pending(|_, in_force| in_force);
                        meet(writing, 2 * round);
                        if vcpu.0 == 0 && domain.newest.is_pending() {
                            left.fetch_add(1, SeqCst);
                        }
                        meet(checking, round);
                    }
                });
            }
        });
        assert_eq!(left.into_inner(), 0, "rounds that left a request alone");
    }
}
