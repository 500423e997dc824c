// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A protected guest (pKVM): what it reads of the device comes from memory that it shares, without
//! an exit; the host can read nothing else of it; what it names and doesn't share costs it no more
//! than its loads; its memory is the host's again when the VMM is killed.

use std::fs::{self, File, Permissions};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use super::bad_input::{NOBODY, refused, refused_when};
use crate::harness::leftovers::left_soon;
use crate::harness::plan::{
    GuestDevice, Plan, ask_for, first_cpus, guest_policy, last_of, let_load_decay, set_governor,
};
use crate::harness::policy::Policy;
use crate::harness::sysfs;
use crate::harness::trace::exits::{Exits, SeenExits};
use crate::harness::vm::{BOOT, Setup, Vm};
use crate::harness::vmm::KERNEL;
use crate::harness::wait::{SOON, settled};

const KVM: &str = "/dev/kvm";
/// Accesses of each kind.
const MANY: u64 = 100_000;
const FEW: u64 = 100;
/// Bytes of all registers.
const REGION: u64 = 0x3_0000;
/// `VCPUFREQ_REG_SHARED_PAGES`.
const SHARED_PAGES: u64 = 0x10c;
/// Where RAM begins, in pages; Linux' image is there.
const RAM_PAGE: u64 = 0x4_0000;
/// Kills, and how much less memory there may be after them: caches come and go.
const KILLS: u32 = 50;
const SLACK_KIB: u64 = 16 << 10;
/// A piece of the kernel's text, behind what it frees after its boot.
const TEXT: Range<u64> = 0x10_0000..0x10_1000;

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let own = plan.driver == "vcpufreq_guest";
    let mut all = LabVerdict::default()
        .part("accesses", accesses(plan, own)?)
        .part("doctor", doctor()?);
    if own {
        all = all
            .part("not_shared", not_shared(plan)?)
            .part("host_reads", host_reads(plan)?)
            .part("killed", killed(plan)?)
            .part("refused", refusals(plan)?);
    }
    Ok(all)
}

fn setup(plan: &Plan) -> Result<(Vec<Policy>, Setup)> {
    let policies = Policy::all()?;
    let setup = Setup {
        silent: true,
        ..plan.mirroring(&first_cpus(&policies))
    };
    Ok((policies, setup))
}

