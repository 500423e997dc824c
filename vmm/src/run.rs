// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq run`: checks everything, then joins configuration, device, host
//! and virtual machine, and tidies up.
//!
//! ```text
//! options ─▶ RunConfig ─▶ offer of the host ─▶ footprint ─▶ device ─▶ vm::run ─▶ report
//!  └────── nothing on the host is changed ──────┘
//! ```

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, bail};
use vcpufreq_device::{
    Device, Headroom, MmioRegion, VcpuId,
    host::{
        self, ActuatorChoice, ActuatorFacts, ActuatorKind, Chosen, HostActuator, HostRoot,
        KernelTree, SysfsSource, Tid,
    },
};

use crate::{
    cli::RunArgs,
    config::RunConfig,
    doctor_facts::{KvmFacts, headroom_of},
    events::{self, EventReport, EventWriter},
    facts::{HostCpus, HostTree},
    footprint::Footprint,
    guest_topology, resolve,
    run_report::{Observer, Summary},
    sys,
    vm::{self, Hooks, VmError, layout},
};

/// How often the source's files are looked after, when a read has failed.
const LOOK_AFTER_SOURCE: Duration = Duration::from_secs(1);

type BridgeDevice = Device<HostActuator, Arc<SysfsSource>, Arc<Observer>>;

/// Tells the user something that ends nothing.
pub fn warn(text: &str) {
    eprintln!("vcpufreq: {text}");
}

/// Runs a guest; returns the exit code.
///
/// # Errors
/// Whatever keeps the guest from starting, in one line.
pub fn run(args: &RunArgs) -> anyhow::Result<u8> {
    if let Err(error) = sys::raise_open_files() {
        warn(&format!(
            "can't raise the limit of open files ({error}); guests of many vCPUs may not start"
        ));
    }
    let host = HostTree::default();
    let cpus = HostCpus::read(&host);
    let config = resolve::run_config(&args.options()?, &cpus)?;
    check_kvm(&config)?;
    let offer = config.bridge.then(|| Offer::of_host(&config)).transpose()?;
    if std::env::consts::ARCH != "aarch64" {
        let arch = std::env::consts::ARCH;
        return Err(VmError::NotThereYet { arch }.into());
    }
    let footprint = Footprint::begin(offer.as_ref().and_then(Offer::groups), warn)?;
    let ran = run_and_report(&config, &host, offer);
    let erased = footprint.erase();
    let code = ran?;
    erased.map(|()| code)
}

fn run_and_report(config: &RunConfig, host: &HostTree, offer: Option<Offer>) -> anyhow::Result<u8> {
    let (observer, writer) = observe(config)?;
    let ran = run_guest(config, host, offer, &observer);
    let written = writer.map(EventWriter::finish).transpose();
    let (code, summary) = ran?;
    let events = written.context("the events file is not complete")?;
    let findings = report(summary, &observer, events);
    Ok(if code == 0 { findings.into() } else { code })
}

/// What the host offers to a guest with the bridge; nothing is made yet.
struct Offer {
    chosen: Chosen,
    source: SysfsSource,
}

impl Offer {
    fn of_host(config: &RunConfig) -> anyhow::Result<Self> {
        const NEXT: &str = "or run without the bridge (--no-bridge)";
        let root = HostRoot::default();
        let chosen = host::choose(config.actuator, ActuatorFacts::probe(&root))
            .map_err(|why| anyhow::anyhow!("{why}; change that, {NEXT}"))?;
        if config.actuator == ActuatorChoice::Auto && chosen.kind == ActuatorKind::Thread {
            warn(&chosen.reason);
        }
        let count = u16::try_from(config.vcpus.len()).context("too many vCPUs")?;
        let source =
            SysfsSource::new(&root, count).map_err(|why| anyhow::anyhow!("{why}, {NEXT}"))?;
        Ok(Self { chosen, source })
    }

    /// The cgroups that this process will make.
    fn groups(&self) -> Option<host::GroupRecord> {
        match &self.chosen.kind {
            ActuatorKind::Cgroup(place) => Some(place.record(std::process::id())),
            ActuatorKind::Thread => None,
        }
    }
}

/// Opens KVM and lets it go again: the guest's is opened when all else is there.
fn check_kvm(config: &RunConfig) -> anyhow::Result<()> {
    let path = &config.kvm_device;
    let version = vm::open_kvm(path)?.get_api_version();
    if version != KvmFacts::API_VERSION {
        bail!(
            "{} is no usable KVM device (API version {version}, not {}); give one with --kvm-device, usually /dev/kvm",
            path.display(),
            KvmFacts::API_VERSION
        );
    }
    Ok(())
}

fn observe(config: &RunConfig) -> anyhow::Result<(Arc<Observer>, Option<EventWriter>)> {
    let Some(path) = &config.events else {
        return Ok((Arc::default(), None));
    };
    let (queue, writer) = events::open(path).with_context(|| {
        format!(
            "can't write events to {}; give another --events",
            path.display()
        )
    })?;
    Ok((Arc::new(Observer::new(Some(queue))), Some(writer)))
}

