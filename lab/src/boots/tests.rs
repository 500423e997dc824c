// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: a scenario of a host is in one set; what finds most defects soonest is in the
//! short one, which judges no samples. Each topology is some host's.
use std::{collections::BTreeSet, fs, path::Path};

use super::*;

/// Each scenario of a set with its host.
fn entries(set: Set) -> Vec<(String, &'static str)> {
    let boots = of(set).into_iter();
    let each = boots.flat_map(|boot| {
        let all = boot.scenarios.iter().chain(boot.sampled);
        all.map(|&one| (boot.name(), one))
    });
    // Two boots of it are one test.
    let (mut repeats, mut others): (Vec<_>, Vec<_>) = each.partition(|(_, one)| *one == "repeat");
    repeats.dedup();
    others.append(&mut repeats);
    others
}

#[test]
fn each_scenario_is_in_one_set() {
    let mut seen = BTreeSet::new();
    for entry in [entries(Short), entries(Long), entries(Instrumented)].concat() {
        assert!(seen.insert(entry.clone()), "twice: {entry:?}");
    }
}

/// Of these boards the trees alone are tried: on the R-Car H3's little CPUs clamps have no effect, and
/// the lab takes no such host.
const NOT_BOOTED: [&str; 1] = ["r8a77951"];

#[test]
fn each_topology_is_booted() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies");
    let files = fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
    let stems = files.map(|file| file.file_stem().unwrap().to_str().unwrap().to_owned());
    let booted: BTreeSet<&str> = BOOTS.iter().map(|boot| boot.topology).collect();
    let left_out: Vec<String> = stems.filter(|name| !booted.contains(&**name)).collect();
    assert_eq!(left_out, NOT_BOOTED);
}

/// A median of three is within a bound if two of the three are: the rule of [`crate::draws`].
#[test]
fn the_bench_has_as_many_repeats_as_there_are_draws() {
    let all = [entries(Short), entries(Long), entries(Instrumented)].concat();
    let bench = all.iter().filter(|(_, one)| one.starts_with("bench:"));
    for (host, one) in bench {
        let mut words = one.split(':');
        let number = words.find_map(|word| word.strip_prefix("--repeats="));
        let number = number.map_or(3, |number| number.parse().unwrap());
        assert_eq!(number, crate::draws::DRAWS, "{host}: {one}");
    }
}

#[test]
fn a_host_has_what_its_scenario_needs() {
    let of = |scenario: &str| parts(&[scenario.to_owned()]);
    let rows: [(HostPart, &[&str]); 13] = [
        (
            DiskModules,
            &["bench:fio", "bench:fio.seq_read:--repeats=5", "disk"],
        ),
        (Fio, &["bench:fio", "bench:fio:--variant=host"]),
        (Board, &["board", "board:kills:3", "board:report"]),
        (Disk, &["debian-guest"]),
        (Firmware, &["qemu-efi"]),
        (GibPage, &["rt-guest"]),
        (Isolated, &["libvirt-rt"]),
        (Libvirt, &["libvirt", "libvirt-rt"]),
        (Monitoring, &["metrics"]),
        (Perfetto, &["perfetto"]),
        (
            Qemu,
            &[
                "board:kills",
                "debian-guest",
                "libvirt",
                "libvirt-rt",
                "paths",
                "qemu",
                "qemu-control",
                "qemu-deaths",
                "qemu-efi",
                "qemu-late",
                "qemu-life",
                "qemu-moves",
                "qemu-ram",
                "qemu-service",
                "rt-io",
                "rt-qemu:kills:50",
            ],
        ),
        (
            Systemd,
            &[
                "libvirt",
                "libvirt-rt",
                "metrics",
                "qemu-service",
                "scx-unit",
                "systemd",
            ],
        ),
        (Tools, &["rt-io", "rt-latency", "rt-loop", tools::SHELL]),
    ];
    for (part, scenarios) in rows {
        for scenario in scenarios {
            assert!(of(scenario).contains(&part), "{scenario}: {part:?}");
        }
    }
    assert_eq!(of("rt-latency"), [Tools]);
    assert_eq!(of("opps-exact:boost"), []);
    assert_eq!(of("peer"), []);
}

#[test]
fn the_short_set_judges_no_samples() {
    let sampled: BTreeSet<&&str> = BOOTS.iter().flat_map(|boot| boot.sampled).collect();
    assert!(sampled.contains(&"no-dip:fifo"));
    for boot in of(Short) {
        let of_boot: BTreeSet<&&str> = boot.scenarios.iter().collect();
        assert!(
            boot.sampled.is_empty() && of_boot.is_disjoint(&sampled),
            "{}",
            boot.name()
        );
    }
}

#[test]
fn the_short_set_has_one_of_each_kind() {
    let short = entries(Short);
    let has = |host: &str, name: &str| {
        let host = format!("2+2 host {host} vcpufreq neoverse-v1 GICv3");
        assert!(short.contains(&(host.clone(), name)), "{host}: {name}");
    };
    for path in ["auto", "ioeventfd", "exit"] {
        let host = format!("Standard guest Standard driver Ours path {path}");
        has(&host, "opps-exact");
    }
    has(
        "Standard guest Standard driver Ours path auto",
        "default-run",
    );
    has(
        "Standard guest Standard driver Ours path auto",
        "bpf-requests",
    );
    has("Rt guest Rt driver Ours path auto", "rt-settings");
}
