// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The bridge of one guest: the device, how its accesses get there, and the
//! threads that it needs.
//!
//! ```text
//! exit    vCPU thread ─▶ MmioRegion ─▶ device
//! ioeventfd KVM ─▶ eventfds ─▶ Worker ─▶ device ─▶ pages ─▶ KVM
//! bpf     KVM ─▶ programs ─▶ kernel module, or Worker ─▶ clamp; programs ─▶ pages ─▶ KVM
//! ```
//! A path that is lost while the guest runs gives way to the next one.

mod backend;
mod handle;
mod ioeventfd;
mod pcpus;
mod snapshot;

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::kvm::{
    confinement::Confinement,
    diagnostics::Diagnostics,
    error::{Context, PathError},
    event_stats::EventStats,
    host_watch::HostWatch,
    hotplug::Hotplug,
    maintenance::MaintenanceThread,
    mmio_device::{MmioDevice, SwappableDevice},
    offload::{KvmOffload, OffloadState, SlotMemory},
    page_mapping::PageMapping,
};
use crate::{
    Device, MmioRegion, PageMemory, RegisterPages, VcpuId,
    host::{HostActuator, HostRoot, SysfsSource, Tid, present_pcpus},
};
pub use backend::{Backend, Offered, RunningBackend};
pub use handle::BridgeHandle;
use ioeventfd::IoeventfdPath;
pub use ioeventfd::IoeventfdPlan;
pub use snapshot::{AccessPath, BridgeSnapshot, PcpuLoad, PcpuTarget, Totals, VcpuSnapshot};

/// The device as a bridge serves it.
pub type BridgeDevice = Device<HostActuator, Arc<SysfsSource>, Arc<EventStats>>;

/// What a bridge is to know of its guest.
#[derive(Clone, Debug)]
pub struct BridgeConfig {
    /// Guest address of the first register.
    pub base: u64,
    /// The pCPUs that each vCPU is pinned to, by number; none: any.
    pub pins: Vec<Vec<u32>>,
    /// The pCPUs of real-time vCPUs.
    pub rt_pcpus: Vec<u32>,
    /// The signal that makes KVM_RUN return; its handler has nothing to do. `None`: the vCPUs are
    /// another process'.
    pub kick: Option<c_int>,
    /// How the path `ioeventfd` is to be, if it may be taken.
    pub ioeventfd: Option<IoeventfdPlan>,
    /// How its threads are confined.
    pub confinement: Arc<dyn Confinement>,
}

/// A device with all that it needs while its guest runs.
pub struct Bridge {
    inner: Arc<BridgeInner>,
    maintenance: MaintenanceThread,
    size: u64,
    offload: Option<Arc<KvmOffload>>,
}

/// What paths know of their guest.
pub struct GuestFacts {
    /// Guest address of the first register.
    pub base: u64,
    /// The pCPUs that vCPUs are pinned to.
    pub pcpus_of_vcpus: Vec<u32>,
    /// Whether all of them are pinned.
    pub all_pinned: bool,
    /// The pCPUs of real-time vCPUs.
    pub rt_pcpus: Vec<u32>,
    /// How many vCPUs there are threads of: in the order of their numbers.
    pub threads: Arc<AtomicU16>,
    /// What KVM answers itself.
    pub state: Arc<OffloadState>,
    /// The signal that makes KVM_RUN return, if the vCPUs are this process'.
    pub kick: Option<c_int>,
    /// How threads are confined.
    pub confinement: Arc<dyn Confinement>,
}

impl GuestFacts {
    /// The pCPUs whose frequency counts: each event there wakes a worker.
    #[must_use]
    pub fn watched_pcpus(&self, host: &HostRoot) -> Vec<u32> {
        let mut pcpus: Vec<_> = present_pcpus(host).into_iter().collect();
        if self.all_pinned {
            pcpus.retain(|pcpu| self.pcpus_of_vcpus.contains(pcpu));
        }
        // To wake it, PREEMPT_RT runs a thread of that pCPU (irq_work/N): not beside a real-time
        // vCPU, whose page is looked after each 4 ms anyway.
        pcpus.retain(|pcpu| !self.rt_pcpus.contains(pcpu));
        pcpus
    }
}

