// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The bridge of one guest: the device, how its accesses get there, and the
//! threads that it needs.
//!
//! ```text
//! exit    vCPU thread ─▶ MmioRegion ─▶ device
//! kernel  KVM ─▶ eventfds ─▶ Worker ─▶ device ─▶ pages ─▶ KVM
//! ```

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

use anyhow::Context;
use vcpufreq_device::{
    Device, DeviceConfig, DomainId, MmioRegion, RegisterPages, VcpuId,
    host::{HostActuator, SysfsSource, Tid},
};
use vmm_sys_util::eventfd::EventFd;

use crate::{
    bridge_stats::BridgeStats,
    config::RunConfig,
    facts::{HostCpus, HostTree},
    housekeeper::Housekeeper,
    kernel_path::{
        Changes, Inbox, Inboxes, KernelRegion, LastWrites, Plan, Recorder, Unknown, Worker,
    },
    run::warn,
    run_report::{Observer, Summary},
    stats,
    vm::{
        Cpufreq, Hooks,
        bus::MmioDevice,
        in_kernel::{Doorbell, InKernel},
        pages::PageMapping,
    },
};

/// The device as this program makes it.
pub type BridgeDevice = Device<HostActuator, Arc<SysfsSource>, Arc<Observer>>;

/// A device with all that it needs while its guest runs.
pub struct Bridge {
    device: Arc<BridgeDevice>,
    housekeeper: Housekeeper,
    in_kernel: Option<KernelPath>,
    stats: Option<stats::Server>,
}

/// What the path `kernel` adds.
struct KernelPath {
    inboxes: Arc<Inboxes>,
    threads: Arc<AtomicU16>,
    recorder: Option<Arc<Recorder>>,
    changes: Option<Arc<Changes>>,
    worker: Worker,
}

/// How the path `kernel` is to be.
#[derive(Clone, Copy, Debug)]
pub struct KernelPlan {
    /// Each store to the pages has to be cleaned out of the cache.
    pub clean: bool,
}

impl Bridge {
    /// Starts the bridge. With `plan`, by the path `kernel`.
    ///
    /// # Errors
    /// What the host refused: memory, threads or open files.
    pub fn start(
        device: BridgeDevice,
        config: &RunConfig,
        plan: Option<KernelPlan>,
        observer: &Arc<Observer>,
    ) -> anyhow::Result<(Self, Cpufreq)> {
        let device = Arc::new(device);
        let region = MmioRegion::new(device.clone());
        let size = region.size();
        let mut cpufreq = Cpufreq {
            device: Arc::new(region),
            size,
            in_kernel: None,
        };
        let in_kernel = plan
            .map(|plan| KernelPath::start(&device, config, plan, &mut cpufreq))
            .transpose()?;
        let housekeeper = Housekeeper::start(device.clone(), observer.clone())?;
        let in_kvm = cpufreq.in_kernel.as_ref();
        let stats = BridgeStats {
            device: device.clone(),
            observer: observer.clone(),
            taken: in_kvm.map(|in_kvm| in_kvm.taken.clone()),
        };
        let bridge = Self {
            device,
            housekeeper,
            in_kernel,
            stats: stats.serve(),
        };
        Ok((bridge, cpufreq))
    }

    /// What the virtual machine tells.
    pub fn hooks(&self) -> Arc<dyn Hooks> {
        Arc::new(BridgeHooks {
            device: self.device.clone(),
            inboxes: self.in_kernel.as_ref().map(|path| path.inboxes.clone()),
            threads: self.in_kernel.as_ref().map(|path| path.threads.clone()),
            recorder: self.in_kernel.as_ref().and_then(|p| p.recorder.clone()),
            changes: self.in_kernel.as_ref().and_then(|p| p.changes.clone()),
        })
    }

    /// Ends its threads; what came of the guest's requests.
    pub fn stop(self) -> Summary {
        if let Some(stats) = self.stats {
            stats.stop();
        }
        if let Some(path) = self.in_kernel {
            let KernelPath {
                inboxes, worker, ..
            } = path;
            drop(worker);
            inboxes.drain(&*self.device);
        }
        self.housekeeper.stop();
        Summary::of(&self.device)
    }
}

impl KernelPath {
    fn start(
        device: &Arc<BridgeDevice>,
        config: &RunConfig,
        plan: KernelPlan,
        cpufreq: &mut Cpufreq,
    ) -> anyhow::Result<Self> {
        let pages = PageMapping::new(cpufreq.size, plan.clean);
        let pages = Arc::new(pages.context("can't map the register pages")?);
        let vcpus = u16::try_from(config.vcpus.len()).context("too many vCPUs")?;
        device.attach_pages(RegisterPages::new(Box::new(pages.clone()), vcpus)?)?;
        let doorbells: Arc<[Doorbell]> = doorbells(device.config())?.into();
        let recorder = Recorder::new(&HostTree::default(), vcpus, cpufreq.size);
        if config.explain {
            eprintln!("{}", order(recorder.as_ref().err()));
        }
        let recorder = recorder.ok().map(Arc::new);
        let last_writes: Arc<dyn LastWrites> = match &recorder {
            Some(recorder) => recorder.clone(),
            None => Arc::new(Unknown),
        };
        let inboxes = inboxes(device.config(), &doorbells, &last_writes)?;
        let threads = Arc::<AtomicU16>::default();
        let worker = Worker::start(Plan {
            inboxes: inboxes.clone(),
            device: device.clone(),
            vcpus: threads.clone(),
            avoid: config.vcpus.iter().flat_map(|v| v.pin.clone()).collect(),
        })?;
        let host = HostTree::default();
        let pcpus = HostCpus::read(&host).online().0;
        let changes = Changes::watch(&host, worker.epoll(), &pcpus, vcpus);
        if config.explain {
            eprintln!("{}", freshness(changes.as_ref().err()));
        }
        cpufreq.in_kernel = Some(InKernel {
            pages,
            doorbells,
            lost: worker.lost(),
            taken: Arc::default(),
        });
        let region: Arc<dyn MmioDevice> = cpufreq.device.clone();
        cpufreq.device = Arc::new(KernelRegion::new(region, device.clone(), inboxes.clone()));
        Ok(Self {
            inboxes,
            threads,
            recorder,
            changes: changes.ok().map(Arc::new),
            worker,
        })
    }
}

