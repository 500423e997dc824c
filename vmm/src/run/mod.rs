// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq run`: checks everything, then joins configuration, device, host
//! and virtual machine, and tidies up.
//!
//! ```text
//! options ─▶ RunConfig ─▶ offer of the host ─▶ host changes ─▶ device ─▶ vcpufreq_vm::run ─▶ report
//!  └────── nothing on the host is changed ──────┘
//! ```

pub mod bridge;
mod hooks;
mod offer;
mod summary;

use std::sync::Arc;

use anyhow::{Context, bail};
use vcpufreq_bridge::{BridgeDevice, EventStats, Totals};
use vcpufreq_device::{Device, DeviceConfig};
use vcpufreq_dt::RegionKind;
use vcpufreq_host::undo::{JournalEntry, KernelHost};
use vcpufreq_host::{ActuatorChoice, ActuatorKind, Chosen, HostActuator, HostRoot, KernelTree};

use self::{bridge::GuestBridge, hooks::GuestHooks, offer::HostOffer, summary::summary};
use crate::{
    config::{RunConfig, no_frequencies::with_next_step, resolve, topology},
    events::{self, EventReport, EventWriter},
    kernel_version::host_headroom,
    lifecycle::{
        guardian::GuardianSocket,
        host_changes::HostChanges,
        record::{VmmRecord, owner_of},
    },
    message::warn,
    options::RunArgs,
    rt_guest::{InForce, RtGuest},
    sandbox::{Confined, Limits, Sandbox},
    session::observe,
    sys,
};
use vcpufreq_host::HostCpus;
use vcpufreq_vm::{RunReport, console_output::ConsoleEnd, disk::DiskImage, layout, protected};

/// Runs a guest; returns the exit code.
///
/// # Errors
/// Whatever keeps the guest from starting, in one line.
pub fn run(options: RunArgs) -> anyhow::Result<u8> {
    if let Err(error) = sys::raise_open_files() {
        warn(&format!(
            "can't raise the limit of open files ({error}); guests of many vCPUs may not start"
        ));
    }
    let host = HostRoot::default();
    let cpus = HostCpus::read(&host);
    let config = configuration(options, &cpus)?;
    vcpufreq_vm::check_kvm(&config.options.kvm_device, config.options.mem.0)?;
    if config.options.protected {
        check_protected(&config.options, &host)?;
    }
    let mut offer = config
        .bridge()
        .then(|| HostOffer::of_host(&config, &cpus))
        .transpose()?;
    let clamps = |offer: &&mut HostOffer| offer.chosen.kind != ActuatorKind::Nothing;
    if let Some(offer) = offer
        .as_mut()
        .filter(clamps)
        .filter(|_| config.options.bridge.explain)
    {
        offer.notes.extend(offer::floors(&config, &host, &cpus));
    }
    if std::env::consts::ARCH != "aarch64" {
        return Err(vcpufreq_vm::not_there_yet());
    }
    // It stays so until the guest is on record. vCPUs that aren't pinned are kept off by cpusets.
    let kernel = KernelHost::default();
    let applied = match config.pinned().is_empty() {
        true => None,
        false => Some(InForce::look(&kernel)?),
    };
    let record = applied.as_ref().and_then(InForce::record);
    let rt = RtGuest::of_host(&config.rt(), &host, record)?;
    let groups = offer.as_ref().and_then(HostOffer::groups);
    let groups = groups.filter(|_| rt.partition().is_none());
    rt.leave_cpus(&host)?;
    let groups = groups.map(JournalEntry::Groups);
    let record = VmmRecord {
        real_time: rt.cpus().iter().collect(),
        pinned: config.pinned(),
        entries: groups.into_iter().chain(rt.changes(&host)).collect(),
        ..VmmRecord::new(owner_of(&host, std::process::id())?)
    };
    let sandbox = Sandbox::by(config.options.sandbox, warn)?.map(Arc::new);
    let (changes, guardian) = HostChanges::begin(record, warn)?;
    let confined = sandbox.map(|sandbox| {
        Arc::new(Confined {
            sandbox,
            guardian: Some(guardian.clone()),
        })
    });
    let still = applied.as_ref().map(|applied| applied.check_still(&kernel));
    let begun = still.transpose().map_err(Into::into);
    let begun = begun
        .and_then(|_| rt.begin(&host))
        .and_then(|()| rt.lock_memory());
    // From here on the record keeps apply and restore off.
    drop(applied);
    let ran = begun.and_then(|()| run_and_report((config, confined), (&host, guardian), offer, rt));
    let erased = changes.undo();
    changes.end();
    let code = ran?;
    erased.map(|()| code)
}

/// Whether this host can have the protected guest.
fn check_protected(options: &RunArgs, host: &HostRoot) -> anyhow::Result<()> {
    let kvm = vcpufreq_vm::open_kvm(&options.kvm_device)?;
    protected::offer(&kvm, host).map_err(anyhow::Error::msg)?;
    let mem_mib = options.mem.0;
    let Err(most_kib) = sys::allow_locked(mem_mib << 20) else {
        return Ok(());
    };
    bail!(
        "a protected guest's memory is locked, and of its {mem_mib} MiB this process may lock \
         {most_kib} KiB; run as root, raise the limit (ulimit -l), or give less with --mem"
    )
}

/// As [`resolve::run_config`].
pub(crate) fn configuration(options: RunArgs, host: &HostCpus) -> anyhow::Result<RunConfig> {
    const INSTEAD: &str = "give --no-bridge to run without";
    let config = resolve::run_config(options, host);
    config.map_err(|error| with_next_step(error, true, INSTEAD))
}

