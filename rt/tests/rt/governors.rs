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
