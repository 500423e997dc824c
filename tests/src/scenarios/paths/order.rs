// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest asks several times while the VMM's worker can't run: what is in
//! force in the end is what it asked for last, whichever values came before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde_json::json;
use vcpufreq_bench::piped::threads;
use vcpufreq_tests::LabVerdict;

use crate::harness::frequency::let_ticks_pass;
use crate::harness::load::pin;
use crate::harness::plan::{Plan, registers};
use crate::harness::policy::Policy;
use crate::harness::sys::set_fifo_priority;
use crate::harness::vm::{Setup, Vm};

/// Indices of table entries, in the order in which they are asked for.
const PATTERNS: [&[usize]; 10] = [
    &[0, 1],
    &[1, 0],
    &[2, 0, 2],
    &[2, 2, 0],
    &[0, 2, 0],
    &[0, 2, 2, 0],
    &[0, 1, 2, 0, 1],
    &[2, 1, 2, 1, 0, 1],
    &[0, 2, 1, 2, 0, 0],
    &[1, 2, 0, 2, 1, 2, 2, 0],
];

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let low = policies.first().context("no policy")?;
    let high = policies.last().context("no policy")?;
    let [.., spare] = high.cpus[..] else {
        anyhow::bail!("the last policy has no CPU to spare");
    };
    let setup = Setup {
        silent: true,
        ..plan.mirroring(&[low.cpu()]).with(&["--clamp", "exact"])
    };
    // Without a driver, which would make requests, too.
    let mut vm = Vm::boot(&setup)?;
    let set_perf = registers(&mut vm)? + 4;
    move_worker(&vm, spare)?;
    let mut wrong = Vec::new();
    for pattern in PATTERNS {
        let asked: Vec<u32> = pattern.iter().map(|&index| low.opps[index]).collect();
        let values: Vec<_> = asked.iter().map(u32::to_string).collect();
        let line = format!(
            "stores 0 {set_perf:#x} {} {}",
            asked.len(),
            values.join(" ")
        );
        let before = vm.clamp(0)?;
        let hog = Hog::on(spare);
        let_ticks_pass();
        vm.ask(line)?;
        let during = vm.clamp(0)?;
        hog.stop()?;
        let util = asked.last().map(|&khz| low.util(khz)).context("no value")?;
        vm.settled_clamp(0, (util, util))?;
        // And no older one comes later.
        let_ticks_pass();
        let after = vm.clamp(0)?;
        // While the worker couldn't run nothing changed: else this is no test.
        if after != (util, util) || during != before {
            wrong.push(json!({
                "asked_khz": asked, "util": util, "before": before, "during": during,
                "after": after,
            }));
        }
    }
    let said = vm.quit()?;
    let figures = json!({ "patterns": PATTERNS.len(), "wrong": wrong, "vmm_said": said });
    Ok(LabVerdict::with_figures(figures).check_none("the newest request counts", &wrong))
}

/// Binds the VMM's worker to a CPU.
fn move_worker(vm: &Vm, cpu: u32) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(usize::try_from(cpu)?)?;
    let worker = threads(vm.pid())?
        .into_iter()
        .find(|(_, name)| name == "requests");
    let (tid, _) = worker.context("the VMM has no worker; is this the path ioeventfd?")?;
    sched_setaffinity(Pid::from_raw(tid), &set).context("moving the worker")
}

/// Keeps a CPU from all other threads until it is stopped.
struct Hog {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Result<()>>,
}

impl Hog {
    fn on(cpu: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            pin(cpu)?;
            set_fifo_priority(50)?;
            while !stopped.load(Relaxed) {
                std::hint::spin_loop();
            }
            Ok(())
        });
        Self { stop, thread }
    }

    fn stop(self) -> Result<()> {
        self.stop.store(true, Relaxed);
        self.thread
            .join()
            .map_err(|_| anyhow::anyhow!("the hog panicked"))?
    }
}
