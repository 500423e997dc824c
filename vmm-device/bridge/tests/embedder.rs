// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The example `embedder` on real KVM, in a process of its own: a VMM with threads that may make the
//! published calls alone and with a chroot before its vCPU runs. Its guest writes 600,000 requests.
//!
//! - The thread that carries out requests dies at its first one: the path falls back, and none is lost.
//! - A KVM wrapper that removes no ioeventfd gets none, with a warning: none is lost either.
//! - A vCPU that was plugged again is pinned; the state goes to another bridge; a bridge that is
//!   dropped leaves no thread and no file.
//! - Its file that has the device, main.rs, has 60 lines.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

use std::process::Command;

use kvm_ioctls::Kvm;

#[path = "../examples/embedder/main.rs"]
mod embedder;

#[test]
#[ignore = "the process that a_foreign_vmm starts"]
fn child() {
    embedder::foreign::run().unwrap();
}

/// What the VMM prints; `None` where it can't run.
fn printed(environment: &[(&str, &str)]) -> Option<String> {
    if let Err(error) = Kvm::new().and_then(|kvm| kvm.create_vm()) {
        println!("SKIP: no usable /dev/kvm: {error}");
        return None;
    }
    let program = std::env::current_exe().unwrap();
    // Also as a plain user it may enter a chroot there.
    let mut command = Command::new("unshare");
    command
        .args(["--user", "--map-root-user", "--"])
        .arg(program);
    command.args(["--exact", "child", "--ignored", "--nocapture"]);
    let output = command.envs(environment.iter().copied()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (printed, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(
        output.status.success(),
        "{}: {printed}{errors}",
        output.status
    );
    Some(printed)
}

fn expect(printed: &str, lines: &[&str]) {
    for line in lines {
        assert!(printed.contains(line), "no \"{line}\" in: {printed}");
    }
}

const ALWAYS: [&str; 3] = [
    "dropped true",
    "unplugged true, pinned again true",
    "restored Some(1800000)",
];

#[test]
fn a_foreign_vmm_loses_no_request_when_it_falls_back() {
    let Some(printed) = printed(&[]) else { return };
    expect(&printed, &ALWAYS);
    // What the thread carried out when it died is tried again, and counts once.
    expect(&printed, &["requests 600000, refused 0"]);
    let said = "warning: the thread that carries out requests has died";
    expect(&printed, &[said, "fell back true, detached true"]);
}

#[test]
fn a_wrapper_that_ignores_values_loses_no_request() {
    let Some(printed) = printed(&[("IGNORES_VALUES", "1")]) else {
        return;
    };
    expect(&printed, &ALWAYS);
    expect(
        &printed,
        &[
            "requests 600000, refused 0",
            "fell back false, detached true",
        ],
    );
    expect(&printed, &["warning: KVM keeps ioeventfds"]);
}

#[test]
fn the_device_takes_sixty_lines_of_a_vmm() {
    let source = include_str!("../examples/embedder/main.rs");
    // The rest makes it an example.
    let (device, _) = source.split_once("#[allow(dead_code)]\nfn main()").unwrap();
    let lines = device.lines().map(str::trim);
    let code = lines.filter(|line| !line.is_empty() && !line.starts_with("//"));
    assert!(code.count() <= 60);
}
