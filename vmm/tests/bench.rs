// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What `vcpufreq bench` promises where it can't measure: exit codes, and one
//! clear line for each cause. That it measures is shown in the lab.

use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

/// One at a time: a bench refuses to run beside another.
static ALONE: Mutex<()> = Mutex::new(());

fn bench(options: &[&str]) -> Output {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    Command::new(env!("CARGO_BIN_EXE_vcpufreq"))
        .arg("bench")
        .args(options)
        .output()
        .expect("the program starts")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_line_for_each_thing_that_is_missing() {
    let files = ["--kernel", "/no/such/kernel", "--initrd", "/no/such/initrd"];
    // Without a QEMU an x86-64 machine has one line about that.
    let output = bench(&[&files[..], &["--qemu", "qemu"]].concat());
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    let said = said(&output);
    assert!(
        said.lines().all(|line| line.starts_with("vcpufreq: ")),
        "{said}"
    );
    let about = |word: &str| said.lines().filter(|line| line.contains(word)).count();
    assert_eq!(about("/no/such/kernel"), 1, "{said}");
    assert_eq!(about("/no/such/initrd"), 1, "{said}");
}

#[test]
fn a_kernel_without_a_ramdisk_is_one_line() {
    let output = bench(&["--kernel", "/no/such/kernel"]);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("--initrd"), "{said}");
}

#[test]
fn an_unknown_scenario_is_one_line_with_those_that_there_are() {
    let output = bench(&["--scenario", "nope"]);
    let said = said(&output);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(
        said.contains("'nope'") && said.contains("big-ramp"),
        "{said}"
    );
}
