// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Makes a checked configuration from the user's options and the host's facts: which pCPU each vCPU
//! mirrors, its table, capacity and domain.
//!
//! Pure but for the kernel and initrd, which are opened to be checked.
//!
//! A vCPU mirrors one pCPU: the one with the largest capacity of those that it may run on, or of
//! all online ones if it isn't pinned. Of equals, the fastest, then the first. That pCPU's capacity
//! and frequencies are the vCPU's unless the user gives others. With `--host-topology` the vCPU
//! also gets the pCPU's whole table and cluster. vCPUs that are pinned within one policy share a
//! domain, which has its first vCPU's number; a real-time vCPU has one of its own. That is the
//! default where each vCPU is pinned within one policy and none is described by the user
//! ([`TopologySource`]).

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use anyhow::{Context, anyhow, bail};
use vcpufreq_device::{
    ClampMode, CurPerfVisibility, DeviceConfig, DomainId, Headroom, Khz, PerfTable, Util, VcpuSpec,
};
use vcpufreq_dt::{CpuPlace, Opp};
use vcpufreq_host::{ActuatorChoice, CAPACITY_SCALE, CpuList};

use crate::{
    config::{
        MAX_VCPUS, RunConfig, VcpuConfig,
        no_frequencies::NoFrequencies,
        rt,
        topology_source::{self, TopologySource, check_maximum, policy_of_pin},
    },
    options::{
        ActuatorWish, BridgeArgs, RunArgs, VcpuArgs,
        values::{self, of_vcpu},
    },
    path::PathChoice,
};
use vcpufreq_host::{CpufreqPolicy, HostCpus, HostOpp, Pcpu};
use vcpufreq_vm::{
    VmSpec,
    disk::DiskImage,
    image::{self, BootPlacement, Initrd, KernelImage},
};

/// Checks everything that can be checked without touching the host.
///
/// # Errors
/// The first rule that is broken: options first, then files, then the host.
pub fn run_config(options: RunArgs, host: &HostCpus) -> anyhow::Result<RunConfig> {
    let count = vcpu_count(&options.vcpus)?;
    check_named(values::largest(&options.bounds.floor), count)?;
    check_sums(&options)?;
    check_protected(&options)?;
    options.check_multi_tenant()?;
    let kernel = options.kernel.as_deref();
    let kernel = kernel.context("no kernel is given; name an arm64 Image with --kernel FILE")?;
    image::check_cmdline(&options.cmdline)?;
    let mut kernel = KernelImage::open(kernel)?;
    let initrd = options.initrd.as_deref().map(Initrd::open).transpose()?;
    let disk = options.disk.as_deref().map(DiskImage::open).transpose()?;
    let place = BootPlacement::new(&kernel, initrd.as_ref(), options.mem.0)?;
    let vcpus = vcpus(&options.vcpus, host, count)?;
    // A kernel without a banner may be any.
    let preempt_rt = kernel.preempt_rt()?.unwrap_or(true);
    let floors = rt::floors(&options.bounds, &vcpus, &host.online())?;
    rt::check_run(&options, &floors)?;
    Ok(RunConfig {
        vm: VmSpec {
            kernel,
            initrd,
            disk,
            place,
            cmdline: options.cmdline.clone(),
            pins: vcpus.iter().map(|vcpu| vcpu.pin.clone()).collect(),
            pages: options.hugepages.unwrap_or_default(),
            protected: options.protected,
            kvm_device: options.kvm_device.clone(),
            dump_dtb: options.dump_dtb.clone(),
        },
        topology_source: topology_source::line(&options.vcpus, host, &vcpus),
        standby: preempt_rt || vcpus.iter().any(|vcpu| vcpu.rt.is_some()),
        vcpus,
        floors,
        actuator: actuator_choice(&options.bridge)?,
        options,
    })
}

/// Whether what is wanted of sums can be had.
///
/// # Errors
/// As [`BridgeArgs::check_sums`]; what `vcpufreq scx` needs.
fn check_sums(options: &RunArgs) -> anyhow::Result<()> {
    options.bridge.check_sums()?;
    if options.bridge.actuator != ActuatorWish::Scx {
        return Ok(());
    }
    if !matches!(options.path, PathChoice::Auto | PathChoice::Bpf) {
        bail!("--actuator scx needs the path bpf; leave --path out");
    }
    Ok(())
}

