// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The programs are replaced while a guest writes: each write is handled once, by the old or the
//! new one.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};
use vcpufreq_device::VcpuId;
use vcpufreq_host_bpf::{ActuateBy, HostBpf};

use super::tiny_vm::{Deed, TinyVm};
use super::{BASE, OBJECT, Policy, like, start};
use crate::harness::load;

const REPLACEMENTS: u32 = 4;
/// Writes in a run of the guest.
const BATCH: u64 = 500;

pub fn run() -> Result<Value> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let mut vcpu = like(policy, 0)?;
    vcpu.actuate = ActuateBy::Nobody;
    let host = start(&policies, vec![vcpu])?;
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let (generation, exits) = std::thread::scope(|scope| {
        let guest = scope.spawn(|| write_on(&host, policy.cpu(), &stop, &written));
        let generation = replace_often(&host, &written, &|| guest.is_finished());
        stop.store(true, SeqCst);
        // Its error is the cause of the other's.
        let exits = guest.join().map_err(|_| anyhow!("the vCPU panicked"))??;
        anyhow::Ok((generation?, exits))
    })?;
    let written = written.load(SeqCst);
    let counters = host.counters(VcpuId(0)).context("no counters")?;
    let latest = host.latest(VcpuId(0)).context("no vCPU")?;
    let handled = counters.generations.iter().sum::<u64>();
    let held = counters.requests == written
        && handled == written
        && counters.generations.iter().all(|&count| count > BATCH)
        && u64::from(latest.count) == written
        && exits == 0
        && generation == REPLACEMENTS + 1;
    Ok(json!({
        "held": held, "written": written, "handled": handled, "exits": exits,
        "by_generation": counters.generations, "generation": generation,
    }))
}

fn replace_often(host: &HostBpf, written: &AtomicU64, ended: &dyn Fn() -> bool) -> Result<u32> {
    let mut generation = 0;
    for _ in 0..REPLACEMENTS {
        let before = written.load(SeqCst);
        generation = host.replace(OBJECT.as_ref())?;
        // The guest goes on between two.
        while written.load(SeqCst) < before + BATCH {
            std::thread::sleep(Duration::from_millis(1));
            ensure!(!ended(), "the vCPU has ended");
        }
    }
    Ok(generation)
}

fn write_on(host: &HostBpf, cpu: u32, stop: &AtomicBool, written: &AtomicU64) -> Result<u64> {
    load::pin(cpu)?;
    host.register_thread(VcpuId(0))?;
    let mut vm = TinyVm::new(None)?;
    let _event = vm.swallow(BASE + 4)?;
    let mut exits = 0;
    let deed = Deed {
        times: BATCH,
        address: BASE + 4,
        value: 1,
        step: 1,
        ..Deed::default()
    };
    while !stop.load(SeqCst) {
        exits += vm.run(deed, |_, _| ())?.exits;
        written.fetch_add(BATCH, SeqCst);
    }
    Ok(exits)
}
