// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What `vcpufreq` promises when another user has planted a record where its own are: each
//! command that reads records refuses it in one line, with exit code 2, and changes nothing.
//!
//! Each test runs the real program in a mount namespace whose /run is a temporary directory. A
//! file of another user needs root; where there are no namespaces, a test is skipped.

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in tests, but not in what they share"
)]

use std::{
    collections::BTreeMap,
    fs,
    os::unix::{
        fs::{FileTypeExt, MetadataExt, PermissionsExt, chown, symlink},
        net::UnixListener,
    },
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use tempfile::TempDir;
use vcpufreq::lifecycle::record::{Owner, VmmRecord, owner_of};
use vcpufreq::lifecycle::state::ROOT_DIR;
use vcpufreq_host::undo::{Format, JournalEntry, OldValue, Target};
use vcpufreq_host::{GroupRecord, HostRoot};
use vcpufreq_rt::{Entry, Partition, Profile};

const NOBODY: u32 = 65534;
/// No process has this number: the kernel's limit is 2²².
const DEAD: u32 = 99_999_999;
/// A command that waits for a pipe would wait forever.
const TIMEOUT: [&str; 2] = ["timeout", "600"];
const APPLY: &[&str] = &["rt", "apply", "--guest=plc=1", "--profile=PROFILE"];
const SWAPPINESS: &str = "/proc/sys/vm/swappiness";

fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}

/// What begins a command line in a mount namespace of its own.
fn namespace() -> Vec<&'static str> {
    match is_root() {
        true => vec!["unshare", "--mount"],
        false => vec!["unshare", "--user", "--map-root-user", "--mount"],
    }
}

fn skipped() -> bool {
    let made = Command::new("unshare")
        .args(&namespace()[1..])
        .args(["mount", "--bind", "/run", "/run"])
        .output();
    let missing = !made.is_ok_and(|output| output.status.success());
    if missing {
        println!("SKIP: no mount namespaces here");
    }
    missing
}

/// A directory that is /run for the program, and a file that no record may reach.
struct Scene {
    dir: TempDir,
}

/// Which record is planted.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// That of `rt apply`.
    Rt,
    /// A killed VMM's.
    Vmm,
}

impl Kind {
    /// Its place below /run.
    fn path(self) -> PathBuf {
        let path = match self {
            Self::Rt => vcpufreq_rt::PATH.into(),
            Self::Vmm => Path::new(ROOT_DIR).join(format!("{DEAD}.json")),
        };
        path.strip_prefix("/run").unwrap().to_owned()
    }

    /// The commands that carry it out, or show what is in it.
    fn commands(self) -> Vec<&'static [&'static str]> {
        match self {
            Self::Rt => vec![
                &["rt", "restore"],
                &["rt", "check"],
                &["rt", "report", "--time=1", "--loads=idle"],
            ],
            Self::Vmm => vec![&["cleanup"], &["stats"], &["top"]],
        }
    }
}

fn boot_id() -> String {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    text.trim().to_owned()
}

fn swappiness() -> String {
    fs::read_to_string(SWAPPINESS).unwrap().trim().to_owned()
}

/// This machine's value of a setting: applying it changes nothing.
fn profile() -> String {
    format!("[settings]\nswappiness = {}\n", swappiness())
}

