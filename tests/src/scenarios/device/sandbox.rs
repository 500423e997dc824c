// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is left to code that has taken the VMM over. Its threads are made to do system calls.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use vcpufreq_tests::LabVerdict;

use crate::harness::console_commands::dmesg;
use crate::harness::injected_call::{Argument, inject};
use crate::harness::leftovers::{left_soon, leftovers, own_cgroups};
use crate::harness::plan::{Plan, first_cpus};
use crate::harness::policy::Policy;
use crate::harness::vm::Vm;
use crate::harness::vmm::Setup;
use crate::harness::wait::{SOON, settled, wait_until};

/// The threads of a VMM, by the beginning of their names: one of each class.
const CLASSES: [&str; 7] = [
    "vcpufreq",
    "vcpu",
    "requests",
    "maintenance",
    "stats",
    "tune",
    "events",
];
/// In which a VMM is set up.
const SET_UP: Duration = Duration::from_secs(30);
/// A file that each user may write, and one that isn't there.
const FILE: &str = "/run/writable";
const NO_FILE: &str = "/run/made";
/// A limit of the file size that the sandbox sets, for a guest without a console: its log alone.
const FILE_SIZE: u64 = 1 << 30;
/// Of the limit of open files, what comes on top of those at the guest's start, and for each vCPU.
const MORE_FILES: u64 = 512;
const VCPU_FILES: u64 = 4;
/// What is sent to the guardian.
const MESSAGES: usize = 4;

/// A system call that ends the VMM: what it is for, its number, its arguments.
type ForbiddenCall = (&'static str, i64, Vec<Argument>);

/// A thread of a VMM.
struct VmmThread {
    tid: i32,
    class: &'static str,
    status: String,
}

/// By each path the guest works, and no thread of its VMM has a right but those of its class.
pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let setup = plan.mirroring(&first_cpus(&Policy::all()?));
    let mut all = Vec::new();
    for path in ["auto", "ioeventfd", "shm", "exit"] {
        let setup = setup.clone().with(&["--path", path]);
        all.push(rights(&setup, path)?);
    }
    all.push(limits(&setup)?);
    Ok(LabVerdict::default().parts("all", all))
}

/// One call of another class ends the process, and the host is as before. What is left to an open
/// VMM touches neither files, nor another VMM, nor BPF, nor what its guardian could.
pub fn attacked(plan: &Plan) -> Result<LabVerdict> {
    let setup = plan.mirroring(&first_cpus(&Policy::all()?));
    let mut all = Vec::new();
    for class in CLASSES {
        let socket = [libc::AF_INET, libc::SOCK_STREAM, 0].map(number).to_vec();
        let payload = ("make a socket", libc::SYS_socket, socket);
        all.push(ends(&setup, class, &payload, &leftovers)?);
    }
    all.extend(attacks(&setup)?);
    all.push(escapes(&setup)?);
    Ok(LabVerdict::default().parts("all", all))
}

