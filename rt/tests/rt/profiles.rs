// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise: the shipped profiles are right, and have the values that their sources give.

use std::{fs, path::Path};

use vcpufreq_rt::{Profile, SHIPPED};

#[test]
fn every_shipped_profile_is_right() {
    for (name, _) in SHIPPED {
        let profile = Profile::shipped(name).unwrap();
        assert!(!profile.description.is_empty(), "{name}");
        let real_time = !profile.settings.need_no_guest();
        assert_eq!(real_time, !profile.cmdline.is_empty(), "{name}");
        assert_eq!(real_time, *name != "no-fair-server");
    }
}

/// As a guest needs that stays in its manager's cgroups.
#[test]
fn a_profile_is_taken_without_its_cpuset() {
    let whole = Profile::shipped("kvm-rt").unwrap();
    let of = |text: &str| whole.clone().with("it", text.parse().unwrap());
    let without = of("cpuset = 'none'").unwrap();
    assert_eq!(without.settings.cpuset, None);
    let back = without
        .clone()
        .with("it", "cpuset = 'isolated'".parse().unwrap());
    assert_eq!(back.unwrap(), whole);
    // A record has it so.
    let record = serde_json::to_string(&without).unwrap();
    assert_eq!(serde_json::from_str::<Profile>(&record).unwrap(), without);
    let error = of("cpuset = 'nothing'").unwrap_err().to_string();
    assert!(
        error.contains("`none`") && error.lines().count() == 1,
        "{error}"
    );
}

/// All of a profile's settings, as `key = value`.
fn settings(name: &str) -> Vec<String> {
    let (_, text) = SHIPPED.iter().find(|(of, _)| *of == name).unwrap();
    let table: toml::Table = text.parse().unwrap();
    let settings = table["settings"].as_table().unwrap();
    let mut lines: Vec<String> = settings
        .iter()
        .map(|(key, value)| format!("{key} = {value}"))
        .collect();
    lines.sort();
    lines
}

/// Whether these words are on a profile's command line.
fn assert_words(name: &str, words: &[&str]) {
    let cmdline = Profile::shipped(name).unwrap().cmdline;
    for word in words {
        assert!(cmdline.iter().any(|of| of == word), "{name} {word}");
    }
}

#[test]
fn kvm_rt_has_these_values() {
    let expected = [
        "compaction-proactiveness = 0",
        "cpuset = \"isolated\"",
        "fair-server-runtime-ns = 0",
        "frequency-cpus = \"rt\"",
        "governor = \"schedutil\"",
        "halt-poll-ns = 0",
        "interrupts = \"housekeeping\"",
        "ksm = 0",
        "ksoftirqd = \"fifo:2\"",
        "ktimers = \"fifo:2\"",
        "nmi-watchdog = 0",
        "numa-balancing = 0",
        "rcub = \"fifo:4\"",
        "rcuc = \"fifo:4\"",
        "rt-runtime-us = -1",
        "stat-interval = 10",
        "swappiness = 10",
        "timer-migration = 0",
        "tracing = 0",
        "transparent-hugepages = \"madvise\"",
        "util-clamp-max = 1024",
        "util-clamp-min = 1024",
        "util-clamp-min-rt-default = 0",
        "watchdog = \"housekeeping\"",
        "workqueues = \"housekeeping\"",
    ];
    assert_eq!(settings("kvm-rt"), expected);
    let profile = Profile::shipped("kvm-rt").unwrap();
    assert!(profile.kernel_config.iter().any(|of| of == "RCU_NOCB_CPU"));
    assert_eq!(
        profile.cmdline,
        [
            "isolcpus=managed_irq,{rt}",
            "nohz_full={rt}",
            "rcu_nocbs={rt}",
            "rcu_nocb_poll",
            "irqaffinity={housekeeping}",
            "rcutree.nohz_full_patience_delay=1000",
            "skew_tick=1"
        ]
    );
}

