// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise of the settings for frequencies: each governor is effective by what the CPU does.

use vcpufreq_rt::{Effect, Finding, Partition};

use crate::{
    fake::{CPU, FakeKernel},
    partition::guest,
    settings::{Case, case, is_not},
};

#[test]
fn a_governor_takes_its_tunables_along() {
    let host = FakeKernel::four();
    let case = case(&host, "governor = 'performance'");
    let dir = format!("{CPU}/cpufreq/policy2");
    assert_eq!(
        case.changes(),
        [
            format!("{dir}/schedutil/rate_limit_us 2000 → kept"),
            format!("{dir}/scaling_governor schedutil → performance"),
        ]
    );
    host.put(&format!("{dir}/scaling_governor"), "performance");
    assert!(is_not(&case.effect("governor"), "600000 of 2800000"));
    host.put(&format!("{dir}/scaling_cur_freq"), "2800000");
    assert_eq!(case.effect("governor"), Effect::Effective);
}

/// Driver and governor, the policy's other files, and behind `|` the objection to it, if
/// there is one. The figures of acpi-cpufreq were measured, on x86. Asleep, intel_pstate with
/// hardware-managed states shows what was last; a Xeon E5 v3 has no such states.
const GOVERNED: &str = "\
scmi performance scaling_cur_freq=2800000 |
acpi-cpufreq performance scaling_cur_freq=2799124 |
acpi-cpufreq performance scaling_cur_freq=3400000 |
amd-pstate performance scaling_cur_freq=1400000 | 1400000 of 2800000
scmi performance scaling_cur_freq=<unknown> | doesn't show
intel_pstate performance energy_performance_preference=performance scaling_cur_freq=800000 |
amd-pstate-epp performance energy_performance_preference=balance_power | 'balance_power'
intel_pstate performance scaling_cur_freq=1200000 |
cppc_cpufreq performance auto_select=1 scaling_cur_freq=2800000 | auto_select
cppc_cpufreq schedutil auto_select=1 | auto_select
cppc_cpufreq performance auto_select=0 scaling_cur_freq=2800000 |
cppc_cpufreq performance auto_select=<unsupported> scaling_cur_freq=2800000 |
scmi performance scaling_max_freq=1400000 scaling_cur_freq=1400000 | at most 1400000 of 2800000 kHz, by scaling_max_freq
scmi performance scaling_max_freq=1400000 scaling_cur_freq=2800000 | at most 1400000 of 2800000 kHz
acpi-cpufreq performance scaling_max_freq=2400000 bios_limit=2400000 scaling_cur_freq=2400000 | at most 2400000 of 2800000 kHz, by bios_limit
acpi-cpufreq performance boost=0 scaling_cur_freq=2400000 | 2400000 of 2800000 kHz (cpuinfo_max_freq); /sys/devices/system/cpu/cpufreq/policy2/boost is 0
intel_pstate performance energy_performance_preference=performance scaling_max_freq=2400000 | at most 2400000
scmi powersave scaling_cur_freq=600000 |
scmi powersave scaling_cur_freq=1000000 | 1000000
intel_pstate powersave | follows the load
scmi userspace scaling_setspeed=1000000 scaling_cur_freq=1000000 |
scmi userspace scaling_setspeed=1000000 scaling_cur_freq=2000000 | 2000000
scmi schedutil |
scmi conservative | follows the load
scmi ondemand | follows the load
";

#[test]
fn each_governor_is_looked_at() {
    for line in GOVERNED.lines() {
        let (scene, said) = line.split_once('|').unwrap();
        let [driver, governor, files @ ..] = &*scene.split_whitespace().collect::<Vec<_>>() else {
            panic!("{line}");
        };
        let host = FakeKernel::four();
        let dir = format!("{CPU}/cpufreq/policy2");
        host.put(&format!("{dir}/scaling_driver"), driver);
        host.put(&format!("{dir}/scaling_governor"), governor);
        for file in files {
            let (name, text) = file.split_once('=').unwrap();
            host.put(&format!("{dir}/{name}"), text);
        }
        let effect = case(&host, &format!("governor = '{governor}'")).effect("governor");
        let why = match &effect {
            Effect::Effective => "",
            Effect::Not(why) | Effect::Unseen(why) => why,
        };
        let said = said.trim();
        assert_eq!(why.is_empty(), said.is_empty(), "{line}: {why}");
        assert!(why.contains(said), "{line}: {why}");
    }
}