/// An eventfd for each entry of each vCPU's table. One entry is no table: any
/// value up to it may be asked for, so that requests exit.
fn doorbells(config: &DeviceConfig) -> anyhow::Result<Vec<Doorbell>> {
    let mut doorbells = Vec::new();
    for (vcpu, spec) in (0..=u16::MAX).map(VcpuId).zip(&config.vcpus) {
        if let entries @ [_, _, ..] = spec.table.entries() {
            for khz in entries.iter().map(|khz| khz.0) {
                let event = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
                let event = event.context("can't make an eventfd for each table entry")?;
                let event = Arc::new(event);
                doorbells.push(Doorbell { vcpu, khz, event });
            }
        }
    }
    Ok(doorbells)
}

fn inboxes(
    config: &DeviceConfig,
    doorbells: &[Doorbell],
    last_writes: &Arc<dyn LastWrites>,
) -> anyhow::Result<Arc<Inboxes>> {
    let mut bells: BTreeMap<DomainId, Vec<_>> = BTreeMap::new();
    let domains = config.domains();
    for domain in &domains {
        bells.insert(*domain, Vec::new());
    }
    for Doorbell { vcpu, khz, event } in doorbells {
        let domain = config.vcpus[vcpu.index()].domain;
        let of_domain = bells.entry(domain).or_default();
        of_domain.push((*vcpu, *khz, event.clone()));
    }
    let inboxes = bells.into_values();
    let inboxes = inboxes.map(|bells| Inbox::new(bells, last_writes.clone()));
    let inboxes = inboxes
        .collect::<Result<Vec<_>, _>>()
        .context("can't watch the guest's requests")?;
    let of_vcpu = config.vcpus.iter();
    let of_vcpu = of_vcpu.map(|spec| domains.partition_point(|id| *id < spec.domain));
    Ok(Inboxes::new(inboxes, of_vcpu.collect()))
}

/// How requests of one table entry that comes back are put in order.
fn order(unknown: Option<&anyhow::Error>) -> String {
    match unknown {
        None => {
            "path kernel: the order of requests that come together is kvm:kvm_mmio's".to_owned()
        }
        Some(why) => format!(
            "path kernel: of requests that come together the highest counts when an earlier one \
             comes back, until the next one: {why:#}"
        ),
    }
}

/// How soon cur_perf is true again.
fn freshness(unknown: Option<&anyhow::Error>) -> String {
    match unknown {
        None => "path kernel: cur_perf follows migrations and frequency changes".to_owned(),
        Some(why) => {
            format!("path kernel: cur_perf is looked after every 4 ms or less often: {why:#}")
        }
    }
}

/// What the virtual machine tells the bridge.
struct BridgeHooks {
    device: Arc<BridgeDevice>,
    inboxes: Option<Arc<Inboxes>>,
    /// How many vCPUs there are threads of, for the worker.
    threads: Option<Arc<AtomicU16>>,
    recorder: Option<Arc<Recorder>>,
    changes: Option<Arc<Changes>>,
}

impl BridgeHooks {
    fn drain(&self) {
        if let Some(inboxes) = &self.inboxes {
            inboxes.drain(&*self.device);
        }
    }
}

impl Hooks for BridgeHooks {
    fn on_vcpu_thread(&self, vcpu: VcpuId, tid: i32) -> anyhow::Result<()> {
        let tid = Tid::new(tid).with_context(|| format!("vCPU {vcpu} has no thread"))?;
        self.device
            .actuator()
            .register_thread(vcpu, tid)
            .with_context(|| format!("the thread of vCPU {vcpu} can't be clamped"))?;
        self.device.source().register_thread(vcpu, tid)?;
        if let Some(recorder) = &self.recorder {
            recorder.register_thread(vcpu, tid)?;
        }
        if let Some(changes) = &self.changes {
            changes.register_thread(vcpu, tid)?;
        }
        if let Some(threads) = &self.threads {
            // In the order of their numbers.
            threads.store(vcpu.0 + 1, Relaxed);
        }
        Ok(())
    }

    fn on_reset(&self) {
        // What the guest asked for before is older than the reset.
        self.drain();
        self.device.reset();
    }

    fn on_end(&self) {
        // Where a thread is can't be read any more when it has ended.
        if let Some(threads) = &self.threads {
            threads.store(0, Relaxed);
        }
    }

    fn on_path_lost(&self) {
        self.drain();
        self.on_warning(
            "the thread that carries out requests has died: each access exits to the VMM from \
             now on; restart the guest for the path kernel",
        );
    }

    fn on_warning(&self, text: &str) {
        warn(text);
    }
}
