// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The path `ioeventfd` of a bridge: its parts, joined.

use std::collections::BTreeMap;
use std::sync::Arc;

use vcpufreq_device::{DeviceConfig, DomainId, VcpuId, region_size};
use vcpufreq_host::Tid;
use vmm_sys_util::eventfd::EventFd;

use super::guest::{BridgeDevice, GuestFacts};
use crate::embedder::Embedder;
use crate::error::{Context, PathError};
use crate::guest_pages::GuestPages;
use crate::ioeventfd::{
    DomainWrites, EntryBell, IoeventfdRegion, MmioTrace, PendingWrites, PerfWatch, Unknown, Worker,
    WorkerParts, WriteOrder, freshness,
};
use crate::mmio_device::MmioDevice;
use crate::offload::{Doorbell, KvmOffload, SlotMemory};

/// The name of this path.
const NAME: &str = "ioeventfd";

/// How the path `ioeventfd` is to be.
#[derive(Clone, Debug)]
pub struct IoeventfdPlan {
    /// Each store to the pages has to be cleaned out of the cache.
    pub clean: bool,
    /// Where a protected guest reads, which KVM has no slots for.
    pub guest_pages: Option<Arc<GuestPages>>,
}

/// The path `ioeventfd`, running.
pub struct IoeventfdPath {
    pending: Arc<PendingWrites>,
    trace: Option<Arc<MmioTrace>>,
    perf_watch: Option<PerfWatch>,
    worker: Worker,
    embedder: Arc<dyn Embedder>,
}

impl IoeventfdPath {
    /// Starts it; what KVM is to do shows `pages`, if there are some, which the device stores to.
    ///
    /// # Errors
    /// [`PathError::Refused`] for want of memory, threads (`EAGAIN`) or open files (`EMFILE`,
    /// `ENFILE`). Nothing of it is left then.
    pub fn start(
        device: &Arc<BridgeDevice>,
        guest: &GuestFacts,
        pages: Option<Arc<dyn SlotMemory>>,
    ) -> Result<(Self, KvmOffload), PathError> {
        let host = device.source().root();
        let config = device.config();
        let vcpus = u16::try_from(config.vcpus.len())
            .ok()
            .context("too many vCPUs")?;
        let bells = bells(config)?;
        let trace = MmioTrace::new(host, vcpus, (guest.base, region_size(vcpus)));
        let embedder = &guest.embedder;
        embedder.explain(&order(trace.as_ref().err()));
        let trace = trace.ok().map(Arc::new);
        let write_order: Arc<dyn WriteOrder> = match &trace {
            Some(trace) => trace.clone(),
            None => Arc::new(Unknown),
        };
        let pending = pending(config, &bells, &write_order)?;
        let worker = Worker::start(WorkerParts {
            requests: pending.clone(),
            device: device.clone(),
            vcpus: guest.threads.clone(),
            avoid: guest.pcpus_of_vcpus.clone(),
            embedder: guest.embedder.clone(),
            // A doorbell wakes it.
            run_watch: None,
        })?;
        let pcpus = guest.watched_pcpus(host);
        let perf_watch = PerfWatch::watch(
            host,
            worker.epoll(),
            pcpus,
            (vcpus, guest.kick, &guest.embedder),
        );
        embedder.explain(&freshness(NAME, perf_watch.as_ref()));
        let offload = KvmOffload {
            base: guest.base,
            pages,
            doorbells: bells.into_iter().map(doorbell).collect(),
            lost: worker.lost(),
            all_or_nothing: false,
            state: guest.state.clone(),
        };
        let path = Self {
            pending,
            trace,
            perf_watch: perf_watch.ok(),
            worker,
            embedder: embedder.clone(),
        };
        Ok((path, offload))
    }

    /// `region`, with requests in the order in which they were written.
    pub fn region(
        &self,
        region: Arc<dyn MmioDevice>,
        device: &Arc<BridgeDevice>,
    ) -> Arc<dyn MmioDevice> {
        let pending = self.pending.clone();
        Arc::new(IoeventfdRegion::new(region, device.clone(), pending))
    }