/// The guest works, and every thread of its VMM is confined.
fn rights(setup: &Setup, path: &str) -> Result<LabVerdict> {
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
    let errors = vm.quit()?;
    let left = leftovers()?;
    let figures = json!({
        "path": path, "classes": classes, "loose": loose, "left": left, "vmm_said": errors,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_none("each thread is confined", &loose)
        .check_none("nothing is left", &left)
        .check(
            "each class has a thread",
            classes == expected.collect(),
            &classes,
        ))
}

/// A VMM without a console and events is limited in open files and their size.
fn limits(setup: &Setup) -> Result<LabVerdict> {
    let setup = Setup {
        silent: true,
        ..setup.clone()
    };
    let setup = setup.with(&["--console", "none"]);
    let vm = set_up(&setup)?;
    let limits = fs::read_to_string(format!("/proc/{}/limits", vm.pid()))?;
    let limit = |name: &str| {
        let mut lines = limits.lines();
        let values = lines.find_map(|line| line.strip_prefix(name))?;
        let mut values = values.split_whitespace().map(str::parse::<u64>);
        Some([values.next()?.ok()?, values.next()?.ok()?])
    };
    let files = fs::read_dir(format!("/proc/{}/fd", vm.pid()))?;
    let numbers = files.filter_map(|file| file.ok()?.file_name().to_str()?.parse::<u64>().ok());
    let highest = numbers.max().context("no open file")?;
    let (open, size) = (limit("Max open files"), limit("Max file size"));
    vm.kill()?;
    let left = left_soon()?;
    let more = MORE_FILES + VCPU_FILES * u64::try_from(setup.pins.len())?;
    let bounded = |[soft, hard]: [u64; 2]| soft == hard && (more..=more + highest).contains(&soft);
    let figures = json!({ "open_files": open, "file_size": size, "highest": highest });
    Ok(LabVerdict::with_figures(figures)
        .check_none("nothing is left", &left)
        .check_eq("the size of files", &size, Some([FILE_SIZE; 2]))
        .check(
            "the number of files",
            open.is_some_and(bounded),
            (open, more, highest),
        ))
}

/// A thread of this class makes a call that isn't its class'. A file that it opens is written. What of
/// the `host` can be seen stays the same.
fn ends(
    setup: &Setup,
    class: &str,
    (what, call, arguments): &ForbiddenCall,
    host: &dyn Fn() -> Result<Vec<String>>,
) -> Result<LabVerdict> {
    let before = host()?;
    let vm = set_up(setup)?;
    let threads = threads(vm.pid())?;
    let thread = threads.iter().find(|thread| thread.class == class);
    let thread = thread.with_context(|| format!("no thread is {class}"))?;
    let answer = inject(vm.pid(), thread.tid, *call, arguments)?;
    if *call == libc::SYS_openat && answer >= 0 {
        let text = [Argument::Number(answer), Argument::text("max"), number(3)];
        inject(vm.pid(), thread.tid, libc::SYS_write, &text)?;
    }
    // It isn't reaped yet.
    let file = format!("/proc/{}/stat", vm.pid());
    let stat = || Ok(fs::read_to_string(&file)?);
    let ended = settled(SOON, stat, |stat| stat.contains(") Z "))?.contains(") Z ");
    let by_filter = dmesg(&format!(" pid={} ", vm.pid()))?;
    let after = settled(2 * SOON, host, |now| *now == before)?;
    vm.kill()?;
    let figures = json!({
        "class": class, "tried": what, "ended": ended, "by_filter": by_filter,
        "before": before, "after": after,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("the VMM ends", ended, (class, what))
        .check("by its filter", by_filter.contains(" sig=31 "), &by_filter)
        .check("the host is as before", after == before, (&before, &after)))
}

/// What code that has taken a VMM over would do to the host and to another VMM, by the main thread: it
/// has the most rights.
fn attacks(setup: &Setup) -> Result<Vec<LabVerdict>> {
    let other = set_up(setup)?;
    let clamp = clamp_file()?;
    fs::write(FILE, "kept")?;
    fs::set_permissions(FILE, Permissions::from_mode(0o666))?;
    let host = || {
        let made = fs::exists(NO_FILE)?.then(|| NO_FILE.to_owned());
        let texts = [fs::read_to_string(FILE)?, fs::read_to_string(&clamp)?];
        Ok([leftovers()?, texts.to_vec(), made.into_iter().collect()].concat())
    };
    let ended = payloads(&other, &clamp)?
        .iter()
        .map(|payload| ends(setup, "vcpufreq", payload, &host))
        .collect::<Result<_>>()?;
    other.kill()?;
    left_soon()?;
    Ok(ended)
}

fn payloads(other: &Vm, clamp: &str) -> Result<Vec<ForbiddenCall>> {
    let open = |path: &str, flags: i32| {
        let path = Argument::text(path);
        vec![number(libc::AT_FDCWD), path, number(flags), number(0o666)]
    };
    let (write, make) = (libc::O_WRONLY, libc::O_WRONLY | libc::O_CREAT);
    let program = vec![Argument::text("/bin/vcpufreq"), number(0), number(0)];
    let pid = number(i32::try_from(other.pid())?);
    let tid = number(other.vcpu_tid(0)?);
    let kill = number(libc::SIGKILL);
    // BPF_PROG_LOAD of a socket filter without instructions.
    let attributes = Argument::Bytes([&1_u32.to_ne_bytes()[..], &[0; 60]].concat());
    Ok(vec![
        ("write a file", libc::SYS_openat, open(FILE, write)),
        ("make a file", libc::SYS_openat, open(NO_FILE, make)),
        ("another's clamp", libc::SYS_openat, open(clamp, write)),
        ("start a program", libc::SYS_execve, program),
        ("kill", libc::SYS_kill, vec![pid.clone(), kill.clone()]),
        ("kill a thread", libc::SYS_tgkill, vec![pid, tid, kill]),
        (
            "load BPF",
            libc::SYS_bpf,
            vec![number(5), attributes, number(64)],
        ),
    ])
}

/// The clamp of the only VM's first domain.
fn clamp_file() -> Result<String> {
    let groups = own_cgroups()?;
    let group = groups.first().context("no cgroup")?;
    Ok(format!("{group}/domain0/cpu.uclamp.min"))
}

/// What the main thread is refused without an end.
fn escapes(setup: &Setup) -> Result<LabVerdict> {
    let other = set_up(setup)?;
    let groups = own_cgroups()?;
    let clamp = clamp_file()?;
    let others = leftovers()?;
    let vm = set_up(setup)?;
    let before = leftovers()?;
    let threads = threads(vm.pid())?;
    let main = threads.iter().find(|thread| thread.class == "vcpufreq");
    let main = main.context("no main thread")?.tid;
    let call = |call: i64, arguments: &[Argument]| inject(vm.pid(), main, call, arguments);
    let open = |path: &str| {
        let (path, flags) = (Argument::text(path), number(libc::O_RDONLY));
        call(libc::SYS_openat, &[number(libc::AT_FDCWD), path, flags])
    };
    let thread = number(other.vcpu_tid(0)?);
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
    let clamp = open(&clamp)?;
    let program_file = open("/bin/vcpufreq")?;
    let memory = open(&format!("/proc/{}/mem", other.pid()))?;
    let cpus = open("/sys/devices/system/cpu/possible")?;
    let told = tell_guardian(vm.pid(), &call, other.pid())?;
    let after = leftovers()?;
    let refused = |answer: i64, errno: i32| answer == -i64::from(errno);
    let files = [record, group, clamp, program_file, memory];
    let no_file = files.iter().all(|answer| refused(*answer, libc::EACCES));
    vm.kill()?;
    let left = settled(SOON, leftovers, |left| *left == others)?;
    other.kill()?;
    let figures = json!({
        "clamped": clamped, "moved": moved,
        "opened": [record, group, clamp, program_file, memory, cpus],
        "told": told, "before": before, "after": after, "left": left,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("no clamp", refused(clamped, libc::EPERM), clamped)
        .check("no move", refused(moved, libc::EPERM), moved)
        .check("no file of another", no_file, files)
        .check("the list of CPUs is readable", cpus >= 0, cpus)
        .check_eq("the guardian is told", &told, MESSAGES)
        .check("nothing changes", after == before, (&before, &after))
        .check(
            "the other's is left alone",
            left == others,
            (&left, &others),
        ))
}

/// Sends what is no request by each socket of a VMM. How much of it one has taken: the guardian's.
fn tell_guardian(
    vmm: u32,
    call: &dyn Fn(i64, &[Argument]) -> Result<i64>,
    other: u32,
) -> Result<usize> {
    let record = format!("/run/vcpufreq/{other}.json");
    let messages = [
        record.as_bytes().to_vec(),
        [b"u", record.as_bytes()].concat(),
        b"\0\0\0\0\0\0\0\0u".to_vec(),
        vec![b'u'; 8],
    ];
    let mut taken = 0;
    for file in fs::read_dir(format!("/proc/{vmm}/fd"))? {
        let file = file?;
        if !fs::read_link(file.path())?
            .to_string_lossy()
            .starts_with("socket:")
        {
            continue;
        }
        let fd = Argument::Number(file.file_name().to_string_lossy().parse()?);
        for message in &messages {
            let length = i64::try_from(message.len())?;
            let bytes = Argument::Bytes(message.clone());
            let answer = call(
                libc::SYS_write,
                &[fd.clone(), bytes, Argument::Number(length)],
            )?;
            taken += usize::from(answer == length);
        }
    }
    Ok(taken)
}

fn number(number: i32) -> Argument {
    Argument::Number(number.into())
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
