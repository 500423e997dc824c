// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Many vCPUs: an access costs what it costs with one, start-up and memory grow
//! with their number. Tables of 16 entries, each vCPU a domain of its own, none
//! of them pinned.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::paths::Measured;
use super::{Plan, Policy, registers, set_governor};
use crate::sysfs;
use crate::vm::{Setup, Vm};

const COUNTS: [usize; 2] = [1, 16];
const ENTRIES: u32 = 16;
const WRITES: u64 = 200;

pub fn run(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let max = policies.last().context("no policy")?.max();
    let table: Vec<String> = (1..=ENTRIES)
        .map(|entry| (max / ENTRIES * entry).to_string())
        .collect();
    let path = match plan.path.as_deref() {
        Some("kernel") => "kernel",
        _ => "bpf",
    };
    let mut rows = Vec::new();
    for count in COUNTS {
        rows.push(one(plan, path, &table, count)?);
    }
    let alike = |name: &str| {
        let ns = |row: &Value| row[name].as_f64();
        let all: Option<Vec<f64>> = rows.iter().map(ns).collect();
        all.is_some_and(|all| all.iter().all(|ns| (ns / all[0] - 1.0).abs() <= 0.1))
    };
    let held = alike("read_virtual_ns") && alike("write_virtual_ns");
    Ok(json!({ "held": held, "path": path, "entries": ENTRIES, "rows": rows }))
}

fn one(plan: &Plan, path: &'static str, table: &[String], count: usize) -> Result<Value> {
    let setup = Setup {
        pins: vec![String::new(); count],
        silent: true,
        ..Setup::default()
    };
    let tables = format!("0-{}={}", count - 1, table.join(","));
    let setup = setup.with(&["--path", path, "--rate-limit", "0", "--table", &tables]);
    let began = Instant::now();
    let mut vm = Vm::start(&setup)?;
    let start_ms = until_first_instruction(&vm, began)?;
    vm.expect("@ready", Duration::from_secs(600))?;
    vm.settle(count)?;
    plan.load_driver(&mut vm)?;
    let vcpu = count - 1;
    set_governor(&mut vm, vcpu, "userspace")?;
    let files = std::fs::read_dir(format!("/proc/{}/fd", vm.pid()))?.count();
    let (resident_kib, threads) = (resident_kib(vm.pid())?, crate::vm::threads(vm.pid())?.len());
    let page = registers(&mut vm)? + 0x1000 * u64::try_from(vcpu)?;
    let mut guest = Measured {
        vm,
        path,
        vcpu,
        page,
        opps: table.join(" "),
    };
    let (read, write) = (guest.reads()?, guest.writes(WRITES)?);
    guest.vm.quit()?;
    Ok(json!({
        "vcpus": count, "read_virtual_ns": read.0, "write_virtual_ns": write.0,
        "write_p99_virtual_ns": write.1, "start_virtual_ms": start_ms,
        "vmm_resident_kib": resident_kib, "open_files": files, "threads": threads,
    }))
}

/// From the start of the program to the guest's first instructions: the first
/// vCPU's thread has used its CPU for longer than it takes to get there.
fn until_first_instruction(vm: &Vm, began: Instant) -> Result<u64> {
    while began.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(2));
        let Ok(tid) = vm.vcpu_tid(0) else { continue };
        let stat = sysfs::text(format!("/proc/{}/task/{tid}/schedstat", vm.pid()))?;
        let ran: u64 = stat.split(' ').next().unwrap_or("0").parse()?;
        if ran > 3_000_000 {
            return Ok(u64::try_from(began.elapsed().as_millis())?);
        }
    }
    anyhow::bail!("the guest doesn't run")
}

/// What the VMM has for itself: what is resident but for the guest's memory,
/// which is by far the largest of its mappings.
fn resident_kib(pid: u32) -> Result<u64> {
    const GUEST_KIB: u64 = 64 * 1024;
    let (mut size, mut sum) = (0, 0);
    for line in sysfs::text(format!("/proc/{pid}/smaps"))?.lines() {
        let kib = |name: &str| {
            let rest = line.strip_prefix(name)?;
            rest.trim().trim_end_matches(" kB").parse::<u64>().ok()
        };
        size = kib("Size:").unwrap_or(size);
        if let (Some(resident), true) = (kib("Rss:"), size < GUEST_KIB) {
            sum += resident;
        }
    }
    Ok(sum)
}
