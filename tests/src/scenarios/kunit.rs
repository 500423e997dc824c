// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! KUnit tests of the kernel modules' functions, on a host or in a guest whose kernel has KUnit:
//! modules of their own, which are built for such a kernel alone.

use std::path::Path;

use anyhow::{Result, ensure};
use vcpufreq_tests::LabVerdict;

use crate::harness::console_commands::{insmod, rmmod};
use crate::harness::kernel_log;
use crate::harness::plan::Plan;
use crate::harness::policy::Policy;
use crate::harness::sysfs;
use crate::harness::vm::Vm;

/// The kernel's, for the results of each suite.
const RESULTS: &str = "/sys/kernel/debug/kunit";

/// A module of tests, and its suites.
const OF_HOST: (&str, [&str; 1]) = ("vcpufreq_host_test", ["vcpufreq_clamp"]);
const OF_GUEST: (&str, [&str; 2]) = ("vcpufreq_guest_test", ["vcpufreq_scale", "vcpufreq_steal"]);

/// All tests passed of each kernel that has KUnit.
pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let mut of = Vec::new();
    if Path::new(RESULTS).exists() {
        of.extend(on_host()?);
    }
    if kernel_log::guests_are_watched() {
        of.extend(in_guest(plan)?);
    }
    ensure!(
        !of.is_empty(),
        "no kernel has KUnit: --host checked, --guest checked"
    );
    let passed = of.iter().all(|results| passed(results));
    Ok(LabVerdict::default()
        .check("each test passes", passed, &of)
        .figure("results", of))
}

fn on_host() -> Result<Vec<String>> {
    let (module, suites) = OF_HOST;
    insmod(module, "")?;
    let texts = suites.map(|suite| sysfs::text(results(suite)));
    rmmod(module)?;
    texts.into_iter().collect()
}

fn in_guest(plan: &Plan) -> Result<Vec<String>> {
    let policy = Policy::all()?.remove(0);
    let mut vm = Vm::boot(&plan.mirroring(&[policy.cpu()]))?;
    let (module, suites) = OF_GUEST;
    vm.ask(format!("insmod {module}"))?;
    let texts = suites.map(|suite| vm.ask(format!("read {}", results(suite))));
    vm.ask(format!("rmmod {module}"))?;
    vm.quit()?;
    let lines = |text: Result<String>| Ok(text?.replace("\\n", "\n"));
    texts.into_iter().map(lines).collect()
}

fn results(suite: &str) -> String {
    format!("{RESULTS}/{suite}/results")
}

/// A suite's last line is its result. It has a line for each test, and one with their number.
fn passed(results: &str) -> bool {
    let lines: Vec<&str> = results.lines().map(str::trim_start).collect();
    let of = |sign: &str| lines.iter().filter(|line| line.starts_with(sign)).count();
    let planned = lines.iter().rev().find_map(|line| line.strip_prefix("1.."));
    let planned = planned.and_then(|number| number.parse::<usize>().ok());
    let all = planned.is_some_and(|planned| planned > 0 && of("ok ") == planned + 1);
    all && !results.contains("# SKIP")
}

#[cfg(test)]
mod tests {
    //! Promise: a suite passes if each of its tests does, and only if it has some.
    use super::*;

    #[test]
    fn each_test_counts() {
        let good =
            "KTAP version 1\n1..1\n    # Subtest: a\n    1..2\n    ok 1 b\n    ok 2 c\nok 1 a";
        assert!(passed(good));
        assert!(!passed(&good.replace("ok 1 b", "not ok 1 b")));
        assert!(!passed(&good.replace("ok 1 b", "ok 1 b # SKIP")));
        assert!(!passed(&good.replace("    ok 2 c\n", "")));
        assert!(!passed("ok 1 a"));
    }
}
