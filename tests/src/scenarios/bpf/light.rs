// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vCPU that has just become busy changes its request: the request alone holds the frequency.
//! Finds the ways of clamping that make the host's frequency dip below both requests.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};
use vcpufreq_device::VcpuId;
use vcpufreq_host_bpf::{ActuateBy, Event, HostBpf, HostModule};

use super::group::Group;
use super::tiny_vm::{Deed, TinyVm};
use super::{BASE, Policy, like, start};
use crate::harness::dips::{Dips, LIGHT_US, dips};
use crate::harness::sys::{set_clamp, set_fifo_priority};
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
}

const WAYS: [(Way, &str); 4] = [
    (Way::ExitThread, "exit, sched_setattr"),
    (Way::ExitGroup, "exit, cgroup"),
    (Way::KfuncGroup, "kfunc, cgroup"),
    (Way::WorkerGroup, "worker, cgroup"),
];

const CHANGES: usize = 100;
/// Turns of the guest's loop in 4 ms: three instructions of 2 ns each.
const TURNS: u64 = 4_000_000 / 6;

/// Every way, on CFS and on FIFO: no dips by a cgroup, from every writer.
pub fn run() -> Result<Value> {
    console_commands::insmod("vcpufreq_host", "")?;
    // A FIFO thread starts with the maximum as its own clamp.
    sysfs::write("/proc/sys/kernel/sched_util_clamp_min_rt_default", 0)?;
    let mut rows = Vec::new();
    let mut held = true;
    for fifo in [false, true] {
        for (way, name) in WAYS {
            let seen = changes(way, fifo).with_context(|| name.to_owned())?;
            let group = way != Way::ExitThread;
            held &= seen.dips.changes >= CHANGES && seen.missed == 0;
            // That the others dip is why they aren't taken.
            held &= group == (seen.dips.dips.is_empty());
            rows.push(json!({
                "way": name, "scheduler": if fifo { "FIFO" } else { "CFS" },
                "changes": seen.dips.changes, "dips": seen.dips.dips.len(),
                "clamp_missed": seen.missed, "exits": seen.exits,
                "first_dip": seen.dips.dips.first(), "clamp_after_ns": seen.clamp_after_ns,
            }));
        }
    }
    crate::harness::console_commands::unload_host_module()?;
    Ok(json!({ "held": held, "rows": rows }))
}

struct Seen {
    dips: Dips,
    /// Requests whose clamp wasn't the thread's when the guest had left.
    missed: usize,
    exits: u64,
    /// Histogram of the module's.
    clamp_after_ns: Value,
}

/// On a thread of its own, with a policy and place of its own.
fn changes(way: Way, fifo: bool) -> Result<Seen> {
    let thread = std::thread::Builder::new().name("vcpu0".into());
    let running = thread.spawn(move || on_thread(way, fifo))?;
    running.join().map_err(|_| anyhow!("the vCPU panicked"))?
}

fn on_thread(way: Way, fifo: bool) -> Result<Seen> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let group = Group::with_current("dip")?;
    load::pin(policy.cpu())?;
    if fifo {
        set_fifo_priority(10)?;
    }
    let mut vcpu = like(policy, 0)?;
    vcpu.actuate = match way {
        Way::ExitThread | Way::ExitGroup => ActuateBy::Nobody,
        Way::KfuncGroup => ActuateBy::Kfunc,
        Way::WorkerGroup => ActuateBy::Worker,
    };
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
    let mut run = Run {
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
    Ok(Seen {
        dips: dips(policy, &run.requests, &seen, LIGHT_US),
        missed: run.missed,
        exits: run.exits,
        clamp_after_ns: after.map_or(Value::Null, |after| super::histogram(&after.after_ns)),
    })
}

/// Does `work` with a thread beside it that serves events, on another policy's CPUs.
fn beside_worker<T>(
    host: &HostBpf,
    group: &Group,
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
                    let Event::Waiting(waiting) = event else {
                        continue;
                    };
                    host.serve(&waiting, |_, clamp| {
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

struct Run<'a> {
    way: Way,
    policy: &'a Policy,
    group: &'a Group,
    requests: Vec<(u64, u32)>,
    missed: usize,
    exits: u64,
}

impl Run<'_> {
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
            let clamp = sysfs::text("/proc/thread-self/sched")?;
            let util = self.policy.util(khz);
            self.missed +=
                usize::from(crate::harness::vm::field(&clamp, "effective uclamp.min")? != util);
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
