// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The first process of the lab's host and of its guest.
//!
//! On the host it mounts, loads the lab's drivers, carries out the scenarios
//! of `/lab/plan.json`, writes one JSON line for each to the result port,
//! and powers off. In the guest it does what the host's scenario asks for,
//! line by line over the console.

#![cfg_attr(
    not(feature = "scenarios"),
    allow(
        dead_code,
        unused_imports,
        reason = "the demo's agent uses a part of the harness"
    )
)]

mod harness;
mod scenarios;

use std::path::Path;

use crate::harness::{guest, guest_shell, host, load, registers};

fn main() {
    // As the first process it must not return: the kernel would panic.
    // Another role is a child that the agent starts itself.
    let role = std::env::args().nth(1);
    match role.as_deref() {
        Some("burn") => load::burn_forever(),
        Some("store-pair") => {
            let address = std::env::args().nth(2).unwrap_or_default();
            let page = registers::register(&address).map(|(page, offset)| page.write_pair(offset));
            std::process::exit(if page.is_ok() { 0 } else { 2 });
        }
        Some("guest-sh") => {
            let code = guest_shell::relay().unwrap_or_else(|error| {
                eprintln!("{error:#}");
                2
            });
            std::process::exit(code);
        }
        #[cfg(feature = "bpf")]
        Some(role @ ("bpf-flood" | "bpf-vmm" | "bpf-vms" | "bpf-switches" | "bpf-calls")) => {
            let words: Vec<String> = std::env::args().skip(2).collect();
            let result = match role {
                "bpf-flood" => scenarios::bpf::flood_guest(&words),
                "bpf-vmm" => scenarios::bpf::vmm(&words),
                "bpf-vms" => scenarios::bpf::vms(&words),
                "bpf-calls" => scenarios::bpf::calls(&words),
                _ => scenarios::bpf::switches(),
            };
            if let Err(error) = result {
                println!("{error:#}");
                std::process::exit(2);
            }
        }
        _ if Path::new("/lab/plan.json").exists() => host::main(scenarios::run),
        _ => guest::main(),
    }
}
