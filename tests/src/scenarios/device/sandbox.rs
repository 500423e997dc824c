// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is left to code that has taken the VMM over. Its threads are made to do system calls.

use std::collections::BTreeSet;
use std::fs;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::harness::console_commands::dmesg;
use crate::harness::injected_call::{Argument, inject};
use crate::harness::leftovers::{leftovers, own_cgroups};
use crate::harness::plan::{Plan, first_cpus};
use crate::harness::policy::Policy;
use crate::harness::vm::Vm;
use crate::harness::vmm::Setup;
use crate::harness::wait::{SOON, wait_until};

/// The threads of a VMM, by the beginning of their names: one of each class.
const CLASSES: [&str; 6] = [
    "vcpufreq",
    "vcpu",
    "requests",
    "maintenance",
    "stats",
    "events",
];
/// In which a VMM is set up.
const SET_UP: Duration = Duration::from_secs(30);
/// `AF_INET`, `SOCK_STREAM`
const SOCKET: [i64; 3] = [2, 1, 0];

/// A thread of a VMM.
struct VmmThread {
    tid: i32,
    class: &'static str,
    status: String,
}

/// Each thread of a VMM has no right but those of its class. One call of another class ends the
/// process, and the host is as before. What is left to an open VMM touches neither files, nor
/// another VMM, nor BPF.
pub fn run(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let setup = plan.mirroring(&first_cpus(&policies));
    let mut all = Vec::new();
    for path in ["auto", "ioeventfd", "shm", "exit"] {
        let setup = setup.clone().with(&["--path", path]);
        all.push(rights(&setup, path)?);
    }
    for class in CLASSES {
        all.push(ends(&setup, class)?);
    }
    all.push(escapes(&setup)?);
    let held = all.iter().all(|one| one["held"] == true);
    Ok(json!({ "held": held, "all": all }))
}

/// The guest works, and every thread of its VMM is confined.
fn rights(setup: &Setup, path: &str) -> Result<Value> {
    let vm = Vm::boot(setup)?;
    let threads = threads(vm.pid())?;
    let classes: BTreeSet<_> = threads.iter().map(|thread| thread.class).collect();
    let expected = CLASSES
        .into_iter()
        .filter(|class| path != "exit" || *class != "requests");
    let loose: Vec<_> = threads
        .iter()
        .filter(|thread| !is_confined(&thread.status))
        .map(|thread| format!("{}: {}", thread.class, thread.status))
        .collect();
    let limits = fs::read_to_string(format!("/proc/{}/limits", vm.pid()))?;
    let errors = vm.quit()?;
    let left = leftovers()?;
    let held = loose.is_empty() && left.is_empty() && classes == expected.collect();
    Ok(json!({
        "held": held, "path": path, "classes": classes, "loose": loose, "left": left,
        "open_files": limits.lines().find(|line| line.starts_with("Max open files")),
        "vmm_said": errors,
    }))
}

/// A thread of this class makes a socket.
fn ends(setup: &Setup, class: &str) -> Result<Value> {
    let vm = set_up(setup)?;
    let threads = threads(vm.pid())?;
    let thread = threads.iter().find(|thread| thread.class == class);
    let thread = thread.with_context(|| format!("no thread is {class}"))?;
    let socket = SOCKET.map(Argument::Number);
    inject(vm.pid(), thread.tid, libc::SYS_socket, &socket)?;
    sleep(SOON);
    // It isn't reaped yet.
    let stat = fs::read_to_string(format!("/proc/{}/stat", vm.pid()))?;
    let ended = stat.contains(") Z ");
    let by_filter = dmesg(&format!(" pid={} ", vm.pid()))?;
    let left = leftovers()?;
    vm.kill()?;
    Ok(json!({
        "held": ended && by_filter.contains(" sig=31 ") && left.is_empty(),
        "class": class, "ended": ended, "by_filter": by_filter, "left": left,
    }))
}

