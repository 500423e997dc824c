// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise: the shipped profiles are right, and have the values that their sources give.

use vcpufreq_rt::{IdleStates, Place, Profile, SHIPPED, Scope};

#[test]
fn every_shipped_profile_is_right() {
    for (name, _) in SHIPPED {
        let profile = Profile::shipped(name).unwrap();
        assert!(
            !profile.description.is_empty() && !profile.cmdline.is_empty(),
            "{name}"
        );
    }
}

#[test]
fn the_boards_have_the_guides_values() {
    for name in ["qcs6490", "iq-9075", "iq-8275"] {
        let profile = Profile::shipped(name).unwrap();
        let settings = &profile.settings;
        assert_eq!(settings.timer_migration, Some(0));
        assert_eq!(settings.rt_runtime_us, Some(-1));
        assert_eq!(settings.workqueues, Some(Place::Housekeeping));
        assert_eq!(settings.interrupts, Some(Place::Housekeeping));
        assert_eq!(settings.governor.as_deref(), Some("performance"));
        assert_eq!(settings.frequency_cpus, Scope::All);
        for word in [
            "rcu_nocbs={rt}",
            "irqaffinity={housekeeping}",
            "cpuidle.off=1",
        ] {
            assert!(profile.cmdline.iter().any(|of| of == word), "{name} {word}");
        }
    }
    let older = Profile::shipped("qcs6490").unwrap();
    let off = Some(IdleStates::Numbers(vec![0, 1, 2]));
    assert_eq!(older.settings.idle_states_off, off);
}

#[test]
fn the_xeon_has_the_papers_values() {
    let profile = Profile::shipped("xeon-e5").unwrap();
    assert_eq!(profile.settings.turbo, Some(false));
    for word in ["isolcpus={rt}", "rcu_nocb_poll", "idle=poll", "iommu=pt"] {
        assert!(profile.cmdline.iter().any(|of| of == word), "{word}");
    }
    assert_eq!(profile.firmware.len(), 8);
}

#[test]
fn a_wrong_profile_is_one_line() {
    for (text, said) in [
        ("[settings]\nfrequncy = 1", "frequncy"),
        ("[settings]\nrcuc = 'fifo:100'", "fifo:1 to fifo:99"),
        ("[settings]\nutil-clamp-min = 1025", "0 to 1024"),
        ("[settings]\nresume-latency-us = 'soon'", "n/a"),
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
