// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The worker serves the requests that the programs leave to the VMM. It periodically checks for
//! writes that they missed and for clamps that the module could not apply.

use std::iter;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use vcpufreq_bridge::{BridgeThread, Doorbell, GuestFacts, KvmOffload, TURNS, budget::Budget};
use vcpufreq_device::{
    ActuateError, Actuator, Clamp, CounterSnapshot, DomainId, Event, Events, Khz, VcpuId,
};

use super::events::refusal;
use super::{ReportPanic, Shared, WatchedVcpu};
use crate::loss_detector::LossDetector;
use crate::sync::unpoisoned;
use crate::{ApplyOutcome, BpfEvent, BpfPages, WorkerEvents, WorkerRequest};

/// How often to look for writes that the programs haven't seen.
pub(super) const LOOK: Duration = Duration::from_millis(100);
/// Part of the time that the thread may run: one in this many. Where a guest floods its registers,
/// a busy CPU beside it loses to this thread, its interrupts and its wake-ups twice that.
pub(super) const SHARE: u32 = 40;
/// How often to look for a VMM that was killed.
pub(super) const SWEEP: Duration = Duration::from_secs(1);
/// Events of one look, at most.
const REFUSALS_REPORTED: u64 = 16;

/// What one look has found.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MissedWrites {
    /// Writes that the programs haven't seen.
    missed: u64,
    /// Writes that they had seen by then, since the start.
    seen: u64,
}

impl Shared {
    pub(super) fn offload(&self, guest: &GuestFacts) -> KvmOffload {
        let bells = (0..=u16::MAX).map(VcpuId).zip(&self.signals);
        let bells = bells.map(|(vcpu, signal)| Doorbell::of_set_perf(vcpu, None, signal.clone()));
        KvmOffload {
            base: guest.base,
            pages: Some(Arc::new(BpfPages(self.host.clone()))),
            doorbells: bells.collect(),
            lost: self.lost.clone(),
            all_or_nothing: true,
            state: guest.state.clone(),
        }
    }

    pub(super) fn all_domains(&self) -> std::ops::Range<u32> {
        0..u32::try_from(self.domains.len()).unwrap_or(u32::MAX)
    }

    /// The worker: what the programs leave to it, until it is stopped.
    pub(super) fn work(&self, worker: &WorkerEvents, last_words: ReportPanic) {
        // Best effort: without these it is a thread like any other.
        let _ = vcpufreq_host::stay_off(&self.pcpus_of_vcpus);
        let _ = vcpufreq_host::clamp_current_thread_to_zero();
        self.embedder.on_thread(BridgeThread::Requests);
        match self.carry_out_requests(worker) {
            Ok(()) => last_words.disarm(),
            Err(error) => self.lose(error),
        }
    }

