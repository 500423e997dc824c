// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! kill -9 at drawn moments of a real-time guest's QEMU, of its server, of both, and of `rt exec`.
//! Nothing of the guest is left, and each setting of the host is as before.

use std::io::Read as _;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use super::inventory::{self, Inventory};
use super::served::{self, KilledPart};
use crate::harness::host::begins;
use crate::harness::leftovers::leftovers;
use crate::harness::policy::Policy;
use crate::harness::random::Random;
use crate::harness::rt_command::{RECORD, command, succeeded};
use crate::harness::trace;
use crate::harness::vm::{Setup, Vm};
use crate::harness::wait::{SOON, settled};

/// Kills, where the scenario's name has no number.
const KILLS: u32 = 10;
/// The moments that they come at, from the start.
const OF_EXEC: Duration = Duration::from_millis(1_000);
const OF_QEMU: Duration = Duration::from_millis(5_000);
/// Of so many kills one is of `rt exec`.
const EXEC_OF: u32 = 5;
const PARTS: [KilledPart; 3] = [KilledPart::Server, KilledPart::Qemu, KilledPart::Both];

/// `name` is `rt-qemu:kills` or `rt-qemu:kills:NUMBER`.
pub fn run(name: &str) -> Result<LabVerdict> {
    let kills = name
        .strip_prefix("rt-qemu:kills:")
        .map_or(Ok(KILLS), str::parse)?;
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let (little, cpu) = (policies[0].cpu(), *policy.cpus.last().context("no CPU")?);
    let guest = format!("plc={cpu}");
    let setup = served::setup(little, cpu);
    trace::off()?;
    // Another number has other moments.
    let mut random = Random::new(kills);
    let mut moment = |within: Duration| within * random.below(1000) / 1000;
    let before = inventory::everything()?;
    let (mut left, mut at_work) = (Vec::new(), 0);
    let of_exec = kills / EXEC_OF;
    for round in 0..of_exec {
        begins(round, kills, "rt exec");
        let (had_changed, found) = exec(&guest, moment(OF_EXEC), &before)?;
        at_work += u32::from(had_changed);
        left.extend(found.iter().map(|one| format!("{round}: rt exec: {one}")));
    }
    succeeded(&["apply", "--guest", &guest])?;
    let applied = inventory::everything()?;
    for (round, part) in (of_exec..kills).zip(PARTS.iter().cycle()) {
        begins(round, kills, "QEMU");
        let (had_changed, found) = qemu(&setup, *part, moment(OF_QEMU), &applied)?;
        at_work += u32::from(had_changed);
        left.extend(found.iter().map(|one| format!("{round}: {part:?}: {one}")));
    }
    let changed = inventory::changes(&applied, &inventory::everything()?);
    succeeded(&["restore"])?;
    left.extend(inventory::changes(&before, &inventory::everything()?));
    left.extend(leftovers()?);
    let figures = json!({
        "kills": kills, "of_rt_exec": of_exec,
        "with_changes_on_the_host": at_work, "changed": changed, "left": left,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_none("nothing is left", &left)
        .check_none("what apply set stays", &changed)
        .check("a quarter is killed at work", at_work * 4 > kills, at_work))
}

/// Whether `rt exec` had changed the host when it was killed, and what is left once its command and
/// its guardian have ended.
fn exec(guest: &str, moment: Duration, before: &Inventory) -> Result<(bool, Vec<String>)> {
    let line = [
        "exec",
        "--guest",
        guest,
        "--",
        "/bin/busybox",
        "sleep",
        "100000",
    ];
    let mut exec = command(&line)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut errors = exec.stderr.take().context("no errors")?;
    sleep(moment);
    let had_changed = std::fs::exists(RECORD)?;
    exec.kill()?;
    exec.wait()?;
    // The others have it too: its end is theirs.
    errors.read_to_string(&mut String::new())?;
    let mut left = inventory::changes(before, &inventory::everything()?);
    left.extend(std::fs::exists(RECORD)?.then(|| RECORD.to_owned()));
    Ok((had_changed, left))
}

/// Whether the vCPU was real-time when `part` was killed, and what is left soon after.
fn qemu(
    setup: &Setup,
    part: KilledPart,
    moment: Duration,
    applied: &Inventory,
) -> Result<(bool, Vec<String>)> {
    let mut vm = Vm::start(setup)?;
    sleep(moment);
    let is_real_time = vm.scheduling(1).is_ok_and(|found| found == "1 1");
    let mut left = Vec::new();
    if part != KilledPart::Qemu {
        vm.kill_prefix()?;
    }
    if part == KilledPart::Server && is_real_time {
        let after = settled(SOON, || vm.scheduling(1), |found| found == "0 0")?;
        left.extend((after != "0 0").then(|| format!("vCPU 1 with {after}")));
    }
    vm.kill()?;
    left.extend(served::changed_soon(applied)?);
    let look = || {
        if part != KilledPart::Qemu {
            // What has no guardian: the record by which a server would take the VM over.
            Command::new("/bin/vcpufreq").arg("cleanup").output()?;
        }
        let mut left = leftovers()?;
        // That of `rt apply`.
        left.retain(|path| !path.contains("vcpufreq-rt."));
        Ok(left)
    };
    left.extend(settled(SOON, look, Vec::is_empty)?);
    Ok((is_real_time, left))
}
