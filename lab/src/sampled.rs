// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which scenarios get a second draw when they fail.

/// Scenarios that judge samples: times, or frequencies and shares at moments that they don't choose.
/// Each build is another draw, and one draw of many is out of bounds by chance.
pub const SAMPLED: &[&str] = &[
    "bench",
    "bpf-dip",
    "bpf-flood",
    "bpf-many",
    "bpf-sum",
    "bpf-switch-cost",
    "dip-by-actuator",
    "guest-facts",
    "hotplug",
    "in-force",
    "no-dip",
    "opps-floor",
    "paths",
    "ramps",
    "rt-guest",
    "rt-latency",
    "rt-loop",
    "scx-fallback",
    "scx-requests",
    "speed",
    "speed-guest",
    "unpinned",
];

/// Whether a scenario, with its options, judges samples.
pub fn is_sampled(scenario: &str) -> bool {
    let name = scenario.split(':').next().unwrap_or_default();
    SAMPLED.contains(&name)
}
