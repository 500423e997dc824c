// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What policies and their CPUs have in common is one line, and what is reserved of them is known.

use super::*;

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
pub fn many_policies(cpus: u32, capacities: &[u16]) -> FakeHost {
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
    let of = |what: &str, cpus: &str| {
        DoctorFinding::limit("a", what, "c").on_cpus(cpus.parse().unwrap())
    };
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
