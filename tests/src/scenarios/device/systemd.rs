// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest as a service of systemd, by the unit that `docs/` ships: the limits of a drop-in hold for
//! every thread of the VMM while requests are in force. Without Delegate= the same, by threads. A unit
//! that is stopped has not failed.

use std::fs;
use std::process::Command;
use std::thread::sleep;

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill as send};
use nix::unistd::Pid;
use serde_json::json;
use vcpufreq_bench::piped::threads;
use vcpufreq_tests::LabVerdict;

use crate::harness::leftovers::processes;
use crate::harness::plan::{Plan, ask_for, first_cpus, last_of, set_governor};
use crate::harness::policy::Policy;
use crate::harness::sysfs;
use crate::harness::systemctl::systemctl;
use crate::harness::vm::{BOOT, Vm};
use crate::harness::vmm::CMDLINE;
use crate::harness::wait::{SOON, settled};

const UNIT: &str = "vcpufreq@lab.service";
const SLICE: &str = "/sys/fs/cgroup/vcpufreq.slice";
const TOOL: &str = "tool.service";
const GROUP: &str = "/sys/fs/cgroup/vcpufreq.slice/vcpufreq@lab.service";
const DROP_IN: &str = "/run/systemd/system/vcpufreq@lab.service.d";
const CONFIG: &str = "/etc/vcpufreq";
const INPUT: &str = "/run/vm.in";
const OUTPUT: &str = "/run/vm.out";
const SAID: &str = "/run/vm.err";
/// Limits of the drop-in. A real guest's are larger.
const DROP_IN_LIMITS: &str = "MemoryMax=1G\nCPUQuota=200%\nTasksMax=64";
/// The same in the kernel's words.
const LIMITS: [(&str, &str); 3] = [
    ("memory.max", "1073741824"),
    ("cpu.max", "200000 100000"),
    ("pids.max", "64"),
];
/// Memory of a guest that has booted, at least.
const TOUCHED: u64 = 32 << 20;
/// In the line of `run` without Delegate=: both ways out.
const ADVICE: [&str; 2] = ["Delegate=cpu", "--cgroup-parent"];

pub fn run(_plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let delegated = service(&policies, "")?;
    let plain = service(&policies, "Delegate=no")?;
    let said = |of: &LabVerdict| of.get("said").as_str().map(str::to_owned);
    let advised = said(&plain).is_some_and(|said| ADVICE.iter().all(|word| said.contains(word)));
    let quiet = said(&delegated).is_some_and(|said| !said.contains("no cgroup"));
    let by_group = [&delegated, &plain].map(|one| one.get("clamped_by_group").clone());
    let killed = killed(&policies)?;
    let stopped = stopped(&policies)?;
    let tools = tools()?;
    let being_made = being_made()?;
    Ok(LabVerdict::default()
        .figure("advised", advised)
        .check("advice without Delegate=", advised, said(&plain))
        .check("none with it", quiet, said(&delegated))
        .check_eq("clamps by groups with it alone", &by_group, [true, false])
        .part("delegated", delegated)
        .part("without_delegate", plain)
        .part("killed", killed)
        .part("stopped", stopped)
        .part("tools", tools)
        .part("being_made", being_made))
}

