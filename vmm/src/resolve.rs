// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! From what the user asks for and what the host is to a checked
//! configuration: which pCPU each vCPU mirrors, its table, capacity and domain.
//!
//! Pure but for the kernel and initrd, which are opened to be checked.
//!
//! A vCPU mirrors one pCPU: the one with the largest capacity among those it
//! may run on (all online ones when it isn't pinned); among equals the
//! fastest, then the first. That pCPU's capacity and frequencies are the
//! vCPU's unless the user gives others. With `--host-topology` the vCPU also
//! gets the pCPU's whole table and cluster, and vCPUs that are pinned within
//! one policy share a domain, whose number is that of its first vCPU; real-time
//! ones have one of their own. That is the default where each vCPU is pinned
//! within one policy and none is described by the user ([`Likeness`]).

use std::{cmp::Reverse, collections::BTreeMap};

use vcpufreq_device::{
    ClampMode, CurPerfVisibility, DeviceConfig, DomainId, Headroom, Khz, PerfTable, Util, VcpuSpec,
    host::ActuatorChoice,
};
use vcpufreq_dt::Opp;

mod likeness;

pub use likeness::Likeness;

use vcpufreq_device::host::CpuList;

use crate::{
    config::{self, ConfigError, MAX_VCPUS, RunConfig, VcpuConfig},
    facts::{HostCpus, Pcpu, Policy},
    options::{self, Actuator, ClampArg, RunOptions, VcpuOptions},
    rt_config::RtConfig,
    vm::image::{self, Initrd, Kernel, Placement},
};

/// Checks everything that can be checked without touching the host.
///
/// # Errors
/// The first rule that is broken: options first, then files, then the host.
pub fn run_config(options: &RunOptions, host: &HostCpus) -> anyhow::Result<RunConfig> {
    let count = vcpu_count(options)?;
    let kernel = options.kernel.clone().ok_or(ConfigError::NoKernel)?;
    let cmdline = options.cmdline.clone();
    let cmdline = cmdline.unwrap_or_else(|| config::DEFAULT_CMDLINE.to_owned());
    let mem_mib = options.mem.map_or(config::DEFAULT_MEM_MIB, |mem| mem.0);
    image::check_cmdline(&cmdline)?;
    let mut image = Kernel::open(&kernel)?;
    let initrd = options.initrd.as_deref().map(Initrd::open).transpose()?;
    Placement::new(&image, initrd.as_ref(), mem_mib)?;
    let vcpus = vcpus(options, host, count)?;
    let likeness = Likeness::of(options, host, count).text(&vcpus);
    // A kernel without a banner may be any.
    let preempt_rt = image.preempt_rt()?.unwrap_or(true);
    Ok(RunConfig {
        rt: RtConfig::new(options, &vcpus, mem_mib, &host.online())?,
        kernel,
        initrd: options.initrd.clone(),
        cmdline,
        mem_mib,
        likeness,
        standby: preempt_rt || vcpus.iter().any(|vcpu| vcpu.rt.is_some()),
        vcpus,
        bridge: !options.no_bridge.unwrap_or(false),
        clamp: clamp_mode(options.clamp),
        actuator: actuator_choice(options)?,
        cgroup_parent: options.cgroup_parent.clone(),
        path: options.path.unwrap_or_default(),
        bpf_object: options
            .bpf_object
            .clone()
            .unwrap_or_else(|| config::DEFAULT_BPF_OBJECT.into()),
        explain: options.explain.unwrap_or(false),
        visibility: visibility(options.cur_perf),
        rate_limit: match options.rate_limit {
            Some(limit) => limit.0,
            None => Some(config::DEFAULT_RATE_LIMIT),
        },
        events: options.events.clone(),
        dump_dtb: options.dump_dtb.clone(),
        console: options.console.clone().unwrap_or_default(),
        pvtime: true,
        kvm_device: options
            .kvm_device
            .clone()
            .unwrap_or_else(|| config::DEFAULT_KVM_DEVICE.into()),
    })
}

/// The number of vCPUs, checked; options for others than these are refused.
pub fn vcpu_count(options: &RunOptions) -> Result<u32, ConfigError> {
    let count = options.cpus.unwrap_or(1);
    if !(1..=MAX_VCPUS).contains(&count) {
        return Err(ConfigError::VcpuCount(count));
    }
    match options.vcpus.keys().find(|vcpu| **vcpu >= count) {
        Some(&vcpu) => Err(ConfigError::NoSuchVcpu { vcpu, count }),
        None => Ok(count),
    }
}

