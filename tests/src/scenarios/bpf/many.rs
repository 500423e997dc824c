// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM of 1, 16 and 64 vCPUs with 16 table entries each. An access of the last one costs the same
//! within 10 %. Start-up and memory grow no faster than the number of vCPUs.

use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};
use vcpufreq_device::VcpuId;
use vcpufreq_host_bpf::{ActuateBy, HostModule};
use vcpufreq_tests::LabVerdict;

use super::group::ClampGroup;
use super::programs::{BASE, like, start};
use super::tiny_vm::{Deed, TinyVm, TinyVmOutcome};
use crate::harness::policy::Policy;
use crate::harness::{console_commands, load, sysfs};

const COUNTS: [u16; 3] = [1, 16, 64];
const ENTRIES: u32 = 16;
const READS: u64 = 20_000;
const WRITES: u64 = 500;
/// What a vCPU may add: to the start, 1.6 ms when measured, and to the memory,
/// where a page of registers and one of counters are under 16 KiB.
const START_MS: u64 = 4;
const RESIDENT_KIB: u64 = 32;
const SETTLE: Duration = Duration::from_millis(500);

pub fn run() -> Result<LabVerdict> {
    console_commands::insmod("vcpufreq_host", "")?;
    let mut rows = Vec::new();
    for count in COUNTS {
        // A vCPU is a thread, whose clamps end with it.
        let running = std::thread::spawn(move || one(count));
        rows.push(running.join().map_err(|_| anyhow!("the vCPU panicked"))??);
    }
    crate::harness::console_commands::unload_host_module()?;
    let alike = |name: &str| {
        let ns: Option<Vec<f64>> = rows.iter().map(|row: &Value| row[name].as_f64()).collect();
        ns.is_some_and(|ns| ns.iter().all(|one| (one / ns[0] - 1.0).abs() <= 0.1))
    };
    let names = [
        "read_virtual_ns",
        "write_bpf_virtual_ns",
        "write_ioeventfd_virtual_ns",
    ];
    let exits = |row: &Value| row["exits"] == 0;
    let grows = |name: &str, most: u64| grows_by(&rows, name).is_some_and(|by| by <= most);
    let alike = names.into_iter().all(alike);
    let starts = grows("start_virtual_ms", START_MS);
    let takes = grows("resident_kib", RESIDENT_KIB);
    let (start_ms, kib) = (
        grows_by(&rows, "start_virtual_ms"),
        grows_by(&rows, "resident_kib"),
    );
    let figures = json!({
        "entries": ENTRIES, "rows": rows,
        "start_virtual_ms_a_vcpu": start_ms, "resident_kib_a_vcpu": kib,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("accesses cost the same", alike, &rows)
        .check("none exits", rows.iter().all(exits), &rows)
        .check("a vCPU's start", starts, start_ms)
        .check("a vCPU's memory", takes, kib))
}

/// From the first row to the last, for each vCPU, rounded up. What grew with the
/// square of their number would be 65 times as much as for one.
fn grows_by(rows: &[Value], name: &str) -> Option<u64> {
    let of = |row: Option<&Value>, name: &str| row?[name].as_u64();
    let by = |name: &str| of(rows.last(), name)?.checked_sub(of(rows.first(), name)?);
    let vcpus = by("vcpus")?;
    // Less than at first is no growth.
    Some(by(name).unwrap_or(0).div_ceil(vcpus))
}

fn one(count: u16) -> Result<Value> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    load::pin(policy.cpu())?;
    let set_perf = |vcpu: u16| BASE + u64::from(vcpu) * 0x1000 + 4;
    let last = count - 1;
    let by_ioeventfd = ioeventfds(count, set_perf)?;

    let group = ClampGroup::with_current(&format!("many{count}"))?;
    let (before, began) = (resident_kib()?, Instant::now());
    let how = |domain| {
        let mut vcpu = like(policy, domain)?;
        vcpu.actuate = ActuateBy::Kfunc;
        Ok(vcpu)
    };
    let vcpus: Result<Vec<_>> = (0..u32::from(count)).map(how).collect();
    let host = start(&policies, vcpus?)?;
    let module = HostModule::open(count, count)?;
    for domain in 0..count {
        module.bind(domain, group.min.as_fd(), group.max.as_fd())?;
    }
    host.register_thread(VcpuId(last))?;
    let mut vm = TinyVm::with_vcpus(Some((BASE, host.pages())), count.into())?;
    let events: Result<Vec<_>> = (0..count).map(|vcpu| vm.swallow(set_perf(vcpu))).collect();
    let _events = events?;
    let start_ms = u64::try_from(began.elapsed().as_millis())?;
    let grown = resident_kib()?.saturating_sub(before);
    std::thread::sleep(SETTLE);
    let read = Deed {
        times: READS,
        address: BASE + u64::from(last) * 0x1000,
        read: true,
        ..Deed::default()
    };
    let write = Deed {
        times: WRITES,
        address: set_perf(last),
        value: policy.min(),
        step: 2_800,
        ..Deed::default()
    };
    let (reads, read_ns) = timed(&mut vm, read)?;
    let (writes, write_ns) = timed(&mut vm, write)?;
    Ok(json!({
        "vcpus": count, "exits": reads.exits + writes.exits, "read_virtual_ns": read_ns,
        "write_bpf_virtual_ns": write_ns, "write_ioeventfd_virtual_ns": by_ioeventfd,
        "start_virtual_ms": start_ms, "resident_kib": grown,
    }))
}

/// KVM's part of the path `ioeventfd`: an eventfd for each entry, without a waiter.
fn ioeventfds(count: u16, set_perf: impl Fn(u16) -> u64) -> Result<f64> {
    let mut vm = TinyVm::with_vcpus(None, count.into())?;
    for vcpu in 0..count {
        for entry in 1..=ENTRIES {
            // KVM keeps what it signals; 1,024 open files are too many here.
            drop(vm.swallow_value(set_perf(vcpu), entry * 100_000)?);
        }
    }
    // Each eventfd leaves work behind on other pCPUs.
    std::thread::sleep(SETTLE);
    let deed = Deed {
        times: WRITES,
        address: set_perf(count - 1),
        value: ENTRIES * 100_000,
        ..Deed::default()
    };
    Ok(timed(&mut vm, deed)?.1)
}

/// The best of three: the host's own work on another pCPU takes emulated time.
fn timed(vm: &mut TinyVm, deed: Deed) -> Result<(TinyVmOutcome, f64)> {
    let (mut sum, mut best) = (TinyVmOutcome::default(), f64::MAX);
    for _ in 0..3 {
        let start = Instant::now();
        let outcome = vm.run(deed, |_, _| ())?;
        best = best.min(start.elapsed().as_nanos() as f64 / deed.times as f64);
        sum.exits += outcome.exits;
    }
    Ok((sum, best))
}

fn resident_kib() -> Result<u64> {
    sysfs::field("/proc/self/status", "VmRSS")
}
