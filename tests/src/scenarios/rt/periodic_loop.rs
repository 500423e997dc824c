// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The periodic loop in the kernel, in the four runs of an old comparison: normal and real-time
//! scheduling, without load, with stress on its CPU, and with a flood of pings beside that. And in
//! a guest, on a real-time vCPU, as it is: the emulated CPUs share one stream of instructions. Of QEMU's
//! guests that alone: they need a partition, in which the host's runs would not be as they were.
//!
//! The pings go over loopback: packets are made and answered in softirqs of that CPU, but it is no
//! network card's interrupts.

use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use super::guest;
use crate::harness::console_commands::{insmod, rmmod};
use crate::harness::guest_shell;
use crate::harness::plan::Plan;
use crate::harness::policy::Policy;
use crate::harness::rt_command::succeeded;
use crate::harness::sysfs;
use crate::harness::vm::Setup;
use crate::harness::vmm::Vmm;

const MODULE: &str = "vcpufreq_rt_loop";
const STATS: &str = "/sys/kernel/debug/vcpufreq_rt_loop/stats";
/// The module's own: the first 1,000 cycles of 10 ms aren't counted.
const IGNORED: Duration = Duration::from_secs(10);
/// Time for the load to begin, within that.
const LEAD: Duration = Duration::from_secs(1);
/// 800 cycles.
const COUNTED: Duration = Duration::from_secs(8);
/// Hogs on the loop's CPU: a fair scheduler gives each as much as the loop.
const HOGS: &str = "4";
/// The guest's programs take 60 MiB, packed and unpacked.
const MEM_MIB: u32 = 512;

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let cpu = *policies
        .last()
        .and_then(|policy| policy.cpus.last())
        .context("no CPU")?;
    let little = policies[0].cpu();
    if plan.vmm == Vmm::Qemu {
        succeeded(&["apply", "--guest", &format!("plc={cpu}")])?;
        let in_guest = guest_row(plan, little, cpu)?;
        succeeded(&["restore"])?;
        let figures = json!({ "emulated": true, "cpu": cpu, "in_guest": in_guest });
        return Ok(LabVerdict::with_figures(figures)
            .check("cycles are counted", counted(&in_guest), &in_guest)
            .check("at most one is late", at_most(&in_guest, 1), &in_guest));
    }
    let up = Command::new("/bin/busybox")
        .args(["ip", "link", "set", "lo", "up"])
        .status()?;
    ensure!(up.success(), "cannot bring up loopback");
    let rows = [
        ("normal", "none"),
        ("normal", "stress"),
        ("real-time", "stress"),
        ("real-time", "stress and ping flood over loopback"),
    ]
    .map(|(scheduler, load)| row(cpu, scheduler, load))
    .into_iter()
    .collect::<Result<Vec<Value>>>()?;
    let in_guest = guest_row(plan, little, cpu)?;
    // The emulated CPUs share one stream of instructions: beside the flood one cycle may be late,
    // which makes the next one short.
    let exact = at_most(&rows[2], 0) && at_most(&rows[3], 1);
    let pings = &rows[3]["pings"];
    let flooded = pings.as_u64() >= Some(1000);
    let figures = json!({
        "emulated": true, "no_network_card": true, "cpu": cpu, "rows": rows, "in_guest": in_guest,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("real-time cycles are in time", exact, &rows[2..])
        .check("pings flood", flooded, pings)
        .check("cycles are counted", rows.iter().all(counted), &rows)
        .check("the guest's are counted", counted(&in_guest), &in_guest)
        .check("what can't be is refused", refusals(cpu)?, ()))
}

/// Whether at most so many cycles were short, and as many long.
fn at_most(row: &Value, cycles: u64) -> bool {
    let mut counts = [&row["under_8ms"], &row["over_12ms"]].into_iter();
    counts.all(|count| count.as_u64().is_some_and(|count| count <= cycles))
}

/// Whether enough cycles were counted, all on the loop's CPU.
fn counted(row: &Value) -> bool {
    row["cycles"].as_u64() >= Some(700) && row["on_another_cpu"] == 0
}

