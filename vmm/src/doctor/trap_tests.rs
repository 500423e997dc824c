// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Each trap of a board is found on such a board, and nothing else is.

use super::policies::many_policies;
use super::*;

/// What is done to the facts of a good host.
type FactChange = &'static dyn Fn(&FakeHost, &mut Live);

/// A board that has the trap of this name, and a part of its finding: of the change, or of what is
/// so where there is nothing to change.
const BOARDS: [(&str, FactChange, &str); 19] = [
    (
        "uclamp",
        &|_, live| live.uclamp = Err("Operation not supported".into()),
        "CONFIG_UCLAMP_TASK",
    ),
    (
        "schedutil",
        &|host, _| governors_of(host, "lab", "performance ondemand"),
        "CONFIG_CPU_FREQ_GOV_SCHEDUTIL",
    ),
    (
        "governor",
        &|host, _| host.write(&format!("{POLICY}/scaling_governor"), "ondemand"),
        "policyN/scaling_governor, N = 0",
    ),
    (
        "firmware",
        &|host, _| governors_of(host, "amd-pstate-epp", "performance powersave"),
        "boot with amd_pstate=passive",
    ),
    (
        "guided",
        &|host, _| host.write("sys/devices/system/cpu/amd_pstate/status", "guided\n"),
        "echo passive > /sys/devices/system/cpu/amd_pstate/status",
    ),
    (
        "frequency events",
        &|host, _| {
            host.write("proc/cpuinfo", "flags\t: cppc\n");
            host.write(&format!("{POLICY}/scaling_driver"), "amd-pstate\n");
        },
        "none by amd-pstate (CPUs 0-1)",
    ),
    (
        "cppc",
        &|host, _| host.write(&format!("{POLICY}/auto_select"), "1\n"),
        "echo 0 > /sys/devices/system/cpu/cpufreq/policyN/auto_select, N = 0",
    ),
    (
        "firmware hint",
        &|host, _| host.write(&format!("{POLICY}/scaling_driver"), "scmi\n"),
        "vcpufreq top",
    ),
    (
        "boost",
        &|host, _| host.write("sys/devices/system/cpu/cpufreq/boost", "1\n"),
        "echo 0 > /sys/devices/system/cpu/cpufreq/boost",
    ),
    (
        "frequency cap",
        &|host, _| capped(host, 0, "0 1", 1_000_000),
        "cool the board",
    ),
    (
        "cpu capacity",
        &|host, _| {
            for cpu in 0..4 {
                host.remove(&format!("sys/devices/system/cpu/cpu{cpu}/cpu_capacity"));
            }
        },
        "--capacity VCPUS=N",
    ),
    (
        "cgroup v1",
        &|host, _| {
            let mount = "cgroup /sys/fs/cgroup/cpu cgroup rw,nosuid,cpu,cpuacct 0 0\n";
            host.write("proc/self/mounts", mount);
        },
        "cgroup_no_v1=all",
    ),
    (
        "slice",
        &|host, _| host.write("sys/fs/cgroup/vcpufreq.slice/cpu.uclamp.min", "0.00\n"),
        "echo max > /sys/fs/cgroup/vcpufreq.slice/cpu.uclamp.min",
    ),
    (
        "lockdown",
        &|host, _| {
            let modes = "none [integrity] confidentiality\n";
            host.write("sys/kernel/security/lockdown", modes);
        },
        "sign the modules",
    ),
    (
        "btf",
        &|host, _| host.remove("sys/kernel/btf/vmlinux"),
        "CONFIG_DEBUG_INFO_BTF",
    ),
    (
        "kvm mode",
        &|host, _| host.write("proc/cmdline", "kvm-arm.mode=protected\n"),
        "protected",
    ),
    (
        "gic",
        &|_, live| live.kvm.as_mut().unwrap().gic = Some(Gic::V2),
        "GICv2",
    ),
    (
        "fair server",
        &|host, _| host.fair_server(500, 1000),
        "no-fair-server",
    ),
    (
        "headroom",
        &|host, _| host.write("proc/sys/kernel/osrelease", "6.1.0-rpi7-rpi-v8\n"),
        "Linux 6.1",
    ),
];

fn governors_of(host: &FakeHost, driver: &str, governors: &str) {
    for (name, text) in [
        ("scaling_driver", driver),
        ("scaling_available_governors", governors),
        ("scaling_governor", "performance"),
    ] {
        host.write(&format!("{POLICY}/{name}"), text);
    }
}

/// Bounds a policy's frequency.
fn capped(host: &FakeHost, policy: u32, cpus: &str, khz: u32) {
    let dir = format!("sys/devices/system/cpu/cpufreq/policy{policy}");
    host.write(&format!("{dir}/affected_cpus"), cpus);
    host.write(&format!("{dir}/scaling_max_freq"), khz.to_string());
}

