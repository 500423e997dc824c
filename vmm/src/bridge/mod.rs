// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The bridge of one guest: the device, how its accesses get there, and the
//! threads that it needs.
//!
//! ```text
//! exit    vCPU thread ─▶ MmioRegion ─▶ device
//! kernel  KVM ─▶ eventfds ─▶ Worker ─▶ device ─▶ pages ─▶ KVM
//! bpf     KVM ─▶ programs ─▶ kernel module, or Worker ─▶ clamp; programs ─▶ pages ─▶ KVM
//! ```
//! A path that is lost while the guest runs gives way to the next one.

mod kernel;
mod pcpus;
mod region;
mod stats;

#[cfg(feature = "bpf")]
mod bpf;
#[cfg(not(feature = "bpf"))]
#[path = "no_bpf.rs"]
mod bpf;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use anyhow::Context;
use vcpufreq_device::{
    CounterSnapshot, Device, MmioRegion, PageMemory, RegisterPages, VcpuId,
    host::{ActuatorChoice, HostActuator, SysfsSource, Tid},
};

use crate::{
    config::{RunConfig, rt_pcpus},
    facts::HostTree,
    hotplug::Hotplug,
    housekeeper::Housekeeper,
    run::warn,
    run_report::{Observer, Summary, add},
    stats::{Server, VcpuStats},
    vm::{
        Cpufreq, Hooks,
        bus::MmioDevice,
        hypercall::Hypercalls,
        in_kernel::{InKernel, SlotMemory, Taken},
        pages::PageMapping,
    },
    watch::Watch,
};
use bpf::BpfPath;
pub use bpf::offer as offer_bpf;
use kernel::KernelPath;
pub use kernel::KernelPlan;
use region::Exchangeable;
use stats::BridgeStats;

/// The device as this program makes it.
pub type BridgeDevice = Device<HostActuator, Arc<SysfsSource>, Arc<Observer>>;

/// How the path `bpf` is to be.
#[derive(Clone, Debug)]
pub struct BpfPlan {
    /// The object file with the programs.
    pub object: PathBuf,
    /// Whether they see hypercalls, too.
    pub hypercalls: bool,
}

/// The paths that the guest's accesses may take, the best first.
#[derive(Clone, Debug, Default)]
pub struct Plans {
    /// The path `bpf`.
    pub bpf: Option<BpfPlan>,
    /// The user wants that one.
    pub only_bpf: bool,
    /// The path `kernel`.
    pub kernel: Option<KernelPlan>,
}

/// A device with all that it needs while its guest runs.
pub struct Bridge {
    joint: Arc<Joint>,
    housekeeper: Housekeeper,
    stats: Option<Server>,
}

/// What paths know of their guest.
pub struct Guest {
    /// The pCPUs that vCPUs are pinned to.
    pub pcpus_of_vcpus: Vec<u32>,
    /// Whether all of them are pinned.
    pub all_pinned: bool,
    /// The pCPUs of real-time vCPUs.
    pub rt_pcpus: Vec<u32>,
    /// How many vCPUs there are threads of: in the order of their numbers.
    pub threads: Arc<AtomicU16>,
    /// What KVM answers itself.
    pub taken: Arc<Taken>,
    /// Whether to say why.
    pub explain: bool,
}

/// What is shared by the virtual machine, the stats and the end.
struct Joint {
    device: Arc<BridgeDevice>,
    observer: Arc<Observer>,
    guest: Guest,
    /// The device on the bus, and what accesses get to that exit.
    region: Arc<dyn MmioDevice>,
    on_bus: Arc<Exchangeable>,
    tids: Box<[OnceLock<Tid>]>,
    path: Mutex<Active>,
    /// The pages that the guest sees, once it sees any.
    pages: OnceLock<Arc<dyn SlotMemory>>,
    kernel: Option<KernelPlan>,
    hypercalls: bool,
}

/// The path in use, and the one that was lost.
#[derive(Default)]
struct Active {
    bpf: Option<BpfPath>,
    kernel: Option<KernelPath>,
    lost_bpf: Option<BpfPath>,
}