/// Whether a protected guest can have what is wanted.
///
/// # Errors
/// What it can't have, and what to do.
fn check_protected(options: &RunArgs) -> anyhow::Result<()> {
    if !options.protected {
        return Ok(());
    }
    if options.hugepages.is_some() {
        bail!("KVM has no huge pages for a protected guest; leave --hugepages out");
    }
    if options.bridge.actuator == ActuatorWish::Scx {
        bail!(
            "--actuator scx needs the path bpf, which a protected guest hasn't; leave --actuator out"
        );
    }
    Ok(())
}

/// The number of vCPUs, checked; options for others than these are refused.
///
/// # Errors
/// Which rule is broken.
pub fn vcpu_count(options: &VcpuArgs) -> anyhow::Result<u32> {
    let count = options.cpus.unwrap_or(1);
    if !(1..=MAX_VCPUS).contains(&count) {
        bail!("{count} vCPUs; give --cpus a number from 1 to {MAX_VCPUS}");
    }
    check_named(options.largest_named(), count)?;
    Ok(count)
}

/// Whether options for vCPUs up to `largest` have these.
///
/// # Errors
/// Names the first that isn't there.
pub fn check_named(largest: Option<u32>, count: u32) -> anyhow::Result<()> {
    match largest {
        Some(vcpu) if vcpu >= count => bail!(
            "there is no vCPU {vcpu}: the guest has {count} (numbers from 0); raise --cpus or correct the option"
        ),
        _ => Ok(()),
    }
}

/// The vCPUs, checked, in their order.
///
/// # Errors
/// The first rule that is broken: the cause, then what to do.
pub fn vcpus(options: &VcpuArgs, host: &HostCpus, count: u32) -> anyhow::Result<Vec<VcpuConfig>> {
    let mut plan = VcpuResolver {
        host,
        options,
        mirror: TopologySource::choose(options, host, count).mirrors(),
        domains: BTreeMap::new(),
        clusters: BTreeMap::new(),
        threads: BTreeSet::new(),
    };
    let vcpus = (0..count).map(|vcpu| plan.vcpu(vcpu));
    let vcpus = vcpus.collect::<anyhow::Result<Vec<_>>>()?;
    if !options.no_bridge {
        let device = device_config(&vcpus, ClampMode::default(), Headroom::None)?;
        let checked = device.check();
        checked.map_err(|why| anyhow!("{why}; correct --table, --capacity or --domain"))?;
    }
    Ok(vcpus)
}

/// What the device is made of for these vCPUs, each of which has a table.
///
/// # Errors
/// Which table is wrong.
pub fn device_config(
    vcpus: &[VcpuConfig],
    mode: ClampMode,
    headroom: Headroom,
) -> anyhow::Result<DeviceConfig> {
    let specs = (0_u32..).zip(vcpus).map(|(vcpu, config)| {
        let table = perf_table(vcpu, &config.opps)?;
        anyhow::Ok(VcpuSpec {
            table: table.referring_to(config.rated().reference),
            capacity: config.capacity,
            domain: config.domain,
        })
    });
    Ok(DeviceConfig {
        vcpus: specs.collect::<Result<_, _>>()?,
        mode,
        headroom,
        visibility: CurPerfVisibility::default(),
        rate_limit: None,
    })
}

/// What can be had of the mode that is wanted: without clamps, and by scx, a ceiling has no effect.
fn clamp_mode(options: &BridgeArgs) -> ClampMode {
    match (options.clamp, options.actuator) {
        (
            ClampMode::Ceilings,
            ActuatorWish::Scx | ActuatorWish::Clamps(ActuatorChoice::Nothing),
        ) => ClampMode::Floor,
        (clamp, _) => clamp,
    }
}

/// The same with all that the bridge's options have of it.
///
/// # Errors
/// As [`device_config`].
pub fn bridge_device_config(
    vcpus: &[VcpuConfig],
    options: &BridgeArgs,
    headroom: Headroom,
) -> anyhow::Result<DeviceConfig> {
    Ok(DeviceConfig {
        visibility: options.cur_perf,
        rate_limit: options.rate_limit.0,
        ..device_config(vcpus, clamp_mode(options), headroom)?
    })
}

fn perf_table(vcpu: u32, opps: &[Opp]) -> anyhow::Result<PerfTable> {
    let khz: Vec<_> = opps.iter().map(|opp| Khz(opp.khz)).collect();
    PerfTable::try_from(khz).map_err(|why| {
        anyhow!(
            "vCPU {vcpu}: {why}; give --table {vcpu}=KHZ,KHZ,... with 1 to 64 rising frequencies"
        )
    })
}

