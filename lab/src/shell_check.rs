// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether `make lab-shell` gives a person a shell, with everything in it.

use std::path::Path;

use crate::artifacts::Artifacts;
use crate::run::Options;
use crate::verdict::TestResult;

/// Prints what isn't there; then one word that isn't in the line itself.
const LINE: &str = "for f in /bin/vcpufreq /bin/vcpufreq-load /bin/rt-app /bin/cyclictest \
    /bin/stress-ng /bin/hackbench /lab/modules/vcpufreq_rt_loop.ko /lab/modules/vcpufreq_host.ko \
    /lab/guest-kernel /lab/guest-initramfs; do [ -e $f ] || echo miss''ing $f; done; \
    vcpufreq --version; cyclictest --help 2>&1 | head -n 1; echo al''l";

/// The shell's test.
pub fn check(artifacts: &Artifacts, repo: &Path) -> TestResult {
    let options = Options {
        topology: "1".to_owned(),
        ..Options::of(&[])
    };
    let said = options.typed(artifacts, repo, LINE);
    let said = said.unwrap_or_else(|error| format!("{error:#}"));
    let lines = || said.lines().map(str::trim_end);
    let has = |start: &str| lines().any(|line| line.starts_with(start));
    let held = has("vcpufreq ") && has("cyclictest ") && lines().any(|line| line == "all");
    let held = held && !said.contains("missing");
    let name = "lab-shell: a line at its prompt, everything is there";
    TestResult::new(name, held, || said.clone())
}
