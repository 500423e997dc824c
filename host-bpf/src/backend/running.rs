// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The path `bpf` while its guest runs, until it is lost or the guest ends.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use vcpufreq_bridge::{AccessPath, BackendError, MmioDevice, RunningBackend, VcpuSnapshot};
use vcpufreq_device::{
    Clamp, HISTOGRAM_BUCKETS, HistogramSnapshot, Khz, PageMemory, REG_CUR_PERF, REGION_STRIDE,
    VcpuId,
};
use vcpufreq_host::Tid;

use super::setup::pcpus;
use super::{BpfPath, Shared};
use crate::BpfPages;
use crate::sync::unpoisoned;

impl RunningBackend for BpfPath {
    fn memory(&self) -> Box<dyn PageMemory> {
        Box::new(BpfPages(self.shared.host.clone()))
    }

    /// The device for accesses that exit: `inner`, but cur_perf is the programs'.
    fn region(&self, inner: Arc<dyn MmioDevice>) -> Arc<dyn MmioDevice> {
        Arc::new(BpfRegion {
            inner,
            shared: self.shared.clone(),
        })
    }

    fn keeps_cur_perf(&self) -> bool {
        true
    }

    fn register_thread(&self, vcpu: VcpuId, tid: Tid) -> Result<(), BackendError> {
        if let Some(known) = self.shared.vcpus.get(vcpu.index()) {
            known.tid.store(tid.get(), Relaxed);
        }
        Ok(self.shared.host.register_thread(vcpu)?)
    }

    fn follow_pcpus(&self, _: &[u32]) -> Result<(), BackendError> {
        let source = self.shared.device.source();
        let khz = |pcpu| source.khz(pcpu);
        Ok(self.shared.host.set_pcpus(&pcpus(source), khz)?)
    }

    fn confine(&self) {
        self.shared.host.confine();
    }

    fn reset(&self) {
        let shared = &self.shared;
        // A write before the reset is no request of the guest that starts.
        shared.count_missed(|vcpu, known, _| {
            known.served.fetch_add(1, Relaxed);
            shared.count_superseded(vcpu, known.domain);
        });
        if let Err(error) = shared.host.reset() {
            shared.embedder.warn(&format!(
                "the guest's requests can't be taken back: {error}"
            ));
        }
        for known in &shared.vcpus {
            known.missed_at_ns.store(0, SeqCst);
        }
        shared
            .all_domains()
            .for_each(|domain| shared.apply_again(domain));
    }

    fn apply_again(&self, vcpu: VcpuId) {
        let domain = self
            .shared
            .vcpus
            .get(vcpu.index())
            .map(|known| known.domain);
        let asks = |domain: &u32| self.shared.host.asked(*domain).is_some();
        if let Some(domain) = domain.filter(asks) {
            self.shared.apply_again(domain);
        }
    }

    fn set_bounds(&self, vcpu: VcpuId, bounds: Clamp) -> bool {
        if let Some(known) = self.shared.vcpus.get(vcpu.index()) {
            self.shared.host.set_bounds(known.domain, bounds);
            self.shared.apply_again(known.domain);
        }
        true
    }

    fn hand_over(&self) -> String {
        let shared = &self.shared;
        self.stop();
        // In this order: a program that is attached could ask again.
        shared.host.detach();
        // The device may have new requests in force by now: nothing is assumed.
        shared.count_missed(|_, _, _| ());
        shared.count_left();
        shared.sync_counters();
        for domain in shared.all_domains() {
            if let Some((vcpu, khz)) = shared.newest(domain) {
                shared.device.adopt_request(vcpu, khz);
            }
        }
        let why = shared.why_lost.get();
        why.map_or_else(|| "KVM refused its ioeventfds".to_owned(), String::clone)
    }

    fn end(&self) {
        self.stop();
        self.shared.count_missed(|_, _, _| ());
        self.shared.count_left();
        self.shared.sync_counters();
    }

    fn sync_counters(&self) {
        self.shared.sync_counters();
    }

    fn fill_snapshot(&self, vcpu: VcpuId, snapshot: &mut VcpuSnapshot) {
        let shared = &self.shared;
        let Some(known) = shared.vcpus.get(vcpu.index()) else {
            return;
        };
        if self.shared.stop.load(SeqCst) {
            // The path that took over fills in the rest.
            return;
        }
        snapshot.path = AccessPath::Backend("bpf");
        snapshot.request = shared.host.asked(known.domain);
        snapshot.cur_perf = shared.host.cur_perf(vcpu).unwrap_or(Khz(0));
        snapshot.clamp = shared.host.wanted(known.domain).unwrap_or(Clamp::NONE);
        snapshot.load = shared.host.load(vcpu);
        snapshot.target = snapshot.pcpu.and_then(|(pcpu, _)| shared.target(pcpu));
        let in_module = shared.module.as_ref();
        let in_module = in_module.and_then(|module| module.applied(known.domain).ok());
        snapshot.clamp_after = match in_module {
            Some(applied) => histogram(&applied.after_ns),
            None => known.clamp_after.snapshot(),
        };
        let by_programs = shared.host.counters(vcpu).unwrap_or_default();
        snapshot.freq_after = histogram(&by_programs.freq_after);
    }

    fn decided_by(&self) -> Option<(String, [u64; 3])> {
        let host = &self.shared.host;
        let name = host.policy_name()?;
        let vcpus = (0..=u16::MAX).map(VcpuId).zip(&self.shared.vcpus);
        let counted = vcpus.filter_map(|(vcpu, _)| host.counters(vcpu));
        let counted = counted.map(|of| of.decisions());
        Some((name, counted.fold([0; 3], sum)))
    }
}

impl BpfPath {
    fn stop(&self) {
        self.shared.stop.store(true, SeqCst);
        let thread = unpoisoned(self.worker.lock()).take();
        if let Some(thread) = thread {
            // A panic of that thread was reported when it happened.
            let _ = thread.join();
        }
        self.shared.look_at_module();
    }
}

/// The device on the bus as long as programs keep cur_perf: a read exits where KVM has refused the
/// read-only slot, and `inner` knows neither requests nor frequencies.
struct BpfRegion {
    inner: Arc<dyn MmioDevice>,
    shared: Arc<Shared>,
}

impl MmioDevice for BpfRegion {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let vcpu = u16::try_from(offset / REGION_STRIDE).map(VcpuId).ok();
        let of_cur_perf = offset % REGION_STRIDE == REG_CUR_PERF && data.len() == 4;
        match vcpu.and_then(|vcpu| self.shared.host.cur_perf(vcpu)) {
            Some(khz) if of_cur_perf => {
                data.copy_from_slice(&khz.0.to_le_bytes());
                self.shared.device.count_exit(vcpu, false);
            }
            _ => self.inner.read(offset, data),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.inner.write(offset, data);
    }
}

fn sum(all: [u64; 3], more: [u64; 3]) -> [u64; 3] {
    [0, 1, 2].map(|n| all[n] + more[n])
}

/// Bucket *n* of the kernel's side starts at 2^n ns.
fn histogram(buckets: &[u32]) -> HistogramSnapshot {
    let mut counts = [0; HISTOGRAM_BUCKETS];
    for (to, from) in counts[1..].iter_mut().zip(buckets) {
        *to = u64::from(*from);
    }
    HistogramSnapshot { counts }
}