/// A place that is named is the one, or there is an error.
///
/// # Errors
/// When the place is of no use to the actuator that is named.
pub fn actuator_choice(options: &BridgeArgs) -> anyhow::Result<ActuatorChoice> {
    let choice = match options.actuator {
        ActuatorWish::Clamps(choice) => choice,
        // When the scheduler is gone.
        ActuatorWish::Scx => ActuatorChoice::Auto,
    };
    match (choice, &options.cgroup_parent) {
        (ActuatorChoice::Thread | ActuatorChoice::Nothing, Some(_)) => bail!(
            "--cgroup-parent is where requests become clamps of cgroups; leave it or --actuator out"
        ),
        (ActuatorChoice::Auto, Some(_)) => Ok(ActuatorChoice::Cgroup),
        (choice, _) => Ok(choice),
    }
}

/// What holds for all vCPUs, and what the earlier ones have taken.
struct VcpuResolver<'a> {
    host: &'a HostCpus,
    options: &'a VcpuArgs,
    mirror: bool,
    /// The domain of a policy's vCPUs, real-time ones apart: the first of them.
    domains: BTreeMap<(u32, bool), u32>,
    /// The guest's cluster for one of the host's.
    clusters: BTreeMap<u32, u32>,
    /// The pCPUs that a vCPU is the thread of.
    threads: BTreeSet<u32>,
}

impl<'a> VcpuResolver<'a> {
    fn vcpu(&mut self, vcpu: u32) -> anyhow::Result<VcpuConfig> {
        let pin = of_vcpu(&self.options.pin, vcpu)
            .cloned()
            .unwrap_or_default();
        self.check_pin(vcpu, &pin)?;
        let pcpu = self.mirrored(&pin);
        let policy = pcpu.and_then(|pcpu| self.host.policy_of(pcpu.id));
        let opps = self.opps(vcpu, policy)?;
        let (capacity, reference_khz) = self.capacity(vcpu, &opps, pcpu.zip(Some(policy)))?;
        Ok(VcpuConfig {
            capacity,
            reference_khz,
            opps,
            domain: DomainId(self.domain(vcpu)),
            place: self.place(pcpu, &pin),
            pin: pin.into_iter().collect(),
            rt: of_vcpu(&self.options.rt, vcpu).copied(),
        })
    }

