// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A good host has no findings; each thing that can be wrong is found, names
//! what to change, and gives the right exit code.

use super::*;
use crate::{
    doctor::facts::Live,
    vm::{gic::Gic, probe::PathFacts},
};
use vcpufreq_device::fakes::FakeHost;

const POLICY: &str = "sys/devices/system/cpu/cpufreq/policy0";

fn good_host() -> FakeHost {
    let host = FakeHost::two_plus_two();
    host.energy_model(0, "0x1", &[(600_000, 1)]);
    host.energy_model(2, "0x1", &[(700_000, 1)]);
    host.fair_server(50, 1000);
    for (path, text) in [
        ("proc/sys/kernel/osrelease", "7.2.12+deb13-arm64\n"),
        ("proc/sys/kernel/sched_util_clamp_min", "1024\n"),
        ("proc/sys/kernel/sched_util_clamp_max", "1024\n"),
        ("proc/sys/kernel/sched_energy_aware", "1\n"),
        ("proc/sys/kernel/unprivileged_bpf_disabled", "2\n"),
        ("proc/self/status", "Name:\tx\nCapEff:\t000001ffffffffff\n"),
        ("proc/cmdline", "quiet kvm-arm.mode=nvhe\n"),
        ("sys/kernel/btf/vmlinux", "x"),
        ("proc/version", "Linux version 7.2 #1 SMP PREEMPT_RT\n"),
    ] {
        host.write(path, text);
    }
    host
}

fn live() -> Live {
    Live {
        kvm: Ok(KvmFacts {
            api_version: 12,
            max_vcpus: 512,
            address_bits: Some(40),
            stolen_time: true,
            readonly_slots: true,
            ioeventfd: true,
            gic: Some(Gic::V3),
            mode: "default".to_owned(),
        }),
        paths: Ok(PathFacts {
            readonly_slots: Ok(()),
            ioeventfds: Ok(()),
            coherent: true,
        }),
        bpf: Ok("by programs".to_owned()),
        uclamp: Ok(()),
        cgroup: Ok("/sys/fs/cgroup".to_owned()),
        capped: None,
    }
}

fn facts(host: &FakeHost) -> DoctorFacts {
    DoctorFacts::read(&host.root(), "aarch64", live())
}

/// The one finding of these facts that isn't good.
fn only_finding(facts: &DoctorFacts) -> DoctorFinding {
    let findings = findings(facts);
    let mut bad = findings
        .into_iter()
        .filter(|finding| finding.level > Level::Good);
    let first = bad.next().expect("a finding");
    assert_eq!(bad.next(), None, "beside {first:?}");
    assert!(first.change.is_some(), "{first:?}");
    first
}

#[test]
fn a_good_host_has_no_findings() {
    let findings = findings(&facts(&good_host()));
    let bad: Vec<_> = findings.iter().filter(|f| f.level > Level::Good).collect();
    assert!(bad.is_empty(), "{bad:?}");
    assert_eq!(exit_code(&findings), 0);
    let text = text(&findings);
    assert!(
        text.contains("mode nvhe") && text.contains("329, 1024"),
        "{text}"
    );
    assert_eq!(text.lines().count(), findings.len());
}

/// `qemu` and `serve` work there, so it is no blocker; `run` doesn't, so it is the first line.
#[test]
fn another_architecture_limits_run_alone() {
    let host = DoctorFacts::read(&good_host().root(), "x86_64", live());
    let finding = only_finding(&host);
    assert_eq!(
        (finding.subject, finding.level),
        ("architecture", Level::Limit)
    );
    let findings = findings(&host);
    assert_eq!(exit_code(&findings), 1);
    let text = text(&findings);
    let first = text.lines().next().unwrap();
    for part in [
        "run, demo, bench and report's guests need arm64",
        "by qemu and serve",
    ] {
        assert!(first.contains(part), "{first}");
    }
}

/// What is done to a good host.
type Damage = &'static dyn Fn(&FakeHost);

