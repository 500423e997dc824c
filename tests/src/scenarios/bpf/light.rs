// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vCPU that has just become busy changes its request: the request alone holds the frequency.
//! Finds the ways of clamping that make the host's frequency dip below both requests.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};
use vcpufreq_device::VcpuId;
use vcpufreq_host_bpf::{ActuateBy, BpfEvent, HostBpf, HostModule};
use vcpufreq_tests::LabVerdict;

use super::group::ClampGroup;
use super::programs::{BASE, histogram, like, start};
use super::scx::{ServiceProcess, scx};
use super::tiny_vm::{Deed, TinyVm};
use super::vcpu::own_clamp;
use crate::harness::dips::{Dips, LIGHT_US, dips};
use crate::harness::machine::{is_rt, mount_bpffs};
use crate::harness::policy::Policy;
use crate::harness::sys::{set_clamp, set_deadline, set_fifo_priority, set_policy_of};
use crate::harness::trace::Trace;
use crate::harness::{console_commands, load, sysfs};

/// How a request reaches the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Exit to userspace, sched_setattr on the vCPU's thread.
    ExitThread,
    /// Exit to userspace, a write of the cgroup's file.
    ExitGroup,
    /// Kernel module, a write of the cgroup's file.
    KfuncGroup,
    /// An event to a thread of the VMM, which writes the cgroup's file.
    WorkerGroup,
    /// A target of the service's scheduler.
    Scx,
}

/// The vCPU's own policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SchedPolicy {
    Other,
    Fifo,
    Rr,
    Deadline,
}

use SchedPolicy::{Deadline, Fifo, Other, Rr};

/// Clamps mean nothing to SCHED_DEADLINE.
const WAYS: [(Way, &str, &[SchedPolicy]); 5] = [
    (Way::ExitThread, "exit, sched_setattr", &[Other, Fifo]),
    (Way::ExitGroup, "exit, cgroup", &[Other, Fifo]),
    (Way::KfuncGroup, "kfunc, cgroup, summed", &[Other, Fifo, Rr]),
    (Way::WorkerGroup, "worker, cgroup", &[Other, Fifo]),
    (Way::Scx, "scx", &[Other, Fifo, Rr, Deadline]),
];

/// Of real-time and DEADLINE threads.
const BANDWIDTH: &str = "/proc/sys/kernel/sched_rt_runtime_us";
const CHANGES: usize = 100;
/// Turns of the guest's loop in 4 ms: three instructions of 2 ns each.
const TURNS: u64 = 4_000_000 / 6;

/// Every way, on each scheduler: no dips by a cgroup, from every writer but a real-time kernel's worker,
/// nor by scx.
pub fn run() -> Result<LabVerdict> {
    console_commands::insmod("vcpufreq_host", "")?;
    // A FIFO thread starts with the maximum as its own clamp.
    sysfs::write("/proc/sys/kernel/sched_util_clamp_min_rt_default", 0)?;
    // Else a DEADLINE thread may not be pinned.
    let bandwidth = sysfs::text(BANDWIDTH)?;
    sysfs::write(BANDWIDTH, -1)?;
    let mut rows = Vec::new();
    // irq_work/N, a FIFO thread of priority 1, wakes the worker there. It waits until a FIFO vCPU
    // sleeps. It runs before an OTHER vCPU, and its enqueue makes the frequency dip.
    let without = is_rt()?.then_some(Way::WorkerGroup);
    for (way, name, schedulers) in WAYS {
        if Some(way) == without {
            continue;
        }
        let service = match way {
            Way::Scx => {
                mount_bpffs()?;
                Some(ServiceProcess::start()?)
            }
            _ => None,
        };
        for &scheduler in schedulers {
            let seen = changes(way, scheduler).with_context(|| name.to_owned())?;
            rows.push(seen.row(way, name, scheduler));
        }
        if service.is_some() {
            scx(&["stop"])?;
        }
    }
    sysfs::write(BANDWIDTH, bandwidth)?;
    console_commands::unload_host_module()?;
    Ok(LabVerdict::default().parts("rows", rows))
}

struct WayResult {
    dips: Dips,
    /// Requests whose clamp wasn't the thread's when the guest had left.
    missed: usize,
    exits: u64,
    /// Histogram of the module's.
    clamp_after_ns: Value,
}

impl WayResult {
    fn row(self, way: Way, name: &str, scheduler: SchedPolicy) -> LabVerdict {
        // That the first one dips is why it isn't taken.
        let dips = way == Way::ExitThread;
        let dips_are = self.dips.dips.is_empty() != dips;
        // On FIFO a clamp's frequency follows at some changes only.
        let enough = way != Way::Scx || self.dips.enough();
        let figures = json!({
            "way": name, "scheduler": format!("{scheduler:?}").to_uppercase(),
            "changes": self.dips.changes, "moves": self.dips.moves,
            "dips": self.dips.dips.len(), "clamp_missed": self.missed, "exits": self.exits,
            "first_dip": self.dips.dips.first(), "clamp_after_ns": self.clamp_after_ns,
        });
        let all = (
            name,
            self.dips.changes,
            self.dips.moves,
            self.dips.dips.len(),
        );
        LabVerdict::with_figures(figures)
            .check("changes", self.dips.changes >= CHANGES, all)
            .check("no clamp is missed", self.missed == 0, (name, self.missed))
            .check("the first way alone dips", dips_are, all)
            .check("enough moves by scx", enough, all)
    }
}

