// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq rt` on a real kernel: plan → apply → check → restore leaves everything as before,
//! also when a file refuses the write, after another boot, and around a command;
//! `rt-settings:kills`: also when apply or restore is killed at each second line.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use nix::mount::{MsFlags, mount, umount};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use super::exec::around_a_command;
use super::impostors;
use super::inventory::{Inventory, changes, everything, values_of};
use crate::harness::plan::Plan;
use crate::harness::policy::Policy;
use crate::harness::rt_command::{CONFIG, NOBODY, RECORD, command, json_of, output, succeeded};
use crate::harness::sysfs;

const SWAPPINESS: &str = "/proc/sys/vm/swappiness";
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// What the lab's kernel starts with is kvm-rt's value: others, so that there is something to write.
/// A row's maximum is above its minimum, in this order and back.
const OTHERS: &[(&str, u32, u32)] = &[
    ("/proc/sys/kernel/sched_util_clamp_min", 1024, 900),
    ("/proc/sys/kernel/sched_util_clamp_max", 1024, 1000),
    ("/proc/sys/kernel/sched_util_clamp_min_rt_default", 0, 128),
    ("/sys/kernel/mm/ksm/run", 0, 1),
];

/// What kvm-rt leaves alone and the lab's kernel has, with values other than its own.
const MORE: &str = "
schedutil-rate-limit-us = 500
idle-states-off = 'deep'
resume-latency-us = 'n/a'
min-free-kbytes = 5000
watermark-scale-factor = 100
watermark-boost-factor = 0
";

pub fn run(_plan: &Plan) -> Result<LabVerdict> {
    with_others(tried)
}

/// How much of it a killed one has done is chance.
pub fn kills(_plan: &Plan) -> Result<LabVerdict> {
    with_others(|| {
        configure()?;
        let before = everything()?;
        let applies = killed(&before, &[], &["apply", "--config", CONFIG])?;
        let restores = killed(&before, &["apply", "--config", CONFIG], &["restore"])?;
        Ok(LabVerdict::default()
            .part("apply_killed", applies.verdict())
            .part("restore_killed", restores.verdict()))
    })
}

/// With values other than the profile's.
fn with_others(work: impl FnOnce() -> Result<LabVerdict>) -> Result<LabVerdict> {
    for (path, own, other) in OTHERS {
        let now = sysfs::text(path)?;
        ensure!(now.trim() == own.to_string(), "{path} starts with {now}");
        sysfs::write(path, other)?;
    }
    let result = work()?;
    for (path, own, _) in OTHERS.iter().rev() {
        sysfs::write(path, own)?;
    }
    Ok(result)
}

/// Writes the configuration; the CPU that it gives to the guest.
fn configure() -> Result<u32> {
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let cpu = *policy.cpus.last().context("no CPU")?;
    // Neither end, which they have.
    let khz = *policy.opps.get(1).context("no second OPP")?;
    let name = policy.path.rsplit('/').next().context("a name")?;
    let limits = format!("min-freq = {khz}\nmax-freq = {{ {name} = {khz} }}");
    let config = format!("[guest]\nplc = '{cpu}'\n[settings]{MORE}{limits}");
    fs::write(CONFIG, config)?;
    Ok(cpu)
}

fn tried() -> Result<LabVerdict> {
    let cpu = configure()?;
    let before = everything()?;
    let unprivileged = without_privilege(&before, cpu)?;
    let (checked, cut_off) = there_and_back(&before, cpu)?;
    let impostors = impostors::left_alone(&before, cpu)?;
    let performance = with_performance(&before, cpu)?;
    let refused = refusals(&before)?;
    let reboot = another_boot(&before)?;
    let exec = around_a_command(&before, cpu)?;
    let figures = json!({
        "files_compared": before.len(), "others_are_cut_off": cut_off,
        "performance_there_and_back": performance,
        "refusing_file_came_back": refused, "other_boot_wrote_nothing": reboot,
    });
    Ok(LabVerdict::with_figures(figures)
        .part("check", checked)
        .check("others are cut off", cut_off, ())
        .check("performance goes there and back", performance, ())
        .check("a file that refuses comes back", refused, ())
        .check("another boot writes nothing", reboot, ())
        .part("unprivileged", unprivileged)
        .part("impostors", impostors)
        .part("exec", exec))
}