    /// Registers `tid` as the thread of `vcpu`. If the host doesn't permit something for that
    /// thread, the path is less exact and there is a warning.
    pub fn register_thread(&self, vcpu: VcpuId, tid: Tid) {
        let recorded = self.trace.as_ref().map(|r| r.register_thread(vcpu, tid));
        let watched = self
            .perf_watch
            .as_ref()
            .map(|c| c.register_thread(vcpu, tid));
        if let Some(Err(error)) = recorded {
            let why = order(Some(&error));
            self.embedder.warn(&format!("vCPU {vcpu}: {why}"));
        }
        if let Some(Err(error)) = watched {
            let why = freshness(NAME, Err(&error));
            self.embedder.warn(&format!("vCPU {vcpu}: {why}"));
        }
    }

    /// Watches pCPUs that have come or gone.
    pub fn follow_pcpus(&self, pcpus: &[u32]) {
        let Some(perf_watch) = &self.perf_watch else {
            return;
        };
        match perf_watch.follow(pcpus) {
            Ok(()) => self.embedder.explain(&freshness(NAME, Ok(perf_watch))),
            Err(error) => self.embedder.warn(&freshness(NAME, Err(&error))),
        }
    }

    /// Carries out what waits.
    pub fn drain(&self, device: &BridgeDevice) {
        self.pending.drain(device);
    }

    /// Ends it; what waits is carried out.
    pub fn stop(self, device: &BridgeDevice) {
        drop(self.worker);
        self.pending.drain(device);
    }
}

/// An eventfd for each entry of each vCPU's table. One entry is no table: any
/// value up to it may be asked for, so that requests exit.
fn bells(config: &DeviceConfig) -> Result<Vec<EntryBell>, PathError> {
    let mut bells = Vec::new();
    for (vcpu, spec) in (0..=u16::MAX).map(VcpuId).zip(&config.vcpus) {
        if let entries @ [_, _, ..] = spec.table.entries() {
            for khz in entries.iter().map(|khz| khz.0) {
                let event = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
                let event = event.context("can't make an eventfd for each table entry")?;
                bells.push(EntryBell {
                    vcpu,
                    khz,
                    event: Arc::new(event),
                });
            }
        }
    }
    Ok(bells)
}

fn doorbell(bell: EntryBell) -> Doorbell {
    Doorbell::of_set_perf(bell.vcpu, Some(bell.khz), bell.event)
}

fn pending(
    config: &DeviceConfig,
    of_entries: &[EntryBell],
    write_order: &Arc<dyn WriteOrder>,
) -> Result<Arc<PendingWrites>, PathError> {
    let domains = config.domains();
    let mut bells: BTreeMap<DomainId, Vec<_>> = BTreeMap::new();
    for domain in &domains {
        bells.insert(*domain, Vec::new());
    }
    for bell in of_entries {
        let domain = config.vcpus[bell.vcpu.index()].domain;
        bells.entry(domain).or_default().push(bell.clone());
    }
    let pending = bells.into_values();
    let pending = pending.map(|bells| DomainWrites::new(bells, write_order.clone()));
    let pending = pending
        .collect::<Result<Vec<_>, _>>()
        .context("can't watch the guest's requests")?;
    let of_vcpu = config.vcpus.iter();
    let of_vcpu = of_vcpu.map(|spec| domains.partition_point(|id| *id < spec.domain));
    Ok(PendingWrites::new(pending, of_vcpu.collect()))
}

/// How requests of one table entry that comes back are put in order.
fn order(unknown: Option<&PathError>) -> String {
    match unknown {
        None => {
            "path ioeventfd: the order of requests that come together is kvm:kvm_mmio's".to_owned()
        }
        Some(why) => format!(
            "path ioeventfd: of requests that come together the highest counts when an earlier one \
             comes back, until the next one: {why}"
        ),
    }
}