    fn carry_out_requests(&self, worker: &WorkerEvents) -> Result<(), String> {
        let mut waiting: Vec<WorkerRequest> = Vec::new();
        let mut detector = LossDetector::new(self.host.missed().unwrap_or(0));
        let (mut look_at, mut scx_at, mut sweep_at, mut gone) = (0, 0, 0, false);
        let (mut turn_at, mut budget) = (0, Budget::new(SHARE, Instant::now()));
        // Domains that may have a ceiling.
        let mut ceilings: Vec<u32> = Vec::new();
        let mut cpu_before = vcpufreq_host::thread_cpu_time();
        while !self.stop.load(SeqCst) {
            let now = vcpufreq_host::monotonic_ns();
            // Requests over the limit get a turn now and then.
            let due = waiting.iter().map(|w| match w.not_before_ns {
                Some(ns) => ns.max(turn_at),
                None => now,
            });
            let look = if self.looks_at_scx() {
                scx_at.min(look_at)
            } else {
                look_at
            };
            let ends = ceilings
                .iter()
                .filter_map(|domain| self.host.ceiling_until(*domain));
            let until = due.chain(ends).min().unwrap_or(look).min(look);
            let until = Duration::from_nanos(until.saturating_sub(now));
            let events = worker.wait(until).map_err(|error| error.to_string())?;
            for event in events {
                match event {
                    BpfEvent::Waiting(request) => waiting.push(request),
                    BpfEvent::Handled(handled) => self.handled(&handled),
                    BpfEvent::Refresh(domain) => self.refresh(domain),
                    BpfEvent::Ceiling(domain) if ceilings.contains(&domain) => {}
                    BpfEvent::Ceiling(domain) => ceilings.push(domain),
                }
            }
            let now = vcpufreq_host::monotonic_ns();
            let turn = now >= turn_at;
            // Domains of which a request waits on, in this turn.
            let mut changing = Vec::new();
            waiting.retain_mut(|request| {
                let limited = request.not_before_ns;
                if limited.is_some_and(|ns| !turn || ns > now) {
                    return true;
                }
                if limited.is_some() {
                    turn_at = now + ns(TURNS[0]);
                }
                request.not_before_ns = None;
                let request = WorkerRequest {
                    not_before_ns: limited,
                    ..*request
                };
                self.serve_one(&request, &mut changing)
            });
            ceilings.retain(|domain| self.keep_ceiling(*domain, now));
            if now >= scx_at {
                scx_at = now + ns(super::scx::LOOK);
                self.look_at_scx();
            }
            if now >= look_at {
                look_at = now + ns(LOOK);
                if now >= sweep_at {
                    sweep_at = now + ns(SWEEP);
                    self.host.sweep();
                }
                self.look_at_module();
                self.look_at_policy();
                // Also those that there was no room to tell of.
                ceilings = self.all_domains().collect();
                self.all_domains().for_each(|domain| self.time(domain));
                self.look_for_dropped(&mut waiting);
                let found = self.look(&mut waiting);
                gone = detector.add(found.missed, found.seen, || self.host.missed());
            }
            if gone {
                return Err("its programs don't see the guest's requests any more".to_owned());
            }
            let cpu = vcpufreq_host::thread_cpu_time();
            let used = cpu.saturating_sub(cpu_before);
            cpu_before = cpu;
            std::thread::sleep(budget.after(used, Instant::now()));
        }
        Ok(())
    }

    pub(super) fn lose(&self, why: impl Into<String>) {
        // The first reason is the one to tell.
        let _ = self.why_lost.set(why.into());
        self.stop.store(true, SeqCst);
        self.device.actuator().forget();
        // A full counter is readable too.
        let _ = self.lost.write(1);
    }

    /// Looks for writes that KVM has completed and no program has seen. Their values are lost: in
    /// their place a request for the vCPU's maximum is queued.
    fn look(&self, waiting: &mut Vec<WorkerRequest>) -> MissedWrites {
        self.count_missed(|vcpu, known, seen| {
            let max = self.device.config().vcpus[vcpu.index()].table.max();
            self.host
                .assume(vcpu, max, seen, vcpufreq_host::monotonic_ns());
            waiting.push(WorkerRequest {
                vcpu,
                domain: known.domain,
                by: vcpu,
                not_before_ns: None,
            });
        })
    }

    /// Calls `tell` for each vCPU with new writes that no program has seen, and with how many
    /// the programs have seen. One of the new ones is to be served; the others are counted.
    /// Signals are counted first: each write is seen before it is signalled.
    pub(super) fn count_missed(
        &self,
        mut tell: impl FnMut(VcpuId, &WatchedVcpu, u64),
    ) -> MissedWrites {
        // A reset does this too.
        let _alone = self.applying();
        let mut found = MissedWrites::default();
        let vcpus = (0..=u16::MAX).map(VcpuId).zip(&self.vcpus);
        for ((vcpu, known), signal) in vcpus.zip(&self.signals) {
            let news = signal.read().unwrap_or(0);
            let signals = known.signals.fetch_add(news, SeqCst) + news;
            let seen = self.host.seen(vcpu);
            found.seen += seen;
            let all = signals.saturating_sub(seen);
            let news = all.saturating_sub(known.missed.load(SeqCst));
            if news > 0 {
                found.missed += news;
                known.missed.store(all, SeqCst);
                known
                    .missed_at_ns
                    .store(vcpufreq_host::monotonic_ns(), SeqCst);
                self.device.count_in_kernel(vcpu, news);
                self.device.add_counters(
                    vcpu,
                    CounterSnapshot {
                        requests: news,
                        coalesced: news - 1,
                        ..CounterSnapshot::default()
                    },
                );
                known.unserved.fetch_add(1, Relaxed);
                tell(vcpu, known, seen);
            }
        }
        found
    }