fn run_guest(
    config: &RunConfig,
    host: &HostTree,
    offer: Option<Offer>,
    observer: &Arc<Observer>,
) -> anyhow::Result<(u8, Option<Summary>)> {
    let base = config.bridge.then_some(layout::CPUFREQ_BASE);
    let machine = guest_topology::machine(&config.vcpus, base)
        .context("can't describe the guest's CPUs; correct --table or --capacity")?;
    let bridge = offer
        .map(|offer| make_device(config, host, offer, observer))
        .transpose()?;
    let keeper = bridge
        .as_ref()
        .map(|bridge| SourceKeeper::start(bridge.source().clone(), observer.clone()))
        .transpose()?;
    let guest = vm::Host {
        hooks: Arc::new(HostHooks {
            bridge: bridge.clone(),
        }),
        cpufreq: bridge.clone().map(|device| {
            let region = MmioRegion::new(device);
            let size = region.size();
            (Arc::new(region) as Arc<dyn vm::bus::MmioDevice>, size)
        }),
    };
    let report = vm::run(config, &machine, &guest);
    if let Some(keeper) = keeper {
        keeper.stop();
    }
    let report = report?;
    if let Some(message) = report.reason.message() {
        warn(&message);
    }
    let summary = bridge.map(|device| Summary::of(&device));
    Ok((report.reason.exit_code(), summary))
}

fn make_device(
    config: &RunConfig,
    host: &HostTree,
    offer: Offer,
    observer: &Arc<Observer>,
) -> anyhow::Result<Arc<BridgeDevice>> {
    let release = host.text("proc/sys/kernel/osrelease").unwrap_or_default();
    let headroom = headroom_of(&release).unwrap_or(Headroom::None);
    let device = resolve::device_config(&config.vcpus, config.clamp, headroom)?;
    let actuator = make_actuator(config, &offer.chosen)?;
    let source = Arc::new(offer.source);
    let device = Device::new(device, actuator, source, observer.clone())?;
    Ok(Arc::new(device))
}

fn make_actuator(config: &RunConfig, chosen: &Chosen) -> anyhow::Result<HostActuator> {
    let domains: Vec<_> = config.vcpus.iter().map(|vcpu| vcpu.domain).collect();
    let build = |kind| HostActuator::build(kind, &KernelTree, &domains);
    match build(&chosen.kind) {
        Err(why) if config.actuator == ActuatorChoice::Auto => {
            warn(&format!(
                "no cgroup can be made, requests go to the threads: {why}"
            ));
            Ok(build(&ActuatorKind::Thread)?)
        }
        built => built.context("can't make this VM's cgroups; see vcpufreq doctor"),
    }
}

/// What the virtual machine tells the rest of the program.
struct HostHooks {
    bridge: Option<Arc<BridgeDevice>>,
}

impl Hooks for HostHooks {
    fn on_vcpu_thread(&self, vcpu: VcpuId, tid: i32) -> anyhow::Result<()> {
        let Some(device) = &self.bridge else {
            return Ok(());
        };
        let tid = Tid::new(tid).with_context(|| format!("vCPU {vcpu} has no thread"))?;
        device
            .actuator()
            .register_thread(vcpu, tid)
            .with_context(|| format!("the thread of vCPU {vcpu} can't be clamped"))?;
        device.source().register_thread(vcpu, tid)?;
        Ok(())
    }

    fn on_reset(&self) {
        if let Some(device) = &self.bridge {
            device.reset();
        }
    }

    fn on_warning(&self, text: &str) {
        warn(text);
    }
}

/// Opens the source's files anew after a read has failed: pCPUs come and go,
/// and so do cpufreq drivers.
struct SourceKeeper {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl SourceKeeper {
    fn start(source: Arc<SysfsSource>, observer: Arc<Observer>) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let keep = move || {
            while !stopped.load(Relaxed) {
                if observer.take_source_failed() {
                    source.refresh();
                }
                std::thread::park_timeout(LOOK_AFTER_SOURCE);
            }
        };
        let thread = std::thread::Builder::new().name("source".to_owned());
        Ok(Self {
            stop,
            thread: thread.spawn(keep).context("can't start a thread")?,
        })
    }

    fn stop(self) {
        self.stop.store(true, Relaxed);
        self.thread.thread().unpark();
        // A panic of that thread was reported when it happened.
        let _ = self.thread.join();
    }
}

/// Says how it went; whether that has findings.
fn report(summary: Option<Summary>, observer: &Observer, events: Option<EventReport>) -> bool {
    let mut findings = false;
    if let Some(summary) = summary {
        warn(&summary.to_string());
        findings |= summary.refused() > 0;
    }
    if let Some(error) = observer.first_refusal() {
        warn(&format!("first refusal: {error}"));
    }
    if let Some(EventReport { written, dropped }) = events
        && dropped > 0
    {
        warn(&format!(
            "events: {written} written, {dropped} dropped because they came faster than they could be written"
        ));
        findings = true;
    }
    findings
}
