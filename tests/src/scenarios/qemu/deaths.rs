// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! kill -9 of a server, of its QEMU, and of both, at 50 drawn moments. The guest goes on, within 1
//! s nothing is left, and the next server takes the guest over. A server that is stopped for a
//! while lets no vCPU wait.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use crate::harness::host::begins;
use crate::harness::leftovers::{left_soon, leftovers};
use crate::harness::plan::{GuestDevice, Plan, first_cpus, set_governor};
use crate::harness::policy::Policy;
use crate::harness::server::ServeProcess;
use crate::harness::vm::{BOOT, Setup, Vm};
use crate::harness::vmm::{SOCKET, Vmm, qemu_at};
use crate::harness::wait::{SOON, settled};

/// Kills while QEMU starts, or its guest boots.
const EARLY: u32 = 24;
/// The moments that they come at, from the start.
const MOMENTS: Duration = Duration::from_millis(2_400);
/// Kills while the guest makes requests,
const LOADED: u32 = 6;
/// and of servers of one such guest, one after the other.
const TAKEN_OVER: u32 = 20;
/// The moments that these come at.
const LOADED_MOMENTS: Duration = Duration::from_millis(400);
/// How long the server is stopped, and how often.
const STOPPED: Duration = Duration::from_secs(5);
const STOPS: u32 = 3;
/// Requests that are made meanwhile,
const REQUESTS: u64 = 2_000;
/// and what one takes at most, on average, of the guest's (virtual) time: 7 us where a server
/// answers. A single wait for the server would take seconds.
const BOUND_NS: u64 = 100_000;
/// The clamp of a vCPU without a server.
const FREE: (u32, u32) = (0, 1024);
/// Files that have no guardian: QEMU's device tree, and the record by which a server takes a VM over.
const UNGUARDED: [&str; 3] = [".dtb.new", ".vm", ".vm.new"];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Victim {
    Server,
    Qemu,
    Both,
}

impl Victim {
    fn of(round: u32) -> Self {
        match round % 3 {
            0 => Self::Server,
            1 => Self::Qemu,
            _ => Self::Both,
        }
    }
}

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let setup = Setup {
        vmm: Vmm::Qemu,
        silent: true,
        ..plan.mirroring(&first_cpus(&policies))
    };
    let parts = EARLY + LOADED + 2;
    let mut left = Vec::new();
    for round in 0..EARLY {
        begins(round, parts, "an early kill");
        left.extend(early(&setup, round)?);
    }
    let mut loaded = Vec::new();
    for round in 0..LOADED {
        begins(EARLY + round, parts, "a kill under load");
        loaded.push(self::loaded(plan, &setup, &policies, round)?);
    }
    begins(parts - 2, parts, "servers that are killed in turn");
    let taken_over = taken_over(plan, &setup, &policies)?;
    begins(parts - 1, parts, "a server that is stopped");
    let stopped = stopped(plan, &setup, &policies)?;
    let figures = json!({ "kills": EARLY + LOADED + TAKEN_OVER, "left": left });
    Ok(LabVerdict::with_figures(figures)
        .check_none("nothing is left", &left)
        .parts("loaded", loaded)
        .part("taken_over", taken_over)
        .part("stopped", stopped))
}

/// A moment, always the same for a round.
fn drawn(round: u32, before: Duration) -> Duration {
    let mut hasher = DefaultHasher::new();
    round.hash(&mut hasher);
    let us = hasher.finish() % u64::try_from(before.as_micros()).unwrap_or(1);
    Duration::from_micros(us)
}

/// Whether something is so within [`SOON`].
fn soon(is_so: impl FnMut() -> Result<bool>) -> Result<bool> {
    settled(SOON, is_so, |so| *so)
}

/// What is left of one that was killed early.
pub fn early(setup: &Setup, round: u32) -> Result<Vec<String>> {
    let mut vm = Vm::start(setup)?;
    sleep(drawn(round, MOMENTS));
    let victim = Victim::of(round);
    if victim == Victim::Qemu {
        vm.kill()?;
        return left_soon();
    }
    vm.kill_prefix()?;
    let mut vm = Some(vm);
    if victim == Victim::Both {
        vm.take().map(Vm::kill).transpose()?;
    }
    let mut left = left_of_server()?;
    vm.map(Vm::kill).transpose()?;
    left.extend(left_after_cleanup()?);
    Ok(left)
}