    /// Checks for clamps that the module could not apply. The next request of such a domain is
    /// applied even if it is the same.
    pub(super) fn look_at_module(&self) {
        let Some(module) = &self.module else { return };
        for (domain, told) in (0..).zip(&self.refusals) {
            let Ok(applied) = module.applied(domain) else {
                continue;
            };
            let news = applied.refused.saturating_sub(told.load(SeqCst));
            if news == 0 {
                continue;
            }
            told.store(applied.refused, SeqCst);
            let clamp = self.host.wanted(domain).unwrap_or(Clamp::NONE);
            self.host.forget(domain);
            let vcpu = self.last_writer(domain);
            let Some(id) = self.id_of(domain) else {
                continue;
            };
            self.count_failed(domain, news);
            let error = refusal(id, Some(applied.last_errno));
            let event = Event::outcome(vcpu, id, clamp, Err(error));
            for _ in 0..news.min(REFUSALS_REPORTED) {
                self.device.events().record(&event);
            }
        }
    }

    /// Counts `news` requests of a domain's vCPUs that count as applied as refused, first the last
    /// writer's: the module doesn't report whose it refused.
    fn count_failed(&self, domain: u32, mut news: u64) {
        let last = self.last_writer(domain);
        self.sync_counters();
        let members = (0..=u16::MAX).map(VcpuId).zip(&self.vcpus);
        let members = members.filter(|(vcpu, one)| one.domain == domain && *vcpu != last);
        for vcpu in iter::once(last).chain(members.map(|(vcpu, _)| vcpu)) {
            news -= self.device.applied_was_refused(vcpu, news);
        }
    }

    /// Adds requests whose events found no room: events that report requests
    /// may have taken it.
    fn look_for_dropped(&self, waiting: &mut Vec<WorkerRequest>) {
        for (vcpu, known) in (0..=u16::MAX).map(VcpuId).zip(&self.vcpus) {
            let dropped = self
                .host
                .counters(vcpu)
                .map_or(0, |counted| counted.dropped);
            let news = dropped.saturating_sub(known.dropped.swap(dropped, Relaxed));
            if news > 0 {
                let coalesced = CounterSnapshot {
                    coalesced: news - 1,
                    ..CounterSnapshot::default()
                };
                self.device.add_counters(vcpu, coalesced);
                known.unserved.fetch_add(1, Relaxed);
                // As one that was over the limit, which may be what it was.
                waiting.push(WorkerRequest {
                    vcpu,
                    domain: known.domain,
                    by: vcpu,
                    not_before_ns: Some(vcpufreq_host::monotonic_ns()),
                });
            }
        }
    }

    /// The vCPU of a domain that made its newest request.
    pub(super) fn last_writer(&self, domain: u32) -> VcpuId {
        let members = (0..=u16::MAX).map(VcpuId).zip(&self.vcpus);
        let members = members.filter(|(_, known)| known.domain == domain);
        let last = members.max_by_key(|(vcpu, _)| self.host.latest(*vcpu).map(|l| l.at_ns));
        last.map_or(VcpuId(0), |(vcpu, _)| vcpu)
    }

