// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `make demo` and `make demo-qemu`: one boot, a table for people, a file in `out/` for programs.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::arch::Arch;
use crate::artifacts::Artifacts;
use crate::boot::Driver;
use crate::out;
use crate::qemu::GuestVmm;
use crate::run::Options;

/// Runs the demo; whether its verdict is good. `started` is when the whole
/// command began, set-up included.
pub fn run(
    artifacts: &Artifacts,
    repo: &Path,
    (arch, vmm): (Arch, GuestVmm),
    started: Instant,
) -> Result<bool> {
    // A stock guest: Linux' own driver, and no device.
    let is_stock = (arch, vmm) == (Arch::Arm64, GuestVmm::Qemu);
    let (driver, path) = match is_stock {
        true => (Driver::Mainline, Some("ram".to_owned())),
        false => (Driver::Ours, None),
    };
    let options = Options {
        about_s: Some(40),
        arch,
        driver,
        path,
        topology: arch.topology().to_owned(),
        vmm,
        ..Options::of(&["demo"])
    };
    let report = options.report(artifacts, repo)?;
    let result = report.results.into_iter().next().context("no result")?;
    let held = result.verdict.held();
    let mut result = complete(
        result.json(),
        &options.topology,
        started.elapsed().as_secs(),
    );
    result["vmm"] = vmm.name().into();
    result["architecture"] = arch.machine().into();
    let file = match (arch, vmm) {
        (Arch::X86_64, _) => "demo-x86.json",
        (Arch::Arm64, GuestVmm::Vcpufreq) => "demo.json",
        (Arch::Arm64, GuestVmm::Qemu) => "demo-qemu.json",
    };
    out::write(repo, file, result.clone())?;
    print(&result, held);
    println!("out/{file} has the same figures.");
    Ok(held && missing(&result).is_empty())
}

/// What `out/demo.json` has at least.
const KEYS: [&str; 10] = [
    "emulated",
    "host_kernel",
    "guest_kernel",
    "topology",
    "opps_checked",
    "opps_wrong",
    "requests",
    "applied",
    "refused",
    "wall_s",
];

/// The scenario's result with what it can't know.
pub fn complete(mut result: Value, topology: &str, wall_s: u64) -> Value {
    result["emulated"] = true.into();
    result["topology"] = topology.into();
    result["wall_s"] = wall_s.into();
    result
}

/// What a complete result lacks of all that it has to have.
pub fn missing(result: &Value) -> Vec<&'static str> {
    let mut keys = KEYS.to_vec();
    keys.retain(|key| result[*key].is_null());
    keys
}

fn print(result: &Value, held: bool) {
    if let Some(error) = result["error"].as_str() {
        println!("the demo broke off: {error}");
        return;
    }
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    println!(
        "\nEmulated {} host, topology {}: Linux {}",
        match result["architecture"] == Arch::X86_64.machine() {
            true => "x86-64",
            false => "Arm",
        },
        text(&result["topology"]),
        text(&result["host_kernel"])
    );
    println!(
        "KVM guest of {}, one vCPU on a pCPU of each kind: Linux {}\n",
        text(&result["vmm"]),
        text(&result["guest_kernel"])
    );
    println!(
        "Busy vCPU, --clamp exact; the guest's userspace governor asks for every OPP, up and down:\n"
    );
    println!("  vCPU  pCPU | guest asks   uclamp of thread   host runs at   guest reads");
    println!("             |      [MHz]          [0..1024]          [MHz]         [MHz]");
    for row in result["rows"].as_array().into_iter().flatten() {
        println!(
            "  {:>4}  {:>4} | {:>10}   {:>16}   {:>12}   {:>11}",
            row["vcpu"],
            row["pcpu"],
            mhz(&row["asked_khz"]),
            format!("{}..{}", row["uclamp_min"], row["uclamp_max"]),
            mhz(&row["host_khz"]),
            mhz(&row["guest_reads_khz"]),
        );
    }
    println!(
        "\nGuest load of 20 % duty, guest governor 'performance'; host frequency, median [MHz]:\n"
    );
    println!("  vCPU  pCPU | without the bridge   with it   pCPU's range");
    let rows = |name: &str| result[name].as_array().cloned().unwrap_or_default();
    for (without, with) in rows("no_bridge").iter().zip(rows("bridge")) {
        println!(
            "  {:>4}  {:>4} | {:>18}   {:>7}   {:>5} to {}",
            with["vcpu"],
            with["pcpu"],
            mhz(&without["busy_khz_median"]),
            mhz(&with["busy_khz_median"]),
            mhz(&with["min_khz"]),
            mhz(&with["max_khz"]),
        );
    }
    println!(
        "\n{}: {} of {} OPPs wrong; {} requests, {} applied, {} refused; {} s of real time (frequencies are the emulated host's)",
        if held {
            "The loop is closed"
        } else {
            "THE LOOP IS NOT CLOSED"
        },
        result["opps_wrong"],
        result["opps_checked"],
        result["requests"],
        result["applied"],
        result["refused"],
        result["wall_s"],
    );
}

fn mhz(khz: &Value) -> String {
    khz.as_u64()
        .map_or_else(|| "?".to_owned(), |khz| format!("{}", khz / 1000))
}

#[cfg(test)]
mod tests {
    //! `out/demo.json` has all its keys, and one that is missing is found.

    use serde_json::json;

    use super::*;

    #[test]
    fn what_the_scenario_cant_know_is_added() {
        let scenario = json!({
            "host_kernel": "7.3", "guest_kernel": "7.3", "opps_checked": 16,
            "opps_wrong": 0, "requests": 20, "applied": 18, "refused": 0,
        });
        assert_eq!(missing(&scenario), ["emulated", "topology", "wall_s"]);
        let result = complete(scenario, "2+2", 31);
        assert_eq!(missing(&result), [""; 0]);
        assert_eq!(result["emulated"], true);
        assert_eq!(result["topology"], "2+2");
        assert_eq!(result["wall_s"], 31);
        assert_eq!(result["requests"], 20);
    }

    #[test]
    fn a_key_that_the_scenario_lacks_is_found() {
        let broken_off = complete(json!({ "error": "no guest" }), "2+2", 3);
        assert!(missing(&broken_off).contains(&"opps_checked"));
        assert!(!missing(&broken_off).contains(&"wall_s"));
    }
}
