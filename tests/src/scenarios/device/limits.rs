// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A program in the guest writes the limits that a resource manager writes (docs/urm.md): of the policy,
//! of a cgroup's uclamp, of all tasks' uclamp. Each reaches the host as the next request, and as a
//! ceiling where it lowers; and is gone there when the guest takes it back.

use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::harness::frequency::{host_runs_at, stay_off};
use crate::harness::guest_shell::ask;
use crate::harness::plan::{Plan, first_cpus, guest_policy, last_of, let_load_decay, set_governor};
use crate::harness::policy::Policy;
use crate::harness::trace::Trace;
use crate::harness::vm::{Setup, Vm};
use crate::harness::wait::{SOON, settled};

/// The loads are threads of the guest's first process.
const GROUP: &str = "/sys/fs/cgroup/managed";
/// Of the light load.
const PERIOD: Duration = Duration::from_millis(20);
const MAKE_GROUP: &str = "
busybox mount -t cgroup2 none /sys/fs/cgroup 2>/dev/null || :
busybox mkdir /sys/fs/cgroup/managed
echo +cpu >/sys/fs/cgroup/cgroup.subtree_control
echo 1 >/sys/fs/cgroup/managed/cgroup.procs";

/// What a limit does to the requests.
#[derive(Clone, Copy, PartialEq)]
enum Does {
    Raise,
    Lower,
    Nothing,
}

/// A limit as URM's code names it, and what is written to set it and to take it back.
struct GuestLimit {
    code: &'static str,
    file: String,
    set: String,
    free: String,
    does: Does,
}

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let (vcpu, policy) = last_of(&policies)?;
    let setup = Setup {
        silent: true,
        ..plan.mirroring(&first_cpus(&policies))
    };
    let mut vm = plan.guest(&setup)?;
    set_governor(&mut vm, vcpu, "schedutil")?;
    ask(&mut vm, MAKE_GROUP)?;
    let mut rows = Vec::new();
    for limit in limits(vcpu, policy) {
        rows.push(limit.tried(&mut vm, (vcpu, policy))?);
    }
    let said = vm.quit()?;
    Ok(LabVerdict::default()
        .check_rows("each limit", &rows)
        .figure("rows", rows)
        .figure("vmm_said", said))
}

/// They raise to half of the speed or more, or lower to the lowest OPP.
fn limits(vcpu: usize, policy: &Policy) -> Vec<GuestLimit> {
    let of_policy = |name: &str| format!("{}/{name}", guest_policy(vcpu));
    let of_group = |name: &str| format!("{GROUP}/{name}");
    let of_all = |name: &str| format!("/proc/sys/kernel/{name}");
    let limit = |code, file, set: &str, free: &str, does| GuestLimit {
        code,
        file,
        set: set.to_owned(),
        free: free.to_owned(),
        does,
    };
    let [low, high] = [policy.min(), policy.max()].map(|khz| khz.to_string());
    let half = raised_to(policy).to_string();
    vec![
        limit(
            "SCALE_MIN_FREQ",
            of_policy("scaling_min_freq"),
            &half,
            &low,
            Does::Raise,
        ),
        limit(
            "SCALE_MAX_FREQ",
            of_policy("scaling_max_freq"),
            &low,
            &high,
            Does::Lower,
        ),
        limit(
            "CGRP_UCLAMP_MIN",
            of_group("cpu.uclamp.min"),
            "60",
            "0",
            Does::Raise,
        ),
        limit(
            "CGRP_UCLAMP_MAX",
            of_group("cpu.uclamp.max"),
            "5",
            "max",
            Does::Lower,
        ),
        limit(
            "SCHED_UTIL_CLAMP_MIN",
            of_all("sched_util_clamp_min"),
            "600",
            // Linux refuses a maximum below the minimum.
            "50",
            Does::Nothing,
        ),
        limit(
            "SCHED_UTIL_CLAMP_MAX",
            of_all("sched_util_clamp_max"),
            "50",
            "1024",
            Does::Lower,
        ),
    ]
}

/// The first OPP of at least half of the highest frequency, and above the lowest.
fn raised_to(policy: &Policy) -> u32 {
    let mut opps = policy.opps.iter().copied();
    let half = opps.find(|khz| 2 * khz >= policy.max() && *khz > policy.min());
    half.unwrap_or(policy.max())
}

/// The highest frequency that a policy has within some of the light load's periods, in kHz.
fn highest_khz(policy: &Policy, vm: &Vm) -> Result<u32> {
    stay_off(policy, vm)?;
    let trace = Trace::start()?;
    let at_start = policy.khz()?;
    sleep(5 * PERIOD);
    let seen = trace.stop()?.frequencies.into_iter();
    let own = seen.filter(|event| policy.cpus.contains(&event.cpu));
    Ok(own.map(|event| event.khz).fold(at_start, u32::max))
}

impl GuestLimit {
    /// A light load asks for little, and a busy one for all, but for the limit.
    fn tried(&self, vm: &mut Vm, (vcpu, policy): (usize, &Policy)) -> Result<Value> {
        let (load, bound) = match self.does {
            Does::Raise | Does::Nothing => ("periodic", policy.util(raised_to(policy))),
            Does::Lower => ("busy", policy.util(policy.min())),
        };
        let times = match load {
            "busy" => String::new(),
            _ => format!(" {} 400", PERIOD.as_micros()),
        };
        vm.ask(format!("start load {load} {vcpu}{times}"))?;
        let_load_decay();
        let is_limited = |(lower, _): &(u32, u32)| match self.does {
            Does::Raise | Does::Nothing => *lower >= bound,
            Does::Lower => *lower <= bound,
        };
        let before = vm.clamp(vcpu)?;
        vm.ask(format!("write {} {}", self.file, self.set))?;
        let during = settled(SOON, || vm.clamp(vcpu), is_limited)?;
        // A ceiling keeps the host from following the vCPU's own load. A floor is above that of a light
        // load, and in force while that runs.
        let raised = raised_to(policy);
        let (khz, is_followed) = match self.does {
            Does::Lower => {
                let khz = host_runs_at(policy, vm, policy.min())?;
                (Some(khz), khz == policy.min())
            }
            Does::Raise => {
                let khz = highest_khz(policy, vm)?;
                (Some(khz), khz >= raised)
            }
            Does::Nothing => (None, true),
        };
        vm.ask(format!("write {} {}", self.file, self.free))?;
        let after = settled(SOON, || vm.clamp(vcpu), |now| !is_limited(now))?;
        vm.ask("stop load")?;
        let right = !is_limited(&before)
            && is_limited(&during) == (self.does != Does::Nothing)
            && is_followed
            && !is_limited(&after);
        Ok(json!({
            "right": right, "code": self.code, "limit": bound, "clamps": [before, during, after],
            "host_khz": khz,
        }))
    }
}
