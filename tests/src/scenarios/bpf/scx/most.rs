// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Two vCPUs of a pCPU ask for more than a target may be: the target is the highest, and the service
//! goes on.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use anyhow::{Result, anyhow};
use serde_json::json;
use vcpufreq_tests::LabVerdict;
use vmm_sys_util::eventfd::EventFd;

use super::super::tiny_vm::Deed;
use super::super::vcpu::{TinyVcpu, stores};
use super::service::{in_force, sum_and_target};
use crate::harness::load;
use crate::harness::policy::Policy;

/// Above it the kernel ends the scheduler.
const HIGHEST: u32 = 1024;
/// Which of two the kernel was given isn't known.
const UNKNOWN: u32 = u32::MAX;
const ROUNDS: u32 = 8;
/// The vCPUs are seldom busy: what they use counts little.
const PAUSE: Duration = Duration::from_millis(100);
/// Turns of the guest's loop in 2 ms.
const TURNS: u64 = 2_000_000 / 6;

type Settled = fn(&Policy) -> Result<(TinyVcpu, EventFd)>;

/// `settled` makes a vCPU that has used little.
pub fn run(policy: &Policy, settled: Settled) -> Result<LabVerdict> {
    let (together, done) = (Barrier::new(2), AtomicBool::new(false));
    let seen = std::thread::scope(|scope| {
        let looker = scope.spawn(|| look(policy.cpu(), &done));
        let vcpus = [(); 2].map(|()| scope.spawn(|| ask(policy, settled, &together)));
        let ended = vcpus.map(|vcpu| vcpu.join().map_err(|_| anyhow!("a vCPU panicked")));
        done.store(true, SeqCst);
        let seen = looker.join().map_err(|_| anyhow!("a thread panicked"))?;
        ended.into_iter().try_for_each(|one| one?)?;
        seen
    })?;
    let (sum, target) = seen;
    let figures = json!({ "part": "two maxima", "highest_sum": sum, "highest_target": target });
    Ok(LabVerdict::with_figures(figures)
        .check("the sum is higher", sum > HIGHEST, sum)
        .check_eq("the target is the highest", &target, HIGHEST)
        .check("the scheduler is in force", in_force(), ()))
}

/// A vCPU that is runnable when the other one is.
fn ask(policy: &Policy, settled: Settled, together: &Barrier) -> Result<()> {
    let mut vcpu = settled(policy);
    let deed = Deed {
        before: TURNS,
        after: TURNS,
        ..stores(1, policy.max(), 0)
    };
    let mut ended = Ok(());
    // Also without a vCPU: the other one waits for it.
    for _ in 0..ROUNDS {
        std::thread::sleep(PAUSE);
        together.wait();
        if let Ok((vcpu, _)) = &mut vcpu {
            ended = ended.and(vcpu.vm.run(deed, |_, _| ()).map(drop));
        }
    }
    vcpu.and(ended)
}

/// The highest of each that was seen.
fn look(cpu: u32, done: &AtomicBool) -> Result<(u32, u32)> {
    load::pin(0)?;
    let (mut sums, mut targets) = (0, 0);
    while !done.load(SeqCst) {
        let (sum, target) = sum_and_target(cpu)?;
        // Between two steps of a change it is below 0.
        if i32::try_from(sum).is_ok() {
            sums = sums.max(sum);
        }
        if target != UNKNOWN {
            targets = targets.max(target);
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    Ok((sums, targets))
}
