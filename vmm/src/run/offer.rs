// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the host offers to a guest with the bridge: an actuator, frequencies and paths.

use std::sync::Arc;

use anyhow::{Context, bail};
use vcpufreq_bridge::{GuestPages, IoeventfdPlan};
use vcpufreq_device::ClampMode;
use vcpufreq_dt::RegionKind;
use vcpufreq_host::{ActuatorFacts, ActuatorKind, Chosen, HostRoot, SysfsSource};

use super::bridge::{BpfRequests, Plans, bpf_backend};
use crate::{
    config::RunConfig,
    floors,
    message::warning,
    options::ActuatorWish,
    path::{self, Needs, Path, PathChoice},
    sys,
};
use vcpufreq_host::HostCpus;
use vcpufreq_vm::probe::PathFacts;

/// What the host offers to a guest with the bridge; nothing is made yet.
pub struct HostOffer {
    /// How requests reach the host's scheduler.
    pub chosen: Chosen,
    /// Where frequencies are read.
    pub source: SysfsSource,
    /// The paths that may be taken.
    pub plans: Plans,
    /// Lines about these, for when nothing hinders the guest.
    pub notes: Vec<String>,
}

impl HostOffer {
    /// Looks at the host.
    ///
    /// # Errors
    /// What it can't do, and what to do about it.
    pub fn of_host(config: &RunConfig, cpus: &HostCpus) -> anyhow::Result<Self> {
        const NEXT: &str = "or run without the bridge (--no-bridge)";
        let root = HostRoot::default();
        let facts = ActuatorFacts::probe(&root, config.options.bridge.cgroup_parent.as_deref());
        let chosen = vcpufreq_host::choose(config.actuator, facts).map_err(|why| {
            anyhow::anyhow!(
                "{why}; change that, {NEXT}, or let it only read what it gets (--actuator none)"
            )
        })?;
        config.rt().check_clamped(config.actuator)?;
        let mut notes = Vec::new();
        let count = u16::try_from(config.vcpus.len()).context("too many vCPUs")?;
        let source =
            SysfsSource::new(&root, count).map_err(|why| anyhow::anyhow!("{why}, {NEXT}"))?;
        if config.options.bridge.sum == Some(true)
            && !matches!(chosen.kind, ActuatorKind::Cgroup(_))
        {
            bail!("--sum needs cgroups for its clamps; leave it out, or see --explain");
        }
        let plans = choose_path(config, cpus, &mut notes)?;
        Ok(Self {
            chosen,
            source,
            plans,
            notes,
        })
    }

    /// The cgroups that this process will make.
    pub fn groups(&self) -> Option<vcpufreq_host::GroupRecord> {
        match &self.chosen.kind {
            ActuatorKind::Cgroup(place) => Some(place.record(std::process::id())),
            ActuatorKind::Adopted(_)
            | ActuatorKind::Partition(_)
            | ActuatorKind::Thread
            | ActuatorKind::Nothing => None,
        }
    }
}

/// Which paths the guest's accesses may take; `notes` gets lines about it.
fn choose_path(
    config: &RunConfig,
    cpus: &HostCpus,
    notes: &mut Vec<String>,
) -> anyhow::Result<Plans> {
    let options = &config.options;
    let facts = PathFacts::ask(&options.kvm_device, options.protected);
    let files = sys::open_files_at_most();
    let bpf = path::offer_bpf();
    let offers = path::offers(bpf, &facts, &needs(config, cpus), files);
    let scx = options.bridge.actuator == ActuatorWish::Scx;
    let wish = match scx {
        true => PathChoice::Bpf,
        false => options.path,
    };
    let taken = path::choose(wish, &offers).map_err(anyhow::Error::msg)?;
    if scx {
        path::check_scx().map_err(|why| anyhow::anyhow!("--actuator scx: {why}"))?;
    }
    if options.bridge.explain {
        notes.push(path::explain(&offers, taken));
    }
    let exact = options.bridge.clamp == ClampMode::Exact;
    if options.bridge.sum == Some(true) && taken != Path::Bpf {
        bail!("--sum needs the path bpf, and this is {taken}; leave it out, or see --explain");
    }
    let how = match options.bridge.sum.unwrap_or(!exact) {
        _ if scx => BpfRequests::Scx,
        true => BpfRequests::Sum,
        false => BpfRequests::Maximum,
    };
    let offered = |path| offers.iter().any(|o| o.path == path && o.possible.is_ok());
    let clean = facts.is_ok_and(|facts| !facts.coherent);
    if wish == PathChoice::Auto && !options.protected {
        let line = path::why_no_better(&offers, taken);
        notes.extend(line.map(|line| warning(&line)));
    }
    let vcpus = u16::try_from(config.vcpus.len()).context("too many vCPUs")?;
    let guest_pages = options.protected.then(|| GuestPages::new(vcpus));
    let guest_pages = guest_pages
        .transpose()
        .context("can't make the register pages")?;
    let guest_pages = guest_pages.map(Arc::new);
    Ok(Plans {
        backends: match taken {
            Path::Bpf => bpf_backend(wish == PathChoice::Bpf, how),
            Path::Ioeventfd | Path::Exit | Path::Shm | Path::Ram => Vec::new(),
        },
        memory: match taken {
            Path::Shm => Some(RegionKind::SharedMemory),
            Path::Ram => Some(RegionKind::Registers),
            Path::Bpf | Path::Ioeventfd | Path::Exit => None,
        },
        ioeventfd: (taken >= Path::Ioeventfd && offered(Path::Ioeventfd))
            .then_some(IoeventfdPlan { clean, guest_pages }),
    })
}

/// Reports how far down clamps hold on the pCPUs that vCPUs may be on.
pub fn floors(config: &RunConfig, host: &HostRoot, cpus: &HostCpus) -> Vec<String> {
    let mut pcpus = config.pinned();
    if config.vcpus.iter().any(|vcpu| vcpu.pin.is_empty()) {
        pcpus = cpus.online().into_iter().collect();
    }
    floors::explain(
        &vcpufreq_host::floors(host, cpus),
        &pcpus,
        config.options.bridge.clamp,
    )
}

fn needs(config: &RunConfig, cpus: &HostCpus) -> Needs {
    let tables = config.vcpus.iter().map(|vcpu| vcpu.opps.len());
    let entries: usize = tables.filter(|len| *len > 1).sum();
    let mut domains: Vec<_> = config.vcpus.iter().map(|vcpu| vcpu.domain).collect();
    domains.sort_unstable();
    domains.dedup();
    let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
    Needs {
        vcpus: count(config.vcpus.len()),
        entries: count(entries),
        domains: count(domains.len()),
        pcpus: count(cpus.cpus.len()),
    }
}
