// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq run`: checks everything, then joins configuration, device, host
//! and virtual machine, and tidies up.
//!
//! ```text
//! options ─▶ RunConfig ─▶ offer of the host ─▶ host changes ─▶ device ─▶ vm::run ─▶ report
//!  └────── nothing on the host is changed ──────┘
//! ```

use std::sync::Arc;

use anyhow::{Context, bail};
use vcpufreq_device::{
    Device, DeviceConfig, Headroom, VcpuId,
    host::{
        self, ActuatorChoice, ActuatorFacts, ActuatorKind, Chosen, HostActuator, HostRoot,
        KernelTree, SysfsSource,
    },
    kvm::{BridgeDevice, EventSink, EventStats, IoeventfdPlan, KvmOffload},
};
use vcpufreq_rt::{InForce, KernelHost, Record};

use crate::{
    cli::RunArgs,
    config::RunConfig,
    dl_server,
    doctor_facts::{KvmFacts, headroom_of},
    events::{self, EventReport, EventWriter},
    facts::HostCpus,
    guest_bridge::{self, BpfPlan, GuestBridge, Plans},
    guest_topology,
    host_changes::{HostChanges, Wanted},
    path::{self, Needs, Path, PathChoice},
    resolve,
    rt_guest::RtGuest,
    run_report::Summary,
    sys,
    vm::{self, Hooks, VmError, layout, probe::PathFacts},
};

/// Tells the user something that ends nothing.
pub fn warn(text: &str) {
    eprintln!("{}", warning(text));
}

fn warning(text: &str) -> String {
    format!("vcpufreq: {text}")
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
    let host = HostRoot::default();
    let cpus = HostCpus::read(&host);
    let config = resolve::run_config(&args.options()?, &cpus)?;
    check_kvm(&config)?;
    let mut offer = config.bridge.then(|| Offer::of_host(&config)).transpose()?;
    let clamps = |offer: &&mut Offer| offer.chosen.kind != ActuatorKind::Nothing;
    if let Some(offer) = offer.as_mut().filter(clamps).filter(|_| config.explain) {
        offer.notes.extend(floors(&config, &host, &cpus));
    }
    if std::env::consts::ARCH != "aarch64" {
        let arch = std::env::consts::ARCH;
        return Err(VmError::NotThereYet { arch }.into());
    }
    let applied = Applied::look(&config)?;
    let rt = RtGuest::of_host(&config, &host, applied.record())?;
    let groups = offer.as_ref().and_then(Offer::groups);
    let groups = groups.filter(|_| rt.partition().is_none());
    rt.leave_cpus(&host)?;
    let wanted = Wanted {
        groups,
        rt: rt.changes(&host),
        pinned: config.pinned(),
    };
    let changes = HostChanges::begin(wanted, warn)?;
    let begun = applied.check_still().and_then(|()| rt.begin(&host));
    // From here on the record keeps apply and restore off.
    drop(applied);
    let ran = begun.and_then(|()| run_and_report(&config, &host, offer, rt));
    let erased = changes.undo();
    let code = ran?;
    erased.map(|()| code)
}

/// What `vcpufreq rt apply` has made of this host, which stays so until the guest is on record. It
/// doesn't matter to vCPUs that aren't pinned: cpusets keep them off.
struct Applied(Option<InForce>);

impl Applied {
    fn look(config: &RunConfig) -> anyhow::Result<Self> {
        if config.pinned().is_empty() {
            return Ok(Self(None));
        }
        Ok(Self(Some(InForce::look(&KernelHost::default())?)))
    }

    fn record(&self) -> Option<&Record> {
        self.0.as_ref()?.record()
    }

    fn check_still(&self) -> anyhow::Result<()> {
        match &self.0 {
            Some(in_force) => Ok(in_force.check_still(&KernelHost::default())?),
            None => Ok(()),
        }
    }
}

fn run_and_report(
    config: &RunConfig,
    host: &HostRoot,
    offer: Option<Offer>,
    rt: RtGuest,
) -> anyhow::Result<u8> {
    if config.bridge {
        warn(&config.likeness);
    }
    for line in offer.iter().flat_map(|offer| &offer.notes) {
        eprintln!("{line}");
    }
    let (stats, writer) = observe(config)?;
    let ran = run_guest((config, host, rt), offer, &stats);
    let written = writer.map(EventWriter::finish).transpose();
    let (code, summary) = ran?;
    let events = written.context("the events file is not complete")?;
    let findings = report(summary, &stats, events);
    Ok(if code == 0 { findings.into() } else { code })
}