fn run_and_report(
    (config, confined): (RunConfig, Option<Arc<Confined>>),
    (host, guardian): (&HostRoot, Arc<GuardianSocket>),
    offer: Option<HostOffer>,
    rt: RtGuest,
) -> anyhow::Result<u8> {
    if config.bridge() {
        warn(&config.topology_source);
    }
    for line in offer.iter().flat_map(|offer| &offer.notes) {
        eprintln!("{line}");
    }
    let sandbox = confined.as_ref().map(|confined| confined.sandbox.clone());
    let events = config.options.bridge.events.as_deref();
    let events = events.map(events::create).transpose()?;
    let (stats, writer) = observe(events, config.vcpus.len(), sandbox)?;
    let ran = run_guest((config, (host, guardian), rt), (offer, confined), &stats);
    let written = writer.map(EventWriter::finish).transpose();
    let (ended, totals) = ran?;
    let events = written.context("the events file is not complete")?;
    let findings = report(totals.map(|totals| (totals, &ended)), &stats, events);
    let code = ended.reason.exit_code();
    Ok(if code == 0 { findings.into() } else { code })
}

fn run_guest(
    (config, (host, guardian), rt): (RunConfig, (&HostRoot, Arc<GuardianSocket>), RtGuest),
    (offer, confined): (Option<HostOffer>, Option<Arc<Confined>>),
    stats: &Arc<EventStats>,
) -> anyhow::Result<(RunReport, Option<Totals>)> {
    let region = |offer: &HostOffer| match offer.plans.memory {
        Some(RegionKind::SharedMemory) => {
            topology::shared_memory(&config.vcpus, layout::CPUFREQ_BASE)
        }
        _ => topology::registers(&config.vcpus, layout::CPUFREQ_BASE),
    };
    let region = offer.as_ref().map(region);
    let machine = topology::machine(&config.vcpus, region, config.standby)
        .context("can't describe the guest's CPUs; correct --table or --capacity")?;
    let bridge = offer
        .map(|mut offer| {
            let plans = std::mem::take(&mut offer.plans);
            let mut device = device_config(&config, host)?;
            if plans.memory == Some(RegionKind::Registers) {
                // Memory has no register that answers a selection.
                device = device.without_steps();
            }
            let device = make_device((&config, &rt), (device, offer), stats)?;
            GuestBridge::start(device, (confined.as_ref(), &guardian), (&config, &plans))
        })
        .transpose()?;
    let (bridge, cpufreq) = bridge.unzip();
    if let Some(bridge) = &bridge {
        bridge.take_policy_calls(&guardian);
    }
    let guest = vcpufreq_vm::VmEnvironment {
        hooks: Arc::new(GuestHooks {
            bridge: bridge.as_ref().map(GuestBridge::handle),
            rt,
            sandbox: confined.map(|confined| (confined.sandbox.clone(), limits(&config))),
            guardian,
        }),
        cpufreq,
        console: config.options.console.clone(),
    };
    let report = vcpufreq_vm::run(config.vm, &machine, &guest);
    let totals = bridge.map(GuestBridge::stop);
    let report = report?;
    if report.console_dropped > 0 {
        let dropped = report.console_dropped;
        warn(&format!("console: {dropped} bytes found its file full"));
    }
    if let Some(message) = report.reason.message() {
        warn(&message);
    }
    Ok((report, totals))
}

/// What the VMM may use once its guest runs.
fn limits(config: &RunConfig) -> Limits {
    let console = match config.options.console {
        ConsoleEnd::File { max, .. } => Some(max),
        ConsoleEnd::Nothing => Some(0),
        // It may be a file of any size.
        ConsoleEnd::Stdio => None,
    };
    let disk = config.vm.disk.as_ref().map_or(0, DiskImage::bytes);
    Limits {
        vcpus: config.vcpus.len(),
        file_bytes: console
            .filter(|_| config.options.bridge.events.is_none())
            .map(|bytes| bytes.max(disk)),
    }
}

fn device_config(config: &RunConfig, host: &HostRoot) -> anyhow::Result<DeviceConfig> {
    let options = &config.options.bridge;
    resolve::bridge_device_config(&config.vcpus, options, host_headroom(host))
}

fn make_device(
    (config, rt): (&RunConfig, &RtGuest),
    (device, offer): (DeviceConfig, HostOffer),
    stats: &Arc<EventStats>,
) -> anyhow::Result<BridgeDevice> {
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
    let build = |kind: &ActuatorKind| HostActuator::build(kind, &KernelTree, &domains);
    if let Some(in_partition) = rt.clamped_in_partition(config.actuator) {
        return build(&in_partition.kind)
            .context("can't clamp in the real-time partition; see vcpufreq rt check");
    }
    if config.actuator == ActuatorChoice::Auto && chosen.kind == ActuatorKind::Thread {
        warn(&chosen.reason);
    }
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

/// Reports the result; returns whether it has findings.
fn report(
    bridge: Option<(Totals, &RunReport)>,
    stats: &EventStats,
    events: Option<EventReport>,
) -> bool {
    let mut findings = false;
    if let Some((totals, ended)) = bridge {
        warn(&summary(&totals, ended));
        findings |= totals.counters.refused > 0;
    }
    if let Some(error) = stats.first_refusal() {
        warn(&format!("first refusal: {error}"));
    }
    let dropped_some = events.filter(|events| events.dropped > 0);
    if let Some(EventReport { written, dropped }) = dropped_some {
        warn(&format!(
            "events: {written} written, {dropped} dropped because they came faster than they could be written"
        ));
        findings = true;
    }
    findings
}
