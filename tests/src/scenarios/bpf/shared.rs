// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The programs on the kernel's hooks are there once for all VMs, outlive the VMM that attached
//! them, and leave those of another version alone.

use anyhow::{Context, Result, ensure};
use libbpf_rs::query::{MapInfoIter, ProgInfoIter};
use libbpf_rs::{MapCore as _, MapFlags, MapHandle, Object, ObjectBuilder, libbpf_sys};
use serde_json::{Value, json};
use vcpufreq_device::Khz;
use vcpufreq_host_bpf::ActuateBy;
use vcpufreq_tests::LabVerdict;

use super::others::spawn;
use super::vcpu::{ONE, SET_PERF, TinyVcpu, stores};
use crate::harness::console_commands;
use crate::harness::wait::{SOON, settled};

/// Programs on the hooks, and those of VMs that see writes.
fn programs() -> (usize, usize) {
    let names = ProgInfoIter::default().map(|program| program.name);
    let names = names.filter_map(|name| name.into_string().ok());
    let names: Vec<_> = names.filter(|name| name != SET).collect();
    let count = |start: &str| names.iter().filter(|name| name.starts_with(start)).count();
    (count("dispatch_"), count("vcpufreq_write"))
}

/// Waits for these numbers of programs; those that there are in the end.
fn settle(wanted: (usize, usize)) -> Result<(usize, usize)> {
    settled(60 * SOON, || Ok(programs()), |now| *now == wanted)
}

/// The program and the map by which VMMs find those on the hooks.
const SET: &str = "dispatch_set";
const SLOTS: &str = "dispatch_slots";

/// What a VMM of another version has: the same two, with another content.
fn other_version() -> Result<(Object, MapHandle)> {
    let object = std::fs::read("/lab/bpf/other_version.bpf.o")?;
    let object = ObjectBuilder::default().open_memory(&object)?.load()?;
    let map = object.maps().next().context("no map")?;
    let map = MapHandle::try_from(&map)?;
    store(&map, vec![0; map.value_size().try_into()?])?;
    Ok((object, map))
}

/// Stores a content, as of another version.
fn store(map: &MapHandle, mut content: Vec<u8>) -> Result<()> {
    const LAYOUT: u32 = 99;
    content[..4].copy_from_slice(&LAYOUT.to_ne_bytes());
    Ok(map.update(&KEY, &content, MapFlags::ANY)?)
}

const KEY: [u8; 4] = [0; 4];

fn content(map: &MapHandle) -> Result<Vec<u8>> {
    map.lookup(&KEY, MapFlags::ANY)?.context("no content")
}

/// The content of the map of this version.
fn of_this_version() -> Result<Vec<u8>> {
    let maps = MapInfoIter::default().filter(|map| map.name == SLOTS);
    let newest = maps.max_by_key(|map| map.id).context("no such map")?;
    content(&MapHandle::from_map_id(newest.id)?)
}

/// Which of the shared maps a confined VMM can map; it has let go of `dispatch_slots`. The arrays of
/// programs aren't opened: that can keep them for ever.
fn writable() -> Result<Vec<String>> {
    const ARRAYS_OF_PROGRAMS: usize = 3;
    let content = of_this_version()?;
    let numbers = content.chunks_exact(4).skip(1).take(6 - ARRAYS_OF_PROGRAMS);
    let mut found = Vec::new();
    for number in numbers {
        let id = u32::from_ne_bytes(*number.first_chunk().context("no number")?);
        let map = MapHandle::from_map_id(id)?;
        if map.info()?.info.map_flags & libbpf_sys::BPF_F_MMAPABLE != 0 {
            found.push(map.name().to_string_lossy().into_owned());
        }
    }
    Ok(found)
}

pub fn run() -> Result<LabVerdict> {
    const WRITES: u64 = 1_000;
    const KHZ: u32 = 1_700_000;
    console_commands::insmod("vcpufreq_host", "")?;
    let (other_set, other) = other_version()?;
    let mut first = spawn(2, 900_000, 0)?;
    let one = settle((3, 1))?;
    // The oldest of the two names what there is, and is of another version all the same.
    store(&other, of_this_version()?)?;
    let untouched = content(&other)?;
    let writable = writable()?;
    let mut vcpu = TinyVcpu::new(ActuateBy::Worker)?;
    let both = settle((3, 2))?;
    first.kill()?;
    first.wait()?;
    // Another VMM that lives frees what this one has left, and nothing else does.
    std::thread::sleep(SOON);
    let killed = programs();
    vcpu.host.sweep();
    let swept = settle((3, 1))?;
    let _event = vcpu.vm.swallow(SET_PERF)?;
    vcpu.vm.run(stores(WRITES, KHZ, 0), |_, _| ())?;
    let requests = vcpu.counters()?.requests;
    let latest = vcpu.host.latest(ONE).context("no vCPU")?.khz;
    // In the slot of the first one.
    let second = spawn(2, 900_000, WRITES)?.wait_with_output()?;
    ensure!(second.status.success(), "a VMM failed");
    let second: Value = serde_json::from_slice(&second.stdout)?;
    let apart = vcpu.counters()?.requests == requests;
    let lost = lost(&vcpu)?;
    drop(vcpu);
    let none = settle((0, 0))?;
    let of_other = content(&other)? == untouched;
    drop((other_set, other));
    console_commands::unload_host_module()?;
    let counts = [one, both, killed, swept, none];
    let figures = json!({
        "requests": requests, "latest_khz": latest.0, "apart": apart,
        "hooks_and_vms": { "one": one, "both": both, "killed": killed, "swept": swept, "lost": lost, "none": none },
        "second": second, "other_version_untouched": of_other, "writable": writable,
    });
    let seconds = &second["requests"];
    let as_they_come = counts == [(3, 1), (3, 2), (3, 2), (3, 1), (0, 0)];
    Ok(LabVerdict::with_figures(figures)
        .check("hooks and VMs as they come and go", as_they_come, counts)
        .check_eq("each request is counted", &requests, WRITES)
        .check("the latest is its own", latest == Khz(KHZ), latest.0)
        .check_eq("what is lost is counted", &lost, (0, 1))
        .check_eq("each of the second's is", seconds, WRITES)
        .check("the second's are apart", apart, ())
        .check_eq("one map is writable", &writable, ["dispatch_cpus"])
        .check("another version's is untouched", of_other, ()))
}

/// What is left when a VMM whose path was lost is the only one that lives, and another one is
/// killed: its own programs, which nothing calls.
fn lost(vcpu: &TinyVcpu) -> Result<(usize, usize)> {
    let mut other = spawn(2, 900_000, 0)?;
    let with = settle((3, 2))?;
    ensure!(with == (3, 2), "hooks and VMs with another VMM: {with:?}");
    vcpu.host.detach();
    other.kill()?;
    other.wait()?;
    settle((0, 1))
}
