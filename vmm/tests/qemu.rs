// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise: what `vcpufreq qemu` starts gets every signal, also before it has vCPUs, and its exit code
//! is the program's.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

#[test]
fn it_blocks_no_signal_of_qemu_and_returns_its_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let qemu = dir.path().join("qemu");
    // By the shell alone: it blocks signals while it starts a program.
    let script = "#!/bin/sh\nwhile read -r name mask; do\n\
                  [ \"$name\" != SigBlk: ] || echo \"$name $mask\" >&2\n\
                  done < /proc/$$/status\nexit 7\n";
    fs::write(&qemu, script).unwrap();
    fs::set_permissions(&qemu, fs::Permissions::from_mode(0o755)).unwrap();
    let ended = Command::new(env!("CARGO_BIN_EXE_vcpufreq"))
        .args(["qemu", "--cpus=1", "--table=0=1000000", "--"])
        .arg(&qemu)
        .output()
        .unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(7), "{said}");
    assert!(said.contains("SigBlk: 0000000000000000"), "{said}");
    assert!(said.contains("isn't served: it has ended"), "{said}");
}

#[test]
fn each_signal_comes_before_the_vcpus_do() {
    const CATCHES: &str = "trap 'exit 5' HUP INT QUIT TERM USR1 USR2\n";
    const BY_SIGNAL: i32 = 128;
    for signal in [
        Signal::SIGHUP,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGTERM,
        Signal::SIGUSR1,
        Signal::SIGUSR2,
    ] {
        assert_eq!(code_after(signal, CATCHES), 5, "{signal}");
    }
    let signal = Signal::SIGTERM;
    assert_eq!(code_after(signal, ""), BY_SIGNAL + signal as i32);
}

/// The exit code when `signal` is sent to the prefix of a QEMU that does this about signals.
fn code_after(signal: Signal, catches: &str) -> i32 {
    let script = format!("#!/bin/sh\n{catches}echo ready\nwhile :; do sleep 0.1; done\n");
    let dir = tempfile::tempdir().unwrap();
    let qemu = dir.path().join("qemu");
    fs::write(&qemu, script).unwrap();
    fs::set_permissions(&qemu, fs::Permissions::from_mode(0o755)).unwrap();
    // A shell can't catch what is ignored when it starts, as in a background job.
    let mut prefix = Command::new("env")
        .args(["--default-signal", env!("CARGO_BIN_EXE_vcpufreq")])
        .args(["qemu", "--cpus=1", "--table=0=1000000", "--"])
        .arg(&qemu)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = [0; 6];
    prefix
        .stdout
        .as_mut()
        .unwrap()
        .read_exact(&mut ready)
        .unwrap();
    // HUP, INT, QUIT, USR1, USR2, TERM and CHLD: it waits for them.
    let waits = |status: String| status.contains("SigBlk:\t0000000000014a07");
    while !waits(fs::read_to_string(format!("/proc/{}/status", prefix.id())).unwrap()) {
        sleep(Duration::from_millis(1));
    }
    let pid = Pid::from_raw(prefix.id().try_into().unwrap());
    kill(pid, signal).unwrap();
    let ended = prefix.wait_with_output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert!(said.contains("isn't served: it has ended"), "{said}");
    ended.status.code().unwrap()
}