#[test]
fn what_a_tree_lacks_is_found() {
    let rows: [(&str, Damage, &str); 9] = [
        (
            "governor",
            &|host| host.write(&format!("{POLICY}/scaling_governor"), "performance"),
            "policyN/scaling_governor, N = 0",
        ),
        (
            "uclamp limits",
            &|host| host.write("proc/sys/kernel/sched_util_clamp_min", "512"),
            "sched_util_clamp_min=1024",
        ),
        (
            "btf",
            &|host| host.remove("sys/kernel/btf/vmlinux"),
            "CONFIG_DEBUG_INFO_BTF",
        ),
        (
            "bpf",
            &|host| host.remove("proc/sys/kernel/unprivileged_bpf_disabled"),
            "CONFIG_BPF_SYSCALL",
        ),
        (
            "bpf",
            &|host| host.write("proc/self/status", "CapEff:\t0000000000000000\n"),
            "CAP_BPF",
        ),
        (
            "energy model",
            &|host| {
                host.remove("sys/kernel/debug/energy_model/cpu0");
                host.remove("sys/kernel/debug/energy_model/cpu2");
            },
            "opp-microwatt",
        ),
        (
            "energy model",
            &|host| host.write("proc/sys/kernel/sched_energy_aware", "0"),
            "sched_energy_aware=1",
        ),
        ("cpufreq driver", &|host| host.remove(POLICY), "pin vCPUs"),
        (
            "headroom",
            &|host| host.write("proc/sys/kernel/osrelease", "unknown"),
            "--clamp exact",
        ),
    ];
    for (subject, damage, change) in rows {
        let host = good_host();
        damage(&host);
        let finding = only_finding(&facts(&host));
        assert_eq!((finding.subject, finding.level), (subject, Level::Limit));
        assert!(
            finding.change.as_ref().unwrap().contains(change),
            "{finding:?}"
        );
    }
}

/// As Linux before 6.0 shows it: `related_cpus` is there, and driver and governor give an error.
#[test]
fn a_policy_whose_cpus_are_offline_is_no_finding() {
    let host = good_host();
    host.write("sys/devices/system/cpu/online", "2-3\n");
    for name in ["scaling_driver", "scaling_governor"] {
        host.remove(&format!("{POLICY}/{name}"));
    }
    let found = findings(&facts(&host));
    let bad: Vec<_> = found.iter().filter(|f| f.level > Level::Good).collect();
    assert!(bad.is_empty(), "{bad:?}");
    // With one of its CPUs online it has a governor, which counts.
    host.write("sys/devices/system/cpu/online", "1-3\n");
    host.write(&format!("{POLICY}/scaling_driver"), "lab\n");
    host.write(&format!("{POLICY}/scaling_governor"), "performance\n");
    assert_eq!(only_finding(&facts(&host)).subject, "governor");
}

fn floors_of(host: &FakeHost) -> Vec<DoctorFinding> {
    let all = findings(&facts(host)).into_iter();
    all.filter(|found| found.subject == "fair server").collect()
}

#[test]
fn opps_below_what_is_reserved_are_named_with_what_to_change() {
    let host = good_host();
    let levels = |host: &FakeHost| floors_of(host).iter().map(|f| f.level).collect::<Vec<_>>();
    assert_eq!(levels(&host), [Level::Good]);
    host.write("sys/devices/system/cpu/cpu0/cpu_capacity", "80");
    host.write("sys/devices/system/cpu/cpu1/cpu_capacity", "80");
    let found = only_finding(&facts(&host));
    assert_eq!(
        (found.cpus.to_string(), found.what.as_str()),
        (
            "0-1".to_owned(),
            "51 of capacity 80 (1147.5 MHz) is reserved"
        )
    );
    assert!(found.why.contains("run at 1400 MHz at least"), "{found:?}");
    assert!(
        found.why.contains("a request for 600, 1000 MHz"),
        "{found:?}"
    );
    let change = found.change.unwrap();
    assert!(
        change.contains("rt apply --profile no-fair-server"),
        "{change}"
    );
    assert!(change.contains("rt restore"), "{change}");
    host.fair_server(0, 1000);
    assert_eq!(levels(&host), [Level::Good]);
    assert!(floors_of(&host)[0].what.contains("nothing is reserved"));
}

