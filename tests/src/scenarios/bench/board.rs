// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq demo`, `bench` and `report` as on a board: without a file named, and interrupted.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use crate::harness::fair_server::floor_khz;
use crate::harness::leftovers::{CGROUPS, leftovers, qemus};
use crate::harness::machine::mount_bpffs;
use crate::harness::policy::Policy;
use crate::harness::schema;
use crate::harness::sysfs;

const PROGRAM: &str = "/bin/vcpufreq";
const OUT: &str = "/run/board.json";
const PAGE: &str = "/run/board.html";
const USER: u32 = 1000;
const DELEGATED: &str = "/sys/fs/cgroup/vms";
const CONTROLLERS: &str = "cgroup.subtree_control";
const SCHEDUTIL: &str = "schedutil";
/// The governor of one policy, as a board's kernel may have it.
const OTHER: &str = "performance";
/// It holds frequencies: there is something to put back.
const HOLDS: [&str; 7] = bench_of("work.infer_small", "host");
/// Its VMM and its load program end with it.
const GUEST: [&str; 7] = bench_of("work.infer_small", "vm+bridge");
/// SIGINT comes as a terminal sends it: to the process group.
const SIGNALS: [Signal; 8] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGKILL,
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGKILL,
    Signal::SIGQUIT,
];
/// Moments for bench, for bench with a guest, and for demo, in a span of time each. No number is a
/// multiple of [`STRIDE`].
const OF_BENCH: (u32, Duration) = (8, Duration::from_millis(1300));
const OF_GUEST: (u32, Duration) = (8, Duration::from_millis(5000));
const OF_DEMO: (u32, Duration) = (11, Duration::from_millis(2800));
/// From one moment to the next: all parts are visited, not in order.
const STRIDE: u32 = 5;
/// Of bench from when rt-app has its folder.
const OF_RT_APP: (u32, Duration) = (3, Duration::from_millis(300));
const RT_APP: [&str; 7] = bench_of("periodic", "host");
const RT_APP_FOLDER: &str = "vcpufreq-load-";
/// It runs once the host has settled.
const SETTLED: Duration = Duration::from_secs(30);
/// What a report may have.
const SCHEMA: &str = include_str!("../../../../vmm/report.schema.json");
/// In no report.
const HOST_NAME: &str = "jo-doe";
/// What this has neither; the lab's PC has one, and no emulated board.
const SERIAL: &str = "/sys/class/dmi/id/product_serial";
/// Of report, before it writes its files.
const OF_REPORT: (u32, Duration) = (3, Duration::from_millis(6000));
const REPORT: [&str; 11] = [
    "report",
    "--scenario",
    "step-down",
    "--variant",
    "vm+bridge",
    "--repeats",
    "1",
    "--out",
    OUT,
    "--html",
    PAGE,
];
const STDERR: &str = "/run/board.err";
/// A VMM tidies up once its bench has ended.
const SOON: Duration = Duration::from_secs(2);

/// A bench of one scenario on one variant, once.
const fn bench_of(scenario: &'static str, variant: &'static str) -> [&'static str; 7] {
    [
        "bench",
        "--scenario",
        scenario,
        "--variant",
        variant,
        "--repeats",
        "1",
    ]
}

/// The demo's rows are those of all OPPs and right, without root too; a report has all its parts;
/// and bench and demo leave nothing when a signal ends them. They choose schedutil where another
/// governor is, and put that back.
pub fn run() -> Result<LabVerdict> {
    mount_bpffs()?;
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let governor = format!("{}/scaling_governor", policy.path);
    sysfs::write(&governor, OTHER)?;
    // For the user other than root; what is interrupted has to leave it.
    sysfs::write(format!("{CGROUPS}/{CONTROLLERS}"), "+cpu")?;
    let before = state()?;
    let demo = demo(&mut Command::new(PROGRAM), (0, 1))?;
    let without_root = demo_without_root(&governor)?;
    let report = report()?;
    let ends = ends(
        &[&WITHOUT_RT_APP[..], &[(&RT_APP, OF_RT_APP)]].concat(),
        &before,
    )?;
    sysfs::write(&governor, SCHEDUTIL)?;
    Ok(LabVerdict::default()
        .part("demo", demo)
        .part("without_root", without_root)
        .part("report", report)
        .part("ends", ends))
}

