// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a dead VMM left is removed, with its record. What belongs to a living VMM, another
//! namespace or another program stays.

use std::{fs, io};

use nix::sys::signal::{Signal, raise};

use super::*;
use crate::{lifecycle::record::Owner, signals::EndSignals};
use vcpufreq_host::{RaisedGroups, fakes::FakeHost};

/// Directories in place of cgroups: what the kernel does on mkdir and rmdir.
struct Directories;

impl CgroupTree for Directories {
    fn make(&self, dir: &Path) -> io::Result<()> {
        fs::create_dir_all(dir)?;
        fs::write(dir.join("cgroup.procs"), "")?;
        fs::write(dir.join("cgroup.events"), "populated 0\n")
    }

    fn remove(&self, dir: &Path) -> io::Result<()> {
        let busy = !fs::read_to_string(dir.join("cgroup.procs"))?.is_empty();
        if busy
            || fs::read_dir(dir)?
                .flatten()
                .any(|entry| entry.path().is_dir())
        {
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        fs::remove_dir_all(dir)
    }
}

/// The same, of which a group can be removed only while nothing has the lock.
struct Unlocked<'a>(&'a StateDir);

impl CgroupTree for Unlocked<'_> {
    fn make(&self, dir: &Path) -> io::Result<()> {
        Directories.make(dir)
    }

    fn remove(&self, dir: &Path) -> io::Result<()> {
        drop(self.0.journal().lock(Duration::ZERO)?);
        Directories.remove(dir)
    }
}

struct Scene {
    host: FakeHost,
    state: StateDir,
}

impl Scene {
    /// Process 7 made `vcpufreq.7` with two groups and a record.
    fn new() -> Self {
        let host = FakeHost::empty();
        host.write("proc/sys/kernel/random/boot_id", "boot\n");
        let scene = Self {
            state: StateDir::at(host.root().path("run")),
            host,
        };
        for group in [
            "vcpufreq.7",
            "vcpufreq.7/rest",
            "vcpufreq.7/domain0",
            "stranger",
        ] {
            Directories.make(&scene.cgroup(group)).unwrap();
        }
        let owner = scene.owner();
        scene.record(owner);
        scene
    }

    fn owner(&self) -> Owner {
        Owner {
            pid: 7,
            start_ticks: 4000,
            boot_id: "boot".to_owned(),
            pid_namespace: String::new(),
        }
    }

    fn record(&self, owner: Owner) {
        let groups = GroupRecord {
            group: self.cgroup("vcpufreq.7"),
            origin: self.cgroup("stranger"),
            enabled_cpu: false,
            raised_min: false,
        };
        let record = VmmRecord {
            entries: vec![JournalEntry::Groups(groups)],
            ..VmmRecord::new(owner)
        };
        self.state.write(&record).unwrap();
    }

    /// Process 7 runs.
    fn alive(&self) {
        let before: Vec<_> = (4..22).map(|field: u32| field.to_string()).collect();
        let stat = format!("7 (vcpufreq) S {} 4000 23", before.join(" "));
        self.host.write("proc/7/stat", stat);
    }

    fn cgroup(&self, name: &str) -> PathBuf {
        self.host.root().path(format!("cgroup/{name}"))
    }

    fn clean(&self) -> Cleaned {
        let host = self.host.root();
        let cleaner = Cleaner {
            host: &host,
            tree: &Directories,
            may_be_group: |path| !path.exists() || path.join("cgroup.procs").exists(),
            patience: Duration::from_millis(20),
            claims_within: Duration::from_millis(20),
        };
        cleaner.by_records(&self.state).unwrap()
    }

    /// Whether group and record are there.
    fn there(&self) -> (bool, bool) {
        let record = self.state.record_path(7).exists();
        (self.cgroup("vcpufreq.7").exists(), record)
    }
}

#[test]
fn a_dead_vmms_groups_and_record_go_and_nothing_else() {
    let scene = Scene::new();
    let cleaned = scene.clean();
    assert_eq!(cleaned.removed.len(), 2, "{cleaned:?}");
    assert!(cleaned.left.is_empty(), "{cleaned:?}");
    assert_eq!(scene.there(), (false, false));
    assert!(scene.cgroup("stranger").exists());
    assert!(scene.clean().removed.is_empty());
}

#[test]
fn what_waits_for_threads_to_end_has_no_lock() {
    let scene = Scene::new();
    let mut record = scene.state.list().unwrap().remove(0).1.unwrap();
    let raised = RaisedGroups::one(scene.cgroup("gone"), "0.00");
    record.entries.push(JournalEntry::Raised(raised));
    let host = scene.host.root();
    let cleaner = Cleaner {
        tree: &Unlocked(&scene.state),
        may_be_group: |_| true,
        ..Cleaner::new(&host)
    };
    let left = cleaner.end(&scene.state, &record, &mut Cleaned::default());
    assert_eq!(left, [""; 0]);
    assert_eq!(scene.there(), (false, false));
}

#[test]
fn a_living_vmms_stay() {
    let scene = Scene::new();
    scene.alive();
    let cleaned = scene.clean();
    assert!(
        cleaned.removed.is_empty() && cleaned.left.is_empty(),
        "{cleaned:?}"
    );
    assert_eq!(scene.there(), (true, true));
}

