// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise: the reference is the kernel's, for each version and way of boost; where it can't be
//! known, that is said.

use crate::HostCpus;
use crate::fakes::FakeHost;

const POLICY: &str = "sys/devices/system/cpu/cpufreq/policy2";

/// Two big CPUs with boost up to 3 GHz, which is on or off.
fn boosted(kernel: &str, on: bool) -> FakeHost {
    let host = FakeHost::two_plus_two();
    host.kernel(kernel);
    host.boost(2, "3000000", on);
    let max_khz = if on { "3000000" } else { "2800000" };
    host.write(&format!("{POLICY}/cpuinfo_max_freq"), max_khz);
    host
}

/// The references of a little and a big CPU, and whether they are known.
fn references(host: &FakeHost) -> (Option<u32>, Option<u32>, bool) {
    let cpus = HostCpus::read(&host.root());
    let of = |cpu| cpus.cpu(cpu).unwrap().reference_khz;
    (of(0), of(3), !cpus.guesses_reference)
}

#[test]
fn it_is_the_maximum_without_boost_since_linux_6_8_and_that_of_the_moment_before() {
    let little = Some(1_800_000);
    for (kernel, on, expected, known) in [
        ("6.12.48", false, 2_800_000, true),
        ("6.12.48", true, 2_800_000, true),
        ("6.8.0", true, 2_800_000, true),
        ("7.3.4+deb13-arm64", true, 2_800_000, true),
        ("6.7.12", false, 2_800_000, true),
        ("6.7.12", true, 3_000_000, true),
        ("5.15.100-android13", true, 3_000_000, true),
        ("", true, 2_800_000, false),
    ] {
        let expected = (little, Some(expected), known);
        assert_eq!(references(&boosted(kernel, on)), expected, "{kernel} {on}");
    }
}

#[test]
fn before_linux_6_8_boost_that_is_switched_on_later_is_not_in_the_capacities() {
    for (kernel, on, little, expected) in [
        ("6.7.12", true, None, true),
        ("6.7.12", false, None, false),
        ("6.12.48", true, None, false),
        // The device tree tells that boost was on when the kernel computed them.
        ("6.7.12", true, Some(307), false),
        ("6.7.12", true, Some(329), true),
    ] {
        let host = boosted(kernel, on);
        if let Some(little) = little {
            with_tree(&host, little);
        }
        let cpus = HostCpus::read(&host.root());
        let case = format!("{kernel} {on} {little:?}");
        assert_eq!(cpus.capacities_lack_boost, expected, "{case}");
    }
}

#[test]
fn scmi_made_its_policies_with_boost_until_linux_6_14() {
    for (kernel, expected) in [("6.12.48", 3_000_000), ("6.14.2", 2_800_000)] {
        let host = boosted(kernel, true);
        host.write(&format!("{POLICY}/scaling_driver"), "scmi\n");
        let expected = (Some(1_800_000), Some(expected), true);
        assert_eq!(references(&host), expected, "{kernel}");
    }
}

/// A device tree with 512 and 1024 per MHz, and this capacity of the little CPUs.
fn with_tree(host: &FakeHost, little: u16) {
    for cpu in 0..4 {
        host.dmips_mhz(cpu, if cpu < 2 { 512 } else { 1024 });
    }
    for cpu in 0..2 {
        let path = format!("sys/devices/system/cpu/cpu{cpu}/cpu_capacity");
        host.write(&path, little.to_string());
    }
}

/// With 512 and 1024 per MHz the little capacity is 329 beside 2.8 GHz and 307 beside 3 GHz.
#[test]
fn the_device_tree_tells_with_which_maximum_the_kernel_computed_the_capacities() {
    for (little, expected, known) in [
        (329, 2_800_000, true),
        (307, 3_000_000, true),
        (300, 2_800_000, false),
    ] {
        let host = boosted("6.12.48", true);
        with_tree(&host, little);
        let expected = (Some(1_800_000), Some(expected), known);
        assert_eq!(references(&host), expected, "{little}");
    }
}

/// As a DGX GB10 has them: the line through 53 at 1,378 MHz and 150 at 3,900 MHz is at 4,004 MHz
/// for 154.
#[test]
fn with_cppc_it_is_the_frequency_of_the_highest_performance() {
    let host = FakeHost::two_plus_two();
    let path = |cpu| format!("sys/devices/system/cpu/cpufreq/policy{cpu}");
    for cpu in [0, 2] {
        host.remove(&format!("{}/scaling_available_frequencies", path(cpu)));
        host.write(&format!("{}/cpuinfo_max_freq", path(cpu)), "3900000");
        host.write(&format!("{}/scaling_driver", path(cpu)), "cppc_cpufreq\n");
    }
    host.cppc(0, [150, 150, 53], [3900, 1378]);
    let rows = [
        ([154, 150, 53], [3900, 1378], 4_004_000),
        // Equal frequencies, and none: nominal performance is the maximum without boost.
        ([160, 150, 53], [3900, 3900], 4_160_000),
        ([160, 150, 53], [0, 0], 4_160_000),
        // No line: not as the specification has it.
        ([160, 53, 53], [3900, 1378], 3_900_000),
        ([140, 150, 53], [3900, 1378], 3_900_000),
    ];
    for (perf, mhz, expected) in rows {
        host.kernel("6.17.0-1014-nvidia");
        host.cppc(3, perf, mhz);
        let expected = (Some(3_900_000), Some(expected), true);
        assert_eq!(references(&host), expected, "{perf:?} {mhz:?}");
        host.kernel("6.6.0");
        assert_eq!(references(&host).1, Some(3_900_000));
    }
}

/// Two equal CPUs of 4.85 GHz that AMD ranks by 196 and 231, and as Intel and acpi-cpufreq have it:
/// a maximum above the table.
#[test]
fn on_x86_it_is_the_maximum_of_the_moment_whatever_cppc_and_the_table_have() {
    let max_khz = Some(4_850_000);
    for driver in [
        "amd-pstate",
        "amd-pstate-epp",
        "intel_cpufreq",
        "intel_pstate",
        "acpi-cpufreq",
        "pcc-cpufreq",
    ] {
        for kernel in ["6.1.0", "7.3.4", ""] {
            let host = FakeHost::two_plus_two();
            host.kernel(kernel);
            for (policy, highest) in [(0, 196), (2, 231)] {
                let dir = format!("sys/devices/system/cpu/cpufreq/policy{policy}");
                host.write(&format!("{dir}/scaling_driver"), driver);
                host.write(&format!("{dir}/cpuinfo_max_freq"), "4850000");
                for cpu in policy..policy + 2 {
                    host.cppc(cpu, [highest, 135, 15], [3700, 400]);
                }
            }
            if driver == "pcc-cpufreq" {
                let processor = "processor\t: 0\nvendor_id\t: GenuineIntel\n";
                host.write("proc/cpuinfo", processor);
            }
            let case = format!("{driver} {kernel}");
            assert_eq!(references(&host), (max_khz, max_khz, true), "{case}");
            let cpus = HostCpus::read(&host.root());
            assert!(!cpus.capacities_lack_boost, "{case}");
        }
    }
}

/// Without `highest_perf` of its own driver, CPPC tells nothing.
#[test]
fn with_another_driver_than_cppcs_it_is_the_tables() {
    let host = boosted("6.17.0", true);
    host.cppc(3, [154, 150, 53], [3900, 1378]);
    assert_eq!(references(&host).1, Some(2_800_000));
}
