// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The clamps of domains: requests are granted, assumed and withdrawn here; the caller applies
//! their clamps. The device's `domain.rs` does so, too: it owns a domain's state, behind its lock, while
//! this follows state in maps, which programs change at any time. One loop would need a lock that the
//! programs can't take.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

use libbpf_rs::{MapCore as _, MapFlags};
use vcpufreq_bridge::{PcpuLoad, PcpuTarget};
use vcpufreq_device::{Clamp, Khz, MAX_HOST_CALLS, Util, VcpuId, clamp};

use super::{ApplyOutcome, HostBpf, LatestRequest, index};
use crate::error::BpfError;
use crate::event::WorkerRequest;
use crate::layout::{DomainEntry, NO_CLAMP};
use crate::policy::VcpuPolicy;
use crate::scx::{ScxError, ScxPins};
use crate::sync::unpoisoned;

/// SCX_TARGET_MAX of `bpf/scx.h`; above it the kernel's target isn't known.
const TARGET_MAX: u32 = 1024;

impl HostBpf {
    /// Applies a waiting request by `apply`. If the guest has changed its request meanwhile,
    /// `apply` is called again, and its last result is the outcome of this request. A later request
    /// has an outcome of its own.
    pub fn apply_waiting<E>(
        &self,
        waiting: &WorkerRequest,
        apply: impl FnMut(u32, Clamp) -> Result<(), E>,
    ) -> ApplyOutcome<E> {
        let (Some(vcpu), Some(domain)) = (
            self.vcpus.get(waiting.vcpu.index()),
            self.domain(waiting.domain),
        ) else {
            return ApplyOutcome::Nothing;
        };
        if let Some(due_ns) = waiting.not_before_ns {
            self.charge(waiting, due_ns);
            vcpu.deferred.store(0, SeqCst);
            self.grant(Some(waiting.vcpu), waiting.domain, domain);
        } else {
            domain.pending.store(0, SeqCst);
        }
        self.apply_pending(waiting.domain, apply)
    }

    /// Charges a request that had no token when it was made, and was due at `due_ns`: its writer and
    /// the VM may owe for it.
    fn charge(&self, waiting: &WorkerRequest, due_ns: u64) {
        let policies = unpoisoned(self.policies.read());
        let limit = policies.get(waiting.vcpu.index()).and_then(|p| p.limit);
        let (Some(limit), Some(vm)) = (limit, self.vm.get(0)) else {
            return;
        };
        let payer = self.vcpus.get(waiting.by.index()).map(|by| &by.due_ns);
        let payer = payer.map(|payer| (payer, limit.each()));
        let all = (&vm.due_ns, limit.of_vm(self.domain_count()));
        for (bucket, pace) in payer.into_iter().chain([all]) {
            let later = |due| Some(pace.charged(due, due_ns));
            // Always adds.
            let _ = bucket.fetch_update(SeqCst, SeqCst, later);
        }
    }

    /// Applies a domain's clamp by `apply`, as [`Self::apply_waiting`] does. If a new policy or a failed
    /// call has reset the clamp, the domain's newest request is granted again first.
    pub fn apply_pending<E>(
        &self,
        domain: u32,
        mut apply: impl FnMut(u32, Clamp) -> Result<(), E>,
    ) -> ApplyOutcome<E> {
        let Some(entry) = self.domain(domain) else {
            return ApplyOutcome::Nothing;
        };
        // The guest may not write again.
        if entry.clamp.load(SeqCst) == NO_CLAMP {
            self.grant(None, domain, entry);
        }
        let mut in_force = None;
        for _ in 0..MAX_HOST_CALLS {
            let wanted = entry.clamp.load(SeqCst);
            let Some(clamp) = Clamp::from_bits(wanted) else {
                break;
            };
            let request = clamp;
            let clamp = self.in_force(domain, request);
            if let Err(error) = apply(domain, clamp) {
                // Unless there is a newer one, which has an event of its own.
                let _ = entry
                    .clamp
                    .compare_exchange(wanted, NO_CLAMP, SeqCst, SeqCst);
                return ApplyOutcome::Failed(clamp, error);
            }
            let same = self.in_force(domain, request) == clamp;
            if entry.clamp.load(SeqCst) == wanted && same {
                return ApplyOutcome::InForce(clamp);
            }
            in_force = Some(clamp);
        }
        in_force.map_or(ApplyOutcome::Nothing, ApplyOutcome::Changing)
    }