    fn check_pin(&self, vcpu: u32, pin: &CpuList) -> anyhow::Result<()> {
        let online = self.host.online();
        for pcpu in pin.iter() {
            match self.host.cpu(pcpu) {
                None => bail!(
                    "vCPU {vcpu} is pinned to CPU {pcpu}, which this host doesn't have; choose from its online CPUs {online}"
                ),
                Some(cpu) if !cpu.online => bail!(
                    "vCPU {vcpu} is pinned to CPU {pcpu}, which is offline; bring it online (echo 1 > /sys/devices/system/cpu/cpu{pcpu}/online) or choose from {online}"
                ),
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// The pCPU that the vCPU mirrors.
    fn mirrored(&self, pin: &CpuList) -> Option<&'a Pcpu> {
        let host = self.host;
        let speed = |id| host.policy_of(id).and_then(CpufreqPolicy::top_khz);
        let allowed = |cpu: &&Pcpu| cpu.online && (pin.is_empty() || pin.contains(cpu.id));
        host.cpus
            .iter()
            .filter(allowed)
            .max_by_key(|cpu| (cpu.capacity_or_full(), speed(cpu.id), Reverse(cpu.id)))
    }

    fn opps(&self, vcpu: u32, policy: Option<&CpufreqPolicy>) -> anyhow::Result<Vec<Opp>> {
        if let Some(table) = of_vcpu(&self.options.table, vcpu) {
            perf_table(vcpu, &table.0)?;
            check_maximum(vcpu, table.0.last().map_or(0, |opp| opp.khz))?;
            return Ok(table.0.clone());
        }
        let opps = match policy {
            Some(policy) if self.mirror && !policy.opps.is_empty() => {
                policy.opps.iter().map(own).collect()
            }
            Some(policy) => policy.top_khz().map(only).into_iter().collect(),
            None => Vec::new(),
        };
        if opps.is_empty() && !self.options.no_bridge {
            let why = match policy {
                Some(policy) => format!("cpufreq policy {} doesn't report its maximum", policy.id),
                None => "its pCPU has no cpufreq policy".to_owned(),
            };
            let others_have = !self.host.policies.is_empty();
            bail!(NoFrequencies {
                vcpu,
                why,
                others_have,
            });
        }
        if !opps.is_empty() {
            perf_table(vcpu, &opps)?;
        }
        Ok(opps)
    }

    fn domain(&mut self, vcpu: u32) -> u32 {
        let policy = policy_of_pin(self.host, of_vcpu(&self.options.pin, vcpu));
        match (
            of_vcpu(&self.options.domain, vcpu),
            policy.filter(|_| self.mirror),
        ) {
            (Some(domain), _) => *domain,
            (None, Some(policy)) => {
                let key = (policy, of_vcpu(&self.options.rt, vcpu).is_some());
                *self.domains.entry(key).or_insert(vcpu)
            }
            (None, None) => vcpu,
        }
    }

    /// A domain follows the policy, a cluster the topology: either can have several of the other.
    /// vCPUs that are pinned to different threads of one core are threads of one core too. Any other
    /// vCPU is a core of its own.
    fn place(&mut self, pcpu: Option<&Pcpu>, pin: &CpuList) -> CpuPlace {
        let Some(pcpu) = pcpu.filter(|_| self.mirror) else {
            return CpuPlace::default();
        };
        let next = u32::try_from(self.clusters.len()).unwrap_or(u32::MAX);
        let cluster = |own| *self.clusters.entry(own).or_insert(next);
        let host = self.host;
        let core = pcpu.core.filter(|_| !pin.is_empty());
        let is_own = |cpu| host.cpu(cpu).is_some_and(|cpu| cpu.core == core);
        let core = core.filter(|_| pin.iter().all(is_own));
        CpuPlace {
            socket: pcpu.package.unwrap_or_default(),
            cluster: pcpu.cluster.map(cluster).unwrap_or_default(),
            core: core.filter(|_| self.threads.insert(pcpu.id)),
        }
    }

    /// The capacity of a vCPU and the frequency that it refers to. The user's is at the vCPU's
    /// maximum; else `pCPU's × IPC ratio`, at the reference of the pCPU's. A vCPU of at most 1.4 GHz
    /// on a pCPU of 2.8 GHz and capacity 1024 has 1024 at 2.8 GHz: half of it at its maximum.
    fn capacity(
        &self,
        vcpu: u32,
        opps: &[Opp],
        mirrored: Option<(&Pcpu, Option<&CpufreqPolicy>)>,
    ) -> anyhow::Result<(Util, Option<u32>)> {
        let own = of_vcpu(&self.options.capacity, vcpu);
        let ratio = of_vcpu(&self.options.ipc_ratio, vcpu);
        let (capacity, reference_khz) = match (own, ratio) {
            (Some(_), Some(_)) => {
                bail!("vCPU {vcpu} has both --capacity and --ipc-ratio; give one of them")
            }
            (Some(capacity), None) => (u64::from(*capacity), None),
            (None, ratio) => {
                let of_pcpu = mirrored.map_or(CAPACITY_SCALE, |(pcpu, _)| pcpu.capacity_or_full());
                let permille = ratio.map_or(1000, |ratio| ratio.permille);
                let capacity = u64::from(of_pcpu) * u64::from(permille) / 1000;
                (capacity, mirrored.and_then(|(pcpu, _)| pcpu.reference_khz))
            }
        };
        let khz = opps.last().map(|opp| opp.khz);
        let (top, reference) = khz.zip(reference_khz).unwrap_or((1, 1));
        // Below 2^27 × 2^32: within 64 bits.
        let at_top = capacity * u64::from(top) / u64::from(reference.max(1));
        let util = |value: u64| u16::try_from(value).ok().and_then(Util::new);
        let (at_reference, own_top) = (util(capacity), util(at_top));
        // What the host's boost adds may be above 1024, what the user adds may not.
        let host_top = mirrored.and_then(|(_, policy)| policy?.top_khz());
        let is_hosts = ratio.is_none() && reference_khz.is_some() && khz <= host_top;
        match at_reference.filter(|_| at_top > 0 && (is_hosts || own_top.is_some())) {
            Some(capacity) => Ok((capacity, reference_khz)),
            None => {
                let own_top = own_top.filter(|capacity| *capacity > Util::ZERO);
                let capacity = own_top.with_context(|| {
                    format!("vCPU {vcpu}: capacity {at_top} isn't within 1 to 1024; correct --capacity or --ipc-ratio")
                })?;
                Ok((capacity, None))
            }
        }
    }
}

/// A point of the host's as one of the guest's.
fn own(&HostOpp { khz, uv, uw, .. }: &HostOpp) -> Opp {
    Opp { khz, uv, uw }
}

/// A table of one entry: no table, any frequency up to it.
fn only(khz: u32) -> Opp {
    Opp {
        khz,
        uv: None,
        uw: None,
    }
}

#[cfg(test)]
#[path = "resolve_tests.rs"]
mod tests;