/// One life of the unit, with more lines for it.
fn service(policies: &[Policy], lines: &str) -> Result<LabVerdict> {
    let (vcpu, policy) = last_of(policies)?;
    write_unit(&first_cpus(policies), lines)?;
    let mut vm = start()?;
    vm.expect("@ready", BOOT)
        .with_context(|| fs::read_to_string(SAID).unwrap_or_default())?;
    vm.ask("insmod cpufreq_userspace")?;
    vm.ask("insmod vcpufreq_guest")?;
    set_governor(&mut vm, vcpu, "userspace")?;
    let khz = policy.opps[policy.opps.len() / 2];
    ask_for(&mut vm, vcpu, khz)?;
    let util = policy.util(khz);
    // Without Delegate= a thread of the VMM sets it.
    let clamp = settled(SOON, || vm.clamp(vcpu), |now| now.0 == util)?;
    let limits = limits(&vm)?;
    let throttled = throttled(&mut vm, policies.len())?;
    let (still, reads) = clamp_after_load(&vm, vcpu, clamp)?;
    let by_group = group_of(vm.pid(), vm.vcpu_tid(vcpu)?)?.contains("/domain");
    vm.tell("quit")?;
    let ended = ended("ExecMainStatus=0")?;
    let figures = json!({
        "asked_khz": khz, "util": util, "clamp": clamp, "clamp_after_load": still, "reads": reads,
        "clamped_by_group": by_group, "nr_throttled": throttled, "said": sysfs::text(SAID)?,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("the clamp is in force", clamp.0 == util, clamp)
        .check_eq("and after the load", &still, clamp)
        .part("limits", limits)
        .check("the limit throttles", throttled > 0, throttled)
        .part("ended", ended))
}

/// A vCPU's clamp as soon as it is what it was before the load, else the last one that was read; and
/// how often it was read. Once in many draws the first read was another value.
fn clamp_after_load(vm: &Vm, vcpu: usize, before: (u32, u32)) -> Result<((u32, u32), usize)> {
    let mut reads = 0;
    let look = || {
        reads += 1;
        vm.clamp(vcpu)
    };
    Ok((settled(SOON, look, |now| *now == before)?, reads))
}

fn write_unit(pcpus: &[u32], lines: &str) -> Result<()> {
    fs::create_dir_all(DROP_IN)?;
    fs::create_dir_all(CONFIG)?;
    for file in [INPUT, OUTPUT, SAID] {
        let _ = fs::remove_file(file);
    }
    nix::unistd::mkfifo(INPUT, nix::sys::stat::Mode::from_bits_truncate(0o600))?;
    fs::write(OUTPUT, "")?;
    let mut config = format!(
        "kernel = \"/lab/guest-kernel\"\ninitrd = \"/lab/guest-initramfs\"\nmem = \"256M\"\n\
         cmdline = \"console=ttyS0 {CMDLINE}\"\n\
         host-topology = true\ncpus = {}\n",
        pcpus.len()
    );
    for (vcpu, pcpu) in pcpus.iter().enumerate() {
        config.push_str(&format!("[vcpu.{vcpu}]\npin = {pcpu}\n"));
    }
    fs::write(format!("{CONFIG}/lab.toml"), config)?;
    let drop_in = format!(
        "[Service]\nStandardInput=file:{INPUT}\nStandardOutput=file:{OUTPUT}\n\
         StandardError=file:{SAID}\n{DROP_IN_LIMITS}\n{lines}\n"
    );
    fs::write(format!("{DROP_IN}/lab.conf"), drop_in)?;
    systemctl(&["daemon-reload"]).map(drop)
}

/// Starts the unit; its guest.
fn start() -> Result<Vm> {
    let mut relay = Command::new("/bin/busybox");
    let script = format!("busybox tail -f {OUTPUT} & exec busybox cat > {INPUT}");
    let mut vm = Vm::spawn(relay.args(["sh", "-c", &script]))?;
    systemctl(&["start", UNIT])?;
    let pid = systemctl(&["show", "--property=MainPID", "--value", UNIT])?;
    vm.set_vmm(pid.parse().with_context(|| format!("MainPID {pid}"))?);
    Ok(vm)
}

/// Whether the unit's limits are as written, every thread of the VMM and its guardian is below
/// them, and they are what is counted there.
fn limits(vm: &Vm) -> Result<LabVerdict> {
    let mut outside = Vec::new();
    let mut tasks = 0;
    for pid in processes()? {
        for (tid, name) in threads(pid)? {
            tasks += 1;
            let group = group_of(pid, tid)?;
            if !format!("/sys/fs/cgroup{group}/").starts_with(&format!("{GROUP}/")) {
                outside.push(format!("{name}: {group}"));
            }
        }
    }
    let in_force: Vec<(&str, String)> = LIMITS
        .iter()
        .map(|(file, _)| Ok((*file, sysfs::text(format!("{GROUP}/{file}"))?)))
        .collect::<Result<_>>()?;
    let as_written = in_force
        .iter()
        .zip(LIMITS)
        .all(|(is, shall)| is.1 == shall.1);
    let counted: usize = sysfs::number(format!("{GROUP}/pids.current"))?;
    let memory: u64 = sysfs::number(format!("{GROUP}/memory.current"))?;
    let figures = json!({
        "outside": outside, "limits": in_force, "tasks": tasks,
        "pids_current": counted, "memory_current": memory,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_none("no thread is outside", &outside)
        .check("limits as written", as_written, &in_force)
        .check("each task is counted", counted == tasks, (counted, tasks))
        .check("memory is counted", memory > TOUCHED, memory)
        .check("the VMM is no init", vm.pid() > 1, vm.pid()))
}

/// A quota of half a CPU, set while the guest runs, stops its busy vCPUs: how often.
fn throttled(vm: &mut Vm, vcpus: usize) -> Result<u64> {
    let count = || -> Result<u64> {
        let text = sysfs::text(format!("{GROUP}/cpu.stat"))?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("nr_throttled "));
        Ok(line.context("no nr_throttled")?.parse()?)
    };
    let before = count()?;
    systemctl(&["set-property", "--runtime", UNIT, "CPUQuota=50%"])?;
    for vcpu in 0..vcpus {
        vm.ask(format!("start busy{vcpu} busy {vcpu}"))?;
    }
    sleep(SOON);
    for vcpu in 0..vcpus {
        vm.ask(format!("stop busy{vcpu}"))?;
    }
    let after = count()?;
    systemctl(&["set-property", "--runtime", UNIT, "CPUQuota=200%"])?;
    Ok(after - before)
}

/// kill -9 of the VMM: its guardian, which is in its group, leaves and removes that.
fn killed(policies: &[Policy]) -> Result<LabVerdict> {
    write_unit(&first_cpus(policies), "")?;
    let mut vm = start()?;
    vm.expect("@ready", BOOT)?;
    let by_group = group_of(vm.pid(), vm.vcpu_tid(0)?)?.contains("/domain");
    let pid = Pid::from_raw(i32::try_from(vm.pid())?);
    send(pid, Signal::SIGKILL).context("killing the VMM")?;
    let ended = ended("ExecMainStatus=9")?;
    Ok(LabVerdict::default()
        .check("clamped by a group", by_group, ())
        .part("ended", ended))
}

/// `systemctl stop` is no failure.
fn stopped(policies: &[Policy]) -> Result<LabVerdict> {
    write_unit(&first_cpus(policies), "")?;
    let mut vm = start()?;
    vm.expect("@ready", BOOT)?;
    systemctl(&["stop", UNIT])?;
    ended("ActiveState=inactive")
}

/// The unit ends with this status, and leaves neither group nor record nor process.
fn ended(status: &str) -> Result<LabVerdict> {
    let look = || systemctl(&["show", "--property=ActiveState,ExecMainStatus", UNIT]);
    let has_ended = |state: &String| {
        let ends = ["ActiveState=inactive", "ActiveState=failed"];
        ends.iter().any(|end| state.contains(end))
    };
    let state = settled(10 * SOON, look, has_ended)?;
    let good = state.contains(status);
    let mut left: Vec<String> = processes()?
        .iter()
        .map(|pid| format!("process {pid}"))
        .collect();
    for path in [GROUP, "/run/vcpufreq"] {
        left.extend(fs::exists(path)?.then(|| path.to_owned()));
    }
    let figures = json!({ "state": state, "left": left });
    Ok(LabVerdict::with_figures(figures)
        .check("its end", good, &state)
        .check_none("nothing is left", &left))
}

/// `doctor` names the place, and `--cgroup-parent` is refused where a limit would end.
fn tools() -> Result<LabVerdict> {
    let doctor = |lines: &str| -> Result<String> {
        let (_, said, _) = tool(lines, "doctor")?;
        let line = said.lines().find(|line| line.contains(" cgroup "));
        Ok(line.unwrap_or(&said).to_owned())
    };
    let delegated = doctor(&format!(
        "Delegate=cpu\nSlice=vcpufreq.slice\n\
         ExecStartPre=/bin/sh -c 'echo max > {SLICE}/cpu.uclamp.min'"
    ))?;
    let plain = doctor("")?;
    let mut refusals = Vec::new();
    // By default a service has a limit of its own: TasksMax.
    for (lines, says) in [
        ("MemoryMax=1G\nTasksMax=infinity", "memory.max"),
        ("CPUQuota=50%\nTasksMax=infinity", "cpu.max"),
        ("TasksMax=64", "pids.max"),
        (
            "DeviceAllow=/dev/kvm rw\nTasksMax=infinity",
            "cgroup_device",
        ),
        ("IPAddressDeny=any\nTasksMax=infinity", "cgroup_inet"),
    ] {
        refusals.push(refused(lines, says)?);
    }
    let advised = ADVICE.iter().all(|word| plain.contains(word));
    let figures = json!({ "doctor": [delegated, plain] });
    Ok(LabVerdict::with_figures(figures)
        .parts("refusals", refusals)
        .check(
            "doctor names the cgroup",
            delegated.contains(TOOL),
            &delegated,
        )
        .check("doctor advises", advised, &plain))
}

fn refused(lines: &str, says: &str) -> Result<LabVerdict> {
    let run = "run --kernel /lab/guest-kernel --cgroup-parent /sys/fs/cgroup";
    let (status, _, said) = tool(lines, run)?;
    let one_line = said.lines().count() == 1;
    let figures = json!({ "lines": lines, "said": said });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("the exit code", &status, "2")
        .check("one line", one_line, &said)
        .check("it names the limit", said.contains(says), &said))
}