    /// Withdraws the requests of all domains, for a guest that restarts. The caller then applies
    /// their clamps ([`Self::apply_pending`]).
    ///
    /// # Errors
    /// [`BpfError::Refused`] when a program can't be run (`ENOMEM`). All requests are withdrawn by
    /// then; cur_perf of this vCPU and those after it changes at the next event.
    pub fn reset(&self) -> Result<(), BpfError> {
        // This withdraws requests that wait for a token, too.
        for vcpu in self.vcpus.all() {
            vcpu.latest.fetch_and(!u64::from(u32::MAX), SeqCst);
        }
        let policies = unpoisoned(self.policies.read());
        for policy in policies.iter() {
            if let Some(domain) = self.domain(policy.domain) {
                domain.granted_khz.store(0, SeqCst);
                let none = Clamp::NONE.raised(policy.floor);
                domain.clamp.store(none.bits(), SeqCst);
            }
        }
        let domains: Vec<_> = policies.iter().map(|policy| policy.domain).collect();
        drop(policies);
        let vcpus = (0..=u16::MAX).take(self.vcpus.all().len());
        for vcpu in vcpus {
            self.programs().call("vcpufreq_refresh", vcpu)?;
        }
        for (vcpu, domain) in (0..=u16::MAX).map(VcpuId).zip(domains) {
            self.decide(vcpu, domain);
        }
        Ok(())
    }

    /// Makes `clamp` what a domain wants, of a VM whose requests reach no program: what is to be in
    /// force for it, with what is added now.
    #[must_use]
    pub fn want(&self, number: u32, clamp: Clamp) -> Clamp {
        let Some(domain) = self.domain(number) else {
            return clamp;
        };
        // To the programs a frequency of 0 is no request; how high it is, they don't look at.
        let asks = clamp.min != Util::ZERO;
        domain.granted_khz.store(asks.into(), SeqCst);
        domain.clamp.store(clamp.bits(), SeqCst);
        self.in_force(number, clamp)
    }

    /// Makes the service's scheduler apply a domain's clamp.
    ///
    /// # Errors
    /// [`BpfError::Refused`] with `ENOENT` when the service's scheduler is gone, there is no such
    /// domain, or requests change too fast for the program to follow: some threads may have the
    /// request. With `ENOMEM` the program was not run.
    pub fn ask_scx(&self, domain: u32) -> Result<(), BpfError> {
        self.programs().call("vcpufreq_scx", domain)
    }

    /// Makes `khz` the request of a vCPU's domain, as if the guest had written it at `now_ns`
    /// (CLOCK_MONOTONIC), unless it has made more than `count` requests. The caller then applies
    /// the clamp ([`Self::apply_pending`]). Requests that wait for a token since before are not
    /// served any more.
    pub fn assume(&self, vcpu: VcpuId, khz: Khz, count: u64, now_ns: u64) {
        let policies = unpoisoned(self.policies.read());
        let Some(policy) = policies.get(vcpu.index()) else {
            return;
        };
        let Some(domain) = self.domain(policy.domain) else {
            return;
        };
        if self.seen(vcpu) != count {
            return;
        }
        let assumed = self.assumed_ns.get(index(policy.domain));
        let assume = |ns| assumed.map(|assumed| assumed.store(ns, SeqCst));
        assume(now_ns);
        store_clamp(domain, policy, khz);
        self.show_granted(&policies, policy.domain);
        let number = policy.domain;
        drop(policies);
        self.decide(vcpu, number);
        // A program may have stored a newer request before this stored its own.
        if self.seen(vcpu) != count {
            assume(0);
            self.grant(None, number, domain);
        }
    }

    /// The frequency that a domain requests; `None` without a request.
    #[must_use]
    pub fn asked(&self, domain: u32) -> Option<Khz> {
        let granted = self.domain(domain)?.granted_khz.load(SeqCst);
        (granted != 0).then_some(Khz(granted))
    }

