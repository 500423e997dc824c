// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Wake-up latency of a real-time guest that drives its pCPU's frequency, by `vcpufreq rt report`.
//! The vCPU is alone, the bridge adds no exit to userspace, and the latency equals that at the
//! maximum. The saving is measured separately, with the speed model on.
//!
//! All emulated CPUs share one stream of instructions: the latencies are no hardware's, and compare
//! only with one another.

use std::fs::{self, File};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use super::guest;
use super::inventory;
use crate::harness::frequency::host_runs_at;
use crate::harness::guest_shell::{self, COMMAND};
use crate::harness::kernel_threads::Company;
use crate::harness::plan::{GuestDevice, Plan, let_load_decay, set_governor};
use crate::harness::policy::Policy;
use crate::harness::rt_command::succeeded;
use crate::harness::sysfs;
use crate::harness::trace::exits::Exits;
use crate::harness::trace::{self, Trace};
use crate::harness::vm::{Setup, Vm};
use crate::scenarios::models::speed::{SPEED_MODEL, energy_uj};

const OUTPUT: &str = "/run/report.json";
/// The guest's programs take 60 MiB, packed and unpacked.
pub(super) const MEM_MIB: u32 = 512;
/// To switch events on patches the kernel's code, which is work on every CPU.
const PATCHED: Duration = Duration::from_secs(1);
/// Senders of hackbench in the guest, and as many receivers.
const FDS: &str = "2";
/// It ran several times: each is 4 of these threads. Without it the test starts 5 (measured).
const FORKS: u64 = 24;
/// Loads that are still there a while after; the pattern doesn't find itself.
const LEFT_IN_GUEST: &str = "sleep 1\nbusybox grep -lE 'hackbenc[h]|stress-n[g]|cyclictes[t]' /proc/[0-9]*/cmdline 2> /dev/null || true\n";

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let (rt, others) = policies.split_last().context("no policy")?;
    let cpu = *rt.cpus.last().context("no CPU")?;
    ensure!(!others.is_empty(), "one policy; use the topology 2+2");
    trace::off()?;
    let before = inventory::everything()?;
    // All of its policy is set apart: another task there would have a say in its frequency.
    let all: Vec<String> = rt.cpus.iter().map(u32::to_string).collect();
    succeeded(&["apply", "--guest", &format!("plc={}", all.join(","))])?;
    let options = ["--rt", "1=fifo:1", "--resume-latency-us", "50"];
    let setup = Setup {
        mem_mib: Some(MEM_MIB),
        ..plan.real_time(&[others[0].cpu(), cpu]).with(&options)
    };
    let mut vm = guest::boot(plan, &setup)?;
    set_governor(&mut vm, 1, "schedutil")?;
    // Before and after: two runs differ by where the host's own work falls.
    let first = at_maximum(&mut vm, (rt, cpu))?;
    let apart = apart(&mut vm, cpu)?;
    let second = at_maximum(&mut vm, (rt, cpu))?;
    let figures = all_loads(&mut vm, cpu)?;
    let hackbench = hackbench(&mut vm, cpu)?;
    let phases = phases(&mut vm, rt, others)?;
    vm.quit()?;
    succeeded(&["restore"])?;
    let left = inventory::changes(&before, &inventory::everything()?);
    let longest = |one: &Value| one["max_us"].as_u64().unwrap_or(0);
    let bridge = longest(apart.get("latency"));
    let maximum = longest(&first).max(longest(&second));
    // Two equal runs differ by a fourth, by where the work of other CPUs falls in the one stream
    // of instructions.
    let near = bridge > 0 && bridge * 2 <= maximum * 3;
    let more = json!({
        "emulated": true, "with_performance": [first, second],
        "no_higher_than_with_performance": bridge <= maximum, "left": left,
    });
    Ok(LabVerdict::with_figures(more)
        .part("apart", apart)
        .part("report", figures)
        .part("guest_hackbench", hackbench)
        .part("phases", phases)
        .check(
            "latencies near those at the maximum",
            near,
            (bridge, maximum),
        )
        .check_none("nothing is left", &left))
}

