// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a guest's requests at the allowed rate cost others: another guest's request, a cgroup, a
//! thread's and a process' start and end. Beside a guest that computes as much, for pCPUs of an
//! emulated host take time from each other.

use std::fs;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};
use vcpufreq_host_bpf::{ActuateBy, HostModule};
use vcpufreq_tests::LabVerdict;

use super::group::ClampGroup;
use super::lock_hold;
use super::scx::{ServiceProcess, scx};
use super::tiny_vm::{Deed, RAM};
use super::vcpu::{FROM_KHZ, SET_PERF, STEP_KHZ, TinyVcpu, stores};
use crate::harness::machine::mount_bpffs;
use crate::harness::policy::Policy;
use crate::harness::sys::fork_and_wait;
use crate::harness::{console_commands, load};

/// Turns of the guest's loop between two requests: 0.9 ms, for 1,000 a second.
const TURNS: u64 = 900_000 / 6;
const REQUESTS: u64 = 700;
/// The highest request.
const TO_KHZ: u32 = 2_800_000;
const TIMES: usize = 300;

/// The agent as a VMM whose guest does the same for ever: `words` are the actuator, and what the guest
/// does: it computes, asks besides, or rests after each request.
pub fn guest(words: &[String]) -> Result<()> {
    if !words.iter().any(|word| word == "rests") {
        return run_guest(words);
    }
    // As a VMM has it: when that is killed, the vCPU's thread isn't the one that frees the VM.
    std::thread::scope(|scope| {
        let vcpu = scope.spawn(|| run_guest(words));
        vcpu.join().map_err(|_| anyhow!("a vCPU panicked"))?
    })
}

fn run_guest(words: &[String]) -> Result<()> {
    let by = actuator(words.first().context("no actuator")?)?;
    let deed = words.get(1).context("no deed")?.as_str();
    let mut vm = FloodVm::new(by, 1)?;
    let quiet = Deed {
        times: 1,
        address: RAM,
        read: true,
        ..Deed::default()
    };
    for n in (0..u32::try_from(REQUESTS)?).cycle() {
        let store = match deed {
            "computes" => quiet,
            // From the highest down: that is above what a new thread is taken to use.
            "rests" => stores(1, TO_KHZ - n * STEP_KHZ, 0),
            _ => stores(1, FROM_KHZ + n * STEP_KHZ, 0),
        };
        let before = TURNS;
        vm.vcpu.vm.run(Deed { before, ..store }, |_, _| ())?;
        if deed == "rests" {
            std::thread::sleep(Duration::from_millis(2));
        }
        if n % 100 == 99 {
            println!("{}", vm.vcpu.counters()?.in_kernel);
        }
    }
    Ok(())
}

/// A tiny VM whose requests are put into force before it goes on.
struct FloodVm {
    vcpu: TinyVcpu,
    _event: vmm_sys_util::eventfd::EventFd,
    _module: Option<(HostModule, ClampGroup)>,
}

impl FloodVm {
    /// Its vCPU is on the pCPU with this index in the last policy.
    fn new(by: ActuateBy, index: usize) -> Result<Self> {
        let vcpu = TinyVcpu::new(by)?;
        let cpus = &vcpu.policy.cpus;
        load::pin(*cpus.get(index).context("a policy of one pCPU")?)?;
        let module = match by {
            ActuateBy::Kfunc => {
                let module = HostModule::open(2, 1)?;
                let group = ClampGroup::with_current(&format!("flood{index}"))?;
                module.bind(0, group.min.as_fd(), group.max.as_fd())?;
                Some((module, group))
            }
            _ => None,
        };
        let event = vcpu.vm.swallow(SET_PERF)?;
        Ok(Self {
            vcpu,
            _event: event,
            _module: module,
        })
    }
}

fn actuator(word: &str) -> Result<ActuateBy> {
    match word {
        "kfunc" => Ok(ActuateBy::Kfunc),
        "scx" => Ok(ActuateBy::Scx),
        _ => Err(anyhow!("{word} is no actuator of this scenario")),
    }
}

fn spawn(by: &str, deed: &str) -> Result<Child> {
    let mut command = Command::new("/init");
    command.args(["bpf-flood", by, deed]).stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let stdout = child.stdout.as_mut().context("no stdout")?;
    // A line: its guest runs.
    let mut byte = [0];
    while byte != *b"\n" {
        stdout.read_exact(&mut byte)?;
    }
    Ok(child)
}