/// tuned's own profiles aren't here to compare with.
#[test]
fn each_row_of_tuned_toml_is_of_kvm_rt_or_has_a_reason() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tuned.toml");
    let table: toml::Table = fs::read_to_string(path).unwrap().parse().unwrap();
    let rows = table["setting"].as_array().unwrap();
    let profile = Profile::shipped("kvm-rt").unwrap();
    let own = [settings("kvm-rt"), profile.cmdline, profile.module_options].concat();
    let text = |row: &toml::Value, key: &str| Some(row.get(key)?.as_str()?.to_owned());
    for row in rows {
        let name = text(row, "tuned").unwrap();
        match (text(row, "kvm-rt"), text(row, "not")) {
            (Some(ours), None) => assert!(own.contains(&ours), "{name}: {ours}"),
            (None, Some(reason)) => assert!(!reason.is_empty(), "{name}"),
            other => panic!("{name}: {other:?}"),
        }
    }
    let profiles = [
        "realtime-virtual-host",
        "realtime-virtual-guest",
        "cpu-partitioning",
    ];
    for profile in profiles {
        let of = |row: &toml::Value| row["of"].as_array().unwrap().contains(&profile.into());
        assert!(rows.iter().any(of), "{profile}");
    }
    assert!(rows.len() > 45, "{}", rows.len());
}

#[test]
fn the_published_maxima_are_the_sources() {
    let published = |name: &str| {
        let rows = Profile::shipped(name).unwrap().published.into_iter();
        let rows = rows.map(|one| {
            assert!(["host", "guest"].contains(&&*one.place), "{name}");
            assert!(
                !one.conditions.is_empty() && !one.source.is_empty(),
                "{name}"
            );
            (one.load, one.max_us)
        });
        rows.collect::<Vec<_>>()
    };
    for (name, _) in SHIPPED {
        let known = ["iq-615", "qcs6490", "xeon-e5"];
        assert_eq!(!published(name).is_empty(), known.contains(name), "{name}");
    }
    let row = |load: &str, us: u64| (load.to_owned(), us);
    assert_eq!(published("iq-615"), [row("idle", 7), row("stress", 9)]);
    assert_eq!(
        published("qcs6490"),
        [
            row("idle", 6),
            row("stress", 6),
            row("idle", 86),
            row("stress", 53)
        ]
    );
    assert_eq!(published("xeon-e5"), [row("idle", 8), row("hackbench", 8)]);
}

#[test]
fn settings_beside_the_servers_of_all_cpus_need_a_guest() {
    for (text, none) in [
        ("fair-server-runtime-ns = 0\nfair-server-cpus = 'all'", true),
        (
            "fair-server-runtime-ns = 25000000\nfair-server-cpus = 'all'",
            true,
        ),
        ("fair-server-runtime-ns = 0", false),
        (
            "fair-server-runtime-ns = 0\nfair-server-cpus = 'all'\nksm = 0",
            false,
        ),
        ("", false),
    ] {
        let profile = Profile::parse("test", &format!("[settings]\n{text}")).unwrap();
        assert_eq!(profile.settings.need_no_guest(), none, "{text}");
    }
}