/// Files of cooling device 3, and whether it holds policy 2 down to 1,400,000 kHz of 2,800,000.
const COOLING: &str = "\
type=cpufreq-cpu2 cur_state=2 | true
type=cpufreq-cpu3 cur_state=1 | true
type=cpufreq-cpu2 cur_state=0 | false
type=cpufreq-cpu0 cur_state=2 | false
type=thermal-cpufreq-1 cur_state=2 | true
type=thermal-cpufreq-1 cur_state=1 | false
type=thermal-cpufreq-1 cur_state=0 | false
type=thermal-idle-2 cur_state=2 | false
type=Fan cur_state=2 | false
type=Processor cur_state=2 | true
type=Processor cur_state=0 | false
";

#[test]
fn a_cap_is_that_of_the_cooling_device_that_makes_it() {
    for line in COOLING.lines() {
        let (files, is_held) = line.split_once('|').unwrap();
        let host = FakeKernel::four();
        let policy = format!("{CPU}/cpufreq/policy2");
        for (name, text) in [
            ("scaling_governor", "performance"),
            ("related_cpus", "2 3"),
            ("affected_cpus", "3"),
            ("scaling_available_frequencies", "600000 1400000 2000000"),
            ("scaling_boost_frequencies", "2800000"),
            ("scaling_max_freq", "1400000"),
            ("scaling_cur_freq", "1400000"),
        ] {
            host.put(&format!("{policy}/{name}"), text);
        }
        let folder = "/sys/class/thermal/cooling_device3";
        for file in files.split_whitespace() {
            let (name, text) = file.split_once('=').unwrap();
            host.put(&format!("{folder}/{name}"), text);
        }
        host.link(
            &format!("{folder}/device/physical_node"),
            &format!("{CPU}/cpu2"),
        );
        let effect = case(&host, "governor = 'performance'").effect("governor");
        let Effect::Not(why) = effect else {
            panic!("{line}: effective");
        };
        let kind = files.split_whitespace().next().unwrap();
        let by = match is_held.trim() == "true" {
            true => kind.replace("type=", "cooling device "),
            false => "scaling_max_freq".to_owned(),
        };
        let said = format!("CPU 3: at most 1400000 of 2800000 kHz, by {by}");
        assert_eq!(why, said, "{line}");
    }
}

#[test]
fn the_profiles_own_limit_is_no_cap() {
    let host = FakeKernel::four();
    let case = case(&host, "governor = 'performance'\nmax-freq = 1400000");
    let dir = format!("{CPU}/cpufreq/policy2");
    for (name, text) in [
        ("scaling_governor", "performance"),
        ("scaling_max_freq", "1400000"),
        ("scaling_cur_freq", "1400000"),
    ] {
        host.put(&format!("{dir}/{name}"), text);
    }
    assert_eq!(case.effect("governor"), Effect::Effective);
    host.put(&format!("{dir}/scaling_max_freq"), "1000000");
    let said = "at most 1000000 of 2800000";
    assert!(is_not(&case.effect("governor"), said));
}

#[test]
fn schedutil_without_uclamp_follows_no_request() {
    let host = FakeKernel::four();
    let case = case(&host, "governor = 'schedutil'");
    assert_eq!(case.effect("governor"), Effect::Effective);
    host.remove("/proc/sys/kernel/sched_util_clamp_min");
    assert!(is_not(&case.effect("governor"), "CONFIG_UCLAMP_TASK"));
}

#[test]
fn a_policy_that_cannot_have_the_governor_is_a_finding_only() {
    let host = FakeKernel::four();
    let dir = |policy: u32| format!("{CPU}/cpufreq/policy{policy}");
    for name in ["scaling_governor", "scaling_available_governors"] {
        host.put(&format!("{}/{name}", dir(0)), "ondemand");
    }
    host.put(&format!("{}/scaling_governor", dir(2)), "performance");
    host.put(&format!("{}/scaling_cur_freq", dir(2)), "2800000");
    let both = Case {
        partition: Partition::new(&host, vec![guest("plc", "1,3")], None, None).unwrap(),
        ..case(&host, "governor = 'performance'")
    };
    assert_eq!(both.effect("governor"), Effect::Effective);
    let of_0 =
        |finding: &Finding| matches!(finding, Finding::Hand(text) if text.contains("policy0"));
    assert!(both.plan().findings.iter().any(of_0));
}

#[test]
fn a_governor_that_is_not_there_is_said() {
    let host = FakeKernel::four();
    let plan = case(&host, "governor = 'conservative'").plan();
    assert_eq!(plan.changes().count(), 0);
    let said = |finding: &Finding| matches!(finding, Finding::Hand(text) if text.contains("cpufreq_conservative"));
    assert!(plan.findings.iter().any(said));
}
