// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: what a killed bench changed is put back once; of one that lives nothing is; a
//! record changes only what a bench changes, and counts only if others couldn't write it. A signal
//! waits until files are whole.
use std::sync::TryLockError;

use super::*;

/// A number that no process has.
const NONE: &str = "4194305";

fn changes(files: &[(&Path, &str)], folder: &Path) -> BenchChanges {
    let file = |(path, old): &(&Path, &str)| (path.to_path_buf(), (*old).to_owned());
    BenchChanges {
        since: 7,
        files: files.iter().map(file).collect(),
        folders: vec![folder.to_owned()],
    }
}

#[test]
fn what_a_killed_bench_changed_is_put_back() {
    let dir = tempfile::tempdir().unwrap();
    let (records, file) = (dir.path().join("records"), dir.path().join("limit"));
    let (folder, missing) = (dir.path().join("instance"), dir.path().join("none/none"));
    fs::create_dir(&folder).unwrap();
    fs::write(&file, "1800000").unwrap();
    let left = [(&*file, "600000"), (&*missing, "1"), (&*file, "700000")];
    let record = records.join(NONE);
    changes(&left, &folder).write(&record).unwrap();
    let (done, left) = of_killed(&records, |_, _| true);
    assert_eq!(done, [file.clone(), file.clone(), folder.clone()]);
    assert!(left[0].contains("none/none can't be set back"), "{left:?}");
    assert_eq!(fs::read_to_string(&file).unwrap(), "600000");
    assert!(!folder.exists());
    // What couldn't be undone is tried again, and nothing else.
    fs::write(&file, "900000").unwrap();
    fs::create_dir(dir.path().join("none")).unwrap();
    let done = of_killed(&records, |_, _| true);
    assert_eq!(done, (vec![missing], Vec::new()));
    assert_eq!(fs::read_to_string(&file).unwrap(), "900000");
    assert!(!record.exists());
}

#[test]
fn of_a_bench_that_lives_nothing_is_put_back() {
    let dir = tempfile::tempdir().unwrap();
    let record = dir.path().join(std::process::id().to_string());
    let mut own = changes(&[], dir.path());
    own.since = started(std::process::id()).unwrap();
    own.write(&record).unwrap();
    let done = of_killed(dir.path(), |_, _| true);
    assert_eq!(done, (Vec::new(), Vec::new()));
    // The number of a process that started later is no longer the bench's.
    own.since -= 1;
    own.folders = vec!["/nowhere".into()];
    own.write(&record).unwrap();
    assert_eq!(of_killed(dir.path(), |_, _| true).0.len(), 1);
}

#[test]
fn a_record_changes_only_what_a_bench_changes() {
    let own = |path: &&str| is_of_a_bench(Path::new(path), Some("ondemand"));
    let policy = "/sys/devices/system/cpu/cpufreq/policy4";
    let good = [
        format!("{policy}/scaling_min_freq"),
        format!("{policy}/scaling_governor"),
        format!("{policy}/scaling_setspeed"),
        format!("{policy}/ondemand/up_threshold"),
        "/sys/devices/system/cpu/cpufreq/ondemand/up_threshold".to_owned(),
        "/proc/sys/kernel/sched_rt_runtime_us".to_owned(),
        "/sys/kernel/tracing/instances/vcpufreq-bench-12".to_owned(),
    ];
    assert!(good.iter().all(|path| own(&&**path)));
    let bad = [
        "/etc/passwd",
        "/sys/devices/system/cpu/cpufreq/policy4/energy_performance_preference",
        "/sys/devices/system/cpu/cpufreq/policy4/../scaling_min_freq",
        "/sys/devices/system/cpu/cpufreq/../cpu0/online",
        "/sys/devices/system/cpu/cpufreq/policy4/stats/../reset",
        "/sys/kernel/tracing/instances/others",
        "/sys/kernel/tracing/instances/vcpufreq-bench-1/../others",
    ];
    assert!(!bad.iter().any(own));
    for old in [Some("a b"), Some(""), None] {
        assert!(!is_of_a_bench(Path::new(&good[1]), old), "{old:?}");
    }
}

#[test]
fn a_governor_that_was_chosen_meanwhile_stays() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join(GOVERNOR);
    for (now, after) in [(SCHEDUTIL, "ondemand"), ("performance", "performance")] {
        fs::write(&file, format!("{now}\n")).unwrap();
        assert_eq!(write_back(&file, "ondemand").unwrap(), now != after);
        assert_eq!(fs::read_to_string(&file).unwrap().trim(), after);
    }
}

#[test]
fn a_governors_settings_are_those_that_can_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let policy = dir.path().join("policy0");
    for (folder, name, mode) in [
        (dir.path().join("ondemand"), "up_threshold", 0o644),
        (dir.path().join("ondemand"), "sampling_rate_min", 0o444),
        (policy.join("ondemand"), "sampling_rate", 0o644),
        (policy.join("conservative"), "down_threshold", 0o644),
        (policy.clone(), SETSPEED, 0o644),
    ] {
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(name), "1").unwrap();
        fs::set_permissions(folder.join(name), Permissions::from_mode(mode)).unwrap();
    }
    let found = settings_of(&policy, "ondemand");
    let all = ["ondemand/up_threshold", "policy0/ondemand/sampling_rate"];
    assert_eq!(found, all.map(|file| dir.path().join(file)));
    assert_eq!(settings_of(&policy, "userspace"), [policy.join(SETSPEED)]);
}

#[test]
fn a_record_that_others_could_write_does_not_count() {
    let dir = tempfile::tempdir().unwrap();
    let record = dir.path().join(NONE);
    changes(&[], dir.path()).write(&record).unwrap();
    fs::set_permissions(&record, Permissions::from_mode(0o622)).unwrap();
    let (done, left) = of_killed(dir.path(), |_, _| true);
    assert!(
        done.is_empty() && left[0].contains("no bench's record"),
        "{left:?}"
    );
    assert!(dir.path().exists());
}

#[test]
fn a_signal_waits_until_files_are_whole() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pipe");
    let mkfifo = std::process::Command::new("mkfifo").arg(&file).status();
    assert!(mkfifo.unwrap().success());
    std::thread::scope(|scope| {
        // It is written when it is read.
        scope.spawn(|| crate::write([(&*file, "all".to_owned())]).unwrap());
        // Slow machines take a while until the thread runs; after ten minutes it is a hang.
        let held = (0..60_000).any(|_| {
            sleep(Duration::from_millis(10));
            matches!(CHANGES.try_lock(), Err(TryLockError::WouldBlock))
        });
        assert_eq!(fs::read_to_string(&file).unwrap(), "all");
        assert!(held, "the lock of what a signal does");
    });
}
