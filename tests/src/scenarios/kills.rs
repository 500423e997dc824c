// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! kill -9 at drawn moments of what changes a host: a VMM, a server or its QEMU, `rt apply`, the
//! demo. All is as before: within 1 s, or after the `restore`, `cleanup` or next start that undoes it.

use std::collections::BTreeMap;
use std::fs;
use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use super::bench::board;
use super::qemu::deaths;
use super::rt::inventory::{changes, everything};
use crate::harness::host::begins;
use crate::harness::leftovers::{left_soon, leftovers, own_cgroups};
use crate::harness::machine::mount_bpffs;
use crate::harness::plan::{Plan, first_cpus};
use crate::harness::policy::Policy;
use crate::harness::random::Random;
use crate::harness::rt_command::{command, succeeded};
use crate::harness::vm::{Setup, Vm};
use crate::harness::vmm::Vmm;

/// Kills, where the scenario's name has no number.
const KILLS: u32 = 30;
/// The moments that they come at, from the start.
const OF_RUN: Duration = Duration::from_millis(1_200);
const OF_RT: Duration = Duration::from_millis(400);
const OF_DEMO: Duration = Duration::from_millis(2_800);

/// What is killed, and how often of 20 times.
const WHAT: [(&str, u32); 4] = [("run", 8), ("rt apply", 6), ("serve", 3), ("demo", 3)];

/// `name` is `board:kills` or `board:kills:NUMBER`.
pub fn run(plan: &Plan, name: &str) -> Result<LabVerdict> {
    mount_bpffs()?;
    let kills = name
        .strip_prefix("board:kills:")
        .map_or(Ok(KILLS), str::parse)?;
    let host = KillTargets::new(plan)?;
    // Another number has other moments.
    let mut random = Random::new(kills);
    let (mut counts, mut left, mut at_work) = (BTreeMap::new(), Vec::new(), 0);
    for round in 0..kills {
        let what = drawn(&mut random);
        begins(round, kills, what);
        let (had_changed, found) = host.kill(what, round, &mut random)?;
        at_work += u32::from(had_changed);
        *counts.entry(what).or_insert(0_u32) += 1;
        left.extend(found.iter().map(|one| format!("{round}: {what}: {one}")));
    }
    left.extend(leftovers()?);
    let whole = kills < KILLS || (counts.len() == WHAT.len() && at_work * 4 > kills);
    let figures = json!({
        "kills": kills, "of": counts, "with_changes_on_the_host": at_work, "left": left,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_none("nothing is left", &left)
        .check(
            "each was killed, a quarter at work",
            whole,
            (&counts, at_work),
        ))
}

fn drawn(random: &mut Random) -> &'static str {
    let mut number = random.below(WHAT.iter().map(|(_, share)| share).sum());
    for (what, share) in WHAT {
        if number < share {
            return what;
        }
        number -= share;
    }
    WHAT[0].0
}

/// How each is started.
struct KillTargets {
    run: Setup,
    qemu: Setup,
    guest: String,
    before: BTreeMap<String, String>,
}

impl KillTargets {
    fn new(plan: &Plan) -> Result<Self> {
        let policies = Policy::all()?;
        let run = plan.mirroring(&first_cpus(&policies));
        let last = policies.last().and_then(|policy| policy.cpus.last());
        Ok(Self {
            qemu: Setup {
                vmm: Vmm::Qemu,
                silent: true,
                ..run.clone()
            },
            run,
            guest: format!("plc={}", last.context("no CPU")?),
            before: board::state()?,
        })
    }

    /// Whether one was seen to have changed the host (of `serve` that is not seen), and what is left.
    fn kill(&self, what: &str, round: u32, random: &mut Random) -> Result<(bool, Vec<String>)> {
        let mut moment = |within: Duration| within * random.below(1000) / 1000;
        match what {
            "run" => {
                let vm = Vm::start(&self.run)?;
                sleep(moment(OF_RUN));
                let group = !own_cgroups()?.is_empty();
                vm.kill()?;
                Ok((group, left_soon()?))
            }
            "serve" => Ok((false, deaths::early(&self.qemu, round)?)),
            "demo" => {
                let how = (Signal::SIGKILL, moment(OF_DEMO), round % 2 == 0);
                let end = board::interrupted(&["demo"], how, &self.before)?;
                Ok((end.changes, end.left))
            }
            _ => self.kill_rt(moment(OF_RT)),
        }
    }

    fn kill_rt(&self, moment: Duration) -> Result<(bool, Vec<String>)> {
        let before = everything()?;
        let mut apply = command(&["apply", "--guest", &self.guest]);
        let mut child = apply.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        sleep(moment);
        // It may have ended.
        let _ = child.kill();
        child.wait()?;
        let applied = fs::exists("/run/vcpufreq-rt/rt.json")?;
        if applied {
            succeeded(&["restore"])?;
        }
        Ok((applied, changes(&before, &everything()?)))
    }
}