/// The program in a service of its own: its exit status, stdout and stderr.
fn tool(lines: &str, words: &str) -> Result<(String, String, String)> {
    let [out, err] = ["/run/tool.out", "/run/tool.err"];
    let text = format!(
        "[Unit]\nStartLimitIntervalSec=0\n[Service]\nType=oneshot\nRemainAfterExit=yes\nSuccessExitStatus=1 2\nExecStart=/bin/vcpufreq {words}\n\
         StandardOutput=truncate:{out}\nStandardError=truncate:{err}\n{lines}\n"
    );
    fs::write(format!("/run/systemd/system/{TOOL}"), text)?;
    systemctl(&["daemon-reload"])?;
    systemctl(&["restart", TOOL])?;
    let status = systemctl(&["show", "--property=ExecMainStatus", "--value", TOOL])?;
    Ok((status, sysfs::text(out)?, sysfs::text(err)?))
}

/// `cleanup` beside a VMM of another PID namespace, which has made its group and isn't in it yet:
/// no process has its number here. Once a process has been in it, it is a leftover.
fn being_made() -> Result<LabVerdict> {
    const FRESH: &str = "/sys/fs/cgroup/vcpufreq.4100000";
    let cleanup = || -> Result<bool> {
        Command::new("/bin/vcpufreq").arg("cleanup").output()?;
        Ok(fs::exists(FRESH)?)
    };
    fs::create_dir(FRESH)?;
    let rest = format!("{FRESH}/rest");
    fs::create_dir(&rest)?;
    sysfs::write(format!("{rest}/cgroup.type"), "threaded")?;
    let while_made = cleanup()?;
    let mut after_use = None;
    if while_made {
        let script = format!("echo $$ > {rest}/cgroup.procs; busybox true");
        Command::new("/bin/busybox")
            .args(["sh", "-c", &script])
            .status()?;
        after_use = Some(cleanup()?);
    }
    let figures = json!({ "there_while_made": while_made, "there_after_use": after_use });
    Ok(LabVerdict::with_figures(figures)
        .check("there while it is made", while_made, ())
        .check_eq("gone after use", &after_use, Some(false)))
}

/// A thread's cgroup, as the kernel names it.
fn group_of(pid: u32, tid: i32) -> Result<String> {
    let text = sysfs::text(format!("/proc/{pid}/task/{tid}/cgroup"))?;
    Ok(text.trim_start_matches("0::").to_owned())
}
