// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: what a killed bench changed is put back once; of one that lives nothing is; a
//! record changes only what a bench changes, and counts only if others couldn't write it. A signal
//! waits until files are whole.
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::TryLockError;
use std::thread::sleep;

use vcpufreq_host::fakes::FakeHost;

use super::*;
use crate::tracefs::INSTANCES;

const POLICY: &str = "/sys/devices/system/cpu/cpufreq/policy4";
const LIMIT: &str = "/sys/devices/system/cpu/cpufreq/policy4/scaling_max_freq";
const FOLDER: &str = "/sys/kernel/tracing/instances/vcpufreq-bench-7";

fn file(path: &str, old: &str) -> OldValue {
    OldValue {
        target: Target::File {
            path: path.to_owned(),
            format: Format::Text,
            shown_in: None,
        },
        old: old.to_owned(),
        only_if: None,
    }
}

fn folder(path: &str) -> OldValue {
    OldValue {
        target: Target::Dir { path: path.into() },
        old: ABSENT.to_owned(),
        only_if: None,
    }
}

/// A host on which process 7 runs, a bench with these changes.
fn host(changes: Vec<OldValue>) -> (FakeHost, KernelHost) {
    let fake = FakeHost::empty();
    fake.write("proc/sys/kernel/random/boot_id", "boot");
    let stat = format!("7 (vcpufreq) S {}4000", "1 ".repeat(18));
    fake.write("proc/7/stat", stat);
    fake.write("run/empty", "");
    fake.write(LIMIT.trim_start_matches('/'), "1800000");
    let host = KernelHost::from(&fake.root());
    let owner = Owner::read(&host, 7).unwrap();
    let record = BenchRecord { owner, changes };
    let journal = Journal::at(host.root().path(RECORDS));
    write_record(&journal, "7", &record).unwrap();
    (fake, host)
}

#[test]
fn what_a_killed_bench_changed_is_put_back() {
    let missing = format!("{POLICY}/scaling_min_freq");
    let (fake, host) = host(vec![
        file(LIMIT, "600000"),
        folder(FOLDER),
        file(&missing, "1"),
        file(LIMIT, "700000"),
    ]);
    let real = fake.root().path(FOLDER);
    fs::create_dir_all(&real).unwrap();
    fake.remove("proc/7");
    let (done, left) = of_killed(&host);
    let [limit, folder] = [LIMIT, FOLDER].map(PathBuf::from);
    assert_eq!(done, [limit.clone(), folder, limit]);
    assert!(
        left[0].contains("scaling_min_freq can't be set back"),
        "{left:?}"
    );
    assert_eq!(fake.root().text(LIMIT).unwrap(), "600000");
    assert!(!real.exists());
    // What couldn't be undone is tried again, and nothing else.
    fake.write(LIMIT.trim_start_matches('/'), "900000");
    fake.write(missing.trim_start_matches('/'), "2");
    let done = of_killed(&host);
    assert_eq!(done, (vec![missing.into()], Vec::new()));
    assert_eq!(fake.root().text(LIMIT).unwrap(), "900000");
    assert!(!fake.root().path(format!("{RECORDS}/7")).exists());
}

#[test]
fn the_next_one_removes_an_instance_that_a_killed_one_left() {
    let (fake, host) = host(vec![folder(FOLDER)]);
    let real = fake.root().path(FOLDER);
    fs::create_dir_all(&real).unwrap();
    let began = || {
        let mut heeded = false;
        begin_on(&host, || {
            heeded = true;
            Ok(())
        })
        .unwrap();
        assert!(heeded);
        real.exists()
    };
    assert!(began(), "its process lives");
    fake.remove("proc/7");
    assert!(!began());
}

#[test]
fn of_a_bench_that_lives_nothing_is_put_back() {
    let (fake, host) = host(vec![file(LIMIT, "600000")]);
    assert_eq!(of_killed(&host), (Vec::new(), Vec::new()));
    // Of an earlier boot nothing is left but the record.
    fake.write("proc/sys/kernel/random/boot_id", "another");
    assert_eq!(of_killed(&host), (Vec::new(), Vec::new()));
    assert!(!fake.root().path(format!("{RECORDS}/7")).exists());
    // The number of a process that started later is no longer the bench's.
    let (fake, host) = self::host(vec![file(LIMIT, "600000")]);
    let stat = format!("7 (sh) S {}5000", "1 ".repeat(18));
    fake.write("proc/7/stat", stat);
    assert_eq!(of_killed(&host).0, [PathBuf::from(LIMIT)]);
}

#[test]
fn a_record_changes_only_what_a_bench_changes() {
    let inside = |path: &str| Target::Inside {
        path: path.to_owned(),
        format: Format::Text,
        or_at: None,
    };
    let own = |path: &str| {
        let of = [file(path, "").target, inside(path), folder(path).target];
        of.iter().any(|target| SCOPE.has(target))
    };
    let good = [
        "/sys/devices/system/cpu/cpufreq/policy4/scaling_min_freq",
        "/sys/devices/system/cpu/cpufreq/policy4/scaling_governor",
        "/sys/devices/system/cpu/cpufreq/policy4/scaling_setspeed",
        "/sys/devices/system/cpu/cpufreq/policy4/ondemand/up_threshold",
        "/sys/devices/system/cpu/cpufreq/ondemand/up_threshold",
        "/proc/sys/kernel/sched_rt_runtime_us",
        "/sys/kernel/tracing/instances/vcpufreq-bench-12",
    ];
    assert!(good.iter().all(|path| own(path)));
    let instances = Path::new(good[6]).parent();
    assert_eq!(instances, Some(Path::new(INSTANCES)));
    assert!(good[6].contains(INSTANCE));
    let bad = [
        "/etc/passwd",
        "/sys/devices/system/cpu/cpufreq/policy4/energy_performance_preference",
        "/sys/devices/system/cpu/cpufreq/policy4/../scaling_min_freq",
        "/sys/devices/system/cpu/cpufreq/../cpu0/online",
        "/sys/devices/system/cpu/cpufreq/policy4/stats/../reset",
        "/sys/kernel/tracing/instances/others",
        "/sys/kernel/tracing/instances/vcpufreq-bench-1/../others",
    ];
    assert!(!bad.iter().any(|path| own(path)));
    let (fake, host) = host(vec![file("/etc/passwd", "root")]);
    fake.remove("proc/7");
    assert_eq!(of_killed(&host), (Vec::new(), Vec::new()));
    assert!(!fake.root().path("/etc/passwd").exists());
}

#[test]
fn a_governor_that_was_chosen_meanwhile_stays() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(GOVERNOR);
    for (now, after) in [(SCHEDUTIL, "ondemand"), ("performance", "performance")] {
        fs::write(&path, "ondemand\n").unwrap();
        if write(&path, SCHEDUTIL).is_err() {
            return println!("SKIP: a record below /run: takes root");
        }
        fs::write(&path, format!("{now}\n")).unwrap();
        assert_eq!(put_back(&path).unwrap(), now != after);
        assert_eq!(fs::read_to_string(&path).unwrap().trim(), after);
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
    let (fake, host) = host(vec![file(LIMIT, "600000")]);
    fake.remove("proc/7");
    let record = fake.root().path(format!("{RECORDS}/7"));
    fs::set_permissions(&record, Permissions::from_mode(0o622)).unwrap();
    let (done, left) = of_killed(&host);
    assert!(
        done.is_empty() && left[0].contains("no bench's record"),
        "{left:?}"
    );
    assert_eq!(fake.root().text(LIMIT).unwrap(), "1800000");
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