/// Applies, checks, restores.
fn there_and_back(before: &Inventory, cpu: u32) -> Result<(LabVerdict, bool)> {
    let plan = json_of(&["plan", "--config", CONFIG, "--json"])?;
    ensure!(everything()? == *before, "planning changed something");
    succeeded(&["apply", "--config", CONFIG])?;
    let changed = changes(before, &everything()?);
    let unlisted = unlisted(&plan, &changed);
    let not_compared = not_compared(&plan, before);
    // No thread outside of the guest's group can be put on its CPU.
    let cut_off = bind(cpu).is_err();
    let check = json_of(&["check", "--json"])?;
    let none = Vec::new();
    let settings = check["settings"].as_array().unwrap_or(&none);
    // Without idle states, as on an emulated PC, nothing obeys the bound of their latency.
    let idles = fs::exists(format!("/sys/devices/system/cpu/cpu{cpu}/cpuidle"))?;
    let obeyed = |one: &Value| match &one["name"] {
        name if name == "resume-latency-us" && !idles => one["effect"] == "not",
        _ => one["effect"] == "effective",
    };
    let good = |one: &&Value| obeyed(one) && one["unset"] == json!([]);
    let effective = settings.iter().filter(good).count();
    let not: Vec<&Value> = settings.iter().filter(|one| !good(one)).collect();
    succeeded(&["restore"])?;
    let left = changes(before, &everything()?);
    let planned = plan["plan"]["settings"].as_array().map_or(0, Vec::len);
    let record_gone = !Path::new(RECORD).exists();
    let figures = json!({
        "settings": planned, "changed_and_not_planned": unlisted,
        "planned_and_not_compared": not_compared,
        "effective": effective, "not": not, "files_changed": changed.len(),
        "left_after_restore": left, "absent": plan["plan"]["absent"],
        "unseen": plan["plan"]["unseen"], "cmdline": plan["plan"]["cmdline"],
    });
    let report = LabVerdict::with_figures(figures)
        .check_none("each setting is effective", &not)
        .check(
            "as many as planned",
            effective == planned,
            (effective, planned),
        )
        .check_none("nothing is left", &left)
        .check("the record is gone", record_gone, ())
        .check_none("what changes is planned", &unlisted)
        .check_none("what is planned is compared", &not_compared)
        .check("files change", changed.len() > 30, changed.len())
        .check("others may run there again", bind(cpu).is_ok(), cpu);
    Ok((report, cut_off))
}

/// What the plan has and the inventory doesn't: it would come back unseen. What the plan itself makes
/// isn't there before.
fn not_compared(plan: &Value, before: &Inventory) -> Vec<String> {
    let compared = changes_of(plan).into_iter().filter_map(|change| {
        let made = change["kind"] == "dir" || change["kind"] == "inside";
        let name = change["path"].as_str().or(change["name"].as_str())?;
        (!made && !before.contains_key(name)).then(|| name.to_owned())
    });
    compared.collect()
}

fn changes_of(plan: &Value) -> Vec<&Value> {
    let settings = plan["plan"]["settings"].as_array().into_iter().flatten();
    settings
        .flat_map(|one| one["changes"].as_array().into_iter().flatten())
        .collect()
}

/// Changes that aren't in the plan and don't follow from it in the kernel. Files of cgroups that
/// the plan makes or gives controllers to, and the list of isolated CPUs, do follow.
fn unlisted(plan: &Value, changed: &[String]) -> Vec<String> {
    let mut planned = BTreeSet::new();
    for change in changes_of(plan) {
        for key in ["path", "shown_in", "name"] {
            planned.extend(change[key].as_str());
        }
    }
    let follows = |path: &str| path.starts_with("/sys/fs/cgroup/");
    let unlisted = changed
        .iter()
        .filter(|path| !planned.contains(path.as_str()) && !follows(path));
    unlisted.cloned().collect()
}

