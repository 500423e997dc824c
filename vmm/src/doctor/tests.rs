// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A good host has no findings; each thing that can be wrong is found, names
//! what to change, and gives the right exit code.

use super::*;
use crate::doctor::facts::Live;
use vcpufreq_host::fakes::FakeHost;
use vcpufreq_vm::{gic::Gic, probe::PathFacts};

#[path = "policy_tests.rs"]
mod policies;
#[path = "trap_tests.rs"]
mod traps_of_boards;

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
        protected: Ok(()),
        paths: Ok(PathFacts {
            protected: false,
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
    // The other paths are run's.
    let paths = findings
        .iter()
        .filter(|one| one.subject.starts_with("path"));
    let paths: Vec<_> = paths.map(|one| (one.subject, &*one.what)).collect();
    assert_eq!(paths, [("path", "shm")]);
    let text = text(&findings);
    let first = text.lines().next().unwrap();
    for part in ["run's guests need arm64", "by qemu and serve"] {
        assert!(first.contains(part), "{first}");
    }
}

/// What KVM was tried with decides, not that this is a PC.
#[test]
fn a_pcs_path_is_what_kvm_takes() {
    let path = |change: &dyn Fn(&mut Live)| {
        let mut live = live();
        change(&mut live);
        let facts = DoctorFacts {
            live,
            ..DoctorFacts::read(&good_host().root(), "x86_64", self::live())
        };
        let found = findings(&facts).into_iter();
        let mut found = found.filter(|one| one.subject.starts_with("path"));
        let one = found.next().expect("a path");
        assert_eq!(found.next(), None);
        (one.level, one.what, one.why)
    };
    assert_eq!(path(&|_| ()).0, Level::Good);
    let refused = "KVM refuses ioeventfds (x)";
    let (level, what, why) = path(&|live| {
        live.paths.as_mut().unwrap().ioeventfds = Err(refused.to_owned());
    });
    assert_eq!((level, &*what), (Level::Limit, "shm"));
    assert!(why.starts_with(refused), "{why}");
    let none = path(&|live| live.paths = Err("/dev/kvm: gone".to_owned()));
    assert_eq!(none, (Level::Absent, "no".into(), "/dev/kvm: gone".into()));
}

/// There is no device tree to change.
#[test]
fn a_pc_gets_no_advice_for_boards() {
    let host = good_host();
    host.remove("sys/kernel/debug/energy_model");
    for cpu in 0..4 {
        host.remove(&format!("sys/devices/system/cpu/cpu{cpu}/cpu_capacity"));
    }
    let advice = |arch: &str| {
        let facts = DoctorFacts::read(&host.root(), arch, live());
        let found = [capacities(&facts), energy_model(&facts)];
        found.map(|one| one.change.unwrap_or_default())
    };
    assert!(
        advice("aarch64")
            .iter()
            .all(|text| text.contains("device tree"))
    );
    assert_eq!(
        advice("x86_64"),
        ["pin each vCPU to CPUs that are equal", ""]
    );
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
            "uclamp ceilings",
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
fn protected_vms_have_their_reason_and_the_next_step() {
    let mut facts = facts(&good_host());
    let step = "write kvm-arm.mode=protected on the kernel's command line";
    facts.live.protected = Err(format!("not in protected mode; {step}"));
    let found = findings(&facts);
    let finding = found.iter().find(|one| one.subject == "protected VMs");
    let finding = finding.expect("a finding");
    assert_eq!((finding.level, &*finding.what), (Level::Absent, "no"));
    assert_eq!(finding.change.as_deref(), Some(step));
    assert_eq!(finding.why, "not in protected mode");
}

#[test]
fn an_empty_tree_is_findings_and_no_panic() {
    let live = Live {
        bpf: Err("no BPF".to_owned()),
        kvm: Err("absent".into()),
        protected: Err("absent".into()),
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
