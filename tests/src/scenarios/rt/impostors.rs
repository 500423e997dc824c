// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq rt` beside processes of another user that have the names of a kernel thread and of
//! irqbalance: they keep their scheduling, `apply` names each in one line, and `check` is content.
//! Of root's irqbalance, `apply` prints what people have to do.

use std::io::{BufRead as _, BufReader};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use serde_json::json;
use vcpufreq_host::stat_field;
use vcpufreq_tests::LabVerdict;

use super::inventory::{Inventory, changes, everything};
use crate::harness::rt_command::{CONFIG, NOBODY, json_of, succeeded};
use crate::harness::sysfs;

const IRQBALANCE: &str = "irqbalance";
/// Writing to its own `comm`, a process can have any name; then it waits for the end of its input.
const SCRIPT: &str = "printf %s \"$0\" > /proc/$$/comm && echo ready && read line";

/// A process with a name that another program has, killed when dropped.
struct Impostor {
    child: Child,
    name: String,
}

impl Impostor {
    fn start(name: &str, user: u32) -> Result<Self> {
        let mut child = Command::new("/bin/busybox")
            .args(["sh", "-c", SCRIPT, name])
            .uid(user)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().context("no output")?;
        let name = name.to_owned();
        let impostor = Self { child, name };
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        anyhow::ensure!(line == "ready\n", "{} didn't start: {line}", impostor.name);
        Ok(impostor)
    }

    /// Its name, and fields 40 and 41 of proc_pid_stat(5): priority and policy.
    fn state(&self) -> Result<[String; 3]> {
        let dir = format!("/proc/{}", self.child.id());
        let stat = sysfs::text(format!("{dir}/stat"))?;
        let field = |number| {
            stat_field(&stat, number)
                .context("a short stat")
                .map(str::to_owned)
        };
        Ok([sysfs::text(format!("{dir}/comm"))?, field(40)?, field(41)?])
    }

    /// The lines that name it.
    fn named_in(&self, text: &str) -> usize {
        let pid = self.child.id();
        let said = format!(
            "process {pid} of user {NOBODY} is called {} and is not",
            self.name
        );
        text.lines().filter(|line| line.contains(&said)).count()
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        // One that was waited for isn't there any more.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(super) fn left_alone(before: &Inventory, cpu: u32) -> Result<LabVerdict> {
    let impostors = [
        Impostor::start(&format!("ksoftirqd/{cpu}"), NOBODY)?,
        Impostor::start(IRQBALANCE, NOBODY)?,
    ];
    let states = || -> Result<Vec<_>> { impostors.iter().map(Impostor::state).collect() };
    let start = states()?;
    let said = succeeded(&["apply", "--config", CONFIG])?;
    let applied = states()?;
    let check = json_of(&["check", "--json"])?;
    let restored = succeeded(&["restore"])?;
    let later = states()?;
    let named = impostors.each_ref().map(|one| one.named_in(&said));
    drop(impostors);
    let told = told_by_hand(cpu)?;
    let left = changes(before, &everything()?);
    let settings = check["settings"].as_array().into_iter().flatten();
    let threads = settings.into_iter().find(|one| one["name"] == "ksoftirqd");
    let kernels = threads.is_some_and(|one| one["effect"] == "effective" && one["of"] == 1);
    let by_hand = check["findings"].to_string().contains("IRQBALANCE_BANNED");
    let same = applied == start && later == start && start.iter().all(|state| state[2] == "0");
    let figures = json!({
        "start": start, "applied": applied, "restored": later, "named": named, "apply_said": said,
        "restore_said": restored, "kernel_thread_set": kernels, "roots_irqbalance_told": told, "left": left,
    });
    Ok(LabVerdict::with_figures(figures)
        .check(
            "they are left as they were",
            same,
            [&start, &applied, &later],
        )
        .check_eq("each is named once", &named, [1, 1])
        .check("the kernel's thread is set", kernels, &check)
        .check("irqbalance isn't theirs", !by_hand, &check["findings"])
        .check("root's irqbalance is told of", told, ())
        .check_none("nothing is left", &left))
}

/// Beside a process of root's with that name, `apply` prints one line with the ban that is missing.
fn told_by_hand(cpu: u32) -> Result<bool> {
    let daemon = Impostor::start(IRQBALANCE, 0)?;
    let said = succeeded(&["apply", "--config", CONFIG])?;
    succeeded(&["restore"])?;
    drop(daemon);
    let ban = format!("IRQBALANCE_BANNED_CPULIST={cpu} ");
    Ok(said.lines().filter(|line| line.contains(&ban)).count() == 1)
}