/// As an unprivileged user: plan and check list what they couldn't read, apply is refused, nothing
/// is changed.
fn without_privilege(before: &Inventory, cpu: u32) -> Result<LabVerdict> {
    let guest = format!("plc={cpu}");
    let mut unseen = Vec::new();
    for word in ["plan", "check"] {
        let output = command(&[word, "--guest", &guest, "--json"])
            .uid(NOBODY)
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.code() == Some(1),
            "rt {word} without privilege: {said}"
        );
        let report: Value = serde_json::from_slice(&output.stdout)?;
        let part = if word == "plan" {
            &report["plan"]
        } else {
            &report
        };
        unseen.push(part["unseen"].as_array().map_or(0, Vec::len));
    }
    let apply = command(&["apply", "--guest", &guest])
        .uid(NOBODY)
        .output()?;
    let refused = apply.status.code() == Some(2)
        && String::from_utf8_lossy(&apply.stderr).lines().count() == 1
        && !Path::new(RECORD).exists();
    let untouched = everything()? == *before;
    // The kernel's configuration is hidden from root as well.
    let figures = json!({ "unseen_by_plan_and_check": unseen, "apply_refused": refused });
    let told = unseen.iter().all(|count| *count > 1);
    Ok(LabVerdict::with_figures(figures)
        .check("what is hidden is told", told, &unseen)
        .check("apply is refused", refused, ())
        .check("nothing changes", untouched, ()))
}

/// The governor's own tunables go with it and come back: the vendors' profiles do that.
fn with_performance(before: &Inventory, cpu: u32) -> Result<bool> {
    succeeded(&[
        "apply",
        "--profile",
        "qcs6490",
        "--guest",
        &format!("plc={cpu}"),
    ])?;
    let check = json_of(&["check", "--json"])?;
    let settings = check["settings"].as_array().context("no settings")?;
    let effect = |name: &str| {
        let one = settings.iter().find(|one| one["name"] == name);
        one.map(|one| one["effect"].clone()).unwrap_or_default()
    };
    // PREEMPT_RT kernels ignore the setting to expedite, and schedutil's tunable isn't there.
    let none = Vec::new();
    let absent = check["absent"].as_array().unwrap_or(&none);
    let absent = |name: &str| absent.iter().any(|one| one["setting"] == name);
    let told = effect("governor") == "effective"
        && absent("rcu-expedited")
        && absent("schedutil-rate-limit-us");
    succeeded(&["restore"])?;
    Ok(told && everything()? == *before)
}

/// Kills at each second line of output.
#[derive(Debug, Default)]
struct Killed {
    times: usize,
    /// Killed with something changed, and something still as before.
    in_the_middle: usize,
    left: Vec<String>,
}

impl Killed {
    fn verdict(&self) -> LabVerdict {
        let figures =
            json!({ "times": self.times, "in_the_middle": self.in_the_middle, "left": self.left });
        let counts = (self.in_the_middle, self.times);
        LabVerdict::with_figures(figures)
            .check_none("nothing is left", &self.left)
            .check(
                "half in the middle",
                self.in_the_middle * 2 > self.times,
                counts,
            )
            .check("enough are killed", self.times > 20, self.times)
    }
}

