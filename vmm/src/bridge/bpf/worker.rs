// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The worker: what the programs leave to the VMM, and a look now and then for
//! what they have not seen and what the module could not do.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::{Duration, Instant};

use vcpufreq_device::{ActuateError, Actuator, Demand, Events, Khz, VcpuId, host};
use vcpufreq_host_bpf::{Event, Waiting, Worker};

use super::events::{applied_event, not_applicable, refusal, refused};
use super::{Shared, Shown};
use crate::budget::Budget;
use crate::housekeeper::TURNS;
use crate::sys;
use crate::vm::in_kernel::{Doorbell, InKernel, Taken};
use crate::vm::sys::thread_cpu_time;

/// How often to look for writes that the programs haven't seen.
const LOOK: Duration = Duration::from_millis(100);
/// So many looks in a row that find nothing but such writes: the programs are
/// gone.
const LOOKS_IN_VAIN: u32 = 2;
/// Events of one look, at most.
const REFUSALS_TOLD: u64 = 16;

/// What one look has found.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Look {
    /// Writes that the programs haven't seen.
    missed: u64,
    /// Writes that they had seen by then, since the start.
    seen: u64,
}

impl Shared {
    pub(super) fn in_kernel(&self, taken: Arc<Taken>) -> InKernel {
        let bells = (0..=u16::MAX).map(VcpuId).zip(&self.vcpus);
        let bells = bells.map(|(vcpu, known)| Doorbell {
            vcpu,
            khz: None,
            event: known.signal.clone(),
        });
        InKernel {
            pages: Arc::new(Shown(self.host.clone())),
            doorbells: bells.collect(),
            lost: self.lost.clone(),
            all_or_nothing: true,
            taken,
        }
    }

    pub(super) fn all_domains(&self) -> std::ops::Range<u32> {
        0..u32::try_from(self.domains.len()).unwrap_or(u32::MAX)
    }

    /// The worker: what the programs leave to it, until it is stopped.
    pub(super) fn work(&self, worker: &Worker) {
        // Best effort: without these it is a thread like any other.
        let _ = crate::vm::sys::stay_off(&self.pcpus_of_vcpus);
        let _ = host::clamp_current_thread_to_zero();
        let last_words = LastWords(self);
        match self.serve(worker) {
            Ok(()) => std::mem::forget(last_words),
            Err(error) => self.lose(error),
        }
    }

    fn serve(&self, worker: &Worker) -> Result<(), String> {
        let mut waiting: Vec<Waiting> = Vec::new();
        let (mut look_at, mut before, mut in_vain) = (0, Look::default(), 0);
        let (mut turn_at, mut budget) = (0, Budget::new(Instant::now()));
        while !self.stop.load(SeqCst) {
            let now = sys::monotonic_ns();
            // Requests over the limit get a turn now and then.
            let due = waiting.iter().filter_map(|w| w.not_before_ns);
            let due = due.min().map_or(look_at, |ns| ns.max(turn_at));
            let until = look_at.min(due).saturating_sub(now);
            let events = worker.wait(Duration::from_nanos(until));
            for event in events.map_err(|error| error.to_string())? {
                match event {
                    Event::Waiting(request) => waiting.push(request),
                    Event::Told(told) => self.told(&told),
                }
            }
            let cpu_before = thread_cpu_time();
            let now = sys::monotonic_ns();
            let turn = now >= turn_at;
            waiting.retain(|request| {
                let due = request.not_before_ns.is_none_or(|ns| turn && ns <= now);
                if due {
                    self.serve_one(request);
                    if request.not_before_ns.is_some() {
                        turn_at = now + ns(TURNS[0]);
                    }
                }
                !due
            });
            let used = thread_cpu_time().saturating_sub(cpu_before);
            if now >= look_at {
                look_at = now + ns(LOOK);
                self.look_at_module();
                self.look_for_dropped();
                let found = self.look();
                in_vain = match found.missed {
                    0 => in_vain,
                    _ if found.seen != before.seen => 0,
                    _ => in_vain + 1,
                };
                before = found;
            }
            if in_vain == LOOKS_IN_VAIN {
                return Err("its programs don't see the guest's requests any more".to_owned());
            }
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

    /// Looks for writes that KVM has finished and no program has seen, and asks
    /// for the highest in their place. Signals are counted first: each write is
    /// seen before it is signalled.
    pub(super) fn look(&self) -> Look {
        let mut found = Look::default();
        for (vcpu, known) in (0..=u16::MAX).map(VcpuId).zip(&self.vcpus) {
            let news = known.signal.read().unwrap_or(0);
            let signals = known.signals.fetch_add(news, SeqCst) + news;
            let seen = self.host.seen(vcpu);
            found.seen += seen;
            let missed = signals.saturating_sub(seen);
            let news = missed.saturating_sub(known.missed.load(SeqCst));
            if news == 0 {
                continue;
            }
            found.missed += news;
            known.missed.store(missed, SeqCst);
            known.seen_at_miss.store(seen, SeqCst);
            let max = self.device.config().vcpus[vcpu.index()].table.max();
            self.host.assume(vcpu, max, seen);
            self.settle(known.domain);
        }
        found
    }

    /// Looks for what the module could not put into force: the next request is
    /// to try again, whatever it asks for.
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
            let demand = self.host.wanted(domain).unwrap_or(Demand::NONE);
            self.host.forget(domain);
            let vcpu = self.last_writer(domain);
            let index = usize::try_from(domain).unwrap_or(usize::MAX);
            let (Some(known), Some(&id)) = (self.vcpus.get(vcpu.index()), self.domains.get(index))
            else {
                continue;
            };
            known.failed.fetch_add(news, Relaxed);
            let event = refused(vcpu, id, demand, refusal(id, Some(applied.last_errno)));
            for _ in 0..news.min(REFUSALS_TOLD) {
                self.observer.record(&event);
            }
        }
    }

