// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq rt` beside a running irqbalance, Debian's: plan → apply → check → restore, and apply
//! killed once it has been told; and one that has ended. What counts is the daemon's own answer.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::inventory::{changes, everything};
use super::settings::{self, json_of};
use crate::harness::plan::Plan;
use crate::harness::policy::Policy;
use crate::harness::rt_command::succeeded;
use crate::harness::sysfs;

const RECORD: &str = "/run/vcpufreq-rt/rt.json";
/// Seconds between two looks of the daemon's at the interrupts.
const INTERVAL_S: &str = "--interval=1";
/// Several of them.
const LOOKS: Duration = Duration::from_secs(4);
/// Times that apply is killed at most, until the daemon has survived it: it ends by SIGPIPE where
/// apply is killed between a question and its answer.
const KILLS: u32 = 10;
/// It starts by reading all of the machine's topology.
const START: Duration = Duration::from_secs(20);

pub fn run(_plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let cpu = *policies
        .last()
        .and_then(|policy| policy.cpus.last())
        .context("no CPU")?;
    fs::create_dir_all("/run/irqbalance")?;
    let before = everything()?;
    let mut rows = vec![
        there_and_back(cpu, None)?,
        there_and_back(cpu, Some("0"))?,
        ended(cpu)?,
    ];
    for _ in 0..KILLS {
        let row = killed(cpu)?;
        let survived = row["ended_by_kill"] == false;
        rows.push(row);
        if survived {
            break;
        }
    }
    let survived = rows.last().is_some_and(|row| row["ended_by_kill"] == false);
    fs::remove_dir("/run/irqbalance").context("it left something behind")?;
    let left = changes(&before, &everything()?);
    let held = survived && rows.iter().all(|row| row["held"] == true) && left.is_empty();
    Ok(json!({ "held": held, "rows": rows, "left": left }))
}

/// With a list from its environment, or none.
fn there_and_back(cpu: u32, own: Option<&str>) -> Result<Value> {
    let daemon = Daemon::start(own)?;
    let guest = format!("plc={cpu}");
    let start = daemon.keeps_off()?;
    let plan = json_of(&["plan", "--guest", &guest, "--json"])?;
    let planned = daemon.keeps_off()?;
    succeeded(&["apply", "--guest", &guest])?;
    let applied = daemon.keeps_off()?;
    let check = json_of(&["check", "--json"])?;
    sleep(LOOKS);
    let later = daemon.keeps_off()?;
    let there = interrupts_on(cpu)?;
    succeeded(&["restore"])?;
    let restored = daemon.keeps_off()?;
    let record_gone = !Path::new(RECORD).exists();
    let pid = daemon.end()?;
    let set = setting(&check["settings"]);
    let targets = &setting(&plan["plan"]["settings"])["changes"];
    let named = targets[0]["kind"] == "banned-cpus" && targets[0]["pid"] == pid;
    let right = planned == start && applied == start | 1 << cpu && later == applied;
    let is_own = start == own.map_or(0, |_| 1) && restored == start;
    let effective = set["effect"] == "effective" && set["unset"] == json!([]);
    Ok(json!({
        "held": named && right && is_own && effective && there.is_empty() && record_gone,
        "own_list": own, "start": start, "applied": applied, "later": later, "restored": restored,
        "plan": targets, "check": set, "interrupts_on_the_rt_cpu": there, "record_gone": record_gone,
    }))
}

/// It ends, by a client that has gone before its answer, and nobody has waited for it yet.
fn ended(cpu: u32) -> Result<Value> {
    let mut daemon = Daemon::start(None)?;
    succeeded(&["apply", "--guest", &format!("plc={cpu}")])?;
    let pid = Pid::from_raw(i32::try_from(daemon.0.id())?);
    kill(pid, Signal::SIGSTOP)?;
    UnixStream::connect(daemon.socket())?.write_all(b"setup")?;
    kill(pid, Signal::SIGCONT)?;
    let stat = format!("/proc/{pid}/stat");
    let end = std::time::Instant::now() + START;
    while !sysfs::text(&stat)?.contains(") Z ") {
        ensure!(std::time::Instant::now() < end, "irqbalance has survived");
        sleep(Duration::from_millis(20));
    }
    let recorded = Path::new(RECORD).exists();
    let said = succeeded(&["restore"])?;
    let record_gone = recorded && !Path::new(RECORD).exists();
    let signal = daemon.ended_by()?;
    let right = signal == Some(Signal::SIGPIPE as i32) && says_gone(&said, &daemon);
    Ok(json!({ "held": right && record_gone, "said": said, "signal": signal }))
}

