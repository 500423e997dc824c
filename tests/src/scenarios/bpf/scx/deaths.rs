// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A hotplug below a running vCPU, which the scheduler outlives; and VMMs killed at drawn moments, of
//! which no target, no program and no map is left.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_host_bpf::ScxPins;
use vcpufreq_tests::LabVerdict;

use super::service::{ServiceProcess, in_force, said, scx, sum_and_target};
use crate::harness::leftovers::{bpf_counts as objects, no_more};
use crate::harness::load::Load;
use crate::harness::machine::mount_bpffs;
use crate::harness::policy::Policy;
use crate::harness::random::Random;
use crate::harness::sysfs;
use crate::harness::wait::{SOON, settled, wait_until};

const KILLS: u32 = 50;
/// The moments that they come at: for every second VMM after its start, for the others after its first
/// request.
const OF_START_US: u32 = 3_000_000;
const OF_WORK_US: u32 = 100_000;

pub fn run() -> Result<LabVerdict> {
    mount_bpffs()?;
    let service = ServiceProcess::start()?;
    // The kernel frees a moment later what the service's start needed.
    std::thread::sleep(SOON);
    let before = objects();
    let hotplug = hotplug()?;
    let kills = kills(&service, before)?;
    said(&scx(&["stop"])?);
    service.ended()?;
    Ok(LabVerdict::default()
        .part("hotplug", hotplug)
        .part("kills", kills))
}

/// The pCPU goes and comes back on which a guest asks, which goes on elsewhere.
fn hotplug() -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let cpus = policies.last().context("no policy")?.cpus.clone();
    let cpu = *cpus.get(1).context("a policy of one pCPU")?;
    let file = format!("/sys/devices/system/cpu/cpu{cpu}/online");
    let (mut guest, start) = (guest()?, std::time::Instant::now());
    let there = |now: &SumsAndTargets| now.iter().any(|(at, now)| *at == cpu && now.0 > 0);
    let counted_there = there(&settled(10 * SOON, || sums(&policies), there)?);
    let ms = start.elapsed().as_millis();
    sysfs::write(&file, 0)?;
    let moved = settled(SOON, || sums(&policies), |now| counted(now, cpu))?;
    let without = in_force();
    sysfs::write(&file, 1)?;
    std::thread::sleep(Duration::from_millis(200));
    let with = in_force();
    let alive = guest.try_wait()?.is_none();
    guest.kill()?;
    guest.wait()?;
    let sums = settled(SOON, || sums(&policies), nothing)?;
    let stuck = stuck(&policies)?;
    let figures = json!({
        "pcpu": cpu, "offline": without, "online": with, "counted": counted_there, "counted_after_ms": ms,
        "counted_offline": moved, "guest_alive": alive, "sums": sums, "stuck": stuck,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("in force with the pCPU offline", without, ())
        .check("and online again", with, ())
        .check("the vCPU is counted there", counted_there, ms)
        .check("the guest lives", alive, ())
        .check("it is counted elsewhere", counted(&moved, cpu), &moved)
        .check("nothing is counted after it", nothing(&sums), &sums)
        .check_none("no pCPU is stuck", &stuck))
}

/// A VMM whose guest asks and sleeps more than it computes: what it asks for is more than it uses.
fn guest() -> Result<Child> {
    let mut command = Command::new("/init");
    command.args(["bpf-flood", "scx", "rests"]);
    Ok(command.stdout(Stdio::null()).spawn()?)
}

/// Each pCPU with its sum and its target.
type SumsAndTargets = Vec<(u32, (u32, u32))>;

fn sums(policies: &[Policy]) -> Result<SumsAndTargets> {
    let cpus = policies.iter().flat_map(|policy| &policy.cpus);
    cpus.map(|cpu| Ok((*cpu, sum_and_target(*cpu)?))).collect()
}

fn nothing(sums: &SumsAndTargets) -> bool {
    sums.iter().all(|(_, now)| *now == (0, 0))
}

/// Whether a vCPU is counted, on another pCPU than that one, which counts none.
fn counted(sums: &SumsAndTargets, without: u32) -> bool {
    sums.iter()
        .all(|(cpu, now)| *cpu != without || *now == (0, 0))
        && !nothing(sums)
}

/// VMMs whose guests ask, killed at drawn moments of start-up and run.
fn kills(service: &ServiceProcess, before: (usize, usize, usize)) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let (mut most, mut at_work, mut counted, mut late) = (0, 0, 0, Vec::new());
    let pins = ScxPins::open()?;
    let mut random = Random::new(KILLS);
    for n in 0..KILLS {
        // The last one leaves when it is switched out.
        let others = settled(SOON, || Ok(pins.vcpus()), |vcpus| *vcpus == 0)?;
        let mut child = guest()?;
        let within = match n % 2 {
            0 => OF_START_US,
            _ => {
                wait_until("a guest at work", 10 * SOON, || Ok(pins.vcpus() > others))?;
                OF_WORK_US
            }
        };
        std::thread::sleep(Duration::from_micros(random.below(within).into()));
        most = most.max(objects().0);
        at_work += u32::from(pins.vcpus() > others);
        counted += u32::from(!nothing(&sums(&policies)?));
        child.kill()?;
        child.wait()?;
        let sums = settled(SOON, || sums(&policies), nothing)?;
        late.extend((!nothing(&sums)).then_some(sums));
    }
    // No VMM lives that could have to see to it.
    let after = settled(10 * SOON, || Ok(objects()), |now| no_more(*now, before))?;
    let stuck = stuck(&policies)?;
    let status = said(&scx(&["status"])?).1;
    let nobody = status == format!("running, process {}, 0 vCPUs\n", service.pid());
    let objects = [format!("{before:?}"), format!("{after:?}")];
    let figures = json!({
        "kills": KILLS, "at_work": at_work, "counted": counted, "late": late,
        "status": status, "stuck": stuck,
        "programs_links_maps": objects, "most_programs": most,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("all of theirs is freed", no_more(after, before), &objects)
        .check("some had programs", most > before.0, most)
        .check("some were at work", at_work > 0, at_work)
        .check("some were counted", counted > 0, counted)
        .check("nothing is counted after a kill", late.is_empty(), &late)
        .check_none("no pCPU is stuck", &stuck)
        .check("no vCPU is left", nobody, &status))
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