#[test]
fn a_cap_has_its_cpus_and_what_makes_it() {
    let host = good_host();
    capped(&host, 2, "2 3", 1_700_000);
    let device = "sys/class/thermal/cooling_device1";
    host.write(&format!("{device}/type"), "cpufreq-cpu2\n");
    host.write(&format!("{device}/cur_state"), "2\n");
    let found = only_finding(&facts(&host));
    assert_eq!(
        (found.subject, found.cpus.to_string(), found.what.as_str()),
        (
            "frequency cap",
            "2-3".to_owned(),
            "at most 1700000 of 2800000 kHz, by cooling device cpufreq-cpuN"
        )
    );
    capped(&host, 2, "2 3", 2_800_000);
    assert_eq!(exit_code(&findings(&facts(&host))), 0);
    let many = many_policies(96, &[1024]);
    for policy in 0..96 {
        capped(&many, policy, &policy.to_string(), 1_200_000);
    }
    let found = only_finding(&facts(&many));
    assert_eq!(found.cpus.to_string(), "0-95");
    assert!(found.what.ends_with("by scaling_max_freq"), "{found:?}");
}

/// Doctor itself asks for boost to be off, so that is no fault.
#[test]
fn boost_that_is_off_is_told_as_a_cap() {
    let host = good_host();
    let told = || {
        let all = findings(&facts(&host)).into_iter();
        let caps = all.filter(|found| found.subject == "frequency cap");
        let caps = caps.map(|found| (found.cpus.to_string(), found.what, found.level));
        caps.collect::<Vec<_>>()
    };
    assert_eq!(told(), []);
    host.boost(2, "3000000", false);
    capped(&host, 2, "2 3", 2_800_000);
    let what = "at most 2800000 of 3000000 kHz, as boost is off";
    assert_eq!(told(), [("2-3".into(), what.into(), Level::Good)]);
    assert_eq!(exit_code(&findings(&facts(&host))), 0);
    capped(&host, 2, "2 3", 1_700_000);
    let what = "at most 1700000 of 2800000 kHz, by scaling_max_freq";
    assert_eq!(told(), [("2-3".into(), what.into(), Level::Limit)]);
    let max = "sys/devices/system/cpu/cpufreq/policy2/cpuinfo_max_freq";
    host.write(max, "3000000");
    host.boost(2, "3000000", true);
    capped(&host, 2, "2 3", 3_000_000);
    assert_eq!(told(), []);
}

/// As a hot GB10, with a policy and a cooling device for each of 20 CPUs.
#[test]
fn caps_that_only_the_devices_number_tells_apart_are_one_finding() {
    let names: [fn(u32) -> String; 2] = [
        |cpu| format!("cpufreq-cpu{cpu}"),
        |cpu| format!("thermal-cpufreq-{cpu}"),
    ];
    for name in names {
        let host = many_policies(20, &[1024]);
        for policy in 0..20 {
            capped(&host, policy, &policy.to_string(), 1_200_000);
            let device = format!("sys/class/thermal/cooling_device{policy}");
            host.write(&format!("{device}/type"), name(policy));
            host.write(&format!("{device}/cur_state"), "1\n");
        }
        let found = only_finding(&facts(&host));
        assert_eq!(found.cpus.to_string(), "0-19");
        assert!(found.what.ends_with('N'), "{found:?}");
    }
}

#[test]
fn each_trap_has_a_board_that_it_is_found_on() {
    let names: Vec<_> = BOARDS.iter().map(|(name, ..)| *name).collect();
    let traps: Vec<_> = traps::ALL.iter().map(|trap| trap.name).collect();
    assert_eq!(names, traps);
    let good = facts(&good_host());
    for ((name, change, part), trap) in BOARDS.into_iter().zip(traps::ALL) {
        assert_eq!((trap.found)(&good), None, "{name}: on a good host");
        let (host, mut live) = (good_host(), live());
        change(&host, &mut live);
        let facts = DoctorFacts::read(&host.root(), "aarch64", live);
        assert!((trap.found)(&facts).is_some(), "{name}");
        let all = findings(&facts).into_iter();
        let all: Vec<_> = all.filter(|found| found.subject == name).collect();
        assert!(
            all.iter().any(|found| found.level == trap.level),
            "{name}: {all:?}"
        );
        let says = |found: &DoctorFinding| match trap.level {
            Level::Good => found.change.is_none() && found.what.contains(part),
            _ => found
                .change
                .as_ref()
                .is_some_and(|text| text.contains(part)),
        };
        assert!(all.iter().any(says), "{name}: {all:?}");
    }
}

#[test]
fn a_trap_of_a_board_is_its_only_finding() {
    for (name, change, _) in BOARDS {
        let (host, mut live) = (good_host(), live());
        change(&host, &mut live);
        let found = findings(&DoctorFacts::read(&host.root(), "aarch64", live));
        let others = found.iter().filter(|found| found.level > Level::Good);
        let others: Vec<_> = others.filter(|found| found.subject != name).collect();
        assert!(others.is_empty(), "{name}: {others:?}");
    }
}