/// They leave nothing, where there is no rt-app: their guests may be QEMU's.
pub fn ends_alone() -> Result<LabVerdict> {
    mount_bpffs()?;
    let policies = Policy::all()?;
    let policy = policies.last().context("no policy")?;
    let governor = format!("{}/scaling_governor", policy.path);
    sysfs::write(&governor, OTHER)?;
    let ends = ends(&WITHOUT_RT_APP, &state()?);
    sysfs::write(&governor, SCHEDUTIL)?;
    ends
}

/// A program's words, at how many moments it is ended, and their span of time.
type EndedProgram = (&'static [&'static str], (u32, Duration));

const WITHOUT_RT_APP: [EndedProgram; 4] = [
    (&HOLDS, OF_BENCH),
    (&GUEST, OF_GUEST),
    (&["demo"], OF_DEMO),
    (&REPORT, OF_REPORT),
];

/// What they leave.
fn ends(programs: &[EndedProgram], before: &BTreeMap<String, String>) -> Result<LabVerdict> {
    let ends = interrupt_each(programs, before)?;
    let count = |of: fn(&SignalledEnd) -> bool| ends.iter().filter(|end| of(end)).count();
    let (changes, governors) = (count(|end| end.changes), count(|end| end.governor));
    let rt_apps = count(|end| end.rt_app);
    let left: Vec<&String> = ends.iter().flat_map(|end| &end.left).collect();
    let has_rt_app = programs.iter().any(|(words, _)| *words == RT_APP);
    let at_work = changes > 0 && governors > 0 && (rt_apps > 0 || !has_rt_app);
    let figures = json!({
        "kills": ends.len(),
        "ended_with_changes_on_the_host": changes,
        "ended_with_another_governor": governors,
        "ended_beside_rt_app": rt_apps, "left": left,
    });
    Ok(LabVerdict::with_figures(figures)
        .check_none("nothing is left", &left)
        .check("some ended at work", at_work, (changes, governors, rt_apps)))
}

/// Ends each program at its moments. One that heeds no signal has that as what is left.
fn interrupt_each(
    programs: &[EndedProgram],
    before: &BTreeMap<String, String>,
) -> Result<Vec<SignalledEnd>> {
    let mut ends = Vec::new();
    for &(options, (moments, span)) in programs {
        let mut heeds = false;
        for number in 0..moments {
            let signal = SIGNALS[number as usize % SIGNALS.len()];
            // The first, a Ctrl-C, is not at the start.
            let after = span / moments * ((number * STRIDE + 1) % moments);
            let by_cleanup = number / 4 % 2 == 0;
            let mut end = interrupted(options, (signal, after, by_cleanup), before)?;
            heeds |= end.by_itself;
            if number + 1 == moments && !heeds {
                end.left
                    .push(format!("{} heeded no signal", options.join(" ")));
            }
            ends.push(end);
        }
    }
    Ok(ends)
}

/// The demo, as with another driver of the guest, or on another architecture.
pub fn demo_alone() -> Result<LabVerdict> {
    mount_bpffs()?;
    demo(&mut Command::new(PROGRAM), (0, 0))
}

/// As a user with a delegated cgroup, as the page of the program has it.
fn demo_without_root(governor: &str) -> Result<LabVerdict> {
    let start = format!("{DELEGATED}/start");
    let runtime = format!("/run/user/{USER}");
    fs::create_dir_all(&start)?;
    fs::create_dir_all(&runtime)?;
    sysfs::write(format!("{DELEGATED}/cpu.uclamp.min"), "max")?;
    let files = ["cgroup.procs", CONTROLLERS, "cgroup.threads"];
    let of = |folder: &str| files.map(|file| format!("{folder}/{file}"));
    let own = [DELEGATED.to_owned(), start.clone(), runtime.clone()];
    for path in own.into_iter().chain(of(DELEGATED)).chain(of(&start)) {
        chown(&path, Some(USER), Some(USER)).with_context(|| path.clone())?;
    }
    fs::set_permissions("/dev/kvm", fs::Permissions::from_mode(0o666))?;
    sysfs::write(format!("{start}/cgroup.procs"), std::process::id())?;
    let program = || {
        let mut command = Command::new(PROGRAM);
        command.uid(USER).gid(USER).env("XDG_RUNTIME_DIR", &runtime);
        command
    };
    let refused = refused(&mut program());
    sysfs::write(governor, SCHEDUTIL)?;
    // The program has BPF, and this user may not load it.
    let result = demo(&mut program(), (1, 0));
    sysfs::write(governor, OTHER)?;
    sysfs::write(format!("{CGROUPS}/cgroup.procs"), std::process::id())?;
    fs::set_permissions("/dev/kvm", fs::Permissions::from_mode(0o600))?;
    fs::remove_dir_all(runtime)?;
    fs::remove_dir(start)?;
    fs::remove_dir(DELEGATED)?;
    Ok(result?.part("refused", refused?))
}

