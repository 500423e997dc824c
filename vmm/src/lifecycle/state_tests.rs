// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A record is written whole, read back, and stands or falls with its process.

use std::os::unix::fs::PermissionsExt;

use vcpufreq_host::fakes::FakeHost;
use vcpufreq_host::undo::{JournalEntry, KernelHost};
use vcpufreq_host::{GroupRecord, HostRoot};

use super::*;
use crate::lifecycle::record::{Owner, OwnerStatus, owner_of};

const BOOT: &str = "proc/sys/kernel/random/boot_id";

/// A host on which process 7, called `(a) b`, started at tick 4000.
fn host(state: &str, ticks: u64) -> FakeHost {
    host_with((state, 1), ticks)
}

/// The same with a process of so many threads.
fn host_with((state, threads): (&str, u32), ticks: u64) -> FakeHost {
    let host = FakeHost::empty();
    host.write(BOOT, "11111111-2222\n");
    let field = |field: u32| if field == 20 { threads } else { field };
    let before: Vec<_> = (4..22).map(|number| field(number).to_string()).collect();
    let stat = format!("7 ((a) b) {state} {} {ticks} 23 24", before.join(" "));
    host.write("proc/7/stat", stat);
    host
}

fn groups(group: &str) -> JournalEntry {
    JournalEntry::Groups(GroupRecord {
        group: group.into(),
        origin: "/sys/fs/cgroup/init".into(),
        enabled_cpu: true,
        raised_min: false,
    })
}

fn record(pid: u32) -> VmmRecord {
    VmmRecord {
        entries: vec![groups(&format!("/sys/fs/cgroup/vcpufreq.{pid}"))],
        ..VmmRecord::new(Owner {
            pid,
            start_ticks: 4000,
            boot_id: "11111111-2222".to_owned(),
            pid_namespace: String::new(),
        })
    }
}

#[test]
fn an_owner_is_read_from_procfs() {
    let owner = owner_of(&host("S", 4000).root(), 7).unwrap();
    assert_eq!(owner, record(7).owner);
    assert!(owner_of(&host("S", 4000).root(), 8).is_err());
    let myself = owner_of(&HostRoot::default(), std::process::id()).unwrap();
    assert_eq!(
        myself.status(&KernelHost::from(&HostRoot::default())),
        OwnerStatus::InUse
    );
}

#[test]
fn a_record_stands_with_its_process() {
    let owner = record(7).owner;
    let rows = [
        ("runs", host("R", 4000), OwnerStatus::InUse),
        ("zombie", host("Z", 4000), OwnerStatus::Stale),
        (
            "zombie whose other thread runs",
            host_with(("Z", 2), 4000),
            OwnerStatus::InUse,
        ),
        (
            "zombie that a thread replaces",
            host_with(("X", 0), 4000),
            OwnerStatus::InUse,
        ),
        (
            "number taken by another",
            host("S", 4001),
            OwnerStatus::Stale,
        ),
        (
            "gone",
            {
                let h = host("S", 4000);
                h.remove("proc/7");
                h
            },
            OwnerStatus::Stale,
        ),
        (
            "rebooted",
            {
                let h = host("S", 4000);
                h.write(BOOT, "3");
                h
            },
            OwnerStatus::OtherBoot,
        ),
    ];
    for (name, host, expected) in rows {
        assert_eq!(
            owner.status(&KernelHost::from(&host.root())),
            expected,
            "{name}"
        );
    }
    let elsewhere = Owner {
        pid_namespace: "pid:[1]".to_owned(),
        ..owner
    };
    let status = elsewhere.status(&KernelHost::from(&host("R", 4000).root()));
    assert_eq!(status, OwnerStatus::Unseen);
    let blind = host("R", 4000);
    blind.remove(BOOT);
    let status = record(7).owner.status(&KernelHost::from(&blind.root()));
    assert_eq!(status, OwnerStatus::Unseen, "not for another boot's");
}

#[test]
fn a_record_is_written_whole_and_removed_with_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    let state = StateDir::at(dir.path().join("vcpufreq"));
    state.write(&record(7)).unwrap();
    state.write(&record(8)).unwrap();
    let listed: Vec<_> = state
        .list()
        .unwrap()
        .into_iter()
        .map(|(_, r)| r.unwrap())
        .collect();
    assert_eq!(listed, [record(7), record(8)]);
    remove(&state.record_path(7)).unwrap();
    assert_eq!(state.list().unwrap().len(), 1);
    remove(&state.record_path(8)).unwrap();
    remove(&state.record_path(8)).unwrap();
    assert!(!dir.path().join("vcpufreq").exists());
    assert!(state.list().unwrap().is_empty());
}

#[test]
fn a_record_that_names_what_is_not_its_own_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let state = StateDir::at(dir.path());
    let write = |record: &VmmRecord, pid| {
        let path = state.record_path(pid);
        fs::write(&path, serde_json::to_string(record).unwrap()).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        read(&state.record_path(pid))
    };
    assert!(write(&record(7), 7).is_ok());
    assert!(write(&record(7), 8).is_err(), "another's number");
    for group in [
        "/sys/fs/cgroup/system.slice",
        "/sys/fs/cgroup/vcpufreq.8",
        "/",
    ] {
        let mut stolen = record(7);
        stolen.entries = vec![groups(group)];
        assert!(write(&stolen, 7).is_err(), "{group}");
    }
}

#[test]
fn a_record_with_a_field_that_is_unknown_is_another_versions() {
    let dir = tempfile::tempdir().unwrap();
    let state = StateDir::at(dir.path());
    let path = state.record_path(7);
    let text = serde_json::to_string(&record(7)).unwrap();
    for before in ["\"owner\"", "\"enabled_cpu\""] {
        let more = text.replace(before, &format!("\"more\":1,{before}"));
        fs::write(&path, more).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        match read(&path) {
            Err(NoRecord::OtherVersion { known, why }) => {
                assert_eq!(*known, record(7));
                assert!(why.contains("unknown field `more`"), "{why}");
            }
            other => panic!("{before}: {other:?}"),
        }
    }
}