/// The vCPUs, checked, in their order.
pub fn vcpus(
    options: &RunOptions,
    host: &HostCpus,
    count: u32,
) -> Result<Vec<VcpuConfig>, ConfigError> {
    let mut plan = Plan {
        host,
        mirror: Likeness::of(options, host, count).mirrors(),
        bridge: !options.no_bridge.unwrap_or(false),
        domains: BTreeMap::new(),
        clusters: BTreeMap::new(),
    };
    let none = VcpuOptions::default();
    let vcpus = (0..count)
        .map(|vcpu| plan.vcpu(vcpu, options.vcpus.get(&vcpu).unwrap_or(&none)))
        .collect::<Result<Vec<_>, _>>()?;
    if plan.bridge {
        let clamp = clamp_mode(options.clamp);
        let device = device_config(&vcpus, clamp, Headroom::None)?;
        device.check().map_err(ConfigError::Device)?;
    }
    Ok(vcpus)
}

/// What the device is made of for these vCPUs, each of which has a table.
pub fn device_config(
    vcpus: &[VcpuConfig],
    mode: ClampMode,
    headroom: Headroom,
) -> Result<DeviceConfig, ConfigError> {
    let specs = (0_u32..).zip(vcpus).map(|(vcpu, config)| {
        Ok(VcpuSpec {
            table: perf_table(vcpu, &config.opps)?,
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

fn perf_table(vcpu: u32, opps: &[Opp]) -> Result<PerfTable, ConfigError> {
    let khz: Vec<_> = opps.iter().map(|opp| Khz(opp.khz)).collect();
    PerfTable::try_from(khz).map_err(|why| ConfigError::Table {
        vcpu,
        why: why.to_string(),
    })
}

fn clamp_mode(clamp: Option<ClampArg>) -> ClampMode {
    match clamp {
        Some(ClampArg::Exact) => ClampMode::Exact,
        Some(ClampArg::Floor) | None => ClampMode::Floor,
    }
}

fn visibility(visibility: Option<options::CurPerfArg>) -> CurPerfVisibility {
    match visibility {
        Some(options::CurPerfArg::Exact) => CurPerfVisibility::Exact,
        Some(options::CurPerfArg::Request) => CurPerfVisibility::Request,
        Some(options::CurPerfArg::Table) | None => CurPerfVisibility::Table,
    }
}

/// A place that is named is the one, or there is an error.
fn actuator_choice(options: &RunOptions) -> Result<ActuatorChoice, ConfigError> {
    let named = options.cgroup_parent.is_some();
    match options.actuator {
        Some(Actuator::Thread | Actuator::None) if named => Err(ConfigError::NoCgroups),
        Some(Actuator::Cgroup) => Ok(ActuatorChoice::Cgroup),
        Some(Actuator::Thread) => Ok(ActuatorChoice::Thread),
        Some(Actuator::None) => Ok(ActuatorChoice::Nothing),
        Some(Actuator::Auto) | None if named => Ok(ActuatorChoice::Cgroup),
        Some(Actuator::Auto) | None => Ok(ActuatorChoice::Auto),
    }
}

/// What holds for all vCPUs, and what the earlier ones have taken.
struct Plan<'a> {
    host: &'a HostCpus,
    mirror: bool,
    bridge: bool,
    /// The domain of a policy's vCPUs, real-time ones apart: the first of them.
    domains: BTreeMap<(u32, bool), u32>,
    /// The cluster of a policy.
    clusters: BTreeMap<u32, u32>,
}

impl<'a> Plan<'a> {
    fn vcpu(&mut self, vcpu: u32, options: &VcpuOptions) -> Result<VcpuConfig, ConfigError> {
        let pin = options.pin.clone().unwrap_or_default();
        self.check_pin(vcpu, &pin)?;
        let pcpu = self.mirrored(&pin);
        let policy = pcpu.and_then(|pcpu| self.host.policy_of(pcpu.id));
        let opps = self.opps(vcpu, options, policy)?;
        Ok(VcpuConfig {
            capacity: capacity(vcpu, options, &opps, pcpu.zip(Some(policy)))?,
            opps,
            domain: DomainId(self.domain(vcpu, options)),
            cluster: self.cluster(policy),
            pin: pin.into_iter().collect(),
            rt: options.rt,
        })
    }

    fn check_pin(&self, vcpu: u32, pin: &CpuList) -> Result<(), ConfigError> {
        let online = || self.host.online().to_string();
        for pcpu in pin.iter() {
            match self.host.cpu(pcpu) {
                None => {
                    let online = online();
                    return Err(ConfigError::NoSuchPcpu { vcpu, pcpu, online });
                }
                Some(cpu) if !cpu.online => {
                    let online = online();
                    return Err(ConfigError::PcpuOffline { vcpu, pcpu, online });
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// The pCPU that the vCPU mirrors.
    fn mirrored(&self, pin: &CpuList) -> Option<&'a Pcpu> {
        let host = self.host;
        let speed = |id| host.policy_of(id).and_then(Policy::top_khz);
        let allowed = |cpu: &&Pcpu| cpu.online && (pin.is_empty() || pin.contains(cpu.id));
        host.cpus
            .iter()
            .filter(allowed)
            .max_by_key(|cpu| (cpu.capacity_or_full(), speed(cpu.id), Reverse(cpu.id)))
    }

    fn opps(
        &self,
        vcpu: u32,
        options: &VcpuOptions,
        policy: Option<&Policy>,
    ) -> Result<Vec<Opp>, ConfigError> {
        if let Some(table) = &options.table {
            perf_table(vcpu, &table.0)?;
            return Ok(table.0.clone());
        }
        let opps = match policy {
            Some(policy) if self.mirror && !policy.opps.is_empty() => policy.opps.clone(),
            Some(policy) => policy.top_khz().map(only).into_iter().collect(),
            None => Vec::new(),
        };
        if opps.is_empty() && self.bridge {
            let why = match policy {
                Some(policy) => format!("cpufreq policy {} doesn't tell its maximum", policy.id),
                None => "its pCPU has no cpufreq policy".to_owned(),
            };
            return Err(ConfigError::NoFrequencies { vcpu, why });
        }
        if !opps.is_empty() {
            perf_table(vcpu, &opps)?;
        }
        Ok(opps)
    }

    fn domain(&mut self, vcpu: u32, options: &VcpuOptions) -> u32 {
        let policy = policy_of_pin(self.host, options).filter(|_| self.mirror);
        match (options.domain, policy) {
            (Some(domain), _) => domain,
            (None, Some(policy)) => {
                let key = (policy, options.rt.is_some());
                *self.domains.entry(key).or_insert(vcpu)
            }
            (None, None) => vcpu,
        }
    }

    fn cluster(&mut self, policy: Option<&Policy>) -> u32 {
        let Some(policy) = policy.filter(|_| self.mirror) else {
            return 0;
        };
        let next = u32::try_from(self.clusters.len()).unwrap_or(u32::MAX);
        *self.clusters.entry(policy.id).or_insert(next)
    }
}

/// The policy of all pCPUs that the vCPU is pinned to, if there is one.
fn policy_of_pin(host: &HostCpus, options: &VcpuOptions) -> Option<u32> {
    let pin = options.pin.as_ref()?;
    let mut ids = pin.iter().map(|cpu| Some(host.policy_of(cpu)?.id));
    let first = ids.next()??;
    ids.all(|id| id == Some(first)).then_some(first)
}

/// A table of one entry: no table, any frequency up to it.
fn only(khz: u32) -> Opp {
    Opp {
        khz,
        uv: None,
        uw: None,
    }
}

/// The capacity of a vCPU at its highest frequency. The user's, else
/// `pCPU's × vCPU's maximum / pCPU's maximum × IPC ratio`: a vCPU of at most
/// 1.4 GHz on a pCPU of 2.8 GHz and capacity 1024 has 512, with a ratio of
/// 0.75, 384.
fn capacity(
    vcpu: u32,
    options: &VcpuOptions,
    opps: &[Opp],
    mirrored: Option<(&Pcpu, Option<&Policy>)>,
) -> Result<Util, ConfigError> {
    let capacity = match (options.capacity, options.ipc_ratio) {
        (Some(_), Some(_)) => return Err(ConfigError::CapacityAndRatio { vcpu }),
        (Some(capacity), None) => u64::from(capacity),
        (None, ratio) => {
            let of_pcpu = mirrored.map_or(crate::facts::CAPACITY_SCALE, |(pcpu, _)| {
                pcpu.capacity_or_full()
            });
            let pcpu_khz = mirrored.and_then(|(_, policy)| policy?.top_khz());
            let vcpu_khz = opps.last().map(|opp| opp.khz);
            let (above, below) = vcpu_khz.zip(pcpu_khz).unwrap_or((1, 1));
            let permille = ratio.map_or(1000, |ratio| ratio.permille);
            // At most 2^11 × 2^32 × 2^16: within 64 bits.
            u64::from(of_pcpu) * u64::from(above) * u64::from(permille) / u64::from(below) / 1000
        }
    };
    let util = u16::try_from(capacity).ok().and_then(Util::new);
    util.filter(|util| *util > Util::ZERO)
        .ok_or(ConfigError::Capacity { vcpu, capacity })
}

#[cfg(test)]
#[path = "resolve_tests.rs"]
mod tests;