impl SchedPolicy {
    fn set(self) -> Result<()> {
        match self {
            Other => Ok(()),
            Fifo => set_fifo_priority(10),
            Rr => set_policy_of(0, (libc::SCHED_RR, 10, 0)),
            // Less than the lowest frequency.
            Deadline => set_deadline(Duration::from_millis(20), Duration::from_millis(100)),
        }
    }
}

/// On a thread of its own, with a policy and place of its own.
fn changes(way: Way, scheduler: SchedPolicy) -> Result<WayResult> {
    let thread = std::thread::Builder::new().name("vcpu0".into());
    let running = thread.spawn(move || on_thread(way, scheduler))?;
    running.join().map_err(|_| anyhow!("the vCPU panicked"))?
}

fn on_thread(way: Way, scheduler: SchedPolicy) -> Result<WayResult> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let group = ClampGroup::with_current("dip")?;
    load::pin(policy.cpu())?;
    scheduler.set()?;
    let mut vcpu = like(policy, 0)?;
    vcpu.actuate = match way {
        Way::ExitThread | Way::ExitGroup => ActuateBy::Nothing,
        Way::KfuncGroup => ActuateBy::Kfunc,
        Way::WorkerGroup => ActuateBy::Worker,
        Way::Scx => ActuateBy::Scx,
    };
    vcpu.sum = way == Way::KfuncGroup;
    let host = start(&policies, vec![vcpu])?;
    let module = match way {
        Way::KfuncGroup => Some(HostModule::open(1, 1)?),
        _ => None,
    };
    if let Some(module) = &module {
        module.bind(0, group.min.as_fd(), group.max.as_fd())?;
    }
    host.register_thread(VcpuId(0))?;
    let mut vm = TinyVm::new(Some((BASE, host.pages())))?;
    let _event = match way {
        Way::ExitThread | Way::ExitGroup => None,
        _ => Some(vm.swallow(BASE + 4)?),
    };
    let trace = Trace::start()?;
    let mut run = LightRun {
        way,
        policy,
        group: &group,
        requests: Vec::new(),
        missed: 0,
        exits: 0,
    };
    let result = if way == Way::WorkerGroup {
        beside_worker(&host, &group, policy.cpus.first().copied(), || {
            run.all(&mut vm, &host)
        })
    } else {
        run.all(&mut vm, &host)
    };
    let seen = trace.stop()?.frequencies;
    result?;
    let after = module
        .as_ref()
        .map(|module| module.applied(0))
        .transpose()?;
    Ok(WayResult {
        dips: dips(policy, &run.requests, &seen, LIGHT_US),
        missed: run.missed,
        exits: run.exits,
        clamp_after_ns: after.map_or(Value::Null, |after| histogram(&after.after_ns)),
    })
}

/// Does `work` with a thread beside it that serves events, on another policy's CPUs.
fn beside_worker<T>(
    host: &HostBpf,
    group: &ClampGroup,
    _busy: Option<u32>,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let worker = host.worker()?;
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let min: &File = &group.min;
        let serving = scope.spawn(|| {
            let worker = worker;
            load::pin(0)?;
            set_fifo_priority(0)?;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                for event in worker.wait(Duration::from_millis(50))? {
                    let BpfEvent::Waiting(waiting) = event else {
                        continue;
                    };
                    host.apply_waiting(&waiting, |_, clamp| {
                        super::group::write_util(min, clamp.min.get().into())
                    });
                }
            }
            anyhow::Ok(())
        });
        let result = work();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        serving
            .join()
            .map_err(|_| anyhow!("the worker panicked"))??;
        result
    })
}

struct LightRun<'a> {
    way: Way,
    policy: &'a Policy,
    group: &'a ClampGroup,
    requests: Vec<(u64, u32)>,
    missed: usize,
    exits: u64,
}

impl LightRun<'_> {
    fn all(&mut self, vm: &mut TinyVm, host: &HostBpf) -> Result<()> {
        let low = self
            .policy
            .opps
            .get(1)
            .copied()
            .context("a policy of one OPP")?;
        for change in 0..CHANGES + 2 {
            let khz = if change % 2 == 0 {
                low
            } else {
                self.policy.max()
            };
            std::thread::sleep(Duration::from_millis(100));
            self.one(vm, khz)?;
            let latest = host.latest(VcpuId(0)).context("no vCPU")?;
            anyhow::ensure!(latest.khz.0 == khz, "the programs saw {}", latest.khz);
            self.requests.push((latest.at_ns / 1000, khz));
            let util = self.policy.util(khz);
            let min = own_clamp()?;
            self.missed += usize::from(match self.way {
                Way::Scx => min != 0,
                // Others may be added.
                Way::KfuncGroup => min < util,
                _ => min != util,
            });
        }
        Ok(())
    }

    fn one(&mut self, vm: &mut TinyVm, khz: u32) -> Result<()> {
        let (way, group) = (self.way, self.group);
        let util = self.policy.util(khz);
        let mut failed = None;
        let deed = Deed {
            before: TURNS,
            times: 1,
            address: BASE + 4,
            value: khz,
            after: TURNS,
            ..Deed::default()
        };
        let outcome = vm.run(deed, |_, _| {
            let result = match way {
                Way::ExitThread => set_clamp(util, 1024),
                Way::ExitGroup => super::group::write_util(&group.min, util),
                // Nothing leaves: it is counted below.
                _ => Ok(()),
            };
            failed = result.err();
        })?;
        self.exits += outcome.exits;
        failed.map_or(Ok(()), Err)
    }
}