    /// Makes the newest request the domain's. With `id`, only if that vCPU wrote it: another
    /// vCPU's request is in force, or has an event of its own. If requests change faster than they
    /// can be sampled, the cached clamp is reset so that the next request is always applied.
    fn grant(&self, id: Option<VcpuId>, number: u32, domain: &DomainEntry) {
        let policies = unpoisoned(self.policies.read());
        let assumed = self.assumed_ns.get(index(number));
        let mut granted = false;
        for _ in 0..MAX_HOST_CALLS {
            let Some((writer, latest)) = self.newest(&policies, number) else {
                return;
            };
            let assumed_ns = assumed.map_or(0, |ns| ns.load(SeqCst));
            let others = id.is_some_and(|id| id != writer);
            if (others && !granted) || latest.at_ns < assumed_ns {
                return;
            }
            let Some(policy) = policies.get(writer.index()) else {
                return;
            };
            store_clamp(domain, policy, latest.khz);
            granted = true;
            // A program may have stored a newer one's before this did.
            if self.newest(&policies, number) == Some((writer, latest)) {
                self.show_granted(&policies, number);
                drop(policies);
                self.decide(writer, number);
                return;
            }
        }
        domain.clamp.store(NO_CLAMP, SeqCst);
    }

    /// Updates cur_perf where it shows the request.
    fn show_granted(&self, policies: &[VcpuPolicy], domain: u32) {
        let members = (0..=u16::MAX).zip(policies);
        for (id, _) in members.filter(|(_, policy)| {
            policy.domain == domain
                && policy.visibility == vcpufreq_device::CurPerfVisibility::Request
        }) {
            // Or its next event does.
            let _ = self.programs().call("vcpufreq_refresh", id);
        }
    }

    /// The last request of a domain, and whose register it was written to.
    fn newest(&self, policies: &[VcpuPolicy], domain: u32) -> Option<(VcpuId, LatestRequest)> {
        let members = (0..=u16::MAX).map(VcpuId).zip(policies);
        let members = members.filter(|(_, policy)| policy.domain == domain);
        members
            .filter_map(|(id, _)| Some((id, self.latest(id)?)))
            .max_by_key(|(_, latest)| latest.at_ns)
    }

    /// Makes the programs forget a domain's clamp, so that the next request is applied even if its
    /// clamp is the same.
    pub fn forget(&self, domain: u32) {
        if let Some(domain) = self.domain(domain) {
            domain.clamp.store(NO_CLAMP, SeqCst);
        }
    }

    /// The clamp that a domain should have; `None` when it isn't known.
    #[must_use]
    pub fn wanted(&self, domain: u32) -> Option<Clamp> {
        let clamp = Clamp::from_bits(self.domain(domain)?.clamp.load(SeqCst))?;
        Some(self.in_force(domain, clamp))
    }

    /// The utilization of a vCPU's pCPU at the last update; `None` if the programs don't look at it,
    /// as they do with sums and for scx.
    #[must_use]
    pub fn load(&self, vcpu: VcpuId) -> Option<PcpuLoad> {
        let policies = unpoisoned(self.policies.read());
        policies
            .get(vcpu.index())
            .filter(|policy| policy.looks_at_load())?;
        let entry = self.vcpus.get(vcpu.index())?;
        let util = |of: &AtomicU32| Util::saturating(of.load(SeqCst).into());
        Some(PcpuLoad {
            own: util(&entry.own_util),
            others: util(&entry.others_util),
        })
    }

    /// The service that its requests go to, for a VM with [`ActuateBy::Scx`](crate::ActuateBy::Scx).
    ///
    /// # Errors
    /// [`ScxError::NotRunning`] when it has ended, [`ScxError::Restarted`] when it was started
    /// again meanwhile, [`ScxError::OtherVersion`]; [`ScxError::Bpf`] when the kernel doesn't
    /// describe a map.
    pub fn scx(&self) -> Result<ScxPins, ScxError> {
        ScxPins::of_loaded(&self.programs())
    }

