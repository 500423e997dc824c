// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a bridge shares with its handles, and how one path takes the place of another.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use crate::tune::Tunings;
use vcpufreq_device::{DomainId, PageMemory, RegisterPages, VcpuId};
use vcpufreq_host::{Tid, is_within, pin};

use super::backend::{Offered, RunningBackend};
use super::config::BridgeConfig;
use super::guest::{BridgeDevice, GuestFacts};
use super::ioeventfd::{IoeventfdPath, IoeventfdPlan};
use super::retry::Retry;
use crate::error::{Context, PathError};
use crate::guest_pages::{GuestPages, GuestPagesRegion};
use crate::mmio_device::{MmioDevice, SwappableDevice};
use crate::offload::{KvmOffload, SlotMemory};
use crate::page_mapping::PageMapping;
use crate::sync::unpoisoned;

/// What is shared by the virtual machine, the stats and the end.
pub struct BridgeInner {
    pub device: Arc<BridgeDevice>,
    pub guest: GuestFacts,
    /// The device on the bus, and what accesses get to that exit.
    region: Arc<dyn MmioDevice>,
    pub on_bus: Arc<SwappableDevice>,
    pins: Box<[Vec<u32>]>,
    tids: Box<[Mutex<Option<Tid>>]>,
    path: Mutex<CurrentPath>,
    /// cur_perf in the pages is the device's to keep true.
    pub keeps_pages: AtomicBool,
    /// The pages that the guest sees, once it sees any.
    pages: OnceLock<Arc<dyn SlotMemory>>,
    ioeventfd: Option<IoeventfdPlan>,
}

/// The path in use, the one that was lost, and what programs have set beside the guest's requests.
#[derive(Default)]
pub struct CurrentPath {
    pub backend: Option<NamedBackend>,
    pub ioeventfd: Option<IoeventfdPath>,
    pub lost: Option<NamedBackend>,
    /// No path is started any more.
    pub ended: bool,
    /// What KVM is to do.
    pub offload: Option<Arc<KvmOffload>>,
    pub tunings: Tunings,
    /// Domains of which it isn't known that the host keeps to their tunings.
    pub(super) not_in_force: BTreeMap<DomainId, Retry>,
}