    /// Carries out requests whose events found no room: those that tell of
    /// requests may have taken it.
    fn look_for_dropped(&self) {
        for (vcpu, known) in (0..=u16::MAX).map(VcpuId).zip(&self.vcpus) {
            let dropped = self
                .host
                .counters(vcpu)
                .map_or(0, |counted| counted.dropped);
            if known.dropped.swap(dropped, Relaxed) != dropped {
                self.serve_one(&Waiting {
                    vcpu,
                    domain: known.domain,
                    not_before_ns: Some(0),
                });
            }
        }
    }

    /// The member of a domain that asked last.
    fn last_writer(&self, domain: u32) -> VcpuId {
        let members = (0..=u16::MAX).map(VcpuId).zip(&self.vcpus);
        let members = members.filter(|(_, known)| known.domain == domain);
        let last = members.max_by_key(|(vcpu, _)| self.host.latest(*vcpu).map(|l| l.at_ns));
        last.map_or(VcpuId(0), |(vcpu, _)| vcpu)
    }

    /// What a domain's members asked for last; the maximum where that was not
    /// seen.
    pub(super) fn newest(&self, domain: u32) -> Option<(VcpuId, Khz)> {
        let members = (0..=u16::MAX).map(VcpuId).zip(&self.vcpus);
        let members = members.filter(|(_, known)| known.domain == domain);
        let asked = members.filter_map(|(vcpu, known)| {
            let latest = self.host.latest(vcpu)?;
            let unseen = known.seen_at_miss.load(SeqCst) == self.host.seen(vcpu);
            if unseen {
                let max = self.device.config().vcpus[vcpu.index()].table.max();
                return Some((u64::MAX, (vcpu, max)));
            }
            (latest.khz != Khz(0)).then_some((latest.at_ns, (vcpu, latest.khz)))
        });
        asked.max_by_key(|(at, _)| *at).map(|(_, asked)| asked)
    }

    pub(super) fn serve_one(&self, request: &Waiting) {
        let vcpu = request.vcpu;
        let apply = |domain, demand| self.apply(vcpu, domain, demand);
        if self.host.serve(request, apply)
            && let (Some(known), Some(latest)) =
                (self.vcpus.get(vcpu.index()), self.host.latest(vcpu))
        {
            let took = sys::monotonic_ns().saturating_sub(latest.at_ns);
            known.clamp_after.record(took);
        }
    }

    /// Puts what a domain wants into force.
    pub(super) fn settle(&self, domain: u32) {
        let vcpu = self.last_writer(domain);
        self.host
            .settle(domain, |domain, demand| self.apply(vcpu, domain, demand));
    }

    pub(super) fn apply(&self, vcpu: VcpuId, domain: u32, demand: Demand) -> bool {
        let index = usize::try_from(domain).unwrap_or(usize::MAX);
        let (Some(&id), Some(known)) = (self.domains.get(index), self.vcpus.get(vcpu.index()))
        else {
            return false;
        };
        let applied = match &self.module {
            Some(module) => module
                .apply(domain, demand)
                .map_err(|error| refusal(id, error.raw_os_error())),
            None => self.device.actuator().apply(id, demand),
        };
        let (counter, event) = match applied {
            Ok(()) => (&known.applied, applied_event(vcpu, id, demand)),
            Err(ActuateError::NotApplicable { reason, .. }) => {
                (&known.not_applicable, not_applicable(vcpu, id, reason))
            }
            Err(error) => (&known.refused, refused(vcpu, id, demand, error)),
        };
        counter.fetch_add(1, Relaxed);
        self.observer.record(&event);
        applied.is_ok()
    }
}

fn ns(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Says so when the worker panics.
struct LastWords<'a>(&'a Shared);

impl Drop for LastWords<'_> {
    fn drop(&mut self) {
        self.0.lose("the thread that carries out requests has died");
    }
}
