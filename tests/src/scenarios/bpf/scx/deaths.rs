// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A hotplug, which the scheduler outlives; and VMMs killed at many moments, of which no target, no
//! program and no map is left.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::service::{ServiceProcess, in_force, said, scx, sum_of};
use crate::harness::leftovers::bpf_counts as objects;
use crate::harness::load::Load;
use crate::harness::machine::mount_bpffs;
use crate::harness::policy::Policy;
use crate::harness::sysfs;
use crate::harness::wait::{SOON, settled};

const KILLS: u32 = 50;
/// Start-up takes about half a second of the emulated host.
const STEP: Duration = Duration::from_millis(21);

pub fn run() -> Result<Value> {
    mount_bpffs()?;
    let service = ServiceProcess::start()?;
    let hotplug = hotplug()?;
    let kills = kills(&service)?;
    said(&scx(&["stop"])?);
    service.ended()?;
    let held = hotplug["held"] == true && kills["held"] == true;
    Ok(json!({ "held": held, "hotplug": hotplug, "kills": kills }))
}

/// A pCPU goes and comes back.
fn hotplug() -> Result<Value> {
    let policies = Policy::all()?;
    let cpus = policies.first().context("no policy")?.cpus.clone();
    let cpu = *cpus.get(1).context("a policy of one pCPU")?;
    let file = format!("/sys/devices/system/cpu/cpu{cpu}/online");
    sysfs::write(&file, 0)?;
    let without = in_force();
    sysfs::write(&file, 1)?;
    std::thread::sleep(Duration::from_millis(200));
    let with = in_force();
    Ok(json!({ "held": without && with, "offline": without, "online": with }))
}

/// VMMs whose guests ask, killed at moments of start-up and run.
fn kills(service: &ServiceProcess) -> Result<Value> {
    let before = objects();
    let mut most = 0;
    for n in 0..KILLS {
        let mut command = Command::new("/init");
        command.args(["bpf-flood", "scx", "asks"]);
        let mut child = command.stdout(Stdio::null()).spawn()?;
        std::thread::sleep(STEP * n);
        most = most.max(objects().0);
        child.kill()?;
        child.wait()?;
    }
    // No VMM lives that could have to see to it.
    let after = settled(10 * SOON, || Ok(objects()), |now| *now == before)?;
    let policies = Policy::all()?;
    let cpus = policies.iter().flat_map(|policy| &policy.cpus);
    let sums = cpus.map(|cpu| sum_of(*cpu)).collect::<Result<Vec<_>>>()?;
    let stuck = stuck(&policies)?;
    let status = said(&scx(&["status"])?).1;
    let nobody = status == format!("running, process {}, 0 vCPUs\n", service.pid());
    let held = after == before
        && most > before.0
        && sums.iter().all(|sum| *sum == 0)
        && stuck.is_empty()
        && nobody;
    Ok(json!({
        "held": held, "kills": KILLS, "sums": sums, "status": status, "stuck": stuck,
        "programs_links_maps": [format!("{before:?}"), format!("{after:?}")],
        "most_programs": most,
    }))
}

/// Policies whose frequency stays up although little is to be done there.
pub fn stuck(policies: &[Policy]) -> Result<Vec<Value>> {
    let mut found = Vec::new();
    for policy in policies {
        let period = Duration::from_millis(10);
        let light = Load::periodic(policy.cpu(), period, period / 100);
        let middle = policy.at_least(policy.max() / 2);
        let mut khz = 0;
        // What was before is forgotten by half each 32 ms.
        for _ in 0..50 {
            std::thread::sleep(Duration::from_millis(20));
            khz = policy.khz()?;
            if khz < middle {
                break;
            }
        }
        light.stop()?;
        if khz >= middle {
            found.push(json!({ "cpu": policy.cpu(), "khz": khz }));
        }
    }
    Ok(found)
}