pub fn run() -> Result<LabVerdict> {
    console_commands::insmod("vcpufreq_host", "")?;
    let kfunc = beside("kfunc");
    console_commands::unload_host_module()?;
    mount_bpffs()?;
    let service = ServiceProcess::start()?;
    let by_scx = beside("scx");
    scx(&["stop"])?;
    drop(service);
    let (kfunc, by_scx) = (kfunc?, by_scx?);
    // Clamps share the kernel's locks with cgroups, so that these take longer.
    let by_kfunc = within(&kfunc, [110, 125, 125, 125]);
    let little = within(&by_scx, [110; 4]);
    let seldom = seldom(&kfunc);
    let figures = json!({ "emulated": true, "cgroup_write": kfunc, "scx": by_scx });
    Ok(LabVerdict::with_figures(figures)
        .check("others take little longer beside clamps", by_kfunc, &kfunc)
        .check("and beside scx", little, &by_scx)
        .check("the lock is seldom held", seldom, &kfunc["asks"]["lock"]))
}

/// Whether each takes so many percent at most of what it takes beside a guest that computes.
fn within(seen: &Value, percents: [u64; 4]) -> bool {
    let whats = ["request", "cgroup", "thread", "fork"];
    whats.into_iter().zip(percents).all(|(what, percent)| {
        let of = |when: &str| seen[when][what]["median_ns"].as_u64();
        let (without, beside) = (of("computes"), of("asks"));
        matches!((without, beside), (Some(without), Some(beside)) if beside * 100 <= without * percent)
    })
}

/// Whether the flood holds the lock for little of the time, and was seen to.
fn seldom(kfunc: &Value) -> bool {
    let lock = &kfunc["asks"]["lock"];
    let share = lock["share_percent"].as_f64();
    lock["holds"].as_u64() > Some(500) && share.is_some_and(|share| share <= 5.0)
}

/// What it takes beside a guest that computes, and beside one that asks besides.
fn beside(by: &str) -> Result<Value> {
    let mut rows = serde_json::Map::new();
    for deed in ["computes", "asks"] {
        let mut other = spawn(by, deed)?;
        let locks = (by == "kfunc" && deed == "asks").then(lock_hold::watch);
        let row = std::thread::scope(|scope| {
            let victim = scope.spawn(|| victim(actuator(by)?));
            victim.join().map_err(|_| anyhow!("a vCPU panicked"))?
        });
        let ended = other.try_wait()?;
        other.kill()?;
        other.wait()?;
        anyhow::ensure!(ended.is_none(), "the other guest has ended: {ended:?}");
        let mut counts = String::new();
        let stdout = other.stdout.as_mut().context("no stdout")?;
        stdout.read_to_string(&mut counts)?;
        let asked = counts
            .lines()
            .last()
            .and_then(|line| line.parse::<u64>().ok());
        let asked = asked.context("the other guest reports nothing")?;
        anyhow::ensure!(
            (asked > 2 * REQUESTS) == (deed == "asks"),
            "{asked} requests"
        );
        let mut row = row?;
        row["other_guests_requests"] = asked.into();
        row["lock"] = locks.transpose()?.into();
        rows.insert(deed.into(), row);
    }
    Ok(rows.into())
}

fn victim(by: ActuateBy) -> Result<Value> {
    let mut guest = FloodVm::new(by, 0)?;
    let mut requests = Vec::new();
    for n in 0..TIMES {
        let khz = FROM_KHZ + u32::try_from(n)? * STEP_KHZ;
        let start = Instant::now();
        // Two, and one: a run's own cost goes.
        guest.vcpu.vm.run(stores(2, khz, STEP_KHZ), |_, _| ())?;
        let two = start.elapsed();
        let start = Instant::now();
        guest.vcpu.vm.run(stores(1, khz, 0), |_, _| ())?;
        requests.push(two.saturating_sub(start.elapsed()));
    }
    drop(guest);
    // The little pCPUs have nothing else to do.
    load::pin(Policy::all()?.first().context("no policy")?.cpu())?;
    let cgroup = times(|| {
        fs::create_dir("/sys/fs/cgroup/flooded")?;
        Ok(fs::remove_dir("/sys/fs/cgroup/flooded")?)
    })?;
    let thread = times(|| {
        let thread = std::thread::spawn(|| ());
        thread.join().map_err(|_| anyhow!("a thread panicked"))
    })?;
    let fork = times(fork_and_wait)?;
    Ok(json!({
        "request": row(requests), "cgroup": row(cgroup), "thread": row(thread), "fork": row(fork),
    }))
}

fn times(mut work: impl FnMut() -> Result<()>) -> Result<Vec<Duration>> {
    let mut took = Vec::new();
    for _ in 0..TIMES {
        let start = Instant::now();
        work()?;
        took.push(start.elapsed());
    }
    Ok(took)
}

fn row(mut took: Vec<Duration>) -> Value {
    took.sort_unstable();
    let at = |percent: usize| took.get(took.len() * percent / 100);
    let ns = |at: Option<&Duration>| at.and_then(|took| u64::try_from(took.as_nanos()).ok());
    json!({ "median_ns": ns(at(50)), "p99_ns": ns(at(99)) })
}