    /// A domain's newest request; the maximum if the programs did not see its value.
    pub(super) fn newest(&self, domain: u32) -> Option<(VcpuId, Khz)> {
        let members = (0..=u16::MAX).map(VcpuId).zip(&self.vcpus);
        let members = members.filter(|(_, known)| known.domain == domain);
        let asked = members.filter_map(|(vcpu, known)| {
            let latest = self.host.latest(vcpu)?;
            let missed_at = known.missed_at_ns.load(SeqCst);
            if missed_at > latest.at_ns {
                let max = self.device.config().vcpus[vcpu.index()].table.max();
                return Some((missed_at, (vcpu, max)));
            }
            Some((latest.at_ns, (vcpu, latest.khz)))
        });
        let newest = asked.max_by_key(|(at, _)| *at).map(|(_, asked)| asked);
        // 0 withdraws the request.
        newest.filter(|(_, khz)| *khz != Khz(0))
    }

    /// Applies the domain's request that `request` announces. True if it must wait for another
    /// turn, since the guest changes its requests too fast. One waiting request of a domain is
    /// enough: all of them apply the domain's newest value.
    fn serve_one(&self, request: &WorkerRequest, changing: &mut Vec<u32>) -> bool {
        let vcpu = request.vcpu;
        let _alone = self.applying();
        let apply = |domain, clamp| self.apply(domain, clamp);
        let outcome = self.host.apply_waiting(request, apply);
        if matches!(outcome, ApplyOutcome::Changing(_)) && !changing.contains(&request.domain) {
            changing.push(request.domain);
            return true;
        }
        if let Some(known) = self.vcpus.get(vcpu.index()) {
            let in_force = matches!(outcome, ApplyOutcome::InForce(_));
            let latest = in_force.then(|| self.host.latest(vcpu)).flatten();
            // The time of a write that no program has seen is unknown.
            let seen = |at_ns: &u64| *at_ns > known.missed_at_ns.load(SeqCst);
            if let Some(at_ns) = latest.map(|latest| latest.at_ns).filter(seen) {
                let took = vcpufreq_host::monotonic_ns().saturating_sub(at_ns);
                known.clamp_after.record(took);
            }
            known.served.fetch_add(1, Relaxed);
        }
        self.time(request.domain);
        self.count(vcpu, request.domain, outcome);
        false
    }

    /// Counts what is no longer served: the worker has ended, and no program leaves anything
    /// to it, or no vCPU runs.
    /// What takes over gets the last request of each domain.
    pub(super) fn count_left(&self) {
        for (vcpu, known) in (0..=u16::MAX).map(VcpuId).zip(&self.vcpus) {
            let counted = self.host.counters(vcpu).unwrap_or_default();
            let dropped = known.dropped.swap(counted.dropped, Relaxed);
            let unseen = counted.dropped.saturating_sub(dropped);
            known.unserved.fetch_add(unseen, Relaxed);
            let all = counted.to_worker + known.unserved.load(Relaxed);
            let left = all.saturating_sub(known.served.swap(all, Relaxed));
            (0..left).for_each(|_| self.count_superseded(vcpu, known.domain));
        }
    }

    /// Applies a domain's clamp again; it counts as a request of the vCPU that wrote last.
    pub(super) fn apply_again(&self, domain: u32) {
        let vcpu = self.last_writer(domain);
        let request = CounterSnapshot {
            requests: 1,
            ..CounterSnapshot::default()
        };
        self.device.add_counters(vcpu, request);
        let _alone = self.applying();
        let apply = |domain, clamp| self.apply(domain, clamp);
        let outcome = self.host.apply_pending(domain, apply);
        self.count(vcpu, domain, outcome);
    }

    /// Ends the ceiling of `domain` when it is due; whether it has one still.
    fn keep_ceiling(&self, domain: u32, now: u64) -> bool {
        let Some(until) = self.host.ceiling_until(domain) else {
            return false;
        };
        if until <= now && self.host.lift_ceiling(domain, until) {
            self.host.decide(self.last_writer(domain), domain);
            self.apply_again(domain);
        }
        self.host.ceiling_until(domain).is_some()
    }