/// 10 s of cyclictest in the guest, which drives the frequency: other threads that ran there, and
/// exits of the bridge's registers to userspace.
fn apart(vm: &mut Vm, cpu: u32) -> Result<LabVerdict> {
    let device = GuestDevice::of(vm)?;
    let exits = Exits::watch()?;
    let trace = Trace::start()?;
    sleep(PATCHED);
    let latency = idle_latency(vm, &["--cpus", &cpu.to_string()])?;
    let seen = trace.stop()?;
    let exits = exits.stop()?.at(device.trapping(0..2));
    let lost = trace::lost_on(cpu)?;
    let Company { counts, strangers } = Company::of("vcpu1", cpu, &seen.switches);
    let ran = counts.get("vcpu1").copied().unwrap_or(0);
    let samples = latency["samples"].as_u64();
    let enough = samples >= Some(9_900);
    let figures = json!({
        "times_switched_to": counts, "strangers": strangers, "events_lost": lost, "latency": latency,
        "requests": exits.trapped, "exits_to_userspace_by_the_bridge": exits.exited,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("no stranger runs there", strangers.is_empty(), &strangers)
        .check_eq("no event is lost", &lost, 0)
        .check("the vCPU runs", ran >= 5000, ran)
        .check("samples", enough, samples)
        .check("requests are trapped", exits.trapped > 0, exits.trapped)
        .check_eq("none exits", &exits.exited, 0))
}

/// The same with the pCPU at its maximum, and traced as much, which costs time as well.
fn at_maximum(vm: &mut Vm, (rt, cpu): (&Policy, u32)) -> Result<Value> {
    let governor = format!("{}/scaling_governor", rt.path);
    sysfs::write(&governor, "performance")?;
    let exits = Exits::watch()?;
    Trace::start()?;
    sleep(PATCHED);
    let latency = idle_latency(vm, &["--cpus", &cpu.to_string()])?;
    trace::off()?;
    exits.stop()?;
    sysfs::write(&governor, "schedutil")?;
    Ok(latency)
}

/// Of 10 s in the guest without load, with more options of `rt report`.
pub(super) fn idle_latency(vm: &mut Vm, more: &[&str]) -> Result<Value> {
    let line = ["--guest-only", "--loads", "idle", "--time", "10s"];
    let report = report(vm, &[&line, more].concat())?;
    let mut latency = report["runs"][0]["latencies"][0].clone();
    latency["histogram"].take();
    Ok(latency)
}

/// Every load on the host, and on the guest stress: idle was before, hackbench comes after:
/// figures for each, no verdict here, nothing left.
fn all_loads(vm: &mut Vm, cpu: u32) -> Result<LabVerdict> {
    let cpu = cpu.to_string();
    let common = [
        "--cpus",
        &cpu,
        "--loops",
        "500",
        "--budget-us",
        "1000",
        // All of them at once are more than the one stream of instructions can carry.
        "--others",
        "0-1",
        // Each latency is above that.
        "--spike-us",
        "1",
    ];
    let of_host = ["--stress-fifo", "1"];
    let status = command(&[&common[..], &of_host].concat())?.status()?;
    let host = printed(status.code())?;
    let of_guest = ["--guest-only", "--guest-others", "0", "--loads", "stress"];
    let guest = report(vm, &[&common[..], &of_guest].concat())?;
    let none = Vec::new();
    let both = [&host, &guest];
    let runs = both
        .iter()
        .flat_map(|one| one["runs"].as_array().unwrap_or(&none));
    let runs: Vec<&Value> = runs.collect();
    let full = |run: &&&Value| {
        let latency = &run["latencies"][0];
        latency["samples"] == 500 && latency["max_us"].as_u64() > Some(0)
    };
    let recorded = |run: &&Value| {
        let spikes = &run["spikes"];
        spikes["count"].as_u64() > Some(0) && spikes["recorded"][0]["at_us"].is_u64()
    };
    let spikes: Vec<Value> = runs
        .iter()
        .map(|run| run["spikes"]["count"].clone())
        .collect();
    let complete = runs.len() == 4 && runs.iter().filter(full).count() == runs.len();
    let refused =
        |one: &&Value| one["verdict"] == "refused" && one["conditions"]["emulated"].is_string();
    let rows: Vec<Value> = runs.iter().map(|run| row(run)).collect();
    let left = left_behind()?;
    let figures = json!({
        "complete": complete, "rows": rows, "verdict": host["verdict"], "left_behind": left,
    });
    let verdicts = [&host["verdict"], &guest["verdict"]];
    Ok(LabVerdict::with_figures(figures)
        .check("each run is complete", complete, &rows)
        .check(
            "long latencies are recorded",
            runs.iter().all(recorded),
            &spikes,
        )
        .check(
            "emulated, both are refused a verdict",
            both.iter().all(refused),
            verdicts,
        )
        .check("nothing is left behind", left.is_empty(), &left))
}

/// A small hackbench in the guest, and one on the host. Not on the measured vCPU's CPU: the test
/// would hardly get its turn among those threads.
fn hackbench(vm: &mut Vm, cpu: u32) -> Result<LabVerdict> {
    let cpu = cpu.to_string();
    let before = forks(vm)?;
    let line = [
        "--cpus",
        &cpu,
        "--guest-only",
        "--guest-others",
        "0",
        "--others",
        "1",
        "--loads",
        "hackbench",
        "--hackbench-fds",
        FDS,
        "--loops",
        "200",
    ];
    let report = report(vm, &line)?;
    let forks = forks(vm)? - before;
    let run = &report["runs"][0];
    let samples = &run["latencies"][0]["samples"];
    let left = guest_shell::ask(vm, LEFT_IN_GUEST)?;
    let figures = json!({
        "forks_in_the_guest": forks, "left_in_the_guest": left, "row": row(run),
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("samples", samples, 200)
        .check_eq("hackbench is the load", &run["load"], "hackbench")
        .check("it forks", forks >= FORKS, forks)
        .check("nothing is left in the guest", left.is_empty(), &left))
}

/// Processes and threads that the guest has started.
fn forks(vm: &mut Vm) -> Result<u64> {
    let text = guest_shell::ask(vm, "busybox grep ^processes /proc/stat")?;
    let number = text.split_whitespace().nth(1);
    Ok(number.context("no processes")?.parse()?)
}

fn row(run: &Value) -> Value {
    let mut latency = run["latencies"][0].clone();
    latency["histogram"].take();
    json!({ "place": run["place"], "load": run["load"], "latency": latency })
}

/// Processes of loads that are still there; what has ended and isn't waited for has no
/// command line.
fn left_behind() -> Result<Vec<String>> {
    let mut left = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let line = fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
        let loads = ["stress-ng", "hackbench", "cyclictest"];
        if loads.iter().any(|load| line.contains(load)) {
            left.push(line.replace('\0', " "));
        }
    }
    Ok(left)
}

/// A guest that is busy for 40 % of the time, with the speed model on. It takes at most 0.3 of the energy
/// at the maximum, its pCPU runs at its request, and other pCPUs fall. That without the model, whose
/// interrupts, which make a slow CPU slow, are a load that the host's governor answers.
fn phases(vm: &mut Vm, rt: &Policy, others: &[Policy]) -> Result<LabVerdict> {
    sysfs::write(SPEED_MODEL, 1)?;
    vm.ask(format!("start {}", guest::PERIODIC))?;
    let bridge = energy_of_5s(rt)?;
    sysfs::write(format!("{}/scaling_governor", rt.path), "performance")?;
    let performance = energy_of_5s(rt)?;
    sysfs::write(format!("{}/scaling_governor", rt.path), "schedutil")?;
    sysfs::write(SPEED_MODEL, 0)?;
    vm.ask("stop busy")?;
    set_governor(vm, 1, "userspace")?;
    let mut rows = Vec::new();
    for &khz in &rt.opps {
        rows.push(phase(vm, rt, others, khz)?);
    }
    let energy = json!({ "bridge": bridge, "performance": performance });
    Ok(LabVerdict::default()
        .parts("rows", rows)
        .check("the bridge takes energy", bridge > 0, bridge)
        .check(
            "and at most 0.3 of performance's",
            bridge * 10 <= performance * 3,
            &energy,
        )
        .figure("energy_of_5_s_uj", energy))
}

/// Asks, starts the load when the last one's has decayed, and looks at all pCPUs.
fn phase(vm: &mut Vm, rt: &Policy, others: &[Policy], khz: u32) -> Result<LabVerdict> {
    let ran_at = guest::runs_under_load((&mut *vm, rt), (khz, khz), let_load_decay)?;
    let (clamp, _) = vm.clamp(1)?;
    let mut fell = Vec::new();
    for other in others {
        fell.push(host_runs_at(other, vm, other.min())?);
    }
    vm.ask("stop busy")?;
    let free = others.iter().map(Policy::min).eq(fell.iter().copied());
    let figures = json!({
        "asked_khz": khz, "uclamp_min": clamp, "ran_at_khz": ran_at, "others_khz": fell,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("other policies are free", free, &fell)
        .check(
            "it runs at what is asked for",
            ran_at.last() == Some(&khz),
            &ran_at,
        )
        .check_eq("its clamp", &clamp, rt.util(khz)))
}

fn energy_of_5s(policy: &Policy) -> Result<u64> {
    let_load_decay();
    let before = energy_uj(policy)?;
    sleep(Duration::from_secs(5));
    Ok(energy_uj(policy)? - before)
}

/// `vcpufreq rt report` with the guest's vCPU 1.
fn report(vm: &mut Vm, line: &[&str]) -> Result<Value> {
    let guest = ["--guest-shell", COMMAND, "--guest-cpus", "1"];
    let line: Vec<&str> = guest.iter().chain(line).copied().collect();
    let status = guest_shell::with_guest(vm, command(&line)?)?;
    printed(status.code())
}

fn command(line: &[&str]) -> Result<Command> {
    let mut command = Command::new("/bin/vcpufreq");
    command
        .args(["rt", "report", "--json"])
        .args(line)
        .stdout(File::create(OUTPUT)?)
        .stderr(File::create("/run/report.err")?);
    Ok(command)
}

fn printed(code: Option<i32>) -> Result<Value> {
    let said = sysfs::text("/run/report.err")?;
    let report = serde_json::from_reader(File::open(OUTPUT)?).context("what rt report printed");
    // A test that is incomplete has its reason there.
    let why = report
        .as_ref()
        .ok()
        .and_then(|report: &Value| report["why"].as_str());
    ensure!(
        code == Some(0),
        "rt report ended with {code:?}: {said}{}",
        why.unwrap_or_default()
    );
    report
}
