// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The current thread as the vCPU of a tiny VM, and what it asks for.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use vcpufreq_device::{RateLimit, VcpuId};
use vcpufreq_host::effective_clamp;
use vcpufreq_host_bpf::{
    ActuateBy, BpfCounters, BpfEvent, HostBpf, HostModule, VcpuPolicy, WorkerEvents, WorkerRequest,
};

use super::programs::{BASE, like, start};
use super::tiny_vm::{Deed, TinyVm, TinyVmOutcome};
use crate::harness::policy::Policy;
use crate::harness::{load, sysfs};

pub(super) const SET_PERF: u64 = BASE + 4;

pub(super) const ONE: VcpuId = VcpuId(0);

/// set_perf of another vCPU in the same domain.
pub(super) const OTHERS_SET_PERF: u64 = SET_PERF + 0x1000;

/// The current thread as the vCPU of a tiny VM.
pub(super) struct TinyVcpu {
    pub policy: Policy,
    pub how: VcpuPolicy,
    pub vm: TinyVm,
    pub host: HostBpf,
}

impl TinyVcpu {
    pub fn new(actuate: ActuateBy) -> Result<Self> {
        let policies = Policy::all()?;
        let policy = policies.last().context("no policy")?.clone();
        load::pin(policy.cpu())?;
        let mut how = like(&policy, 0)?;
        how.actuate = actuate;
        let host = start(&policies, vec![how.clone(), how.clone()])?;
        host.register_thread(ONE)?;
        let vm = TinyVm::new(Some((BASE, host.pages())))?;
        Ok(Self {
            policy,
            how,
            vm,
            host,
        })
    }

    /// The outcome, and virtual ns for each access, the two ends of a run included.
    pub fn timed(
        &mut self,
        deed: Deed,
        left: impl FnMut(u64, u32),
    ) -> Result<(TinyVmOutcome, u64)> {
        let start = Instant::now();
        let outcome = self.vm.run(deed, left)?;
        let ns = u64::try_from(start.elapsed().as_nanos())?;
        Ok((outcome, ns / deed.times))
    }

    pub fn counters(&self) -> Result<BpfCounters> {
        self.host.counters(ONE).context("no vCPU")
    }
}

pub(super) fn stores(times: u64, value: u32, step: u32) -> Deed {
    Deed {
        times,
        address: SET_PERF,
        value,
        step,
        ..Deed::default()
    }
}

/// One request for another vCPU of the domain.
pub(super) fn by_other(khz: u32) -> Deed {
    Deed {
        address: OTHERS_SET_PERF,
        ..stores(1, khz, 0)
    }
}

/// Of the other vCPU of the domain.
pub(super) fn others_counters(host: &HostBpf) -> Result<BpfCounters> {
    host.counters(VcpuId(1)).context("no vCPU")
}

pub(super) fn the_one_that_waits(vcpu: &TinyVcpu) -> Result<WorkerRequest> {
    let events: Vec<_> = vcpu
        .host
        .worker()?
        .wait(Duration::from_millis(100))?
        .collect();
    match events[..] {
        [BpfEvent::Waiting(waiting)] => Ok(waiting),
        _ => bail!("one request waits, and the events are {events:?}"),
    }
}

/// Does what a VMM's worker does with the events that there are; how many.
pub(super) fn refresh(
    vcpu: &TinyVcpu,
    worker: &WorkerEvents,
    module: &HostModule,
    time: Duration,
) -> Result<u32> {
    let mut refreshed = 0;
    for event in worker.wait(time)? {
        let BpfEvent::Refresh(domain) = event else {
            continue;
        };
        refreshed += 1;
        vcpu.host.begin_refresh(domain);
        let by_module = |domain, clamp| module.refresh(domain, clamp);
        vcpu.host.apply_pending(domain, by_module);
    }
    Ok(refreshed)
}

/// The limit, where there is one.
pub(super) const PER_SECOND: u32 = 100;
pub(super) const BURST: u32 = 10;

/// Requests, of which some pass at once.
pub(super) const FLOOD: u64 = 600;

/// What a limit lets pass at most of requests that began then: the burst, and what its rate has
/// added since.
pub(super) fn most_passed(per_second: u32, burst: u32, since: Instant) -> u64 {
    let ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
    u64::from(burst) + ms.saturating_mul(per_second.into()) / 1000 + 1
}

pub(super) fn set_limit(vcpu: &mut TinyVcpu, on: bool) -> Result<()> {
    vcpu.how.limit = match on {
        true => Some(RateLimit {
            per_second: NonZeroU32::new(PER_SECOND).context("0")?,
            burst: NonZeroU32::new(BURST).context("0")?,
        }),
        false => None,
    };
    Ok(vcpu.host.set_policy(ONE, vcpu.how.clone())?)
}

pub(super) fn own_clamp() -> Result<u32> {
    Ok(own_clamps()?.0)
}

/// uclamp.min and uclamp.max in force for this thread.
pub(super) fn own_clamps() -> Result<(u32, u32)> {
    let text = sysfs::text("/proc/thread-self/sched")?;
    effective_clamp(&text).context("the kernel shows no clamp")
}

pub(super) const FROM_KHZ: u32 = 700_000;

pub(super) const STEP_KHZ: u32 = 2_800;