#[test]
fn the_boards_have_the_guides_values() {
    let common = [
        "compaction-proactiveness = 0",
        "fair-server-runtime-ns = 0",
        "frequency-cpus = \"all\"",
        "governor = \"performance\"",
        "interrupts = \"housekeeping\"",
        "rcu-expedited = 1",
        "rt-runtime-us = -1",
        "swappiness = 100",
        "timer-migration = 0",
        "workqueues = \"housekeeping\"",
    ];
    assert_eq!(settings("iq-9075"), common);
    assert_eq!(settings("iq-8275"), common);
    assert_eq!(settings("iq-615"), common);
    let mut older = [
        &common[..],
        &[
            "cpuset = \"isolated\"",
            "idle-cpus = \"all\"",
            "idle-states-off = [0, 1, 2]",
            "schedutil-rate-limit-us = 1000",
            "tracing = 0",
            "util-clamp-max = 1024",
            "util-clamp-min = 1024",
            "util-clamp-min-rt-default = 128",
        ],
    ]
    .concat();
    older.sort_unstable();
    assert_eq!(settings("qcs6490"), older);
    for name in ["qcs6490", "iq-9075", "iq-8275", "iq-615"] {
        let words = [
            "rcu_nocbs={rt}",
            "irqaffinity={housekeeping}",
            "cpuidle.off=1",
        ];
        assert_words(name, &words);
    }
    assert_words(
        "qcs6490",
        &[
            "kpti=off",
            "mitigations=auto",
            "kernel.sched_pelt_multiplier=4",
            "rcupdate.rcu_expedited=1",
            "isolcpus={rt}",
            "nohz_full={rt}",
            "no-steal-acc",
        ],
    );
}

#[test]
fn the_xeon_has_the_papers_values() {
    let expected = [
        "frequency-cpus = \"all\"",
        "governor = \"performance\"",
        "interrupts = \"housekeeping\"",
        "max-freq = \"max\"",
        "min-freq = \"max\"",
    ];
    assert_eq!(settings("xeon-e5"), expected);
    assert_words(
        "xeon-e5",
        &[
            "isolcpus={rt}",
            "rcu_nocbs={rt}",
            "rcu_nocb_poll",
            "intel_idle.max_cstate=0",
            "processor.max_cstate=1",
            "idle=poll",
            "intel_iommu=on",
            "iommu=pt",
        ],
    );
    let firmware = Profile::shipped("xeon-e5").unwrap().firmware;
    assert_eq!((firmware.len(), &*firmware[0]), (8, "turbo off"));
}

#[test]
fn a_wrong_profile_is_one_line() {
    for (text, said) in [
        ("[settings]\nfrequncy = 1", "frequncy"),
        ("[settings]\nrcuc = 'fifo:100'", "fifo:1 to fifo:99"),
        ("[settings]\nutil-clamp-min = 1025", "0 to 1024"),
        ("[settings]\nresume-latency-us = 'soon'", "n/a"),
        ("[settings]\nresume-latency-us = '0'", "n/a"),
        ("[settings]\nresume-latency-us = '-5'", "n/a"),
        ("[settings]\nwatermark-scale-factor = 3001", "1 to 3000"),
        ("[settings]\nmin-freq = { silver = 'max' }", "policy0"),
        ("[settings]\nmin-freq = 'most'", "policy0 = 1804800"),
        ("module-options = ['kvm/../x.y=1']", "kvm.NAME=VALUE"),
        ("settings = 3", "settings"),
    ] {
        let line = Profile::parse("mine.toml", text).unwrap_err().to_string();
        assert!(line.contains(said) && line.contains("mine.toml"), "{line}");
        assert_eq!(line.lines().count(), 1);
    }
    let line = Profile::shipped("nope").unwrap_err().to_string();
    assert!(
        line.contains("kvm-rt") && line.contains("xeon-e5"),
        "{line}"
    );
}

#[test]
fn single_settings_can_be_other_ones() {
    let profile = Profile::shipped("kvm-rt").unwrap();
    let other = |text: &str| profile.clone().with("rt.toml", text.parse().unwrap());
    let changed = other("governor = 'performance'\nidle-states-off = 'deep'").unwrap();
    assert_eq!(changed.settings.governor.as_deref(), Some("performance"));
    assert_eq!(changed.settings.rcuc, profile.settings.rcuc);
    for (text, said) in [("govrnor = 'x'", "govrnor"), ("rcuc = 'fifo:0'", "fifo:1")] {
        let line = other(text).unwrap_err().to_string();
        assert!(line.contains(said) && line.contains("rt.toml"), "{line}");
    }
}