/// Has the guest make a request each millisecond on one vCPU, and another one busy under the
/// guest's own governor.
fn make_requests(vm: &mut Vm, policies: &[Policy]) -> Result<()> {
    let [first, .., _] = policies else {
        bail!("needs two policies: take another topology");
    };
    let set_perf = GuestDevice::of(vm)?.set_perf(0);
    let (min, max) = (first.min(), first.max());
    vm.ask(format!("start busy busy {}", policies.len() - 1))?;
    vm.ask(format!("start writes writes 0 {set_perf} 1000 {max} {min}"))?;
    Ok(())
}

fn all_clamped(clamps: &[(u32, u32)]) -> bool {
    clamps.iter().all(|(min, _)| *min > 0)
}

fn all_free(clamps: &[(u32, u32)]) -> bool {
    clamps.iter().all(|clamp| *clamp == FREE)
}

/// Whether the guest makes requests.
fn goes_on(vm: &mut Vm) -> Result<bool> {
    let turns = vm.number("turns writes")?;
    soon(|| Ok(vm.number("turns writes")? > turns))
}

fn loaded(plan: &Plan, setup: &Setup, policies: &[Policy], round: u32) -> Result<LabVerdict> {
    let victim = Victim::of(round);
    let mut vm = plan.guest(setup)?;
    make_requests(&mut vm, policies)?;
    let clamped = soon(|| Ok(all_clamped(&clamps(&vm, policies)?)))?;
    sleep(drawn(EARLY + round, LOADED_MOMENTS));
    let mut without = None;
    if victim != Victim::Qemu {
        vm.kill_prefix()?;
    }
    let mut left = if victim == Victim::Server {
        let left = left_of_server()?;
        let after = clamps(&vm, policies)?;
        let goes_on = goes_on(&mut vm)?;
        let figures = json!({ "clamps": after, "guest_goes_on": goes_on });
        let free = all_free(&after);
        let verdict = LabVerdict::with_figures(figures)
            .check("all vCPUs are free", free, &after)
            .check("the guest goes on", goes_on, ());
        without = Some(verdict);
        vm.kill()?;
        left
    } else {
        vm.kill()?;
        match victim {
            Victim::Both => left_of_server()?,
            _ => left_soon()?,
        }
    };
    if victim != Victim::Qemu {
        left.extend(left_after_cleanup()?);
    }
    let figures = json!({
        "killed": format!("{victim:?}"), "clamped": clamped, "left": left,
    });
    let mut verdict = LabVerdict::with_figures(figures)
        .check("each vCPU was clamped", clamped, ())
        .check_none("nothing is left", &left);
    if let Some(without) = without {
        verdict = verdict.part("without", without);
    }
    Ok(verdict)
}

/// A guest whose first server waits for its QEMU at a socket, or starts it where registers are in RAM;
/// and the options of the next servers.
fn first_server(plan: &Plan, setup: &Setup) -> Result<(Vm, Option<ServeProcess>, Setup)> {
    if plan.path.is_none() {
        let server = ServeProcess::start(setup)?;
        let mut vm = Vm::spawn(&mut qemu_at(SOCKET, setup))?;
        vm.expect("@ready", BOOT)?;
        plan.load_driver(&mut vm)?;
        return Ok((vm, Some(server), setup.clone()));
    }
    let vm = plan.guest(setup)?;
    let options = Setup {
        vmm: Vmm::Qemu,
        silent: true,
        ..Setup::mirroring(&first_cpus(&Policy::all()?))
    };
    let next = options.with(&["--pid", &vm.pid().to_string()]);
    Ok((vm, None, next))
}

