// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! kill -9 of a real-time guest's QEMU, of its server, of both, and of `rt exec`, at moments that are
//! spread over the start and as long after it. Nothing of the guest is left, and each setting of the host
//! is as before.

use std::io::Read as _;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

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
use crate::harness::wait::{SOON, settled, wait_until};

/// Kills, where the scenario's name has no number.
const KILLS: u32 = 10;
/// The longest that a start may take.
const STARTS: Duration = Duration::from_secs(60);
/// Of so many kills one is of `rt exec`.
const EXEC_OF: u32 = 5;
const PARTS: [KilledPart; 3] = [KilledPart::Server, KilledPart::Qemu, KilledPart::Both];

/// When something is killed.
enum KillMoment {
    /// So long after its start.
    After(Duration),
    /// Once it has changed the host.
    AtWork,
}

/// What came of a kill.
struct KillOutcome {
    /// After so long.
    after: Duration,
    /// It had changed the host.
    at_work: bool,
    left: Vec<String>,
}

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
    // In this part of twice a start: half of them come when it is over.
    let mut moment = |start: Duration, (part, of): (u32, u32)| {
        KillMoment::After(2 * start * (1000 * part + random.below(1000)) / (1000 * of))
    };
    let before = inventory::everything()?;
    let (mut left, mut at_work) = (Vec::new(), 0);
    let of_exec = kills / EXEC_OF;
    let first = exec(&guest, KillMoment::AtWork, &before)?;
    left.extend(first.left.iter().map(|one| format!("rt exec: {one}")));
    for round in 0..of_exec {
        begins(round, kills, "rt exec");
        let killed = exec(&guest, moment(first.after, (round, of_exec)), &before)?;
        at_work += u32::from(killed.at_work);
        let found = killed.left.iter();
        left.extend(found.map(|one| format!("{round}: rt exec: {one}")));
    }
    succeeded(&["apply", "--guest", &guest])?;
    let applied = inventory::everything()?;
    let first = qemu(&setup, KilledPart::Both, KillMoment::AtWork, &applied)?;
    left.extend(first.left.iter().map(|one| format!("Both: {one}")));
    for (round, part) in (of_exec..kills).zip(PARTS.iter().cycle()) {
        begins(round, kills, "QEMU");
        let moment = moment(first.after, (round - of_exec, kills - of_exec));
        let killed = qemu(&setup, *part, moment, &applied)?;
        at_work += u32::from(killed.at_work);
        let found = killed.left.iter();
        left.extend(found.map(|one| format!("{round}: {part:?}: {one}")));
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

impl KillMoment {
    /// Waits for it; how long that was.
    fn wait(self, is_at_work: impl FnMut() -> Result<bool>) -> Result<Duration> {
        let started = Instant::now();
        match self {
            Self::After(moment) => sleep(moment),
            Self::AtWork => wait_until("its work", STARTS, is_at_work)?,
        }
        Ok(started.elapsed())
    }
}

/// Kills `rt exec`. What is left once its command and its guardian have ended.
fn exec(guest: &str, moment: KillMoment, before: &Inventory) -> Result<KillOutcome> {
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
    let has_changed = || Ok(std::fs::exists(RECORD)?);
    let after = moment.wait(has_changed)?;
    let at_work = has_changed()?;
    exec.kill()?;
    exec.wait()?;
    // The others have it too: its end is theirs.
    errors.read_to_string(&mut String::new())?;
    let mut left = inventory::changes(before, &inventory::everything()?);
    left.extend(std::fs::exists(RECORD)?.then(|| RECORD.to_owned()));
    Ok(KillOutcome {
        after,
        at_work,
        left,
    })
}

/// Kills `part`, at work once the vCPU is real-time. What is left soon after.
fn qemu(
    setup: &Setup,
    part: KilledPart,
    moment: KillMoment,
    applied: &Inventory,
) -> Result<KillOutcome> {
    let mut vm = Vm::start(setup)?;
    let is_real_time = |vm: &Vm| vm.scheduling(1).is_ok_and(|found| found == "1 1");
    let after = moment.wait(|| Ok(is_real_time(&vm)))?;
    let at_work = is_real_time(&vm);
    let mut left = Vec::new();
    if part != KilledPart::Qemu {
        vm.kill_prefix()?;
    }
    if part == KilledPart::Server && at_work {
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
    Ok(KillOutcome {
        after,
        at_work,
        left,
    })
}
