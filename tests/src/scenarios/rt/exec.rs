// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq rt exec` on a real kernel: the command starts in the partition, its exit code is exec's, and
//! each setting is as before when all have ended, also after kill -9 of exec, or of its guardian too.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _},
    path::Path,
    process::Stdio,
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use super::inventory::{Inventory, changes, everything};
use crate::harness::rt_command::{CONFIG, RECORD, command, succeeded};

/// The processes that are killed beside the command.
#[derive(Clone, Copy, Debug, PartialEq)]
enum KilledProcesses {
    Exec,
    ExecAndGuardian,
}

/// `cpu` is the one that the configuration gives to guest plc.
pub(super) fn around_a_command(before: &Inventory, cpu: u32) -> Result<LabVerdict> {
    let (code, said) = in_partition()?;
    let ended = left(before)?;
    let exec = left_after_kill(before, KilledProcesses::Exec)?;
    let both = left_after_kill(before, KilledProcesses::ExecAndGuardian)?;
    let figures = json!({
        "exit_code": code, "cpus_in_partition": said, "left_after_end": ended,
        "left_after_kill_of_exec": exec, "left_after_kill_of_both": both,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("the exit code is the command's", &code, Some(7))
        .check_eq("the command is in the partition", &said, cpu.to_string())
        .check_none("nothing is left after its end", &ended)
        .check_none("nothing after a kill", &exec)
        .check_none("nothing after a kill of both", &both))
}

/// The exit code of exec, and the CPUs that its command may run on in the partition.
fn in_partition() -> Result<(Option<i32>, String)> {
    let script = "while read -r name value; do
    [ \"$name\" != Cpus_allowed_list: ] || echo \"$value\"
done < /proc/self/status
exit 7";
    let shell = ["--enter", "--", "/bin/sh", "-c", script];
    let line = [&["exec", "--config", CONFIG], &shell[..]].concat();
    let output = command(&line).output().context("starting rt exec")?;
    let cpus = String::from_utf8(output.stdout)?;
    Ok((output.status.code(), cpus.trim().to_owned()))
}

/// What differs from before, with the record if that is there.
fn left(before: &Inventory) -> Result<Vec<String>> {
    let mut left = changes(before, &everything()?);
    if Path::new(RECORD).exists() {
        left.push(RECORD.to_owned());
    }
    Ok(left)
}

/// What is left when these were killed while the command ran, and all others have ended. Nothing
/// restores by itself once the guardian is killed too: then `rt restore` has to.
fn left_after_kill(before: &Inventory, these: KilledProcesses) -> Result<Vec<String>> {
    let script = "echo runs; exec sleep 100000";
    let line = ["exec", "--config", CONFIG, "--", "/bin/sh", "-c", script];
    let mut exec = command(&line)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let output = exec.stdout.take().context("no output")?;
    let mut errors = exec.stderr.take().context("no errors")?;
    let mut said = String::new();
    BufReader::new(output).read_line(&mut said)?;
    ensure!(said == "runs\n", "rt exec's command: {said:?}");
    let in_force = changes(before, &everything()?).len();
    ensure!(in_force > 30, "rt exec changed {in_force} files only");
    if these == KilledProcesses::ExecAndGuardian {
        // It starts no other one.
        kill(Pid::from_raw(i32::try_from(exec.id())?), Signal::SIGSTOP)?;
        kill(guardian_of(exec.id())?, Signal::SIGKILL)?;
    }
    exec.kill()?;
    exec.wait()?;
    // Command and guardian have it too: its end is theirs.
    errors.read_to_string(&mut said)?;
    if these == KilledProcesses::ExecAndGuardian {
        ensure!(Path::new(RECORD).exists(), "the record is gone: {said}");
        succeeded(&["restore"])?;
    }
    left(before)
}

fn guardian_of(exec: u32) -> Result<Pid> {
    let wanted = format!("rt\0guard\0--pid\0{exec}\0");
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        // One that ends meanwhile is another one.
        let line = fs::read_to_string(entry.path().join("cmdline")).unwrap_or_default();
        if line.contains(&wanted) {
            return Ok(Pid::from_raw(pid));
        }
    }
    anyhow::bail!("rt exec {exec} has no guardian")
}