impl Bridge {
    /// Starts the bridge by the first of `plans` that the host doesn't refuse.
    ///
    /// # Errors
    /// What the host refused: memory, threads or open files; or the one path
    /// that the user wants.
    pub fn start(
        device: BridgeDevice,
        config: &RunConfig,
        plans: &Plans,
        observer: &Arc<Observer>,
    ) -> anyhow::Result<(Self, Cpufreq)> {
        let device = Arc::new(device);
        let region = MmioRegion::new(device.clone());
        let size = region.size();
        let region: Arc<dyn MmioDevice> = Arc::new(region);
        let joint = Arc::new(Joint {
            device: device.clone(),
            observer: observer.clone(),
            guest: Guest {
                all_pinned: config.vcpus.iter().all(|vcpu| !vcpu.pin.is_empty()),
                pcpus_of_vcpus: config.vcpus.iter().flat_map(|v| v.pin.clone()).collect(),
                rt_pcpus: rt_pcpus(&config.vcpus),
                threads: Arc::default(),
                taken: Arc::default(),
                explain: config.explain,
            },
            on_bus: Arc::new(Exchangeable::new(region.clone())),
            region,
            tids: config.vcpus.iter().map(|_| OnceLock::new()).collect(),
            path: Mutex::default(),
            pages: OnceLock::new(),
            kernel: plans.kernel,
            hypercalls: config.hypercalls,
        });
        let host = HostTree::default();
        // In this order: what changes from here on is found, what changed before is looked up.
        let mut hotplug = Hotplug::of_host(&host);
        device.source().refresh();
        let in_kernel = joint.start_best(plans, size)?;
        let pins: Vec<_> = config.vcpus.iter().map(|vcpu| vcpu.pin.clone()).collect();
        let clamped = config.actuator != ActuatorChoice::Nothing;
        let mut watch = Watch::of_host(&pins, clamped, &host);
        let watched = joint.clone();
        let look = move || {
            watched.follow_pcpus(&hotplug.look());
            watch.look(&watched.observer, |vcpu| watched.thread(vcpu));
        };
        let housekeeper = Housekeeper::start(device, observer.clone(), look)?;
        let cpufreq = Cpufreq {
            device: joint.on_bus.clone(),
            size,
            in_kernel: in_kernel.map(Arc::new),
        };
        let told = joint.clone();
        let stats = BridgeStats {
            device: joint.device.clone(),
            observer: joint.observer.clone(),
            taken: joint.guest.taken.clone(),
            more: Box::new(move |vcpu, stats| told.tell(vcpu, stats)),
        };
        let bridge = Self {
            stats: stats.serve(),
            joint,
            housekeeper,
        };
        Ok((bridge, cpufreq))
    }

    /// What the virtual machine tells.
    pub fn hooks(&self) -> Arc<dyn Hooks> {
        self.joint.clone()
    }

    /// Ends its threads; what came of the guest's requests.
    pub fn stop(self) -> Summary {
        if let Some(stats) = self.stats {
            stats.stop();
        }
        let joint = self.joint;
        let mut summary = CounterSnapshot::default();
        {
            let mut active = joint.active();
            if let Some(path) = active.kernel.take() {
                path.stop(&joint.device);
            }
            let Active { bpf, lost_bpf, .. } = &mut *active;
            for path in [bpf, lost_bpf].into_iter().filter_map(Option::take) {
                path.end();
                for vcpu in joint.vcpus() {
                    summary = add(summary, path.counters(vcpu));
                }
            }
        }
        self.housekeeper.stop();
        Summary::of(&joint.device)
            .with(summary)
            .on_host(&joint.observer)
    }
}

impl Joint {
    fn active(&self) -> MutexGuard<'_, Active> {
        // Whoever panicked left a path that runs, or none.
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

    /// Adds what the path `bpf` knows of a vCPU.
    fn tell(&self, vcpu: VcpuId, stats: &mut VcpuStats) {
        let active = self.active();
        for path in active.bpf.iter().chain(&active.lost_bpf) {
            path.tell(vcpu, stats);
        }
    }

    fn start_best(&self, plans: &Plans, size: u64) -> anyhow::Result<Option<InKernel>> {
        if let Some(plan) = &plans.bpf {
            match BpfPath::start(&self.device, &self.guest, plan, &self.observer) {
                Ok((path, in_kernel)) => {
                    self.show(path.memory(), in_kernel.pages.clone())?;
                    self.on_bus.exchange(path.region(self.region.clone()));
                    self.active().bpf = Some(path);
                    return Ok(Some(in_kernel));
                }
                Err(why) if plans.only_bpf => {
                    return Err(why.context("--path bpf isn't possible"));
                }
                Err(why) => warn(&format!(
                    "not by the path bpf, but by the next one: {why:#}; see vcpufreq doctor"
                )),
            }
        }
        let Some(plan) = plans.kernel else {
            return Ok(None);
        };
        let pages = PageMapping::new(size, plan.clean);
        let pages = Arc::new(pages.context("can't map the register pages")?);
        self.show(Box::new(pages.clone()), pages)?;
        self.start_kernel().map(Some)
    }

    /// Has the device store what guests read in `memory`, too.
    fn show(&self, memory: Box<dyn PageMemory>, pages: Arc<dyn SlotMemory>) -> anyhow::Result<()> {
        let vcpus = u16::try_from(self.tids.len()).context("too many vCPUs")?;
        self.device
            .attach_pages(RegisterPages::new(memory, vcpus)?)?;
        // Nobody has shown any before.
        let _ = self.pages.set(pages);
        Ok(())
    }