fn says_gone(said: &str, daemon: &Daemon) -> bool {
    let pid = daemon.0.id();
    said.contains(&format!("irqbalance's ban list (process {pid}) is gone"))
}

/// Apply killed at the line that says that the daemon is told.
fn killed(cpu: u32) -> Result<Value> {
    let mut daemon = Daemon::start(None)?;
    let start = daemon.keeps_off()?;
    let mut apply = settings::command(&["apply", "--guest", &format!("plc={cpu}")]);
    let mut apply = apply.stdout(Stdio::piped()).spawn()?;
    let output = BufReader::new(apply.stdout.take().context("no output")?);
    let mut lines = output.lines().map_while(Result::ok);
    let told = lines.find(|line| line.contains("irqbalance"));
    apply.kill()?;
    apply.wait()?;
    let recorded = Path::new(RECORD).exists();
    let restored = succeeded(&["restore"])?;
    let named = told
        .as_ref()
        .is_some_and(|line| line.contains(&daemon.0.id().to_string()));
    let record_gone = !Path::new(RECORD).exists();
    let mut row = json!({ "killed_at": told, "start": start });
    let right = if let Some(signal) = daemon.ended_by()? {
        row["ended_by_kill"] = true.into();
        row["signal"] = signal.into();
        signal == Signal::SIGPIPE as i32 && says_gone(&restored, &daemon)
    } else {
        let restored = daemon.keeps_off()?;
        // What it was told in the end would be in force by now.
        sleep(LOOKS);
        let later = daemon.keeps_off()?;
        daemon.end()?;
        row["ended_by_kill"] = false.into();
        row["restored"] = restored.into();
        row["later"] = later.into();
        [restored, later] == [start, start]
    };
    row["held"] = (named && recorded && record_gone && right).into();
    Ok(row)
}

fn setting(settings: &Value) -> &Value {
    let mut all = settings.as_array().into_iter().flatten();
    let found = all.find(|one| one["name"] == "irqbalance");
    found.unwrap_or(&Value::Null)
}

/// Interrupts that the CPU is to handle, of those that can be elsewhere.
fn interrupts_on(cpu: u32) -> Result<Vec<String>> {
    let mut there = Vec::new();
    for entry in fs::read_dir("/proc/irq")?.flatten() {
        let path = entry.path();
        let Ok(metadata) = fs::metadata(path.join("smp_affinity")) else {
            continue;
        };
        let movable = metadata.permissions().mode() & 0o200 != 0;
        let on = mask(&sysfs::text(path.join("effective_affinity"))?)?;
        if movable && on >> cpu & 1 == 1 {
            there.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Ok(there)
}

fn mask(text: &str) -> Result<u64> {
    Ok(u64::from_str_radix(&text.trim().replace(',', ""), 16)?)
}

/// A running irqbalance, killed when dropped.
struct Daemon(Child);

impl Daemon {
    fn start(own: Option<&str>) -> Result<Self> {
        let mut command = Command::new("/bin/irqbalance");
        command.args(["--foreground", INTERVAL_S]);
        if let Some(own) = own {
            command.env("IRQBALANCE_BANNED_CPULIST", own);
        }
        let mut daemon = Self(command.stdout(Stdio::null()).spawn()?);
        let end = std::time::Instant::now() + START;
        while daemon.keeps_off().is_err() {
            let ended = daemon.0.try_wait()?;
            ensure!(ended.is_none(), "irqbalance has ended: {ended:?}");
            ensure!(std::time::Instant::now() < end, "irqbalance has no socket");
            sleep(Duration::from_millis(20));
        }
        Ok(daemon)
    }

    fn socket(&self) -> String {
        format!("/run/irqbalance/irqbalance{}.sock", self.0.id())
    }

    /// Its answer, as a mask.
    fn keeps_off(&self) -> Result<u64> {
        let mut stream = UnixStream::connect(self.socket())?;
        stream.write_all(b"setup")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        mask(answer.rsplit_once("BANNED ").context("no ban list")?.1)
    }

    /// The signal that ended it, if it has ended; then its socket is removed.
    fn ended_by(&mut self) -> Result<Option<i32>> {
        let Some(status) = self.0.try_wait()? else {
            return Ok(None);
        };
        fs::remove_file(self.socket())?;
        Ok(Some(status.signal().context("it had ended by itself")?))
    }

    /// Its number; its socket stays, as it can't remove that.
    fn end(mut self) -> Result<u32> {
        ensure!(self.0.try_wait()?.is_none(), "it had ended by itself");
        self.0.kill()?;
        self.0.wait()?;
        fs::remove_file(self.socket())?;
        Ok(self.0.id())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // One that was waited for isn't there any more.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
