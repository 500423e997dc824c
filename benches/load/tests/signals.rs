// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise: a signal ends the load program with its own exit code, and neither rt-app nor its folder is
//! left.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Leaves its process number, and runs until it is ended.
const RT_APP: &str = "#!/bin/sh\necho $$ > \"$TMPDIR/pid\"\nexec sleep 600\n";

#[test]
fn a_signal_leaves_neither_rt_app_nor_its_folder() {
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let dir = tempfile::tempdir().unwrap();
        let rt_app = dir.path().join("rt-app");
        fs::write(&rt_app, RT_APP).unwrap();
        fs::set_permissions(&rt_app, fs::Permissions::from_mode(0o755)).unwrap();
        let path = format!("{}:/usr/bin:/bin", dir.path().display());
        let mut load = Command::new(env!("CARGO_BIN_EXE_vcpufreq-load"))
            .env("PATH", path)
            .env("TMPDIR", dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut input = load.stdin.take().unwrap();
        input.write_all(b"start one rt-app=1000/20000/5\n").unwrap();
        let rt_app = loop {
            let text = fs::read_to_string(dir.path().join("pid")).unwrap_or_default();
            match text.trim().parse::<i32>() {
                Ok(pid) => break pid,
                Err(_) => sleep(Duration::from_millis(10)),
            }
        };
        let folder = dir.path().join(format!("vcpufreq-load-{}", load.id()));
        assert!(folder.exists(), "else this is no test");
        kill(Pid::from_raw(load.id().try_into().unwrap()), signal).unwrap();
        let status = load.wait().unwrap();
        assert_eq!(status.code(), Some(128 + signal as i32));
        assert!(!folder.exists(), "{}", folder.display());
        // It takes a moment to be gone, on a busy machine a longer one.
        let is_there = || {
            let stat = fs::read_to_string(format!("/proc/{rt_app}/stat"));
            stat.is_ok_and(|stat| !stat.contains(") Z "))
        };
        // Ends a test that would hang: ten minutes.
        let runs = (0..60_000).all(|_| {
            sleep(Duration::from_millis(10));
            is_there()
        });
        assert!(!runs, "rt-app {rt_app}");
    }
}
