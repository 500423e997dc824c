// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise: files whose values depend on one another, or that come and go with another's, get there
//! and back whatever their values were.

use vcpufreq_rt::{Profile, apply, check, plan};

use crate::{
    fake::{CPU, FakeKernel},
    partition::{plc, restored},
};

/// Applies a profile to a host with a guest on CPU 3, looks whether all of it is effective, and
/// restores; the host has to be as before.
fn there_and_back(host: &FakeKernel, profile: &Profile, looked_at: &dyn Fn(&FakeKernel)) {
    let before = host.snapshot();
    let partition = plc(host);
    let planned = plan(host, &partition, profile);
    let mut told = Vec::new();
    let applied = apply(host, &planned, ("test", profile), &mut |name, old, new| {
        told.push(format!("{name} {old} {new}"));
    });
    let refused = applied.unwrap().refused;
    assert!(refused.is_empty(), "{refused:?}");
    for line in &told {
        let times = told.iter().filter(|one| *one == line).count();
        assert_eq!(times, 1, "{line}");
    }
    looked_at(host);
    for one in check(host, &plan(host, &partition, profile), profile) {
        assert!(one.unset.is_empty(), "{one:?}");
    }
    let (left, gone) = restored(host);
    assert!(left.is_empty() && gone.is_empty(), "{left:?} {gone:?}");
    // Masks and choices have more than one text.
    for path in ["cpufreq", "kernel/sched_util", "vm/min_free"] {
        let of = |state: &std::collections::BTreeMap<String, String>| -> Vec<_> {
            let own = state.iter().filter(|(name, _)| name.contains(path));
            own.map(|(name, text)| format!("{name} {text}")).collect()
        };
        assert_eq!(of(&host.snapshot()), of(&before));
    }
}

fn settings(text: &str) -> Profile {
    Profile::parse("test", &format!("[settings]\n{text}")).unwrap()
}

#[test]
fn utilization_clamps_from_below_and_back() {
    let host = FakeKernel::four();
    host.put("/proc/sys/kernel/sched_util_clamp_min", "100");
    host.put("/proc/sys/kernel/sched_util_clamp_max", "800");
    let profile = settings("util-clamp-min = 1024\nutil-clamp-max = 1024");
    there_and_back(&host, &profile, &|_| {});
    let profile = settings("util-clamp-min = 50\nutil-clamp-max = 80");
    there_and_back(&host, &profile, &|_| {});
}

#[test]
fn limits_above_and_below_the_old_ones() {
    let host = FakeKernel::four();
    let dir = format!("{CPU}/cpufreq/policy2");
    host.put(&format!("{dir}/scaling_min_freq"), "700000");
    host.put(&format!("{dir}/scaling_max_freq"), "1000000");
    for profile in [
        "min-freq = 'max'\nmax-freq = 'max'",
        "min-freq = 'min'\nmax-freq = 'min'",
    ] {
        there_and_back(&host, &settings(profile), &|_| {});
    }
}

/// Each choice of transparent huge pages that is written raises it.
#[test]
fn memory_that_is_kept_free_is_as_it_was() {
    let path = "/proc/sys/vm/min_free_kbytes";
    for (settings_text, there) in [
        ("transparent-hugepages = 'never'", "90112"),
        (
            "transparent-hugepages = 'never'\nmin-free-kbytes = 5000",
            "5000",
        ),
        (
            "transparent-hugepages = 'never'\nmin-free-kbytes = 67584",
            "67584",
        ),
        (
            "transparent-hugepages = 'always'\nmin-free-kbytes = 5000",
            "5000",
        ),
    ] {
        let host = FakeKernel::four();
        there_and_back(&host, &settings(settings_text), &|host| {
            assert_eq!(host.snapshot()[path], there, "{settings_text}");
        });
    }
    // What is as wanted isn't written, and nothing else is recorded with it.
    let host = FakeKernel::four();
    let planned = plan(
        &host,
        &plc(&host),
        &settings("transparent-hugepages = 'always'"),
    );
    assert_eq!(planned.changes().count(), 1);
}

#[test]
fn a_tunable_of_the_governor_that_comes_with_the_plan() {
    let both = settings("governor = 'schedutil'\nschedutil-rate-limit-us = 1000");
    let host = FakeKernel::four();
    let dir = format!("{CPU}/cpufreq/policy2");
    host.put(&format!("{dir}/scaling_governor"), "performance");
    host.put(&format!("{dir}/scaling_cur_freq"), "2800000");
    host.remove(&format!("{dir}/schedutil"));
    there_and_back(&host, &both, &|host| {
        let rate = &host.snapshot()[&format!("{dir}/schedutil/rate_limit_us")];
        assert_eq!(rate, "1000");
    });
    // One folder of tunables for all policies.
    host.tunables_in_common();
    there_and_back(&host, &both, &|host| {
        let rate = &host.snapshot()[&format!("{CPU}/cpufreq/schedutil/rate_limit_us")];
        assert_eq!(rate, "1000");
    });
    let alone = settings("schedutil-rate-limit-us = 1000");
    let alone = plan(&host, &plc(&host), &alone);
    assert_eq!((alone.changes().count(), alone.absent.len()), (0, 1));
}

#[test]
fn a_speed_that_was_set_by_hand_comes_back() {
    let host = FakeKernel::four();
    let dir = format!("{CPU}/cpufreq/policy2");
    host.put(&format!("{dir}/scaling_governor"), "userspace");
    host.put(&format!("{dir}/scaling_setspeed"), "1100000");
    host.remove(&format!("{dir}/schedutil"));
    let cur = format!("{dir}/scaling_cur_freq");
    host.put(&cur, "1100000");
    there_and_back(&host, &settings("governor = 'performance'"), &|host| {
        assert_eq!(host.snapshot()[&cur], "2800000");
    });
}

#[test]
fn every_shipped_profile_there_and_back() {
    for (name, _) in vcpufreq_rt::SHIPPED {
        let profile = Profile::shipped(name).unwrap();
        there_and_back(&FakeKernel::four(), &profile, &|_| {});
    }
}