#[test]
fn after_another_boot_only_the_record_goes() {
    let scene = Scene::new();
    scene.record(Owner {
        boot_id: "before".to_owned(),
        ..scene.owner()
    });
    assert_eq!(scene.clean().removed.len(), 1);
    assert_eq!(scene.there(), (true, false));
}

#[test]
fn another_namespaces_stay_and_are_reported() {
    let scene = Scene::new();
    scene.record(Owner {
        pid_namespace: "pid:[1]".to_owned(),
        ..scene.owner()
    });
    let cleaned = scene.clean();
    assert_eq!((cleaned.removed.len(), cleaned.left.len()), (0, 1));
    assert_eq!(scene.there(), (true, true));
}

#[test]
fn a_group_in_use_stays_with_its_record_and_is_reported() {
    let scene = Scene::new();
    fs::write(scene.cgroup("vcpufreq.7/domain0/cgroup.procs"), "99\n").unwrap();
    let cleaned = scene.clean();
    assert_eq!(cleaned.left.len(), 1, "{cleaned:?}");
    assert!(cleaned.left[0].contains("still in use"), "{cleaned:?}");
    assert_eq!(scene.there(), (true, true));
}

// A guardian holds a record as long as a cgroup is busy: the next server is not deaf meanwhile.
#[test]
fn a_signal_ends_the_wait_for_others_that_clean_up() {
    let told = std::thread::spawn(|| {
        let _signals = EndSignals::take().unwrap();
        raise(Signal::SIGTERM).unwrap();
        let scene = Scene::new();
        let _held = state::hold(&scene.state.record_path(7), Duration::ZERO).unwrap();
        let host = scene.host.root();
        let cleaner = Cleaner {
            may_be_group: |_| true,
            claims_within: Duration::from_secs(600),
            ..Cleaner::new(&host)
        };
        let told = cleaner.by_records(&scene.state).unwrap_err().to_string();
        (told, scene.there())
    });
    let told = told.join().unwrap();
    assert_eq!(
        told,
        ("this program is told to end".to_owned(), (true, true))
    );
}

#[test]
fn what_another_cleans_up_stays_and_is_reported() {
    let scene = Scene::new();
    let _held = state::hold(&scene.state.record_path(7), Duration::ZERO).unwrap();
    let cleaned = scene.clean();
    assert_eq!(cleaned.left.len(), 1, "{cleaned:?}");
    let what = "another process cleans up after it";
    assert!(cleaned.left[0].contains(what), "{cleaned:?}");
    assert_eq!(scene.there(), (true, true));
}

#[test]
fn what_is_unfinished_goes_with_its_writer() {
    let scene = Scene::new();
    let record = scene.state.record_path(8).with_extension("json.new");
    fs::write(&record, "{").unwrap();
    let tree = scene.state.tree_file(8).unwrap();
    let beside = tree.with_extension("new.XT6EI3");
    fs::write(&beside, "").unwrap();
    let unfinished = [tree, beside, record];
    scene.host.write("proc/8/stat", "");
    scene.clean();
    assert!(
        unfinished.iter().all(|path| path.exists()),
        "it may be at it"
    );
    scene.host.remove("proc/8");
    assert_eq!(scene.clean().removed, unfinished);
    assert!(!unfinished.iter().any(|path| path.exists()));
}

#[test]
fn a_file_that_is_no_record_stays_and_is_reported() {
    let scene = Scene::new();
    let foreign = scene.state.record_path(9);
    fs::write(&foreign, "{\"owner\": 9}").unwrap();
    let cleaned = scene.clean();
    assert_eq!(cleaned.left.len(), 1, "{cleaned:?}");
    assert!(foreign.exists());
}

#[test]
fn what_fails_keeps_nothing_else_from_being_undone() {
    let scene = Scene::new();
    let raised = |name: &str| RaisedGroups::one(scene.cgroup(name), "0.00");
    let (mut record, min) = (
        scene.state.list().unwrap().remove(0).1.unwrap(),
        "cpu.uclamp.min",
    );
    for (name, file) in [
        ("refuses", format!("{min}/directory")),
        ("slice", min.to_owned()),
    ] {
        scene.host.write(&format!("cgroup/{name}/cgroup.procs"), "");
        scene.host.write(&format!("cgroup/{name}/{file}"), "max");
        record.entries.push(JournalEntry::Raised(raised(name)));
    }
    scene.state.write(&record).unwrap();
    fs::write(scene.cgroup("vcpufreq.7/rest/cgroup.procs"), "9\n").unwrap();
    let cleaned = scene.clean();
    let [busy, refused] = &cleaned.left[..] else {
        panic!("{:?}", cleaned.left);
    };
    assert!(
        busy.contains("vcpufreq.7") && refused.contains("refuses"),
        "{cleaned:?}"
    );
    let put_back = fs::read_to_string(scene.cgroup("slice").join(min));
    assert_eq!(put_back.unwrap(), "0.00");
    assert!(scene.state.record_path(7).exists());
}