/// What the main thread is refused without an end: it has the most rights.
fn escapes(setup: &Setup) -> Result<Value> {
    let other = set_up(setup)?;
    let groups = own_cgroups()?;
    let vm = set_up(setup)?;
    let threads = threads(vm.pid())?;
    let main = threads.iter().find(|thread| thread.class == "vcpufreq");
    let main = main.context("no main thread")?.tid;
    let call = |call: i64, arguments: &[Argument]| inject(vm.pid(), main, call, arguments);
    let (here, number) = (Argument::Number(libc::AT_FDCWD.into()), Argument::Number);
    let open = |path: &str| {
        let flags = number(libc::O_RDONLY.into());
        call(
            libc::SYS_openat,
            &[here.clone(), Argument::text(path), flags],
        )
    };
    let thread = number(other.vcpu_tid(0)?.into());
    // A clamp to the maximum: struct sched_attr with SCHED_FLAG_UTIL_CLAMP and KEEP_ALL.
    let attributes = Argument::Bytes(clamp_to_the_maximum());
    let clamped = call(
        libc::SYS_sched_setattr,
        &[thread.clone(), attributes, number(0)],
    )?;
    let pcpu = Argument::Bytes(1_u64.to_ne_bytes().to_vec());
    let moved = call(libc::SYS_sched_setaffinity, &[thread, number(8), pcpu])?;
    let record = open(&format!("/run/vcpufreq/{}.json", other.pid()))?;
    let group = open(groups.first().context("no cgroup")?)?;
    let program_file = open("/bin/vcpufreq")?;
    let memory = open(&format!("/proc/{}/mem", other.pid()))?;
    let cpus = open("/sys/devices/system/cpu/possible")?;
    let refused = |answer: i64, errno: i32| answer == -i64::from(errno);
    let held = refused(clamped, libc::EPERM)
        && refused(moved, libc::EPERM)
        && [record, group, program_file, memory]
            .iter()
            .all(|answer| refused(*answer, libc::EACCES))
        && cpus >= 0;
    vm.kill()?;
    other.kill()?;
    Ok(json!({
        "held": held, "clamped": clamped, "moved": moved,
        "opened": [record, group, program_file, memory, cpus],
    }))
}

/// A VMM whose threads are all confined. Its guest may still boot.
fn set_up(setup: &Setup) -> Result<Vm> {
    let vm = Vm::start(setup)?;
    let is_main = |thread: &VmmThread| thread.class == "vcpufreq" && is_confined(&thread.status);
    wait_until("a confined VMM", SET_UP, || {
        Ok(threads(vm.pid()).is_ok_and(|threads| threads.iter().any(is_main)))
    })?;
    Ok(vm)
}

/// The threads of a process.
fn threads(pid: u32) -> Result<Vec<VmmThread>> {
    let mut threads = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?;
        let name = fs::read_to_string(task.path().join("comm"))?;
        let status = fs::read_to_string(task.path().join("status"))?;
        let known = CLASSES.into_iter().find(|class| {
            let rest = name.trim().strip_prefix(class);
            rest.is_some_and(|rest| rest.chars().all(|c| c.is_ascii_digit()))
        });
        threads.push(VmmThread {
            tid: task.file_name().to_string_lossy().parse()?,
            class: known.with_context(|| format!("a thread is {name}"))?,
            status,
        });
    }
    ensure!(!threads.is_empty(), "process {pid} has no threads");
    Ok(threads)
}

/// Another user, no capability, no new one, and a filter.
fn is_confined(status: &str) -> bool {
    let is = |key: &str, want: &dyn Fn(&str) -> bool| {
        let mut lines = status.lines();
        let value = lines.find_map(|line| line.strip_prefix(key));
        value.is_some_and(|value| want(value.trim()))
    };
    let none = |set: &str| set.chars().all(|digit| digit == '0');
    is("Uid:", &|users| {
        users.split_whitespace().all(|user| user != "0")
    }) && is("Gid:", &|groups| {
        groups.split_whitespace().all(|group| group != "0")
    }) && is("Groups:", &str::is_empty)
        && ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"]
            .iter()
            .all(|set| is(set, &none))
        && is("NoNewPrivs:", &|value| value == "1")
        && is("Seccomp:", &|value| value == "2")
}

/// As `include/uapi/linux/sched/types.h` has it.
fn clamp_to_the_maximum() -> Vec<u8> {
    const KEEP_ALL_AND_CLAMP: u64 = 0x78;
    let mut bytes = Vec::new();
    bytes.extend(56_u32.to_ne_bytes());
    bytes.extend(0_u32.to_ne_bytes());
    bytes.extend(KEEP_ALL_AND_CLAMP.to_ne_bytes());
    bytes.extend([0; 32]);
    bytes.extend(1024_u32.to_ne_bytes());
    bytes.extend(1024_u32.to_ne_bytes());
    bytes
}