/// What the host offers to a guest with the bridge; nothing is made yet.
struct Offer {
    chosen: Chosen,
    source: SysfsSource,
    /// The paths that may be taken.
    plans: Plans,
    /// What there is to say of these once nothing hinders the guest.
    notes: Vec<String>,
}

impl Offer {
    fn of_host(config: &RunConfig) -> anyhow::Result<Self> {
        const NEXT: &str = "or run without the bridge (--no-bridge)";
        let root = HostRoot::default();
        let facts = ActuatorFacts::probe(&root, config.cgroup_parent.as_deref());
        let chosen = host::choose(config.actuator, facts).map_err(|why| {
            anyhow::anyhow!(
                "{why}; change that, {NEXT}, or let it only read what it gets (--actuator none)"
            )
        })?;
        if chosen.kind == ActuatorKind::Nothing && config.rt.has_floor() {
            bail!("--actuator none can't keep a --floor; leave one of them out");
        }
        let mut notes = Vec::new();
        let count = u16::try_from(config.vcpus.len()).context("too many vCPUs")?;
        let source =
            SysfsSource::new(&root, count).map_err(|why| anyhow::anyhow!("{why}, {NEXT}"))?;
        let plans = choose_path(config, &mut notes)?;
        Ok(Self {
            chosen,
            source,
            plans,
            notes,
        })
    }

    /// The cgroups that this process will make.
    fn groups(&self) -> Option<host::GroupRecord> {
        match &self.chosen.kind {
            ActuatorKind::Cgroup(place) => Some(place.record(std::process::id())),
            ActuatorKind::Thread | ActuatorKind::Nothing => None,
        }
    }
}

/// Which paths the guest's accesses may take; `notes` gets what there is to say of it.
fn choose_path(config: &RunConfig, notes: &mut Vec<String>) -> anyhow::Result<Plans> {
    let bpf = BpfPlan {
        object: config.bpf_object.clone(),
    };
    let facts = PathFacts::ask(&config.kvm_device);
    let files = sys::open_files_at_most();
    let offers = path::offers(guest_bridge::offer_bpf(&bpf), &facts, &needs(config), files);
    let taken = path::choose(config.path, &offers).map_err(anyhow::Error::msg)?;
    if config.explain {
        notes.push(path::explain(&offers, taken));
    }
    let offered = |path| offers.iter().any(|o| o.path == path && o.possible.is_ok());
    let clean = facts.is_ok_and(|facts| !facts.coherent);
    if taken == Path::Exit
        && config.path == PathChoice::Auto
        && let Some(why) = path::why_not(&offers, Path::Ioeventfd)
    {
        notes.push(warning(&format!("each access exits to the VMM: {why}")));
    }
    Ok(Plans {
        bpf: (taken == Path::Bpf).then_some(bpf),
        only_bpf: config.path == PathChoice::Bpf,
        ioeventfd: (taken >= Path::Ioeventfd && offered(Path::Ioeventfd))
            .then_some(IoeventfdPlan { clean }),
    })
}

/// Says how far down clamps hold on the pCPUs that vCPUs may be on.
fn floors(config: &RunConfig, host: &HostRoot, cpus: &HostCpus) -> Vec<String> {
    let mut pcpus = config.pinned();
    if config.vcpus.iter().any(|vcpu| vcpu.pin.is_empty()) {
        pcpus = cpus.online().into_iter().collect();
    }
    dl_server::explain(&dl_server::floors(host, cpus), &pcpus, config.clamp)
}

fn needs(config: &RunConfig) -> Needs {
    let tables = config.vcpus.iter().map(|vcpu| vcpu.opps.len());
    let entries: usize = tables.filter(|len| *len > 1).sum();
    let mut domains: Vec<_> = config.vcpus.iter().map(|vcpu| vcpu.domain).collect();
    domains.sort_unstable();
    domains.dedup();
    let cpus = HostCpus::read(&HostRoot::default());
    let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    Needs {
        vcpus: count(config.vcpus.len()),
        entries: count(entries),
        domains: count(domains.len()),
        pcpus: count(cpus.cpus.len()),
    }
}

/// Opens KVM and lets it go again: the guest's is opened when all else is there.
fn check_kvm(config: &RunConfig) -> anyhow::Result<()> {
    let path = &config.kvm_device;
    let kvm = vm::open_kvm(path)?;
    let version = kvm.get_api_version();
    if version != KvmFacts::API_VERSION {
        bail!(
            "{} is no usable KVM device (API version {version}, not {}); give one with --kvm-device, usually /dev/kvm",
            path.display(),
            KvmFacts::API_VERSION
        );
    }
    Ok(vm::arch::check_memory(&kvm, config.mem_mib)?)
}