fn row(cpu: u32, scheduler: &str, load: &str) -> Result<Value> {
    let priority = if scheduler == "normal" { 0 } else { 80 };
    insmod(MODULE, &format!("cpu={cpu} priority={priority}"))?;
    sleep(IGNORED - LEAD);
    let pings = pings()?;
    let mut loads = Vec::new();
    if load.contains("stress") {
        loads.push(begin(
            cpu,
            &["stress-ng", "--quiet", "--temp-path", "/tmp", "--cpu", HOGS],
        )?);
    }
    if load.contains("ping") {
        // The next one as soon as the answer to the last is there.
        loads.push(begin(cpu, &["busybox", "ping", "-q", "-A", "127.0.0.1"])?);
    }
    sleep(LEAD + COUNTED);
    let stats = sysfs::text(STATS)?;
    for one in loads {
        end(one)?;
    }
    rmmod(MODULE)?;
    let mut row = figures(&stats)?;
    row["scheduler"] = json!(scheduler);
    row["load"] = json!(load);
    row["pings"] = json!(self::pings()? - pings);
    Ok(row)
}

/// On the real-time vCPU of a guest, without load.
fn guest_row(plan: &Plan, little: u32, cpu: u32) -> Result<Value> {
    let setup = Setup {
        mem_mib: Some(MEM_MIB),
        ..plan.real_time(&[little, cpu]).with(&["--rt", "1=fifo:1"])
    };
    let mut vm = guest::boot(plan, &setup)?;
    let seconds = (IGNORED + COUNTED).as_secs();
    let script = format!(
        "busybox insmod /lab/modules/{MODULE}.ko cpu=1 priority=80 && busybox sleep {seconds} && \
         busybox cat {STATS} && busybox rmmod {MODULE}"
    );
    let stats = guest_shell::ask(&mut vm, &script)?;
    vm.quit()?;
    let mut row = figures(&stats)?;
    row["scheduler"] = json!("real-time, in a guest");
    row["load"] = json!("none");
    Ok(row)
}

fn figures(stats: &str) -> Result<Value> {
    let number = |key: &str| -> Result<u64> {
        let mut lines = stats.lines();
        let line = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(' '));
        Ok(line
            .with_context(|| format!("no {key}: {stats}"))?
            .parse()?)
    };
    Ok(json!({
        "cycles": number("cycles")?,
        "under_8ms": number("under_8000000_ns")?, "over_12ms": number("over_12000000_ns")?,
        "longest_us": number("longest_ns")? / 1000, "shortest_us": number("shortest_ns")? / 1000,
        "on_another_cpu": number("on_another_cpu")?,
    }))
}

/// What the module refuses leaves nothing behind.
fn refusals(cpu: u32) -> Result<bool> {
    let wrong = [
        "cpu=4000".to_owned(),
        format!("cpu={cpu} priority=100"),
        format!("cpu={cpu} period_us=0"),
    ];
    let refused = wrong.iter().all(|options| insmod(MODULE, options).is_err());
    Ok(refused && !std::fs::exists(STATS)?)
}

/// A load on the loop's CPU.
fn begin(cpu: u32, line: &[&str]) -> Result<Child> {
    let mut command = Command::new("/bin/busybox");
    command.args(["taskset", "-c", &cpu.to_string()]).args(line);
    let command = command.env("PATH", "/bin").stdin(Stdio::null());
    let quiet = command.stdout(Stdio::null());
    quiet.spawn().with_context(|| format!("starting {line:?}"))
}

/// stress-ng ends its children itself.
fn end(mut load: Child) -> Result<()> {
    ensure!(load.try_wait()?.is_none(), "a load had ended by itself");
    let pid = Pid::from_raw(i32::try_from(load.id())?);
    kill(pid, Signal::SIGTERM)?;
    load.wait()?;
    Ok(())
}

/// Echo requests that this host's IP layer has received.
fn pings() -> Result<u64> {
    let text = sysfs::text("/proc/net/snmp")?;
    let mut lines = text.lines().filter(|line| line.starts_with("Icmp:"));
    let names = lines.next().context("no Icmp line")?;
    let values = lines.next().context("no Icmp values")?;
    let at = names.split(' ').position(|name| name == "InEchos");
    let value = values.split(' ').nth(at.context("no InEchos")?);
    Ok(value.context("no InEchos value")?.parse()?)
}
