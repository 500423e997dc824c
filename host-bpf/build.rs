// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Compiles the BPF programs, by their own makefile, for `src/objects.rs` to take in.

use std::env;
use std::process::{Command, Stdio};

fn main() {
    if env::var_os("CARGO_FEATURE_LOAD").is_none() {
        return;
    }
    println!("cargo::rerun-if-changed=bpf");
    println!("cargo::rerun-if-changed=abi");
    println!("cargo::rerun-if-env-changed=CLANG");
    // For the makefile, which has it from the environment.
    println!("cargo::rerun-if-env-changed=BPF_INCLUDE");
    if let Err(why) = compile() {
        println!("cargo::error={why}");
    }
}

/// All that the makefile makes, into cargo's folder.
fn compile() -> Result<(), String> {
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let version = Command::new(&clang)
        .arg("--version")
        .stdout(Stdio::null())
        .status();
    if let Err(error) = version {
        return Err(format!(
            "{clang} compiles the BPF programs and can't be run ({error}): install clang and \
             libbpf-dev, or build without BPF (--no-default-features)"
        ));
    }
    let out = env::var("OUT_DIR").map_err(|error| format!("OUT_DIR: {error}"))?;
    let made = Command::new("make")
        .args(["--silent", "-C", "bpf", "all"])
        .args([format!("OUT={out}"), format!("CLANG={clang}")])
        .output()
        .map_err(|error| format!("make can't be run ({error}): install make"))?;
    if made.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&made.stderr);
    let cause = text.lines().find(|line| line.contains("error"));
    Err(format!(
        "the BPF programs don't compile ({}); see make -C host-bpf/bpf",
        cause.unwrap_or("make gives no reason").trim()
    ))
}