/// One guest, and servers of which each but the last is killed.
fn taken_over(plan: &Plan, setup: &Setup, policies: &[Policy]) -> Result<LabVerdict> {
    let (mut vm, mut server, next) = first_server(plan, setup)?;
    make_requests(&mut vm, policies)?;
    let mut wrong = Vec::new();
    // QEMU starts where this process is, which may be the first vCPU's pCPU.
    let last = policies.len() - 1;
    for round in 0..=TAKEN_OVER {
        let clamped = soon(|| Ok(all_clamped(&clamps(&vm, policies)?)))?;
        let pinned = vm.allowed(last)?;
        if !clamped || pinned != setup.pins[last] {
            wrong.push(json!({ "round": round, "clamped": clamped, "pinned": pinned }));
        }
        if round == TAKEN_OVER {
            break;
        }
        sleep(drawn(EARLY + LOADED + round, LOADED_MOMENTS));
        match server.take() {
            Some(server) => drop(server),
            None => vm.kill_prefix()?,
        }
        let free = soon(|| Ok(all_free(&clamps(&vm, policies)?)))?;
        let left = left_of_server()?;
        let goes_on = goes_on(&mut vm)?;
        if !free || !goes_on || !left.is_empty() {
            wrong.push(json!({ "round": round, "free": free, "goes_on": goes_on, "left": left }));
        }
        server = Some(ServeProcess::start(&next)?);
    }
    let said = match plan.path {
        None => vm.quit()?,
        // Its first server is dead.
        Some(_) => vm.kill().map(|()| String::new())?,
    };
    let server_said = server.map(ServeProcess::stop).transpose()?;
    let left = left_soon()?;
    let figures = json!({
        "servers_killed": TAKEN_OVER, "wrong": wrong,
        "left": left, "said": said, "last_server_said": server_said,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_none("no round is wrong", &wrong)
        .check_none("nothing is left", &left))
}

/// What is left soon of a server, but for [`UNGUARDED`] files.
fn left_of_server() -> Result<Vec<String>> {
    let look = || {
        let mut left = leftovers()?;
        left.retain(|what| !UNGUARDED.iter().any(|part| what.contains(part)));
        Ok(left)
    };
    settled(SOON, look, Vec::is_empty)
}

/// What `cleanup` leaves, once both have ended.
fn left_after_cleanup() -> Result<Vec<String>> {
    let look = || {
        Command::new("/bin/vcpufreq").arg("cleanup").output()?;
        leftovers()
    };
    settled(SOON, look, Vec::is_empty)
}

/// Requests of a guest whose server is stopped end at once; the last one is carried out when it
/// goes on.
fn stopped(plan: &Plan, setup: &Setup, policies: &[Policy]) -> Result<LabVerdict> {
    let mut vm = plan.guest(setup)?;
    // So that the guest's kernel requests nothing.
    set_governor(&mut vm, 0, "userspace")?;
    let device = GuestDevice::of(&mut vm)?;
    let set_perf = device.set_perf(0);
    let process = vm.vm_process().context("the VM has no process")?;
    let servers = [vm.program(), process];
    let signal = |signal| {
        let mut pids = servers.into_iter();
        pids.try_for_each(|pid| anyhow::Ok(kill(Pid::from_raw(i32::try_from(pid)?), signal)?))
    };
    let Some(policy) = policies.first() else {
        bail!("no policy");
    };
    let (min, max) = (policy.min(), policy.max());
    let mut rows = Vec::new();
    for stop in 0..STOPS {
        sleep(Duration::from_millis(20 + 37 * u64::from(stop)));
        signal(Signal::SIGSTOP)?;
        let since = Instant::now();
        let ns = vm.number(format!("stores 0 {set_perf} {REQUESTS} {max} {min}"))?;
        vm.ask(format!("poke 0 {set_perf} {max}"))?;
        let answered = since.elapsed();
        let while_stopped = clamps(&vm, policies)?;
        sleep(STOPPED.saturating_sub(since.elapsed()));
        signal(Signal::SIGCONT)?;
        sleep(SOON);
        let (util, _) = vm.clamp(0)?;
        vm.ask(format!("poke 0 {set_perf} {min}"))?;
        let figures = json!({
            "requests": REQUESTS, "virtual_ns_each": ns / REQUESTS, "bound_ns_each": BOUND_NS,
            "answered_ms": answered.as_millis(), "clamps_while_stopped": while_stopped,
            "clamp_after": util,
        });
        let row = LabVerdict::with_figures(figures)
            .check(
                "the guest goes on while it is stopped",
                answered < STOPPED,
                answered,
            )
            .check("requests cost no more", ns <= REQUESTS * BOUND_NS, ns)
            .check_eq("the last one is in force later", &util, policy.util(max));
        rows.push(row);
    }
    let said = vm.quit()?;
    Ok(LabVerdict::default()
        .parts("stops", rows)
        .figure("said", said))
}

fn clamps(vm: &Vm, policies: &[Policy]) -> Result<Vec<(u32, u32)>> {
    (0..policies.len()).map(|vcpu| vm.clamp(vcpu)).collect()
}