pub type NamedBackend = (&'static str, Box<dyn RunningBackend>);

impl BridgeInner {
    pub fn new(
        device: &Arc<BridgeDevice>,
        region: Arc<dyn MmioDevice>,
        config: &BridgeConfig,
    ) -> Arc<Self> {
        Arc::new(Self {
            device: device.clone(),
            guest: GuestFacts {
                base: config.base,
                all_pinned: config.pins.iter().all(|pin| !pin.is_empty()),
                pcpus_of_vcpus: config.pins.concat(),
                rt_pcpus: config.rt_pcpus.clone(),
                threads: config.pins.iter().map(|_| AtomicBool::default()).collect(),
                state: Arc::default(),
                kick: config.kick,
                embedder: config.embedder.clone(),
            },
            on_bus: Arc::new(SwappableDevice::new(region.clone())),
            region,
            pins: config.pins.clone().into(),
            tids: config.pins.iter().map(|_| Mutex::default()).collect(),
            path: Mutex::default(),
            keeps_pages: AtomicBool::new(false),
            pages: OnceLock::new(),
            ioeventfd: config.ioeventfd.clone(),
        })
    }

    pub fn active(&self) -> MutexGuard<'_, CurrentPath> {
        // A thread that panicked left a path that runs, or none.
        unpoisoned(self.path.lock())
    }

    fn vcpus(&self) -> impl Iterator<Item = VcpuId> + use<> {
        let count = u16::try_from(self.tids.len()).unwrap_or(u16::MAX);
        (0..count).map(VcpuId)
    }

    /// The thread of a vCPU, while the guest has one.
    pub fn thread(&self, vcpu: VcpuId) -> Option<Tid> {
        let running = self.guest.threads.get(vcpu.index())?.load(Relaxed);
        let tid = self.tids.get(vcpu.index()).filter(|_| running)?;
        *tid.lock().ok()?
    }

    /// `tid` runs `vcpu` from now on; none does when it is `None`.
    pub fn set_thread(&self, vcpu: VcpuId, tid: Option<Tid>) {
        let slot = self.tids.get(vcpu.index());
        if let Some(mut slot) = slot.and_then(|slot| slot.lock().ok()) {
            *slot = tid;
        }
        if let Some(has_thread) = self.guest.threads.get(vcpu.index()) {
            has_thread.store(tid.is_some(), Relaxed);
        }
    }

    /// Pins a vCPU's thread, unless it is pinned: a SCHED_DEADLINE thread takes no affinity any more.
    pub fn pin(&self, vcpu: VcpuId, tid: Tid) -> Result<(), PathError> {
        let pcpus = self.pins.get(vcpu.index()).filter(|pin| !pin.is_empty());
        let pinned = pcpus.map_or(Ok(()), |pcpus| match is_within(tid, pcpus)? {
            true => Ok(()),
            false => pin(tid, pcpus),
        });
        pinned.map_err(|error| PathError::NotPinned { vcpu, error })
    }

    pub fn start_best(
        &self,
        backends: &[Offered],
        size: u64,
    ) -> Result<Option<KvmOffload>, PathError> {
        for Offered { backend, required } in backends {
            let name = backend.name();
            match backend.start(&self.device, &self.guest) {
                Ok((path, offload)) => {
                    let pages = offload.as_ref().and_then(|kvm| kvm.pages.clone());
                    if let Err(error) = self.show(path.memory(), pages) {
                        path.end();
                        return Err(error);
                    }
                    self.on_bus.exchange(path.region(self.region.clone()));
                    self.keeps_pages.store(!path.keeps_cur_perf(), Relaxed);
                    self.active().backend = Some((name, path));
                    return Ok(offload);
                }
                Err(why) => {
                    if let Some(required) = required.clone() {
                        let error = why;
                        return Err(PathError::Required { required, error });
                    }
                    self.guest.embedder.warn(&format!(
                        "not by the path {name}, but by the next one: {why}; see vcpufreq doctor"
                    ));
                }
            }
        }
        let Some(plan) = &self.ioeventfd else {
            return Ok(None);
        };
        if let Some(pages) = &plan.guest_pages {
            self.show(Box::new(pages.clone()), None)?;
        } else {
            let pages = PageMapping::new(size, plan.clean);
            let pages = Arc::new(pages.context("can't map the register pages")?);
            self.show(Box::new(pages.clone()), Some(pages))?;
        }
        self.start_ioeventfd().map(Some)
    }

    /// Checks that the device alone has the guest's requests.
    pub fn check_no_backend(&self) -> Result<(), PathError> {
        match &self.active().backend {
            None => Ok(()),
            Some(_) => Err(PathError::Missing(
                "this path can't save and restore a guest; take ioeventfd",
            )),
        }
    }

    /// Carries out requests that KVM has finished.
    pub fn drain(&self) {
        if let Some(path) = &self.active().ioeventfd {
            path.drain(&self.device);
        }
    }

    /// Has the device store what guests read in `memory`, too.
    fn show(
        &self,
        memory: Box<dyn PageMemory>,
        pages: Option<Arc<dyn SlotMemory>>,
    ) -> Result<(), PathError> {
        let vcpus = u16::try_from(self.tids.len())
            .ok()
            .context("too many vCPUs")?;
        self.device
            .attach_pages(RegisterPages::new(memory, vcpus)?)?;
        if let Some(pages) = pages {
            // They are set once, at the start.
            let _ = self.pages.set(pages);
        }
        Ok(())
    }

    /// Starts the path `ioeventfd` on the pages that there are.
    fn start_ioeventfd(&self) -> Result<KvmOffload, PathError> {
        let pages = self.pages.get().cloned();
        let (path, offload) = IoeventfdPath::start(&self.device, &self.guest, pages)?;
        let region = path.region(self.region.clone(), &self.device);
        self.on_bus.exchange(match self.guest_pages() {
            Some(pages) => self.with_guest_pages(region, pages.clone()),
            None => region,
        });
        for vcpu in self.vcpus() {
            if let Some(tid) = self.thread(vcpu) {
                path.register_thread(vcpu, tid);
            }
        }
        let mut active = self.active();
        if active.ended {
            drop(active);
            path.stop(&self.device);
            return Err(PathError::Missing("the bridge has ended"));
        }
        active.ioeventfd = Some(path);
        drop(active);
        self.keeps_pages.store(true, Relaxed);
        Ok(offload)
    }

    fn guest_pages(&self) -> Option<&Arc<GuestPages>> {
        self.ioeventfd.as_ref()?.guest_pages.as_ref()
    }

    /// The registers of a guest that may share pages.
    fn with_guest_pages(
        &self,
        region: Arc<dyn MmioDevice>,
        pages: Arc<GuestPages>,
    ) -> Arc<dyn MmioDevice> {
        let embedder = self.guest.embedder.clone();
        let device = self.device.clone();
        Arc::new(GuestPagesRegion::new(region, device, pages, embedder))
    }

    pub fn ioeventfd_lost(&self, path: IoeventfdPath) {
        self.keeps_pages.store(false, Relaxed);
        path.drain(&self.device);
        self.on_bus.exchange(self.region.clone());
        self.guest_pages().inspect(|pages| pages.withdraw());
        path.stop(&self.device);
        self.guest.embedder.warn(
            "the thread that carries out requests has died: each access exits to the VMM from \
             now on; restart the guest for the path ioeventfd",
        );
    }

    /// Hands over to the path `ioeventfd`, or to the exit.
    pub fn backend_lost(&self, (name, path): NamedBackend) -> Option<KvmOffload> {
        self.on_bus.exchange(self.region.clone());
        let why = path.hand_over();
        self.active().lost = Some((name, path));
        self.apply_tunings();
        let next = self.ioeventfd.as_ref().map(|_| self.start_ioeventfd());
        let (next, how) = match next {
            Some(Ok(next)) => (Some(next), "by the path ioeventfd".to_owned()),
            Some(Err(error)) => (None, format!("by exits to the VMM ({error})")),
            None => (None, "by exits to the VMM".to_owned()),
        };
        self.guest.embedder.warn(&format!(
            "the path {name} is lost, {why}: accesses go on {how}; restart the guest for \
             the path {name}"
        ));
        next
    }
}