/// A host of `cpus` policies of one CPU each, of these capacities in turn, without debugfs.
fn many_policies(cpus: u32, capacities: &[u16]) -> FakeHost {
    const CPU: &str = "sys/devices/system/cpu";
    let host = good_host();
    host.remove(&format!("{CPU}/cpufreq"));
    host.remove("sys/kernel/debug/sched");
    for list in ["present", "online"] {
        host.write(&format!("{CPU}/{list}"), format!("0-{}\n", cpus - 1));
    }
    for (cpu, capacity) in (0..cpus).zip(capacities.iter().cycle()) {
        let file = format!("{CPU}/cpu{cpu}/cpu_capacity");
        host.write(&file, capacity.to_string());
        host.policy(cpu, &cpu.to_string(), "", "2400000");
        host.remove(&format!(
            "{CPU}/cpufreq/policy{cpu}/scaling_available_frequencies"
        ));
    }
    host
}

/// An EPYC has 96 equal policies, a GB10 has 20 with three capacities.
#[test]
fn policies_that_are_alike_have_one_line() {
    let file =
        |policy: u32, name: &str| format!("sys/devices/system/cpu/cpufreq/policy{policy}/{name}");
    for (cpus, capacities) in [(96, &[1024_u16][..]), (20, &[718, 997, 1024])] {
        let host = many_policies(cpus, capacities);
        let found = floors_of(&host);
        let all = format!("0-{}", cpus - 1);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].cpus.to_string(), all);
        assert_eq!((found[0].level, &found[0].change), (Level::Absent, &None));
        let (before, lines) = (
            text(&findings(&facts(&good_host()))),
            text(&findings(&facts(&host))),
        );
        assert_eq!(lines.lines().count(), before.lines().count(), "{lines}");
        for policy in 0..cpus {
            host.write(&file(policy, "scaling_governor"), "performance\n");
            host.write(&file(policy, "auto_select"), "1\n");
            host.write(&file(policy, "boost"), "1\n");
        }
        let found = findings(&facts(&host));
        let bad: Vec<_> = found.iter().filter(|f| f.level == Level::Limit).collect();
        assert_eq!(bad.len(), 3, "{bad:?}");
        for finding in bad {
            let change = finding.change.as_ref().unwrap();
            assert!(change.ends_with(&format!("N = {all}")), "{change}");
        }
    }
}

#[test]
fn a_finding_of_other_cpus_is_the_same_and_one_of_the_host_is_not() {
    let of =
        |what: &str, cpus: &str| DoctorFinding::limit("a", what, "c").of(cpus.parse().unwrap());
    let found = vec![of("b", "0"), of("x", "1"), of("b", "2-3"), of("b", "")];
    let expected = [of("b", "0,2-3"), of("x", "1"), of("b", "")];
    assert_eq!(finding::grouped(found), expected);
    let lines = text(&expected);
    assert!(lines.contains("CPUs 0,2-3: b; c\n"), "{lines}");
    assert!(lines.ends_with("  b; c\n"), "{lines}");
}

#[test]
fn a_floor_that_is_not_readable_is_unknown_and_a_kernel_without_servers_has_none() {
    let host = good_host();
    host.remove("sys/kernel/debug/sched");
    for (capacity, level, said) in [
        ("329", Level::Absent, "unknown, by default 51 of 1024"),
        ("80", Level::Limit, "unknown, by default 51 of capacity 80"),
    ] {
        for cpu in 0..2 {
            host.write(
                &format!("sys/devices/system/cpu/cpu{cpu}/cpu_capacity"),
                capacity,
            );
        }
        let found = &floors_of(&host)[0];
        assert_eq!(found.level, level);
        assert!(found.what.contains(said), "{found:?}");
        let know = found.change.as_ref().unwrap_or(&found.why);
        assert!(know.contains("as root"), "{found:?}");
    }
    host.write("proc/sys/kernel/osrelease", "6.11.4");
    let found = floors_of(&host);
    assert!(found.iter().all(|f| f.level == Level::Absent), "{found:?}");
    let text = text(&found);
    assert!(text.lines().all(|line| line.starts_with("n/a  ")), "{text}");
    assert_eq!(exit_code(&found), 0);
}

