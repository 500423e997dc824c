// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The lowest frequency of each policy, in words.

use vcpufreq_device::ClampMode;
use vcpufreq_host::{Floor, PolicyFloor, Reserved};

/// How far down clamps of this mode hold, a line for each policy that vCPUs may be on.
pub fn explain(floors: &[PolicyFloor], pcpus: &[u32], mode: ClampMode) -> Vec<String> {
    let mode = match mode {
        ClampMode::Floor => "floor",
        ClampMode::Ceilings => "ceilings",
        ClampMode::Exact => "exact",
    };
    let line = |of: &PolicyFloor| {
        let by_default = match of.reserved {
            Reserved::Default(_) => ", by default (debugfs isn't readable)",
            Reserved::Known(_) | Reserved::NoServer => "",
        };
        let Floor { util, capacity, .. } = of.floor;
        let holds = match of.floor.opps_below_khz.is_empty() {
            true => "for every OPP".to_owned(),
            false => format!(
                "down to {}: {util} of capacity {capacity} are reserved for fair tasks",
                mhz(&[of.floor.khz])
            ),
        };
        let cpus = &of.cpus;
        format!("clamp {mode} on CPUs {cpus} holds {holds}{by_default}; see vcpufreq doctor")
    };
    let floors = floors.iter();
    let concerned = floors.filter(|of| of.cpus.iter().any(|cpu| pcpus.contains(&cpu)));
    concerned.map(line).collect()
}

/// `574.706 MHz`; `300, 574 MHz`.
pub fn mhz(khz: &[u32]) -> String {
    let number = |khz: &u32| {
        let text = format!("{}.{:03}", khz / 1000, khz % 1000);
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    let all: Vec<String> = khz.iter().map(number).collect();
    format!("{} MHz", all.join(", "))
}

#[cfg(test)]
mod tests {
    //! Promise: a line names the floor of the CPUs that a guest may be on.
    use vcpufreq_host::fakes::FakeHost;
    use vcpufreq_host::{HostCpus, floors};

    use super::*;

    #[test]
    fn an_explanation_names_the_floors_of_the_guests_cpus() {
        let host = FakeHost::two_plus_two();
        host.write("proc/sys/kernel/osrelease", "7.3.4");
        // 600 of 1,800 MHz is 109 of 329.
        host.fair_server(120, 1000);
        let root = host.root();
        let floors = floors(&root, &HostCpus::read(&root));
        let little = "clamp exact on CPUs 0-1 holds down to 667.477 MHz: 122 of capacity 329 are \
                      reserved for fair tasks; see vcpufreq doctor";
        assert_eq!(explain(&floors, &[1], ClampMode::Exact), [little]);
        let big = "clamp floor on CPUs 2-3 holds for every OPP; see vcpufreq doctor";
        assert_eq!(explain(&floors, &[2, 3], ClampMode::Floor), [big]);
        assert_eq!(explain(&floors, &[0, 2], ClampMode::Floor).len(), 2);
    }

    #[test]
    fn frequencies_are_as_precise_as_they_are() {
        assert_eq!(
            mhz(&[574_706, 300_000, 1_050, 100_010]),
            "574.706, 300, 1.05, 100.01 MHz"
        );
    }
}