    /// What the service's scheduler has of a pCPU; `None` for a VM that has no part in it.
    #[must_use]
    pub fn target(&self, pcpu: u32) -> Option<PcpuTarget> {
        let programs = self.sizes.scx.then(|| self.programs())?;
        let cpus = programs.map("scx_cpus").ok()?;
        let entry = cpus.lookup(&pcpu.to_ne_bytes(), MapFlags::ANY).ok()??;
        // `sum` and `set` of struct vcpufreq_scx_cpu.
        let word = |at: usize| Some(u32::from_ne_bytes(*entry.get(at..)?.first_chunk()?));
        let (sum, set) = (word(0)?, word(4)?);
        (set <= TARGET_MAX).then_some(PcpuTarget {
            // Between two CPUs a part may be taken out before it is added.
            sum: i32::try_from(sum).map_or(0, |_| sum),
            target: Util::saturating(set.into()),
        })
    }

    /// Marks a [`BpfEvent::Refresh`](crate::BpfEvent::Refresh) as being carried out: a later change
    /// has an event of its own.
    pub fn begin_refresh(&self, domain: u32) {
        if let Some(domain) = self.domain(domain) {
            domain.refresh.store(0, SeqCst);
        }
    }

    /// When a domain's ceiling ends, in ns of CLOCK_MONOTONIC, if it has one.
    #[must_use]
    pub fn ceiling_until(&self, number: u32) -> Option<u64> {
        let until_ns = self.domain(number)?.ceiling_until.load(SeqCst);
        (until_ns != 0).then_some(until_ns)
    }

    /// Ends a domain's ceiling if it holds until then, and no longer since the guest has written it
    /// again. Whether the clamp has changed, which the caller then applies ([`Self::apply_pending`]).
    pub fn lift_ceiling(&self, number: u32, until_ns: u64) -> bool {
        let Some(domain) = self.domain(number) else {
            return false;
        };
        let ended = domain
            .ceiling_until
            .compare_exchange(until_ns, 0, SeqCst, SeqCst);
        // One that is written meanwhile may end too: the guest writes it again.
        let max = Util::MAX;
        let without = |bits| {
            let clamp = Clamp::from_bits(bits)?;
            (clamp.max != max).then_some(Clamp { max, ..clamp }.bits())
        };
        ended.is_ok() && domain.clamp.fetch_update(SeqCst, SeqCst, without).is_ok()
    }

    /// Keeps a domain's clamps within `bounds` from now on. The caller then applies the clamp
    /// ([`Self::apply_pending`]).
    pub fn set_bounds(&self, number: u32, bounds: Clamp) {
        if let Some(domain) = self.domain(number) {
            domain.bounds.store(bounds.bits(), SeqCst);
        }
    }

    /// The clamp in force where a domain requests `clamp`: with what is added to it, within its bounds.
    fn in_force(&self, number: u32, clamp: Clamp) -> Clamp {
        let policies = unpoisoned(self.policies.read());
        let mut members = policies.iter();
        let policy = members.find(|policy| policy.domain == number);
        let (Some(domain), Some(policy)) = (self.domain(number), policy) else {
            return clamp;
        };
        let bounds = Clamp::from_bits(domain.bounds.load(SeqCst)).unwrap_or(Clamp::NONE);
        let clamp = match domain.granted_khz.load(SeqCst) {
            0 => clamp,
            _ => {
                // Above it is the vCPU that it is of.
                let [.., a, b, c, d] = domain.others.load(SeqCst).to_be_bytes();
                policy.summed(clamp, u32::from_be_bytes([a, b, c, d]))
            }
        };
        clamp.within(bounds).raised(policy.floor)
    }
}

/// Sets a domain's clamp to that of a request for `khz`, which is no ceiling: the worker doesn't know
/// how old one is.
fn store_clamp(domain: &DomainEntry, policy: &VcpuPolicy, khz: Khz) {
    let decision = clamp(&policy.spec, khz, policy.clamp, policy.headroom);
    domain.granted_khz.store(decision.granted.0, SeqCst);
    let clamp = decision.clamp.raised(policy.floor);
    domain.clamp.store(clamp.bits(), SeqCst);
}