impl Scene {
    fn new(kind: Kind) -> Self {
        let scene = Self {
            dir: TempDir::new().unwrap(),
        };
        scene.folder("run");
        let place = scene.place(kind);
        let place = place.parent().unwrap();
        fs::create_dir(place).unwrap();
        fs::set_permissions(place, fs::Permissions::from_mode(0o700)).unwrap();
        scene.file(&scene.path("victim"), "untouched");
        scene.file(&scene.path("profile.toml"), &profile());
        // What rmdir would take away, and what processes would be moved to.
        scene.folder(&format!("vcpufreq.{DEAD}"));
        scene.file(&scene.path("cgroup.procs"), "");
        scene.file(
            &scene.path(&format!("vcpufreq.{DEAD}/cgroup.procs")),
            "4242\n",
        );
        scene
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn place(&self, kind: Kind) -> PathBuf {
        self.path("run").join(kind.path())
    }

    fn folder(&self, name: &str) {
        fs::create_dir(self.path(name)).unwrap();
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn file(&self, path: &Path, text: &str) {
        fs::write(path, text).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    }

    /// A record that would be carried out, if it were trusted; it names `path`.
    fn text(&self, kind: Kind, path: &Path) -> String {
        match kind {
            Kind::Rt => rt_record(path, "planted"),
            Kind::Vmm => serde_json::to_string(&VmmRecord {
                entries: vec![JournalEntry::Groups(GroupRecord {
                    group: path.join(format!("vcpufreq.{DEAD}")),
                    origin: path.to_owned(),
                    enabled_cpu: false,
                    raised_min: false,
                })],
                pinned: vec![1],
                ..VmmRecord::new(dead())
            })
            .unwrap(),
        }
    }

    fn record(&self, kind: Kind) {
        self.file(&self.place(kind), &self.text(kind, &self.target(kind)));
    }

    /// What a record of this kind names.
    fn target(&self, kind: Kind) -> PathBuf {
        match kind {
            Kind::Rt => self.path("victim"),
            Kind::Vmm => self.dir.path().to_owned(),
        }
    }

    /// The program, with this scene's /run.
    fn program(&self, line: &[&str]) -> Output {
        let run = self.path("run");
        let profile = self.path("profile.toml");
        let line = line
            .iter()
            .map(|word| word.replace("PROFILE", profile.to_str().unwrap()));
        let [unshare, options @ ..] = &namespace()[..] else {
            unreachable!();
        };
        Command::new(unshare)
            .args(options)
            .args(["sh", "-c", "mount --bind $0 /run && exec \"$@\""])
            .arg(run)
            .args(TIMEOUT)
            .arg(env!("CARGO_BIN_EXE_vcpufreq"))
            .args(line)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }

    /// Every file, with its owner, mode and text.
    fn state(&self) -> BTreeMap<PathBuf, String> {
        let mut found = BTreeMap::new();
        let mut folders = vec![self.dir.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let about = path.symlink_metadata().unwrap();
                let text = match about.file_type() {
                    kind if kind.is_dir() => {
                        folders.push(path.clone());
                        String::new()
                    }
                    kind if kind.is_file() && about.len() < 1 << 20 => {
                        fs::read_to_string(&path).unwrap()
                    }
                    kind if kind.is_symlink() => {
                        fs::read_link(&path).unwrap().display().to_string()
                    }
                    kind => format!("fifo {}, {} bytes", kind.is_fifo(), about.len()),
                };
                let text = format!("{} {:o} {text}", about.uid(), about.mode());
                found.insert(path, text);
            }
        }
        found
    }

    /// Checks the promise for all commands that read this kind of record; apply looks at all.
    fn assert_refused(&self, kind: Kind, said: &str) {
        let mut commands = kind.commands();
        if Path::new("/sys/devices/system/cpu/cpu1").exists() {
            commands.push(APPLY);
        }
        self.assert_refused_by(&commands, kind, said);
    }

    fn assert_refused_by(&self, commands: &[&[&str]], kind: Kind, said: &str) {
        let (before, swaps) = (self.state(), swappiness());
        for line in commands {
            let output = self.program(line);
            let error = String::from_utf8_lossy(&output.stderr);
            let what = format!("{kind:?}, {line:?}: {error}");
            assert_eq!(output.status.code(), Some(2), "{what}");
            assert_eq!(error.lines().count(), 1, "{what}");
            assert!(output.stdout.is_empty(), "{what}");
            assert!(error.contains(said) && error.contains(';'), "{what}");
            assert_eq!(self.state(), before, "{what}");
            assert_eq!(swappiness(), swaps, "{what}");
        }
    }
}

/// A record of `rt apply` of this boot, by which restore gives `path` the text `old`.
fn rt_record(path: &Path, old: &str) -> String {
    let target = Target::File {
        path: path.display().to_string(),
        format: Format::Text,
        shown_in: None,
    };
    let record = vcpufreq_rt::Record {
        boot_id: boot_id(),
        profile_name: "planted".into(),
        profile: Profile::parse("planted", &profile()).unwrap(),
        partition: Partition {
            guests: vec![vcpufreq_rt::PartitionGuest {
                name: "plc".into(),
                cpus: "1".parse().unwrap(),
            }],
            housekeeping: "0".parse().unwrap(),
        },
        owner: None,
        entries: vec![Entry {
            setting: "swappiness".into(),
            was: OldValue {
                target,
                old: old.into(),
                only_if: None,
            },
            new: Some("1".into()),
        }],
    };
    serde_json::to_string(&record).unwrap()
}

/// A process of this boot that has ended.
fn dead() -> Owner {
    let own = owner_of(&HostRoot::default(), std::process::id()).unwrap();
    Owner { pid: DEAD, ..own }
}

const KINDS: [Kind; 2] = [Kind::Rt, Kind::Vmm];

#[test]
fn another_users_record_or_directory_is_refused() {
    if skipped() {
        return;
    }
    if !is_root() {
        return println!("SKIP: only root can give files to another user");
    }
    for kind in KINDS {
        let scene = Scene::new(kind);
        scene.record(kind);
        chown(scene.place(kind), Some(NOBODY), None).unwrap();
        scene.assert_refused(kind, "belongs to user 65534, not to root");
        let scene = Scene::new(kind);
        scene.record(kind);
        chown(scene.place(kind).parent().unwrap(), Some(NOBODY), None).unwrap();
        scene.assert_refused(kind, "belongs to user 65534, not to root");
    }
}

#[test]
fn a_symbolic_link_to_a_record_or_directory_is_refused() {
    if skipped() {
        return;
    }
    for kind in KINDS {
        let scene = Scene::new(kind);
        let real = scene.path("real.json");
        scene.file(&real, &scene.text(kind, &scene.target(kind)));
        symlink(&real, scene.place(kind)).unwrap();
        scene.assert_refused(kind, "is not a regular file");
        let scene = Scene::new(kind);
        scene.record(kind);
        let (dir, away) = (
            scene.place(kind).parent().unwrap().to_owned(),
            scene.path("away"),
        );
        fs::rename(&dir, &away).unwrap();
        symlink(&away, dir).unwrap();
        scene.assert_refused(kind, "is not a directory of its own");
    }
}

#[test]
fn what_other_users_can_write_to_is_refused() {
    if skipped() {
        return;
    }
    for kind in KINDS {
        for (of_directory, mode) in [(true, 0o777), (true, 0o720), (false, 0o602), (false, 0o660)] {
            let scene = Scene::new(kind);
            scene.record(kind);
            let place = scene.place(kind);
            let path = match of_directory {
                true => place.parent().unwrap(),
                false => &place,
            };
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
            scene.assert_refused(kind, "can be written by other users");
        }
    }
}

#[test]
fn what_is_no_file_or_too_long_is_refused() {
    if skipped() {
        return;
    }
    for kind in KINDS {
        let scene = Scene::new(kind);
        let made = Command::new("mkfifo").arg(scene.place(kind)).status();
        assert!(made.unwrap().success());
        scene.assert_refused(kind, "is not a regular file");
        let scene = Scene::new(kind);
        scene.record(kind);
        let file = fs::File::options().write(true).open(scene.place(kind));
        file.unwrap().set_len(64 << 20).unwrap();
        scene.assert_refused(kind, "and no record");
    }
}

#[test]
fn a_record_that_names_what_this_program_never_changes_is_refused() {
    if skipped() {
        return;
    }
    for kind in KINDS {
        let scene = Scene::new(kind);
        scene.record(kind);
        // stats and top show nothing of the groups that cleanup would remove.
        let acting: &[&[&str]] = match kind {
            Kind::Rt => &kind.commands(),
            Kind::Vmm => &[&["cleanup"]],
        };
        scene.assert_refused_by(acting, kind, "names");
        let target = scene.target(kind);
        let target = target.strip_prefix("/").unwrap().to_owned();
        for base in ["/proc/sys/vm/../../..", "/sys/fs/cgroup/../../.."] {
            let scene = Scene::new(kind);
            let text = scene.text(kind, &Path::new(base).join(&target));
            scene.file(&scene.place(kind), &text);
            scene.assert_refused_by(&kind.commands(), kind, "names");
        }
    }
}

#[test]
fn this_programs_own_records_are_carried_out() {
    if skipped() {
        return;
    }
    let scene = Scene::new(Kind::Rt);
    let text = rt_record(Path::new(SWAPPINESS), &swappiness());
    scene.file(&scene.place(Kind::Rt), &text);
    let output = scene.program(&["rt", "restore"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(!scene.place(Kind::Rt).exists());
    let scene = Scene::new(Kind::Vmm);
    let record = VmmRecord::new(dead());
    let place = scene.place(Kind::Vmm);
    scene.file(&place, &serde_json::to_string(&record).unwrap());
    let output = scene.program(&["cleanup"]);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(!place.exists());
}

#[test]
fn another_users_socket_is_not_asked() {
    if skipped() {
        return;
    }
    if !is_root() {
        return println!("SKIP: only root can give files to another user");
    }
    let scene = Scene::new(Kind::Vmm);
    let pid = std::process::id();
    let record = VmmRecord::new(owner_of(&HostRoot::default(), pid).unwrap());
    let dir = scene.path("run/vcpufreq");
    let text = serde_json::to_string(&record).unwrap();
    scene.file(&dir.join(format!("{pid}.json")), &text);
    let socket = dir.join(format!("{pid}.sock"));
    let listener = UnixListener::bind(&socket).unwrap();
    listener.set_nonblocking(true).unwrap();
    chown(&socket, Some(NOBODY), None).unwrap();
    let number = pid.to_string();
    for line in [&["stats"][..], &["stats", &number], &["top", &number]] {
        let output = scene.program(line);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("belongs to user 65534"), "{said}");
        assert!(listener.accept().is_err(), "{line:?} has connected");
    }
}