/// What is shared by the virtual machine, the stats and the end.
struct BridgeInner {
    device: Arc<BridgeDevice>,
    guest: GuestFacts,
    diagnostics: Arc<dyn Diagnostics>,
    /// The device on the bus, and what accesses get to that exit.
    region: Arc<dyn MmioDevice>,
    on_bus: Arc<SwappableDevice>,
    tids: Box<[OnceLock<Tid>]>,
    path: Mutex<CurrentPath>,
    /// cur_perf in the pages is the device's to keep true.
    keeps_pages: AtomicBool,
    /// The pages that the guest sees, once it sees any.
    pages: OnceLock<Arc<dyn SlotMemory>>,
    ioeventfd: Option<IoeventfdPlan>,
}

/// The path in use, and the one that was lost.
#[derive(Default)]
struct CurrentPath {
    backend: Option<NamedBackend>,
    ioeventfd: Option<IoeventfdPath>,
    lost: Option<NamedBackend>,
}

type NamedBackend = (&'static str, Box<dyn RunningBackend>);

impl Bridge {
    /// Starts the bridge by the first of `backends`, else the path `ioeventfd`, else the exit, that
    /// the host doesn't refuse.
    ///
    /// # Errors
    /// [`PathError::Refused`] for want of memory, threads or open files; [`PathError::Required`]
    /// when a backend that is required can't be started.
    pub fn start(
        device: BridgeDevice,
        config: &BridgeConfig,
        backends: &[Offered],
        diagnostics: &Arc<dyn Diagnostics>,
    ) -> Result<Self, PathError> {
        let device = Arc::new(device);
        let region = MmioRegion::new(device.clone());
        let size = region.size();
        let inner = BridgeInner::new(&device, Arc::new(region), config, diagnostics);
        let host = device.source().root();
        // In this order: what changes from here on is found, what changed before is looked up.
        let mut hotplug = Hotplug::of_host(host);
        device.source().refresh();
        let offload = inner.start_best(backends, size)?;
        let mut watch = HostWatch::of_host(&config.pins, device.actuator().clamps(), host);
        let watched = inner.clone();
        let look = move || {
            watched.follow_pcpus(&hotplug.look());
            for vcpu in watched.device.actuator().look_at_policies() {
                watched.device.apply_again(vcpu);
                if let Some((_, path)) = &watched.active().backend {
                    path.apply_again(vcpu);
                }
            }
            let (stats, diagnostics) = (watched.device.events(), &*watched.diagnostics);
            watch.look(stats, diagnostics, |vcpu| watched.thread(vcpu));
        };
        Ok(Self {
            maintenance: MaintenanceThread::start(
                device.clone(),
                config.confinement.clone(),
                look,
            )?,
            inner,
            size,
            offload: offload.map(Arc::new),
        })
    }

    /// For the threads of the virtual machine.
    #[must_use]
    pub fn handle(&self) -> BridgeHandle {
        BridgeHandle::new(&self.inner)
    }

    /// What answers an access that exits.
    #[must_use]
    pub fn mmio(&self) -> Arc<dyn MmioDevice> {
        self.inner.on_bus.clone()
    }

    /// Bytes of the registers, from [`BridgeConfig::base`] on.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// What KVM is to answer itself from the start; all accesses exit without it.
    #[must_use]
    pub fn offload(&self) -> Option<Arc<KvmOffload>> {
        self.offload.clone()
    }

    /// Ends its threads; what was counted.
    #[must_use]
    pub fn stop(self) -> Totals {
        let inner = self.inner;
        {
            let mut active = inner.active();
            if let Some(path) = active.ioeventfd.take() {
                path.stop(&inner.device);
            }
            let CurrentPath { backend, lost, .. } = &mut *active;
            for (_, path) in [backend, lost].into_iter().filter_map(Option::take) {
                path.end();
            }
        }
        self.maintenance.stop();
        Totals::of(&inner.device)
    }
}

impl BridgeInner {
    fn new(
        device: &Arc<BridgeDevice>,
        region: Arc<dyn MmioDevice>,
        config: &BridgeConfig,
        diagnostics: &Arc<dyn Diagnostics>,
    ) -> Arc<Self> {
        Arc::new(Self {
            device: device.clone(),
            guest: GuestFacts {
                base: config.base,
                all_pinned: config.pins.iter().all(|pin| !pin.is_empty()),
                pcpus_of_vcpus: config.pins.concat(),
                rt_pcpus: config.rt_pcpus.clone(),
                threads: Arc::default(),
                state: Arc::default(),
                kick: config.kick,
                confinement: config.confinement.clone(),
            },
            diagnostics: diagnostics.clone(),
            on_bus: Arc::new(SwappableDevice::new(region.clone())),
            region,
            tids: config.pins.iter().map(|_| OnceLock::new()).collect(),
            path: Mutex::default(),
            keeps_pages: AtomicBool::new(false),
            pages: OnceLock::new(),
            ioeventfd: config.ioeventfd,
        })
    }

    fn active(&self) -> MutexGuard<'_, CurrentPath> {
        // A thread that panicked left a path that runs, or none.
        self.path.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn vcpus(&self) -> impl Iterator<Item = VcpuId> + use<> {
        let count = u16::try_from(self.tids.len()).unwrap_or(u16::MAX);
        (0..count).map(VcpuId)
    }

    /// The thread of a vCPU, while the guest has one.
    fn thread(&self, vcpu: VcpuId) -> Option<Tid> {
        let running = vcpu.0 < self.guest.threads.load(Relaxed);
        let tid = self.tids.get(vcpu.index()).filter(|_| running)?;
        tid.get().copied()
    }

    fn start_best(&self, backends: &[Offered], size: u64) -> Result<Option<KvmOffload>, PathError> {
        for Offered { backend, required } in backends {
            let name = backend.name();
            match backend.start(&self.device, &self.guest, &self.diagnostics) {
                Ok((path, offload)) => {
                    self.show(path.memory(), offload.as_ref().map(|kvm| kvm.pages.clone()))?;
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
                    self.diagnostics.warn(&format!(
                        "not by the path {name}, but by the next one: {why}; see vcpufreq doctor"
                    ));
                }
            }
        }
        let Some(plan) = self.ioeventfd else {
            return Ok(None);
        };
        let pages = PageMapping::new(size, plan.clean);
        let pages = Arc::new(pages.context("can't map the register pages")?);
        self.show(Box::new(pages.clone()), Some(pages))?;
        self.start_ioeventfd().map(Some)
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
        let pages = self.pages.get().context("no register pages")?.clone();
        let (path, offload) =
            IoeventfdPath::start(&self.device, &self.guest, pages, &self.diagnostics)?;
        self.on_bus
            .exchange(path.region(self.region.clone(), &self.device));
        for (vcpu, tid) in self.vcpus().zip(&self.tids) {
            if let Some(tid) = tid.get() {
                path.register_thread(vcpu, *tid);
            }
        }
        self.active().ioeventfd = Some(path);
        self.keeps_pages.store(true, Relaxed);
        Ok(offload)
    }

    fn ioeventfd_lost(&self, path: IoeventfdPath) {
        self.keeps_pages.store(false, Relaxed);
        path.drain(&self.device);
        self.on_bus.exchange(self.region.clone());
        path.stop(&self.device);
        self.diagnostics.warn(
            "the thread that carries out requests has died: each access exits to the VMM from \
             now on; restart the guest for the path ioeventfd",
        );
    }

    /// Hands over to the path `ioeventfd`, or to the exit.
    fn backend_lost(&self, (name, path): NamedBackend) -> Option<KvmOffload> {
        self.on_bus.exchange(self.region.clone());
        let why = path.hand_over();
        self.active().lost = Some((name, path));
        let next = self.ioeventfd.map(|_| self.start_ioeventfd());
        let (next, how) = match next {
            Some(Ok(next)) => (Some(next), "by the path ioeventfd".to_owned()),
            Some(Err(error)) => (None, format!("by exits to the VMM ({error})")),
            None => (None, "by exits to the VMM".to_owned()),
        };
        self.diagnostics.warn(&format!(
            "the path {name} is lost, {why}: accesses go on {how}; restart the guest for \
             the path {name}"
        ));
        next
    }
}
