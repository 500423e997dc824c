// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A vCPU of another VM on the same pCPU: while it waits to run, what it asks for is added too.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::json;
use vcpufreq_device::{ClampMode, Util};
use vcpufreq_host_bpf::{HostModule, VcpuPolicy};
use vcpufreq_tests::LabVerdict;

use super::programs::{BASE, like, start};
use super::tiny_vm::TinyVm;
use super::vcpu::{ONE, SET_PERF, TinyVcpu, own_clamps, refresh, stores};
use crate::harness::load;
use crate::harness::policy::Policy;
use crate::harness::sys::set_fifo_priority;

/// A little of the pCPU's time: what it asks for is far above its utilization.
const BUSY: Duration = Duration::from_millis(4);
const IDLE: Duration = Duration::from_millis(40);
/// Load tracking forgets half of what was in 32 ms.
const SETTLED: Duration = Duration::from_millis(400);
/// Requests after the other VM has ended. The kernel may take an idle pCPU's load for what it was until
/// a pCPU becomes idle anew (nohz_newidle_balance() in kernel/sched/fair.c).
const LOOKS: u32 = 3;
/// How far the sum may be off: what else the kernel has to do on that pCPU.
const WITHIN: u32 = 150;

/// The other VM, in a thread of its own.
struct OtherVm {
    stop: Arc<AtomicBool>,
    bursts: Receiver<()>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl OtherVm {
    fn start(cpu: u32, khz: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (tell, bursts) = channel();
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || other_vm(cpu, khz, &stopped, &tell));
        Self {
            stop,
            bursts,
            thread: Some(thread),
        }
    }

    /// Waits for the middle of its next burst. A real-time thread takes the pCPU from it then.
    fn in_burst(&self) -> Result<()> {
        while self.bursts.try_recv().is_ok() {}
        self.bursts.recv().context("the other VM has ended")
    }

    fn end(mut self) -> Result<()> {
        self.stop.store(true, Relaxed);
        let thread = self.thread.take().context("already ended")?;
        thread
            .join()
            .map_err(|_| anyhow!("the other VM panicked"))?
    }
}

fn other_vm(cpu: u32, khz: u32, stop: &AtomicBool, tell: &Sender<()>) -> Result<()> {
    load::pin(cpu)?;
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let host = start(&policies, vec![like(policy, 0)?])?;
    host.register_thread(ONE)?;
    let mut vm = TinyVm::new(Some((BASE, host.pages())))?;
    let _event = vm.swallow(SET_PERF)?;
    let outcome = vm.run(stores(1, khz, 0), |_, _| ())?;
    ensure!(outcome.exits == 0, "the other VM's request left the kernel");
    let spin = |time| {
        let end = Instant::now() + time;
        while Instant::now() < end {
            std::hint::spin_loop();
        }
    };
    while !stop.load(Relaxed) {
        spin(BUSY / 2);
        // The scenario may have failed.
        if tell.send(()).is_err() {
            break;
        }
        spin(BUSY / 2);
        sleep(IDLE);
    }
    Ok(())
}

/// A real-time vCPU that asks for a quarter of its pCPU while another VM's asks for a half: what is
/// in force when that sleeps, when it waits, and after it has ended.
pub fn run(
    vcpu: &mut TinyVcpu,
    how: &VcpuPolicy,
    module: &HostModule,
    khz: u32,
) -> Result<LabVerdict> {
    let (asked, others) = (1024 / 4, 1024 / 2);
    set_fifo_priority(10)?;
    sleep(SETTLED);
    let alone = ask(vcpu, how, khz)?.0;
    // A thread has the policy of the one that starts it.
    set_fifo_priority(0)?;
    let other = OtherVm::start(vcpu.policy.cpu(), 2 * khz);
    set_fifo_priority(10)?;
    // Its start is work too.
    other.in_burst()?;
    sleep(SETTLED);

    other.in_burst()?;
    let waits = ask(vcpu, how, khz)?.0;
    other.in_burst()?;
    sleep(BUSY + IDLE / 4);
    let sleeps = ask(vcpu, how, khz)?.0;
    // Without a request.
    let worker = vcpu.host.worker()?;
    refresh(vcpu, &worker, module, Duration::ZERO)?;
    other.in_burst()?;
    refresh(vcpu, &worker, module, Duration::from_millis(1))?;
    let refreshed = own_clamps()?.0;

    let small = VcpuPolicy {
        spec: vcpufreq_device::VcpuSpec {
            capacity: Util::saturating(400),
            ..how.spec.clone()
        },
        ..how.clone()
    };
    let exact = VcpuPolicy {
        clamp: ClampMode::Exact,
        ..how.clone()
    };
    let maximum = VcpuPolicy {
        sum: false,
        ..how.clone()
    };
    let mut others_ask = |how, khz| -> Result<(u32, u32)> {
        other.in_burst()?;
        ask(vcpu, how, khz)
    };
    let limited = others_ask(&small, 2 * khz)?;
    let exact = others_ask(&exact, khz)?;
    let maximum = others_ask(&maximum, khz)?;
    other.end()?;
    let (mut ended, mut looks) = (0, 0);
    while ended != alone && looks < LOOKS {
        sleep(SETTLED);
        ended = ask(vcpu, how, khz)?.0;
        looks += 1;
    }
    set_fifo_priority(0)?;
    let sum = alone + others;
    let figures = json!({
        "alone": alone, "waits": waits, "sleeps": sleeps, "refreshed": refreshed,
        "limited": limited, "exact": exact, "maximum": maximum, "ended": ended,
        "looks_until_ended": looks,
    });
    Ok(LabVerdict::with_figures(figures)
        .check(
            "the sum while the other waits",
            waits.abs_diff(sum) <= WITHIN,
            (waits, sum),
        )
        .check(
            "and when refreshed",
            refreshed.abs_diff(sum) <= WITHIN,
            (refreshed, sum),
        )
        .check(
            "less while it sleeps",
            sleeps < alone + others / 2,
            (sleeps, alone),
        )
        .check_eq("limited to the capacity", &limited, (400, 1024))
        .check_eq("nothing is added in mode exact", &exact, (asked, asked))
        .check_eq("nor without sum", &maximum, (asked, 1024))
        .check("as alone when it has ended", ended == alone, (ended, alone)))
}

/// The clamps in force after a request.
fn ask(vcpu: &mut TinyVcpu, how: &VcpuPolicy, khz: u32) -> Result<(u32, u32)> {
    vcpu.host.set_policy(ONE, how.clone())?;
    let outcome = vcpu.vm.run(stores(1, khz, 0), |_, _| ())?;
    ensure!(outcome.exits == 0, "the request left the kernel");
    own_clamps()
}
