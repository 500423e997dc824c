// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: restore carries out no record that another user could have written, nor one that names
//! what no setting changes.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink},
};

use vcpufreq_host::undo::{Format, Target, Untrusted};
use vcpufreq_rt::{PATH, Record, RecordError, RestoreError, restore};

use crate::{
    fake::FakeKernel,
    partition::{applied, planned},
};

/// The record of an apply, and why restore refuses it after `spoil`.
fn refused(spoil: impl FnOnce(&FakeKernel)) -> RecordError {
    let host = FakeKernel::four();
    applied(&host, &planned(&host, "settings.swappiness = 1")).unwrap();
    spoil(&host);
    let before = host.snapshot();
    let tried = restore(&host, &mut |_, _, _| {});
    assert_eq!(host.snapshot(), before);
    match tried {
        Err(RestoreError::Record(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_record_that_others_could_have_written_is_not_carried_out() {
    let mode = |path: &'static str, mode: u32| {
        refused(move |host| {
            let mode = fs::Permissions::from_mode(mode);
            fs::set_permissions(host.real(path), mode).unwrap();
        })
    };
    for why in [mode(PATH, 0o620), mode("/run/vcpufreq-rt", 0o702)] {
        assert!(
            matches!(why, RecordError::Untrusted(Untrusted::Mode { .. })),
            "{why}"
        );
    }
    let linked = refused(|host| {
        let away = host.real("/run/away");
        fs::rename(host.real(PATH), &away).unwrap();
        symlink(away, host.real(PATH)).unwrap();
    });
    assert!(
        matches!(linked, RecordError::Untrusted(Untrusted::Kind { .. })),
        "{linked}"
    );
    if fs::metadata("/proc/self").unwrap().uid() != 0 {
        return println!("SKIP: only root can give files to another user");
    }
    for path in [PATH, "/run/vcpufreq-rt"] {
        let why = refused(|host| chown(host.real(path), Some(1000), None).unwrap());
        assert!(
            matches!(
                why,
                RecordError::Untrusted(Untrusted::Owner { uid: 1000, .. })
            ),
            "{why}"
        );
    }
}

#[test]
fn a_record_that_names_anything_else_is_not_carried_out() {
    let with = |target: Target| {
        refused(move |host| {
            let mut record = Record::read(host).unwrap().unwrap();
            record.entries[0].was.target = target;
            host.put(PATH, &serde_json::to_string(&record).unwrap());
        })
    };
    let file = |path: &str| Target::File {
        path: path.into(),
        format: Format::Text,
        shown_in: None,
    };
    for target in [
        file("/proc/sys/kernel/core_pattern"),
        file("/proc/sys/vm/../../../proc/swaps"),
        Target::Dir {
            path: "/run".into(),
        },
    ] {
        let why = with(target);
        assert!(matches!(why, RecordError::Foreign(_)), "{why}");
    }
    let named = refused(|host| {
        let mut record = Record::read(host).unwrap().unwrap();
        record.partition.guests[0].name = "../plc'; reboot".into();
        host.put(PATH, &serde_json::to_string(&record).unwrap());
    });
    assert!(matches!(named, RecordError::Guests(_)), "{named}");
}
