// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What `vcpufreq bench` promises where it can't measure, and of
//! `--compare`: exit codes, and one clear line for each cause. That it
//! measures is shown in the lab.

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use tempfile::TempDir;

fn bench(options: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_vcpufreq"))
        .arg("bench")
        .args(options)
        .output()
        .expect("the program starts")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn report(dir: &Path, name: &str, median: u64) -> String {
    let path = dir.join(name);
    let text = format!(
        r#"{{"conditions":{{}},"results":[{{"scenario":"big-ramp","variant":"host",
        "metric":"to_fmax","unit":"us","n":1,"median":{median},"min":1,"max":9}}]}}"#
    );
    fs::write(&path, text).expect("a file in the temporary directory");
    path.to_str().expect("a UTF-8 path").to_owned()
}

#[test]
fn a_line_for_each_thing_that_is_missing() {
    let output = bench(&["--kernel", "/no/such/kernel"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    let said = said(&output);
    assert!(
        said.lines().all(|line| line.starts_with("vcpufreq: ")),
        "{said}"
    );
    let about = |word: &str| said.lines().filter(|line| line.contains(word)).count();
    assert_eq!(about("/no/such/kernel"), 1, "{said}");
    assert_eq!(about("--initrd is missing"), 1, "{said}");
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

#[test]
fn compare_tells_equal_from_different_from_unreadable() {
    let dir = TempDir::new().expect("a temporary directory");
    let (old, new) = (report(dir.path(), "a", 5), report(dir.path(), "b", 6));
    assert_eq!(bench(&["--compare", &old, &old]).status.code(), Some(0));
    let differ = bench(&["--compare", &old, &new]);
    assert_eq!(differ.status.code(), Some(1));
    let text = String::from_utf8_lossy(&differ.stdout);
    assert!(text.contains("big-ramp host to_fmax: 5 us"), "{text}");
    fs::write(dir.path().join("c"), "{}").expect("a file in the temporary directory");
    let wrong = dir.path().join("c");
    let unreadable = bench(&["--compare", &old, wrong.to_str().expect("a UTF-8 path")]);
    assert_eq!(unreadable.status.code(), Some(2));
    assert_eq!(said(&unreadable).lines().count(), 1);
}