#[test]
fn what_the_running_kernel_lacks_is_found() {
    let with = |change: &dyn Fn(&mut Live)| {
        let mut live = live();
        change(&mut live);
        only_finding(&DoctorFacts::read(&good_host().root(), "aarch64", live))
    };
    let no_uclamp = with(&|live| live.uclamp = Err("Operation not supported".into()));
    assert_eq!(
        (no_uclamp.subject, no_uclamp.level),
        ("uclamp", Level::Limit)
    );
    assert!(no_uclamp.why.contains("not applicable"));
    let no_cgroup = with(&|live| live.cgroup = Err("cgroup v2 is not mounted".into()));
    assert_eq!(
        (no_cgroup.subject, no_cgroup.level),
        ("cgroup", Level::Limit)
    );
    let no_kvm = with(&|live| live.kvm = Err("No such file or directory".into()));
    assert_eq!((no_kvm.subject, no_kvm.level), ("kvm", Level::Blocker));
    let old_kvm = with(&|live| live.kvm.as_mut().unwrap().api_version = 11);
    assert_eq!((old_kvm.subject, old_kvm.level), ("kvm", Level::Blocker));
    let protected = with(&|live| live.kvm.as_mut().unwrap().readonly_slots = false);
    assert_eq!((protected.subject, protected.level), ("kvm", Level::Limit));
    assert!(protected.why.contains("read-only memory slots"));
}

/// The findings of a good host about paths, with this done to its facts.
fn paths_of(change: &dyn Fn(&mut DoctorFacts)) -> Vec<(&'static str, Level, String)> {
    let mut facts = facts(&good_host());
    change(&mut facts);
    let found = findings(&facts).into_iter();
    let found = found.filter(|finding| finding.subject.starts_with("path"));
    let found = found.map(|finding| {
        let DoctorFinding { what, change, .. } = finding;
        let text = [what, change.unwrap_or_default()].join("|");
        (finding.subject, finding.level, text)
    });
    found.collect()
}

#[test]
fn the_path_in_use_is_told_and_what_the_best_one_lacks() {
    let refused = |why: &str| Err::<String, _>(why.to_owned());
    assert_eq!(paths_of(&|_| ()), [("path", Level::Good, "bpf|".into())]);
    let kernel = || ("path", Level::Good, "ioeventfd|".to_owned());
    let built = paths_of(&|facts| {
        facts.bpf_built = true;
        facts.live.bpf = refused("no BTF; use a kernel that has it");
    });
    let lacks = "not possible|use a kernel that has it".to_owned();
    assert_eq!(built, [("path bpf", Level::Limit, lacks), kernel()]);
    let not_built = paths_of(&|facts| {
        facts.bpf_built = false;
        facts.live.bpf = refused("built without");
    });
    let step = "not in this program|cargo build --release -p vcpufreq".to_owned();
    assert_eq!(not_built, [("path bpf", Level::Absent, step), kernel()]);
    let neither = paths_of(&|facts| {
        facts.bpf_built = false;
        facts.live.bpf = refused("built without");
        facts.btf = false;
    });
    let nothing = "not in this program|".to_owned();
    assert_eq!(neither, [("path bpf", Level::Absent, nothing), kernel()]);
    let old_cpus = paths_of(&|facts| {
        facts.bpf_built = true;
        facts.live.paths.as_mut().unwrap().coherent = false;
    });
    let nothing = "not for these CPUs|".to_owned();
    assert_eq!(old_cpus, [("path bpf", Level::Absent, nothing), kernel()]);
}

#[test]
fn what_is_not_here_is_not_called_good() {
    let mut facts = facts(&good_host());
    facts.bpf_built = false;
    facts.live.bpf = Err("built without".to_owned());
    facts.realtime = false;
    let findings = findings(&facts);
    assert_eq!(exit_code(&findings), 0);
    let text = text(&findings);
    let marked = |mark: &str| text.lines().filter(|line| line.starts_with(mark)).count();
    assert_eq!(marked("n/a "), 2, "{text}");
    let wrong = |line: &&str| line.starts_with("ok") && line.contains("not ");
    assert_eq!(text.lines().find(wrong), None);
    let json = serde_json::to_value(&findings).unwrap();
    let rows = json.as_array().unwrap().iter();
    let absent = rows.filter(|row| row["level"] == "n/a");
    assert_eq!(absent.count(), 2);
}