/// A user without the right to choose schedutil gets a line about that, and exit code 2.
fn refused(command: &mut Command) -> Result<LabVerdict> {
    let output = command.arg("demo").output()?;
    let said = text(&output.stderr);
    let names = [OTHER, "run as root", "scaling_governor"];
    let one_line = said.lines().count() == 1 && names.iter().all(|name| said.contains(name));
    let code = output.status.code();
    let figures = json!({ "exit_code": code, "said": said });
    Ok(LabVerdict::with_figures(figures)
        .check("one line names it", one_line, &said)
        .check_eq("the exit code", &code, Some(2)))
}

/// Every OPP is right. So many lines name a better path that the guest goes without, and so many
/// governors.
fn demo(command: &mut Command, (notes, governors): (usize, usize)) -> Result<LabVerdict> {
    // Another user can't make a file there.
    fs::write(OUT, "")?;
    fs::set_permissions(OUT, fs::Permissions::from_mode(0o666))?;
    let output = command.args(["demo", "--out", OUT]).output()?;
    let report = fs::read_to_string(OUT).unwrap_or_default();
    let report: Value = serde_json::from_str(&report).unwrap_or_default();
    let mut wanted = Vec::new();
    for policy in one_of_each_kind()? {
        let floor = floor_khz(&policy)?;
        let down = policy.opps.iter().rev().skip(1);
        let each = policy.opps.iter().chain(down);
        wanted.extend(each.map(|&asked| (policy.cpu(), asked, policy.at_least(asked.max(floor)))));
    }
    let rows = report["rows"].as_array().cloned().unwrap_or_default();
    let row = |row: &Value, (cpu, asked, is): &(u32, u32, u32)| {
        row["pcpu"] == *cpu
            && row["asked_khz"] == *asked
            && row["host_khz"] == *is
            && row["guest_reads_khz"] == *is
    };
    let same = rows.len() == wanted.len() && rows.iter().zip(&wanted).all(|(one, is)| row(one, is));
    let said = text(&output.stderr);
    let lines = |with: &str| said.lines().filter(|line| line.contains(with)).count();
    // QEMU's guests have one path.
    let notes = if cfg!(target_arch = "aarch64") {
        notes
    } else {
        0
    };
    let noted = lines("without the path bpf") == notes
        && lines(&format!("{OTHER} → {SCHEDUTIL}")) == governors;
    let elapsed = &report["elapsed_s"];
    let figures = json!({
        "exit_code": output.status.code(), "elapsed_s": elapsed,
        "opps_checked": rows.len(), "opps_wrong": report["opps_wrong"],
        "rows": rows, "table": text(&output.stdout), "said": said,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("the demo succeeds", output.status.success(), &said)
        .check("each OPP is in force", same, &rows)
        .check("its notes", noted, &said)
        .check("its time", elapsed.is_u64(), elapsed))
}

/// The policies that the demo tries, in its order: by their CPUs, and of equal ones the first.
fn one_of_each_kind() -> Result<Vec<Policy>> {
    let mut policies = Policy::all()?;
    let mut kinds = BTreeSet::new();
    policies.retain(|policy| kinds.insert((policy.capacity, policy.opps.clone())));
    Ok(policies)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).trim().to_owned()
}