/// Reads through the driver and requests, in tight loops, and a ramp under schedutil, in whose ticks
/// the driver reads: how many of them reach the VMM. Linux' driver reads registers.
fn accesses(plan: &Plan, own: bool) -> Result<LabVerdict> {
    let (policies, setup) = setup(plan)?;
    let mut vm = plan.guest(&setup)?;
    let device = GuestDevice::of(&mut vm)?;
    let (last, policy) = last_of(&policies)?;
    for vcpu in 0..policies.len() {
        set_governor(&mut vm, vcpu, "userspace")?;
    }
    let at = |seen: &SeenExits, range: Range<u64>| seen.at(range);
    let region = device.base..device.base + REGION;
    let exits = Exits::watch()?;
    if own {
        vm.ask(format!("reads {} {MANY}", cur_freq(last)))?;
    }
    let reads = at(&exits.stop()?, region.clone());
    let opps: Vec<_> = policy.opps.iter().map(u32::to_string).collect();
    let set_perf = device.set_perf(last);
    let exits = Exits::watch()?;
    let opps = opps.join(" ");
    vm.number(format!("stores {last} {set_perf} {MANY} {opps}"))?;
    let page = device.cur_perf(last);
    let writes = at(&exits.stop()?, page + 4..page + 8);
    let mut wrong = Vec::new();
    vm.ask(format!("start busy busy {last}"))?;
    for &khz in policy.opps.iter().filter(|_| own) {
        ask_for(&mut vm, last, khz)?;
        let_load_decay();
        let read = vm.number(format!("read {}", cur_freq(last)))?;
        let host = policy.khz()?;
        if read != u64::from(host) {
            wrong.push(json!({ "guest_reads_khz": read, "host_khz": host }));
        }
    }
    vm.ask("stop busy")?;
    let ramp = ramp(&mut vm, policies.len(), region)?;
    let said = vm.quit()?;
    let no_read = reads.exited == 0 && ramp["exited"] == 0;
    let figures = json!({
        "reads": if own { MANY } else { 0 }, "reads_exited": reads.exited,
        "writes_trapped": writes.trapped, "writes_exited": writes.exited, "ramp": ramp,
        "wrong": wrong, "vmm_said": said,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("each write is trapped", &writes.trapped, MANY)
        .check_eq("no write exits", &writes.exited, 0)
        .check_none("no read is wrong", &wrong)
        .check(
            "reads exit by the kernel's driver alone",
            no_read == own,
            (reads.exited, &ramp),
        )
        .check("a ramp is trapped", ramp["trapped"] != 0, &ramp))
}

fn ramp(vm: &mut Vm, vcpus: usize, region: Range<u64>) -> Result<Value> {
    for vcpu in 0..vcpus {
        set_governor(vm, vcpu, "schedutil")?;
    }
    let exits = Exits::watch()?;
    for vcpu in 0..vcpus {
        vm.ask(format!("start busy busy {vcpu}"))?;
        let_load_decay();
        vm.ask("stop busy")?;
        let_load_decay();
    }
    let seen = exits.stop()?.at(region);
    Ok(json!({ "trapped": seen.trapped, "exited": seen.exited }))
}

fn cur_freq(vcpu: usize) -> String {
    format!("{}/host_cur_freq", guest_policy(vcpu))
}

fn doctor() -> Result<LabVerdict> {
    let output = Command::new("/bin/vcpufreq")
        .args(["doctor", "--json"])
        .output()?;
    let said: Value = serde_json::from_slice(&output.stdout).context("doctor --json")?;
    let mut all = said["findings"].as_array().into_iter().flatten();
    let finding = all.find(|one| one["subject"] == "protected VMs");
    let yes = finding.is_some_and(|finding| finding["what"] == "yes");
    Ok(LabVerdict::default()
        .check("protected VMs are found", yes, finding)
        .figure("finding", finding.cloned()))
}

/// Pages that are none, and such that the guest doesn't share: its driver goes on by registers, and
/// there is one line about it.
fn not_shared(plan: &Plan) -> Result<LabVerdict> {
    let (policies, setup) = setup(plan)?;
    let mut vm = plan.guest(&setup)?;
    let device = GuestDevice::of(&mut vm)?;
    let register = device.base + SHARED_PAGES;
    for page in [1, RAM_PAGE + 0x300, u64::from(u32::MAX), RAM_PAGE - 1] {
        vm.ask(format!("poke 0 {register:#x} {page}"))?;
    }
    let (last, policy) = last_of(&policies)?;
    set_governor(&mut vm, last, "userspace")?;
    ask_for(&mut vm, last, policy.min())?;
    let exits = Exits::watch()?;
    vm.ask(format!("reads {} {FEW}", cur_freq(last)))?;
    let seen = exits.stop()?.at(device.base..device.base + REGION);
    let said = vm.quit()?;
    let lines = said.matches("names pages that it doesn't share").count();
    let figures = json!({ "reads_exited": seen.exited, "vmm_said": said });
    Ok(LabVerdict::with_figures(figures)
        .check("it is told once", lines == 1, &said)
        .check("reads exit", seen.exited >= FEW, seen.exited))
}

/// Another process of the host, with all rights, reads the guest's memory where its kernel is. The
/// kernel takes the page from the guest for that, which ends it. Of an ordinary guest it reads the text.
fn host_reads(plan: &Plan) -> Result<LabVerdict> {
    let (policies, setup) = setup(plan)?;
    let ordinary = Setup {
        silent: true,
        ..Setup::mirroring(&first_cpus(&policies))
    };
    let (text, of_ordinary, _) = text_seen(plan, &ordinary)?;
    let (_, of_protected, read) = text_seen(plan, &setup)?;
    let figures = json!({
        "bytes": text, "equal_of_ordinary": of_ordinary, "equal_of_protected": of_protected,
        "read": read, "left": left_soon()?,
    });
    // Linux patches some of it when it boots.
    let sees = of_ordinary * 10 >= text * 9;
    Ok(LabVerdict::with_figures(figures)
        .check("the text isn't empty", text > 0, text)
        .check("of an ordinary guest it is seen", sees, of_ordinary)
        .check_eq("of a protected one nothing", &of_protected, 0))
}

/// How many bytes of a piece of the guest's kernel aren't 0, how many of these another process sees in
/// the VMM's largest mapping, and how the read ended.
fn text_seen(plan: &Plan, setup: &Setup) -> Result<(usize, usize, String)> {
    let mut kernel = vec![0; usize::try_from(TEXT.end - TEXT.start)?];
    File::open(KERNEL)?.read_exact_at(&mut kernel, TEXT.start)?;
    let vm = plan.guest(setup)?;
    let pid = vm.pid();
    let maps = sysfs::text(format!("/proc/{pid}/maps"))?;
    let range = |line: &str| {
        let (start, end) = line.split_whitespace().next()?.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        Some((number(start)?, number(end)?))
    };
    let all = maps.lines().filter_map(range);
    let ram = all.max_by_key(|(start, end)| end - start);
    let (start, _) = ram.context("the VMM maps nothing")?;
    let mut seen = vec![0; kernel.len()];
    let memory = File::open(format!("/proc/{pid}/mem"))?;
    let read = memory.read_exact_at(&mut seen, start + TEXT.start);
    vm.kill()?;
    let text = kernel.iter().filter(|byte| **byte != 0).count();
    let equal = kernel.iter().zip(&seen).filter(|(a, b)| a == b && **a != 0);
    Ok((text, equal.count(), format!("{read:?}")))
}

/// Kills of a VMM whose guest has booted: nothing is left, and the memory is the host's again.
fn killed(plan: &Plan) -> Result<LabVerdict> {
    let (_, setup) = setup(plan)?;
    let available = || sysfs::field::<u64>("/proc/meminfo", "MemAvailable");
    let boot_and_kill = || {
        let mut vm = Vm::start(&setup)?;
        vm.expect("@ready", BOOT)?;
        vm.kill()
    };
    // What the first one leaves in caches is no loss.
    boot_and_kill()?;
    let before = available()?;
    for _ in 0..KILLS {
        boot_and_kill()?;
    }
    let back = |now: &u64| now + SLACK_KIB >= before;
    let after = settled(SOON, available, back)?;
    let left = left_soon()?;
    let figures = json!({ "before_kib": before, "after_kib": after, "left": left });
    Ok(LabVerdict::with_figures(figures)
        .check("memory comes back", back(&after), (before, after))
        .check_none("nothing is left", &left))
}

/// What a protected guest can't have: exit code 2, and a line with what to do.
fn refusals(plan: &Plan) -> Result<LabVerdict> {
    let (_, setup) = setup(plan)?;
    let rows: [(&[&str], &str); 5] = [
        (&["--path", "bpf"], "leave --path out"),
        (&["--path", "shm"], "leave --path out"),
        (&["--path", "ram"], "leave --path out"),
        (&["--hugepages", "2M"], "leave --hugepages out"),
        (&["--actuator", "scx"], "leave --actuator out"),
    ];
    let results = rows.map(|(options, wanted)| {
        refused(&setup.clone().with(options), &["protected guest", wanted])
    });
    let mut results = results.into_iter().collect::<Result<Vec<_>>>()?;
    // Of a user's 8 MiB, which are the kernel's default.
    fs::set_permissions(KVM, Permissions::from_mode(0o666))?;
    let says = ["this process may lock 8192 KiB; run as root", "ulimit -l"];
    results.push(refused_when(&setup, &says, |vmm| {
        vmm.uid(NOBODY).gid(NOBODY);
    })?);
    fs::set_permissions(KVM, Permissions::from_mode(0o600))?;
    Ok(LabVerdict::default().parts("each", results))
}