fn observe(config: &RunConfig) -> anyhow::Result<(Arc<EventStats>, Option<EventWriter>)> {
    let vcpus = config.vcpus.len();
    let Some(path) = &config.events else {
        return Ok((Arc::new(EventStats::new(vcpus, None)), None));
    };
    let (queue, writer) = events::open(path).with_context(|| {
        format!(
            "can't write events to {}; give another --events",
            path.display()
        )
    })?;
    let queue: Box<dyn EventSink> = Box::new(queue);
    Ok((Arc::new(EventStats::new(vcpus, Some(queue))), Some(writer)))
}

fn run_guest(
    (config, host, rt): (&RunConfig, &HostRoot, RtGuest),
    offer: Option<Offer>,
    stats: &Arc<EventStats>,
) -> anyhow::Result<(u8, Option<Summary>)> {
    let console = config.console.open()?;
    let base = config.bridge.then_some(layout::CPUFREQ_BASE);
    let machine = guest_topology::machine(&config.vcpus, base, config.standby)
        .context("can't describe the guest's CPUs; correct --table or --capacity")?;
    let bridge = offer
        .map(|offer| {
            let plans = offer.plans.clone();
            let device = make_device((config, host, &rt), offer, stats)?;
            GuestBridge::start(device, config, &plans)
        })
        .transpose()?;
    let (bridge, cpufreq) = bridge.unzip();
    let guest = vm::Host {
        hooks: rt.hooks(match &bridge {
            Some(bridge) => bridge.hooks(),
            None => Arc::new(NoBridge),
        }),
        cpufreq,
        console,
    };
    let report = vm::run(config, &machine, &guest);
    let totals = bridge.map(GuestBridge::stop);
    let report = report?;
    let summary = totals.map(|totals| Summary::new(totals, &report));
    if report.console_dropped > 0 {
        let dropped = report.console_dropped;
        warn(&format!("console: {dropped} bytes found its file full"));
    }
    if let Some(message) = report.reason.message() {
        warn(&message);
    }
    Ok((report.reason.exit_code(), summary))
}

fn make_device(
    (config, host, rt): (&RunConfig, &HostRoot, &RtGuest),
    offer: Offer,
    stats: &Arc<EventStats>,
) -> anyhow::Result<BridgeDevice> {
    let release = host.text("proc/sys/kernel/osrelease").unwrap_or_default();
    let headroom = headroom_of(&release).unwrap_or(Headroom::None);
    let device = DeviceConfig {
        visibility: config.visibility,
        rate_limit: config.rate_limit,
        ..resolve::device_config(&config.vcpus, config.clamp, headroom)?
    };
    let actuator = make_actuator(config, rt, &offer.chosen)?;
    let actuator = rt.actuator(actuator);
    let source = Arc::new(offer.source);
    Ok(Device::new(device, actuator, source, stats.clone())?)
}

fn make_actuator(
    config: &RunConfig,
    rt: &RtGuest,
    chosen: &Chosen,
) -> anyhow::Result<HostActuator> {
    let domains: Vec<_> = config.vcpus.iter().map(|vcpu| vcpu.domain).collect();
    // The groups of a partition need no place of their own.
    let grouped = matches!(
        config.actuator,
        ActuatorChoice::Auto | ActuatorChoice::Cgroup
    );
    if let Some(groups) = rt.partition().filter(|_| grouped) {
        return HostActuator::in_partition(groups, &domains)
            .context("can't clamp in the real-time partition; see vcpufreq rt check");
    }
    if config.actuator == ActuatorChoice::Auto && chosen.kind == ActuatorKind::Thread {
        warn(&chosen.reason);
    }
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

/// Hooks of a guest without the bridge.
struct NoBridge;

impl Hooks for NoBridge {
    fn on_vcpu_thread_start(&self, _vcpu: VcpuId, _tid: i32) -> anyhow::Result<()> {
        Ok(())
    }

    fn on_vcpu_thread(&self, _vcpu: VcpuId, _tid: i32) -> anyhow::Result<()> {
        Ok(())
    }

    fn on_vcpu_moved(&self, _vcpu: VcpuId) {}

    fn on_reset(&self) {}

    fn on_path_lost(&self) -> Option<Arc<KvmOffload>> {
        None
    }

    fn on_end(&self) {}

    fn on_warning(&self, text: &str) {
        warn(text);
    }
}

/// Says how it went; whether that has findings.
fn report(summary: Option<Summary>, stats: &EventStats, events: Option<EventReport>) -> bool {
    let mut findings = false;
    if let Some(summary) = summary {
        warn(&summary.to_string());
        findings |= summary.refused() > 0;
    }
    if let Some(error) = stats.first_refusal() {
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