#[test]
fn an_empty_tree_is_findings_and_no_panic() {
    let live = Live {
        bpf: Err("no BPF".to_owned()),
        kvm: Err("absent".into()),
        paths: Err("absent".into()),
        uclamp: Err("absent".into()),
        cgroup: Err("absent".into()),
        capped: None,
    };
    let facts = DoctorFacts::read(&FakeHost::empty().root(), "x86_64", live);
    assert_eq!(facts.energy_model, EnergyModel::Hidden);
    let findings = findings(&facts);
    assert_eq!(exit_code(&findings), 2);
    let changes = findings
        .iter()
        .filter(|finding| finding.level > Level::Good);
    assert!(changes.clone().count() >= 8 && changes.clone().all(|f| f.change.is_some()));
}

#[test]
fn the_headroom_rule_follows_the_version() {
    let rows = [
        ("6.7.12", Some(Headroom::Quarter)),
        ("6.8.0-rc1", Some(Headroom::None)),
        ("7.2.12+deb13-arm64", Some(Headroom::None)),
        ("5.15", Some(Headroom::Quarter)),
        ("", None),
        ("next", None),
    ];
    for (release, expected) in rows {
        assert_eq!(
            crate::kernel_version::headroom_of(release),
            expected,
            "{release}"
        );
    }
}

/// The finding about the parts of a kernel of this release.
fn parts_of(release: &str) -> Vec<DoctorFinding> {
    let host = good_host();
    host.write("proc/sys/kernel/osrelease", release);
    let all = findings(&facts(&host)).into_iter();
    all.filter(|found| found.subject == "kernel parts")
        .collect()
}

#[test]
fn the_parts_that_the_running_kernel_is_too_old_for_are_named() {
    let [old] = &parts_of("6.1.0-rpi7-rpi-v8")[..] else {
        panic!("one finding");
    };
    assert_eq!(
        old.what,
        "Linux 6.1.0-rpi7-rpi-v8 lacks: bpf (6.12), vcpufreq_host (6.12), scx (7.0), sandbox: network \
         (6.7), sandbox: sockets (6.12), sandbox: signals (6.15), real-time partition (6.7)"
    );
    // Guests run without these.
    assert_eq!((old.level, &old.change), (Level::Absent, &None));
    let [new] = &parts_of("7.3.0-rc1")[..] else {
        panic!("one finding");
    };
    assert_eq!((new.level, new.what.as_str()), (Level::Good, "all"));
    assert_eq!(parts_of("next"), []);
}

#[test]
fn exit_codes_follow_the_worst_finding() {
    let limit = DoctorFinding::limit("a", "b", "c");
    let blocker = DoctorFinding::blocker("a", "b", "c");
    let good = DoctorFinding::good("a", "b", "c");
    assert_eq!(exit_code(&[]), 0);
    assert_eq!(exit_code(&[good.clone(), limit.clone()]), 1);
    assert_eq!(exit_code(&[good, blocker, limit]), 2);
}

/// What is done to the facts of a good host.
type FactChange = &'static dyn Fn(&FakeHost, &mut Live);

/// A board that has the trap of this name, and a part of its finding: of the change, or of what is
/// so where there is nothing to change.
const BOARDS: [(&str, FactChange, &str); 17] = [
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
            "at most 1700000 of 2800000 kHz, by cooling device cpufreq-cpu2"
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

#[test]
fn a_slice_above_that_caps_is_named_with_the_command() {
    let file = "/sys/fs/cgroup/machine.slice/cpu.uclamp.min";
    let mut live = live();
    live.capped = Some((file.to_owned(), "0.00".to_owned()));
    let found = only_finding(&DoctorFacts::read(&good_host().root(), "aarch64", live));
    assert_eq!(found.change, Some(format!("echo max > {file}")));
}

#[test]
fn protected_mode_is_no_advice_where_kvm_lacks_something() {
    let host = good_host();
    host.write("proc/cmdline", "kvm-arm.mode=protected\n");
    let mut live = live();
    live.kvm.as_mut().unwrap().stolen_time = false;
    let found = only_finding(&DoctorFacts::read(&host.root(), "aarch64", live));
    let change = found.change.unwrap();
    assert!(!change.contains("mode"), "{change}");
}

#[test]
fn the_page_has_the_tables_of_parts_and_traps() {
    let page = include_str!("../../docs/boards.md");
    for table in [features::table(), traps::table()] {
        assert!(
            page.contains(&table),
            "docs/boards.md has another table than:\n{table}"
        );
    }
}
