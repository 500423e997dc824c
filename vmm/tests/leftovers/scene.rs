// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A process that stands for a VMM, with cgroups, a record and a guardian.

use std::{
    fs,
    io::{self, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::OnceLock,
    thread::sleep,
    time::{Duration, Instant},
};

use nix::fcntl::OFlag;
use nix::unistd::pipe2;
use tempfile::TempDir;
use vcpufreq::lifecycle::record::{VmmRecord, owner_of};
use vcpufreq::lifecycle::state::StateDir;
use vcpufreq_host::undo::JournalEntry;
use vcpufreq_host::{GroupRecord, HostRoot};

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_vcpufreq");
/// Ends a test that would hang. A machine may be busy with something else for long.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// Where cgroup v2 is, if groups can be made there. Looked for once: the tests
/// of this process would find the probe of one another.
fn cgroups() -> Option<PathBuf> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOUND.get_or_init(look_for_cgroups).clone()
}

fn look_for_cgroups() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "))?;
    let mount = PathBuf::from(mount.split(' ').nth(4)?);
    let probe = mount.join(format!("probe-{}", std::process::id()));
    fs::create_dir(&probe).ok()?;
    fs::remove_dir(&probe).ok()?;
    Some(mount)
}

pub fn cgroups_or_skip() -> Option<PathBuf> {
    let found = cgroups();
    if found.is_none() {
        println!("SKIP: no cgroup v2 in which this user can make groups");
    }
    found
}

/// Where cgroups can be made, and a directory with that of the records in it.
pub fn scene_or_skip() -> Option<(PathBuf, TempDir, StateDir)> {
    let cgroups = cgroups_or_skip()?;
    let runtime = TempDir::new().expect("a temporary directory");
    let dir = StateDir::at(runtime.path().join("vcpufreq"));
    Some((cgroups, runtime, dir))
}

/// A process that stands for a VMM, and how far it got.
pub struct Vmm {
    pub child: Child,
    pub group: PathBuf,
    record: VmmRecord,
}

impl Vmm {
    /// Starts one whose end is the end of `output`.
    pub fn start(cgroups: &Path, output: Stdio) -> Self {
        let child = Command::new("sleep")
            .arg("3600")
            .stdin(Stdio::null())
            .stdout(output)
            .spawn()
            .expect("sleep starts");
        let owner = owner_of(&HostRoot::default(), child.id()).expect("it is in procfs");
        let group = cgroups.join(format!("vcpufreq.{}", child.id()));
        let groups = JournalEntry::Groups(GroupRecord {
            group: group.clone(),
            origin: cgroups.to_owned(),
            enabled_cpu: false,
            raised_min: false,
        });
        let record = VmmRecord {
            entries: vec![groups],
            ..VmmRecord::new(owner)
        };
        Self {
            child,
            group,
            record,
        }
    }

    /// Does the first `steps` of: record, group, its children, moving there.
    pub fn make(&self, dir: &StateDir, steps: u64) {
        let step = |number: u64, what: &dyn Fn() -> io::Result<()>| {
            if number < steps {
                what().expect("a step of the VMM");
            }
        };
        step(0, &|| dir.write(&self.record).map_err(io::Error::other));
        step(1, &|| fs::create_dir(&self.group));
        step(2, &|| fs::create_dir(self.group.join("rest")));
        step(3, &|| fs::create_dir(self.group.join("domain0")));
        let procs = self.group.join("rest/cgroup.procs");
        step(4, &|| fs::write(&procs, self.child.id().to_string()));
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("it can be killed");
    }
}

pub fn is_gone_within(limit: Duration, mut gone: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    while !gone() {
        if Instant::now() > deadline {
            return false;
        }
        sleep(Duration::from_millis(1));
    }
    true
}

/// A VMM with a guardian that is on guard.
pub fn guarded(cgroups: &Path, dir: &StateDir) -> (Vmm, Child) {
    guarded_at(cgroups, dir, Stdio::null())
}

/// The same, at a terminal.
pub fn guarded_at(cgroups: &Path, dir: &StateDir, terminal: Stdio) -> (Vmm, Child) {
    let (input, output) = pipe2(OFlag::O_CLOEXEC).expect("a pipe");
    let vmm = Vmm::start(cgroups, output.into());
    let guardian = guardian(dir, &vmm, input.into(), terminal);
    (vmm, guardian)
}

/// The program, for which `dir` is this user's directory of records.
pub fn program(dir: &StateDir) -> Command {
    let record = dir.record_path(0);
    let runtime = record
        .parent()
        .and_then(Path::parent)
        .expect("in a directory");
    let mut command = if is_root() {
        let mut command = Command::new("unshare");
        let mount = r#"mount --bind "$0" /run && exec "$@""#;
        command.args(["--mount", "sh", "-c", mount]).arg(runtime);
        command.arg(PROGRAM);
        command
    } else {
        Command::new(PROGRAM)
    };
    command.env("XDG_RUNTIME_DIR", runtime);
    command
}

pub fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

/// A guardian that is on guard.
pub fn guardian(dir: &StateDir, vmm: &Vmm, input: Stdio, terminal: Stdio) -> Child {
    let mut guardian = program(dir)
        .arg("guardian")
        .arg(vmm.child.id().to_string())
        .stdin(input)
        .stdout(Stdio::piped())
        .stderr(terminal)
        .spawn()
        .expect("the guardian starts");
    let mut said = [0; 9];
    let mut output = guardian.stdout.take().expect("its output");
    output.read_exact(&mut said).expect("it is on guard");
    guardian
}
