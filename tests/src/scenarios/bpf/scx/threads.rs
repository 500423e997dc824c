// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whose request a thread has: its domain's from its first switch on, and no other VM's; and the
//! maps of one service alone.

use anyhow::{Context, Result, anyhow};
use libbpf_rs::MapHandle;
use serde_json::json;
use vcpufreq_device::{Khz, VcpuId};
use vcpufreq_host_bpf::{ActuateBy, ScxError};
use vcpufreq_tests::LabVerdict;

use super::super::vcpu::{ONE, SET_PERF, TinyVcpu, stores};
use super::service::{ServiceProcess, said, scx, sum_of};
use crate::harness::load;

/// A thread that comes into a domain that has asked already.
pub fn joins() -> Result<LabVerdict> {
    let mut vcpu = TinyVcpu::new(ActuateBy::Scx)?;
    let _event = vcpu.vm.swallow(SET_PERF)?;
    let max = vcpu.policy.max();
    vcpu.vm.run(stores(1, max, 0), |_, _| ())?;
    let (host, cpus) = (&vcpu.host, &vcpu.policy.cpus);
    let cpu = *cpus.get(1).context("a policy of one pCPU")?;
    let sum = std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            load::pin(cpu)?;
            let before = sum_of(cpu)?;
            host.register_thread(VcpuId(1))?;
            // It is counted from its first switch on.
            std::thread::sleep(std::time::Duration::from_millis(1));
            anyhow::Ok((before, sum_of(cpu)?))
        });
        other.join().map_err(|_| anyhow!("a vCPU panicked"))?
    })?;
    let figures = json!({ "part": "a new thread", "sum_before_and_after": sum });
    // What a new thread is taken to use is half of the pCPU's capacity at most.
    Ok(LabVerdict::with_figures(figures)
        .check("nothing is counted before", sum.0 == 0, sum)
        .check("it is counted after", sum.1 >= 200, sum))
}

/// A thread that was one VM's and is another one's by now, as of a number that is used again.
pub fn keeps() -> Result<LabVerdict> {
    let first = TinyVcpu::new(ActuateBy::Scx)?;
    let mut second = TinyVcpu::new(ActuateBy::Scx)?;
    let _event = second.vm.swallow(SET_PERF)?;
    let (min, max) = (second.policy.min(), second.policy.max());
    second.vm.run(stores(1, min, 0), |_, _| ())?;
    let now = u64::try_from(std::time::UNIX_EPOCH.elapsed()?.as_nanos())?;
    first.host.assume(ONE, Khz(max), first.host.seen(ONE), now);
    first.host.ask_scx(0)?;
    let sum = sum_of(second.policy.cpu())?;
    let most = second.policy.util(min) * 4 / 5;
    let figures = json!({ "part": "another VM's", "sum": sum, "most": most });
    Ok(LabVerdict::with_figures(figures).check("the other's stays", sum <= most, sum))
}

/// A VM that has found the pins of a service, and of the one after it.
pub fn mixed() -> Result<LabVerdict> {
    const PIN: &str = "/sys/fs/bpf/vcpufreq-scx/scx_cpus";
    let service = ServiceProcess::start()?;
    let vcpu = TinyVcpu::new(ActuateBy::Scx)?;
    let same = vcpu.host.scx().is_ok();
    drop(vcpu);
    let mut old = MapHandle::from_pinned_path(PIN)?;
    service.kill()?;
    super::service::disabled()?;
    let service = ServiceProcess::start()?;
    std::fs::remove_file(PIN)?;
    old.pin(PIN)?;
    let vcpu = TinyVcpu::new(ActuateBy::Scx)?;
    let refused = matches!(vcpu.host.scx(), Err(ScxError::Restarted));
    drop((vcpu, old));
    said(&scx(&["stop"])?);
    service.ended()?;
    let figures = json!({ "part": "two services", "same": same, "refused": refused });
    Ok(LabVerdict::with_figures(figures)
        .check("its own service's are taken", same, ())
        .check("another's are refused", refused, ()))
}
