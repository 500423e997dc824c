// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Promises: from `capacity-dmips-mhz`, Linux' own arithmetic arrives at the host's capacities
//! within 1, and exactly on realistic machines. Without a CPU of 1024 it arrives at the host's
//! ratios. Where 32 bits don't allow that, there is an error and no wrong number.

use proptest::collection::vec;
use proptest::prelude::*;
use vcpufreq_dt::{FactsError, Machine};

use crate::samples::{cpus, machine};

/// `topology_normalize_cpu_scale()` (Linux 7.2, `drivers/base/arch_topology.c`)
/// with `capacity_freq_ref` in kHz, in 64 bits that must not overflow.
fn linux(dmips_mhz: &[u32], khz: &[u32]) -> Vec<u64> {
    let product = |cpu: usize| u64::from(dmips_mhz[cpu]) * u64::from(khz[cpu]);
    let mut scale = 1;
    for cpu in 0..khz.len() {
        scale = scale.max(product(cpu));
    }
    let shifted = |cpu| product(cpu).checked_mul(1024).expect("64 bits are enough");
    (0..khz.len()).map(|cpu| shifted(cpu) / scale).collect()
}

/// What Linux makes of a machine's numbers.
fn in_guest(machine: &Machine, perf: &[(u16, u32)]) -> Vec<u64> {
    let khz: Vec<u32> = perf.iter().map(|&(_, khz)| khz).collect();
    let seen = linux(machine.capacity_dmips_mhz(), &khz);
    let told: Vec<u64> = machine
        .guest_capacities()
        .iter()
        .copied()
        .map(u64::from)
        .collect();
    assert_eq!(told, seen, "what the guest sees, by the crate");
    seen
}

#[test]
fn realistic_machines_are_exact() {
    let rows: &[(&str, &[(u16, u32)])] = &[
        ("2+2", &[(329, 1_800_000), (1024, 2_800_000)]),
        (
            "4+3+1",
            &[(355, 1_900_800), (857, 2_400_000), (1024, 2_707_200)],
        ),
        ("one kind", &[(1024, 2_000_000), (1024, 2_000_000)]),
        (
            "three kinds, far apart",
            &[(160, 1_803_000), (498, 2_253_000), (1024, 2_802_000)],
        ),
        ("big.LITTLE", &[(446, 850_000), (1024, 1_100_000)]),
        (
            "the little one is faster in MHz",
            &[(300, 3_000_000), (1024, 1_200_000)],
        ),
        (
            "same capacity, other frequency",
            &[(1024, 2_400_000), (1024, 3_200_000)],
        ),
        ("a tiny one", &[(1, 100_000), (1024, 5_000_000)]),
    ];
    for (name, perf) in rows {
        let host: Vec<u64> = perf
            .iter()
            .map(|&(capacity, _)| u64::from(capacity))
            .collect();
        assert_eq!(in_guest(&machine(cpus(perf)), perf), host, "{name}");
    }
}

#[test]
fn the_usual_scale_is_used_where_it_is_enough() {
    let perf = [(329, 1_800_000), (1024, 2_800_000)];
    assert_eq!(machine(cpus(&perf)).capacity_dmips_mhz(), [512, 1024]);
}

#[test]
fn the_scale_grows_where_1024_is_too_coarse() {
    // At a scale of 1024 the first would have 100.1: 1000 or 1010 in the guest.
    let perf = [(1001, 10_000_000), (1024, 1_000_000)];
    let machine = machine(cpus(&perf));
    assert_eq!(in_guest(&machine, &perf), [1001, 1024]);
    assert!(machine.capacity_dmips_mhz()[1] > 1024);
}

#[test]
fn a_guest_of_little_cpus_calls_its_largest_1024() {
    let perf = [(329, 1_800_000), (329, 1_800_000)];
    assert_eq!(in_guest(&machine(cpus(&perf)), &perf), [1024, 1024]);
    let perf = [(200, 1_500_000), (400, 2_000_000)];
    assert_eq!(in_guest(&machine(cpus(&perf)), &perf), [512, 1024]);
}

#[test]
fn what_32_bits_cannot_say_is_an_error() {
    // Performance per MHz differs by 2^41.
    let facts = cpus(&[(1, 4_000_000_000), (1024, 1)]);
    assert_eq!(
        Machine::try_from(facts),
        Err(FactsError::CapacityOutOfReach {
            cpu: 1,
            wanted: 1024,
            khz_max: 1,
            nearest: 1,
        })
    );
}

/// Any CPU from 100 MHz to 10 GHz.
fn cpu() -> impl Strategy<Value = (u16, u32)> {
    (1..=1024_u16, 100_000..=10_000_000_u32)
}

proptest! {
    #[test]
    fn with_a_largest_cpu_the_guest_has_the_hosts_capacities(
        mut perf in vec(cpu(), 1..=16),
        at in any::<prop::sample::Index>(),
    ) {
        at.get_mut(&mut perf).0 = 1024;
        let seen = in_guest(&machine(cpus(&perf)), &perf);
        for (seen, (host, _)) in seen.iter().zip(&perf) {
            prop_assert!(seen.abs_diff(u64::from(*host)) <= 1, "{seen} for {host}");
        }
    }

    #[test]
    fn with_one_kind_of_largest_cpu_they_are_exact(
        mut perf in vec((1..=1023_u16, 100_000..=10_000_000_u32), 1..=16),
        khz in 100_000..=10_000_000_u32,
    ) {
        perf.push((1024, khz));
        let seen = in_guest(&machine(cpus(&perf)), &perf);
        let host: Vec<u64> = perf.iter().map(|&(capacity, _)| u64::from(capacity)).collect();
        prop_assert_eq!(seen, host);
    }

    #[test]
    fn without_one_it_has_their_ratios(perf in vec(cpu(), 1..=16)) {
        let largest = perf.iter().map(|&(capacity, _)| u64::from(capacity)).max().unwrap();
        let seen = in_guest(&machine(cpus(&perf)), &perf);
        for (seen, (host, _)) in seen.iter().zip(&perf) {
            let ratio = u64::from(*host) * 1024 / largest;
            prop_assert!(seen.abs_diff(ratio) <= 1, "{seen} for {ratio}");
        }
    }

    #[test]
    fn whatever_the_frequencies_it_is_right_or_an_error(
        mut perf in vec((1..=1024_u16, prop_oneof![1..=u32::MAX, 1..=1000_u32]), 1..=16),
        at in any::<prop::sample::Index>(),
    ) {
        at.get_mut(&mut perf).0 = 1024;
        match Machine::try_from(cpus(&perf)) {
            Ok(machine) => {
                prop_assert!(machine.capacity_dmips_mhz().iter().all(|&dmips| dmips != 0));
                for (seen, (host, _)) in in_guest(&machine, &perf).iter().zip(&perf) {
                    prop_assert!(seen.abs_diff(u64::from(*host)) <= 1, "{seen} for {host}");
                }
            }
            Err(error) => {
                prop_assert!(matches!(error, FactsError::CapacityOutOfReach { .. }), "{error}");
            }
        }
    }
}