/// A page with all parts, with a bench of one scenario, and a file as the schema has it, both without
/// the host's name and serial number. The exit code tells of findings.
pub fn report() -> Result<LabVerdict> {
    sysfs::write("/proc/sys/kernel/hostname", HOST_NAME)?;
    let mut command = Command::new(PROGRAM);
    let output = command.args(REPORT).output()?;
    let file = fs::read_to_string(OUT)?;
    let page = fs::read_to_string(PAGE)?;
    let serial = fs::read_to_string(SERIAL).ok();
    let serial = serial.as_deref().map(str::trim);
    let own = [Some(HOST_NAME), serial].into_iter().flatten();
    let private: Vec<_> = own
        .filter(|own| file.contains(own) || page.contains(own))
        .collect();
    let has_serial = serial.is_some_and(|one| !one.is_empty()) || cfg!(target_arch = "aarch64");
    let report: Value = serde_json::from_str(&file)?;
    let fault = schema::fault(&serde_json::from_str(SCHEMA)?, &report);
    let parts = ["<h2>doctor</h2>", "The loop is closed", "<svg", "</html>"];
    let whole = parts.iter().all(|part| page.contains(part));
    let count = |value: &Value| value.as_array().map_or(0, Vec::len);
    let (results, rows) = (
        count(&report["bench"]["results"]),
        count(&report["demo"]["rows"]),
    );
    let figures = json!({
        "exit_code": output.status.code(), "host": report["host"], "fault": fault,
        "results": results, "rows": rows, "failures": report["bench"]["failures"],
        "said": text(&output.stderr),
    });
    // The program's own verdict.
    let demo = report["demo"]["held"] == true;
    let bench = &report["bench"];
    let mut rows_of_bench = bench["results"].as_array().into_iter().flatten();
    let finds = report["doctor"]["exit_code"] != 0
        || !demo
        || count(&bench["failures"]) > 0
        || rows_of_bench.any(|row| count(&row["unsettled"]) > 0);
    Ok(LabVerdict::with_figures(figures)
        .check("the page is whole", whole, ())
        .check("the demo's loop is closed", demo, &report["demo"])
        .check("the bench has results", results > 0, results)
        .check("the demo has rows", rows > 0, rows)
        .check("this host has a serial number", has_serial, serial)
        .check_none("neither that nor the host's name is in it", &private)
        .check_eq(
            "the exit code",
            &output.status.code(),
            Some(i32::from(finds)),
        )
        .check_none("the file is as the schema has it", fault.as_slice()))
}

/// What a signal ended, and what of it is left.
pub struct SignalledEnd {
    /// There was something to put back.
    pub changes: bool,
    /// A governor among it: a trace instance or a record alone is there for longer.
    governor: bool,
    /// rt-app had its folder.
    rt_app: bool,
    /// The program ended itself.
    by_itself: bool,
    pub left: Vec<String>,
}

/// Ends the program by a signal. After SIGKILL `cleanup` has its turn, or the next start.
pub fn interrupted(
    options: &[&str],
    (signal, after, by_cleanup): (Signal, Duration, bool),
    before: &BTreeMap<String, String>,
) -> Result<SignalledEnd> {
    for file in [OUT, PAGE] {
        let _ = fs::remove_file(file);
    }
    let mut child = Command::new(PROGRAM)
        .args(options)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(fs::File::create(STDERR)?)
        .process_group(0)
        .spawn()?;
    if options == RT_APP {
        until_rt_app()?;
    }
    sleep(after);
    let (now, rt_app) = (state()?, !rt_app_folders()?.is_empty());
    let governor = differences(before, &now)
        .iter()
        .any(|one| one.contains("/scaling_governor: "));
    let pid = Pid::from_raw(i32::try_from(child.id())?);
    let runs = child.try_wait()?.is_none();
    // It may have ended by itself, which is as good.
    let _ = match signal {
        Signal::SIGINT => killpg(pid, signal),
        _ => kill(pid, signal),
    };
    let ended = waited(&mut child)?;
    sleep(SOON);
    let mut left: Vec<String> = match ended {
        Some(status) if runs => not_as_by(signal, status)?,
        Some(_) => Vec::new(),
        None => vec!["the program itself".to_owned()],
    };
    if signal == Signal::SIGKILL {
        // The next start does the same, here one that can't measure.
        let next = ["demo", "--kernel", "/none", "--initrd", "/none"];
        let options = if by_cleanup { &["cleanup"][..] } else { &next };
        Command::new(PROGRAM).args(options).output()?;
    }
    left.extend(differences(before, &state()?));
    left.extend(leftovers()?);
    left.extend(qemus()?.iter().map(|pid| format!("QEMU, process {pid}")));
    let at = |one| format!("{options:?}, {} after {after:?}: {one}", signal.as_str());
    Ok(SignalledEnd {
        changes: now != *before,
        governor,
        rt_app,
        by_itself: ended.is_some_and(|status| status.signal().is_none()),
        left: left.into_iter().map(at).collect(),
    })
}

