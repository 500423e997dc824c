// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The rate limit charges the vCPU that writes and the VM. A vCPU that writes every page gets its
//! own rate. Writers at the same time lose no charge.

use std::num::NonZeroU32;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use serde_json::json;
use vcpufreq_device::{RateLimit, VcpuId};
use vcpufreq_host_bpf::HostBpf;
use vcpufreq_tests::LabVerdict;

use super::programs::{BASE, like, start};
use super::tiny_vm::{Deed, TinyVm};
use super::vcpu::{
    BURST, FROM_KHZ, OTHERS_SET_PERF, PER_SECOND, SET_PERF, STEP_KHZ, most_passed, stores,
};
use crate::harness::load;
use crate::harness::policy::Policy;

pub fn run() -> Result<LabVerdict> {
    Ok(LabVerdict::default()
        .part("all_pages", all_pages()?)
        .part("two_writers", two_writers()?))
}

/// Two vCPUs in these domains, and their limit.
fn host(domains: [u32; 2], per_second: u32, burst: u32) -> Result<HostBpf> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let mut vcpus = Vec::new();
    for domain in domains {
        let mut vcpu = like(policy, domain)?;
        vcpu.limit = Some(RateLimit {
            per_second: NonZeroU32::new(per_second).context("0")?,
            burst: NonZeroU32::new(burst).context("0")?,
        });
        vcpus.push(vcpu);
    }
    start(&policies, vcpus)
}

/// Writes these registers so often, each, as the thread of a vCPU.
fn write(host: &HostBpf, vcpu: u16, registers: &[u64], times: u64) -> Result<()> {
    load::pin(2 + u32::from(vcpu))?;
    host.register_thread(VcpuId(vcpu))?;
    let mut vm = TinyVm::new(Some((BASE, host.pages())))?;
    let _events = [vm.swallow(SET_PERF)?, vm.swallow(OTHERS_SET_PERF)?];
    for &address in registers {
        let deed = Deed {
            address,
            ..stores(times, FROM_KHZ, STEP_KHZ)
        };
        vm.run(deed, |_, _| ())?;
    }
    Ok(())
}

/// Requests that the limit has let pass.
fn passed(host: &HostBpf) -> u64 {
    let counters = [0, 1].map(|vcpu| host.counters(VcpuId(vcpu)).unwrap_or_default());
    let passed = counters.map(|counted| counted.requests - counted.limited);
    passed.iter().sum()
}

/// A vCPU writes its own register and another's; then that one writes its own.
fn all_pages() -> Result<LabVerdict> {
    const EACH: u64 = 600;
    let host = host([0, 1], PER_SECOND, BURST)?;
    let by = |vcpu, registers: &'static [u64]| {
        let before = passed(&host);
        let started = Instant::now();
        let wrote = std::thread::scope(|scope| {
            let writer = scope.spawn(|| write(&host, vcpu, registers, EACH));
            writer.join().map_err(|_| anyhow!("a vCPU panicked"))?
        });
        let most = most_passed(PER_SECOND, BURST, started);
        wrote.map(|()| (passed(&host) - before, most))
    };
    let one = by(0, &[SET_PERF, OTHERS_SET_PERF])?;
    let other = by(1, &[OTHERS_SET_PERF])?;
    let right = |(passed, most)| (u64::from(BURST)..=most).contains(&passed);
    let figures = json!({ "requests_of_one": 2 * EACH, "passed_and_most": one, "of_other": other });
    Ok(LabVerdict::with_figures(figures)
        .check("one vCPU's are within the limit", right(one), one)
        .check("the other's are", right(other), other))
}

/// Two vCPUs write one register at the same time.
fn two_writers() -> Result<LabVerdict> {
    const EACH: u64 = 50_000;
    const BURST: u32 = 60_000;
    let host = host([0, 0], 1, BURST)?;
    let started = Instant::now();
    std::thread::scope(|scope| {
        let writers = [0, 1].map(|vcpu| {
            let host = &host;
            scope.spawn(move || write(host, vcpu, &[SET_PERF], EACH))
        });
        writers
            .into_iter()
            .try_for_each(|writer| writer.join().map_err(|_| anyhow!("a vCPU panicked"))?)
    })?;
    let most = most_passed(1, BURST, started);
    let passed = passed(&host);
    let within = (u64::from(BURST)..=most).contains(&passed);
    let figures = json!({ "requests": 2 * EACH, "passed": passed, "at_most": most });
    Ok(LabVerdict::with_figures(figures).check("within the limit", within, passed))
}