    /// Starts the path `kernel` on the pages that there are.
    fn start_kernel(&self) -> anyhow::Result<InKernel> {
        let pages = self.pages.get().context("no register pages")?.clone();
        let (path, in_kernel) = KernelPath::start(&self.device, &self.guest, pages)?;
        self.on_bus
            .exchange(path.region(self.region.clone(), &self.device));
        for (vcpu, tid) in self.vcpus().zip(&self.tids) {
            if let Some(tid) = tid.get() {
                path.register_thread(vcpu, *tid);
            }
        }
        self.active().kernel = Some(path);
        Ok(in_kernel)
    }

    fn kernel_lost(&self, path: KernelPath) {
        path.drain(&self.device);
        self.on_bus.exchange(self.region.clone());
        path.stop(&self.device);
        self.on_warning(
            "the thread that carries out requests has died: each access exits to the VMM from \
             now on; restart the guest for the path kernel",
        );
    }

    /// Hands over to the path `kernel`, or to the exit.
    fn bpf_lost(&self, path: BpfPath) -> Option<InKernel> {
        self.on_bus.exchange(self.region.clone());
        let (why, calling) = path.hand_over(&self.device, self.hypercalls);
        self.active().lost_bpf = Some(path);
        let next = self.kernel.map(|_| self.start_kernel());
        let (next, how) = match next {
            Some(Ok(next)) => (Some(next), "by the path kernel".to_owned()),
            Some(Err(error)) => (None, format!("by exits to the VMM ({error:#})")),
            None => (None, "by exits to the VMM".to_owned()),
        };
        // A filter of hypercalls can't be changed once a VM has run.
        let calls = match (self.hypercalls, calling) {
            (true, Ok(())) => ", set_perf by hypercall by BPF and a thread".to_owned(),
            (true, Err(error)) => {
                format!(", set_perf by hypercall to nobody until the guest restarts ({error:#})")
            }
            (false, _) => String::new(),
        };
        self.on_warning(&format!(
            "the path bpf is lost, {why}: accesses go on {how}{calls}; restart the guest for the \
             path bpf"
        ));
        next
    }
}

impl Hooks for Joint {
    fn on_vcpu_thread_start(&self, _vcpu: VcpuId, _tid: i32) -> anyhow::Result<()> {
        Ok(())
    }

    fn on_vcpu_thread(&self, vcpu: VcpuId, tid: i32) -> anyhow::Result<()> {
        let tid = Tid::new(tid).with_context(|| format!("vCPU {vcpu} has no thread"))?;
        self.device
            .actuator()
            .register_thread(vcpu, tid)
            .with_context(|| format!("the thread of vCPU {vcpu} can't be clamped"))?;
        self.device.source().register_thread(vcpu, tid)?;
        let active = self.active();
        if let Some(path) = &active.kernel {
            path.register_thread(vcpu, tid);
        }
        if let Some(path) = &active.bpf {
            path.register_thread(vcpu)?;
        }
        drop(active);
        if let Some(slot) = self.tids.get(vcpu.index()) {
            // A vCPU has one thread.
            let _ = slot.set(tid);
        }
        // In the order of their numbers.
        self.guest.threads.store(vcpu.0 + 1, Relaxed);
        Ok(())
    }

    /// What the page shows is true again before the guest's next look at it.
    fn on_vcpu_moved(&self, vcpu: VcpuId) {
        if self.active().kernel.is_some() {
            self.device.refresh(vcpu);
        }
    }

    fn on_reset(&self) {
        // What the guest asked for before is older than the reset.
        let active = self.active();
        if let Some(path) = &active.kernel {
            path.drain(&self.device);
        }
        // KVM forwards those of the guest that boots now.
        if let Some(path) = &active.lost_bpf {
            path.end_calls();
        }
        self.device.reset();
        if let Some(path) = &active.bpf {
            path.reset();
        }
    }

    fn on_end(&self) {
        // Where a thread is can't be read any more when it has ended.
        self.guest.threads.store(0, Relaxed);
    }

    fn hypercalls(&self) -> Hypercalls {
        match self.hypercalls {
            true if self.active().bpf.is_some() => Hypercalls::WritesInKernel,
            true => Hypercalls::Forwarded,
            false => Hypercalls::None,
        }
    }

    fn on_path_lost(&self) -> Option<Arc<InKernel>> {
        let (bpf, kernel) = {
            let mut active = self.active();
            (active.bpf.take(), active.kernel.take())
        };
        if let Some(path) = kernel {
            self.kernel_lost(path);
        }
        self.bpf_lost(bpf?).map(Arc::new)
    }

    fn on_warning(&self, text: &str) {
        warn(text);
    }
}