/// What of the end isn't as after a signal: the exit code, which is 128 and the signal's number, the
/// line on stderr, and that no report is there. Before a program heeds a signal it ends by the signal.
fn not_as_by(signal: Signal, status: ExitStatus) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    let number = signal as i32;
    let by_itself = status.code() == Some(128 + number) && signal != Signal::SIGKILL;
    if !by_itself && status.signal() != Some(number) {
        wrong.push(format!("it ended with {status}"));
    }
    let said = fs::read_to_string(STDERR)?;
    let line = format!("vcpufreq: ended by {}; ", signal.as_str());
    if by_itself && said.lines().filter(|one| one.starts_with(&line)).count() != 1 {
        wrong.push(format!("it said: {said}"));
    }
    let files = [OUT, PAGE]
        .into_iter()
        .filter(|file| Path::new(file).exists());
    wrong.extend(files.map(str::to_owned));
    Ok(wrong)
}

/// How it ended; `None` where it had to be killed.
fn waited(child: &mut Child) -> Result<Option<ExitStatus>> {
    let end = Instant::now() + 5 * SOON;
    while Instant::now() < end {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        sleep(Duration::from_millis(10));
    }
    child.kill()?;
    child.wait()?;
    Ok(None)
}

/// The folders of rt-apps that a load program runs.
fn rt_app_folders() -> Result<Vec<String>> {
    let entries = fs::read_dir(std::env::temp_dir()).into_iter().flatten();
    let paths = entries.map(|entry| Ok(entry?.path().display().to_string()));
    let own = |path: &Result<String>| path.as_ref().is_ok_and(|path| path.contains(RT_APP_FOLDER));
    paths.filter(own).collect()
}

fn until_rt_app() -> Result<()> {
    let until = Instant::now() + SETTLED;
    while rt_app_folders()?.is_empty() && Instant::now() < until {
        sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// What demo and bench change: limits, governors, tracing, the root cgroup's controllers, folders.
pub fn state() -> Result<BTreeMap<String, String>> {
    let mut state = BTreeMap::new();
    for policy in Policy::all()? {
        for file in ["scaling_min_freq", "scaling_max_freq", "scaling_governor"] {
            let path = format!("{}/{file}", policy.path);
            let text = sysfs::text(&path)?;
            state.insert(path, text);
        }
    }
    let real_time = "/proc/sys/kernel/sched_rt_runtime_us".to_owned();
    for path in [real_time, format!("{CGROUPS}/{CONTROLLERS}")] {
        let text = sysfs::text(&path)?;
        state.insert(path, text);
    }
    for folder in ["/sys/kernel/tracing/instances", "/run/vcpufreq-bench"] {
        for entry in fs::read_dir(folder).into_iter().flatten() {
            let path = entry.context(folder)?.path();
            state.insert(path.display().to_string(), "there".to_owned());
        }
    }
    let folders = rt_app_folders()?.into_iter();
    state.extend(folders.map(|path| (path, "there".to_owned())));
    Ok(state)
}

/// What changed, came or went.
fn differences(before: &BTreeMap<String, String>, after: &BTreeMap<String, String>) -> Vec<String> {
    let changed = after
        .iter()
        .filter(|(path, is)| before.get(*path) != Some(is));
    let changed = changed.map(|(path, is)| format!("{path}: {is}"));
    let gone = before.keys().filter(|path| !after.contains_key(*path));
    changed
        .chain(gone.map(|path| format!("{path}: gone")))
        .collect()
}