    /// Asks an operator's policy about each domain again: a vCPU that neither sleeps nor requests
    /// has what it answers by now.
    fn look_at_policy(&self) {
        if self.embedder.policy_holder_has_ended() {
            self.host.end_policy();
        }
        for domain in self.all_domains() {
            if self.host.decide(self.last_writer(domain), domain) {
                self.put_into_force(domain);
            }
        }
    }

    /// Puts into force what is added to a domain's request now.
    fn refresh(&self, domain: u32) {
        self.host.begin_refresh(domain);
        self.put_into_force(domain);
    }

    /// Puts a domain's clamp into force. It is no request, and isn't counted. What can't be put into
    /// force is tried again with the next one.
    fn put_into_force(&self, domain: u32) {
        let _alone = self.applying();
        let Some(id) = self.id_of(domain) else { return };
        let _ = self
            .host
            .apply_pending(domain, |domain, clamp| match &self.module {
                // The files' only writer: else it takes a clamp for in force that isn't.
                Some(module) => module
                    .refresh(domain, clamp)
                    .map_err(|error| refusal(id, error.raw_os_error())),
                None => {
                    let by_scx = self.by_scx(domain);
                    by_scx.unwrap_or_else(|| self.device.actuator().apply(id, clamp))
                }
            });
        let members = (0..=u16::MAX).map(VcpuId).zip(&self.vcpus);
        let members = members.filter(|(_, known)| known.domain == domain);
        members.for_each(|(vcpu, _)| self.tell_load(vcpu));
    }

    /// An actuator is called by one thread at a time: the worker's, and at a
    /// reset the main one's.
    fn applying(&self) -> MutexGuard<'_, ()> {
        unpoisoned(self.applying.lock())
    }

    fn apply(&self, domain: u32, clamp: Clamp) -> Result<(), ActuateError> {
        let id = self.id_of(domain).ok_or(ActuateError::NoThread {
            domain: DomainId(domain),
        })?;
        if let Some(applied) = self.by_scx(domain) {
            return applied;
        }
        match &self.module {
            Some(module) => module
                .apply(domain, clamp)
                .map_err(|error| refusal(id, error.raw_os_error())),
            None => self.device.actuator().apply(id, clamp),
        }
    }

    /// Counts what became of a request.
    fn count(&self, vcpu: VcpuId, domain: u32, outcome: ApplyOutcome<ActuateError>) {
        let (clamp, applied) = match outcome {
            ApplyOutcome::InForce(clamp) | ApplyOutcome::Changing(clamp) => (clamp, Ok(())),
            ApplyOutcome::Failed(clamp, error) => (clamp, Err(error)),
            ApplyOutcome::Nothing => return self.count_superseded(vcpu, domain),
        };
        let Some(id) = self.id_of(domain) else {
            return;
        };
        if self.module.is_none() || applied.is_ok() {
            let event = Event::outcome(vcpu, id, clamp, applied);
            return self.device.count(&event);
        }
        // [`Self::look_at_module`] takes it from these and reports it, as all that the module could
        // not do.
        let applied = CounterSnapshot {
            applied: 1,
            ..CounterSnapshot::default()
        };
        self.device.add_counters(vcpu, applied);
    }

    /// Adds what the programs have counted since the last call to the device's counters.
    pub(super) fn sync_counters(&self) {
        for (vcpu, known) in (0..=u16::MAX).map(VcpuId).zip(&self.vcpus) {
            let mut synced = unpoisoned(known.synced.lock());
            let now = self.host.counters(vcpu).unwrap_or_default().outcomes();
            let news = now.since(*synced);
            *synced = now;
            self.device.count_in_kernel(vcpu, news.requests);
            self.device.add_counters(vcpu, news);
        }
    }

    pub(super) fn count_superseded(&self, vcpu: VcpuId, domain: u32) {
        if let Some(domain) = self.id_of(domain) {
            self.device.count(&Event::Superseded { vcpu, domain });
        }
    }

    pub(super) fn id_of(&self, domain: u32) -> Option<DomainId> {
        let index = usize::try_from(domain).ok()?;
        self.domains.get(index).copied()
    }
}

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