/// Kills `line` after each second of its lines of output in turn, then restores. In between, what apply
/// changes is compared; at the end, everything: what is left once, the next apply records as old.
fn killed(before: &Inventory, prepare: &[&str], line: &[&str]) -> Result<Killed> {
    let mut killed = Killed::default();
    succeeded(&["apply", "--config", CONFIG])?;
    let mut paths = changes(before, &everything()?);
    succeeded(&["restore"])?;
    // Not the threads.
    paths.retain(|path| path.starts_with('/'));
    let own = before.iter().filter(|(path, _)| paths.contains(path));
    let own_before: Inventory = own
        .map(|(path, text)| (path.clone(), text.clone()))
        .collect();
    for lines in (1..).step_by(2) {
        if !prepare.is_empty() {
            succeeded(prepare)?;
        }
        let ended = kill_after(line, lines)?;
        let changed = changes(&own_before, &values_of(&paths)).len();
        killed.in_the_middle += usize::from(changed > 0 && changed < paths.len());
        succeeded(&["restore"])?;
        killed.left.extend(changes(&own_before, &values_of(&paths)));
        if ended {
            killed.left.extend(changes(before, &everything()?));
            return Ok(killed);
        }
        killed.times += 1;
    }
    Ok(killed)
}

/// Runs it until it has printed so many lines, then kills it; whether it had ended before.
fn kill_after(line: &[&str], lines: usize) -> Result<bool> {
    let mut child = command(line).stdout(Stdio::piped()).spawn()?;
    let output = child.stdout.take().context("no output")?;
    let seen = BufReader::new(output).lines().take(lines).count();
    child.kill()?;
    child.wait()?;
    Ok(seen < lines)
}

/// A file that refuses the write in apply, and one that does in restore.
fn refusals(before: &Inventory) -> Result<bool> {
    read_only(SWAPPINESS)?;
    let applied = output(&["apply", "--config", CONFIG])?;
    let said = String::from_utf8_lossy(&applied.stderr).contains(SWAPPINESS);
    let named = applied.status.code() == Some(1) && said;
    umount(SWAPPINESS)?;
    succeeded(&["restore"])?;
    let after_apply = everything()? == *before;
    succeeded(&["apply", "--config", CONFIG])?;
    read_only(SWAPPINESS)?;
    let restored = output(&["restore"])?;
    umount(SWAPPINESS)?;
    let kept = restored.status.code() == Some(1) && Path::new(RECORD).exists();
    let only_that = changes(before, &everything()?) == [SWAPPINESS];
    succeeded(&["restore"])?;
    Ok(named && after_apply && kept && only_that && everything()? == *before)
}

/// A file that can be read and not written.
fn read_only(path: &str) -> Result<()> {
    mount(
        Some(path),
        path,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    )?;
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(None::<&str>, path, None::<&str>, flags, None::<&str>).context("remounting read-only")
}

/// With another boot id, restore removes the record and writes nothing.
fn another_boot(before: &Inventory) -> Result<bool> {
    succeeded(&["apply", "--config", CONFIG])?;
    let record = fs::read(RECORD)?;
    let applied = everything()?;
    fs::write("/run/boot_id", "another boot\n")?;
    let over = mount(
        Some("/run/boot_id"),
        BOOT_ID,
        None::<&str>,
        MsFlags::MS_BIND,
        None::<&str>,
    );
    over.context("another boot id")?;
    let restored = output(&["restore"]);
    umount(BOOT_ID)?;
    let closed = restored?.status.success() && !Path::new(RECORD).exists();
    let untouched = everything()? == applied;
    // This boot's again, or the host would stay as it is.
    put_back(&record)?;
    succeeded(&["restore"])?;
    Ok(closed && untouched && everything()? == *before)
}

/// As apply makes it: what others could have written isn't read.
fn put_back(record: &[u8]) -> Result<()> {
    let dir = Path::new(RECORD).parent().context("no directory")?;
    fs::DirBuilder::new().mode(0o700).create(dir)?;
    let mut file = fs::File::options();
    let file = file.write(true).create_new(true).mode(0o600).open(RECORD);
    Ok(file?.write_all(record)?)
}

fn bind(cpu: u32) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(usize::try_from(cpu)?)?;
    // A process of its own: this one shall stay where it may be.
    let mut child = Command::new("/bin/busybox")
        .args(["sleep", "100"])
        .spawn()?;
    let bound = sched_setaffinity(Pid::from_raw(i32::try_from(child.id())?), &set);
    child.kill()?;
    child.wait()?;
    bound.context("binding")
}
