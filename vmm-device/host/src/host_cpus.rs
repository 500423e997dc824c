// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's CPUs as sysfs, debugfs and the device tree show them: which are
//! online, their capacities, cpufreq policies and operating points.
//!
//! Reads once and keeps nothing open. A file that is missing or makes no sense leaves its fact out,
//! and the caller decides what that means. Tests replace the root of all paths. It is not the
//! source of `cur_perf`.

use super::cpu_flags::has_flag;
use super::opp_node::{self, HostOpp};
use super::root::CPUS;
use super::{CpuList, HostRoot, ReferenceRule, energy_model, topology};

/// The highest capacity. Also the capacity of a host that reports none: its CPUs are alike.
pub const CAPACITY_SCALE: u16 = 1024;

/// One pCPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pcpu {
    /// Its number.
    pub id: u32,
    /// Whether tasks can run on it now.
    pub online: bool,
    /// `cpu_capacity`, 1..=1024; `None` if the host doesn't report it.
    pub capacity: Option<u16>,
    /// The frequency in kHz that its capacity refers to; `None` without a cpufreq policy.
    pub reference_khz: Option<u32>,
    /// Its cluster, by its first CPU; where Linux shows none, the policy of its core.
    pub cluster: Option<u32>,
    /// Its core, by the first of its threads.
    pub core: Option<u32>,
    /// Its package, by its first CPU; `None` where Linux may mean a cluster by that.
    pub package: Option<u32>,
}

/// One cpufreq policy: CPUs that share a frequency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpufreqPolicy {
    /// Its number, as in `policy4`.
    pub id: u32,
    /// `related_cpus`: offline ones too.
    pub cpus: CpuList,
    /// `scaling_driver`.
    pub driver: String,
    /// `scaling_governor`.
    pub governor: String,
    /// `cpuinfo_max_freq` in kHz; `None` if the host doesn't report it.
    pub max_khz: Option<u32>,
    /// Whether schedutil changes its frequency without the event `power:cpu_frequency`: by the driver's
    /// adjust_perf(), as up to Linux 7.3.
    without_events: bool,
    /// Operating points, frequency rising, those of boost too, whether it is on or off; empty if the
    /// host reports none.
    pub opps: Vec<HostOpp>,
}

impl CpufreqPolicy {
    /// The kernel's parameter by which a governor chooses the frequency, where the CPU itself does: the
    /// driver has no governors of cpufreq's then.
    #[must_use]
    pub fn passive_by(&self) -> Option<&'static str> {
        match &*self.driver {
            "intel_pstate" => Some("intel_pstate=passive"),
            "amd-pstate-epp" => Some("amd_pstate=passive"),
            _ => None,
        }
    }

    /// The kernel's parameter by which changes come as events, where they do not.
    #[must_use]
    pub fn events_by(&self) -> Option<&'static str> {
        let word = match &*self.driver {
            "intel_cpufreq" => "intel_pstate=no_hwp",
            _ => "amd_pstate=disable",
        };
        self.without_events.then_some(word)
    }
}

/// The CPUs of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostCpus {
    /// All that are present, by number.
    pub cpus: Vec<Pcpu>,
    /// Policies, by number.
    pub policies: Vec<CpufreqPolicy>,
    /// Whether `reference_khz` of the CPUs is only likely.
    pub guesses_reference: bool,
    /// Whether the capacities lack the boost that `reference_khz` has: before Linux 6.8, if it was
    /// switched on later.
    pub capacities_lack_boost: bool,
}

impl HostCpus {
    /// Reads the host below `root`.
    #[must_use]
    pub fn read(root: &HostRoot) -> Self {
        let present = topology::present_pcpus(root);
        let online = topology::online_pcpus(root, &present);
        let policies = policies(root);
        let rule = ReferenceRule::of_host(root);
        let policy_of = |cpu| {
            let policy = policies.iter().find(|policy| policy.cpus.contains(cpu))?;
            Some(policy.id)
        };
        let reference_khz = |cpu| {
            let policy = policy_of(cpu)?;
            rule.khz(root, cpu, &format!("{CPUS}/cpufreq/policy{policy}"))
        };
        let clusters = topology::clusters(root, &present).into_iter();
        let cpu = |(id, cluster): (u32, Option<CpuList>)| Pcpu {
            id,
            online: online.contains(id),
            capacity: root
                .number(format!("{CPUS}/cpu{id}/cpu_capacity"))
                .filter(|capacity| (1..=CAPACITY_SCALE).contains(capacity)),
            reference_khz: reference_khz(id),
            cluster: cluster
                .and_then(|list| list.iter().next())
                .or_else(|| policy_of(topology::core(root, id).unwrap_or(id))),
            core: topology::core(root, id),
            package: topology::package(root, id),
        };
        Self {
            cpus: clusters.map(cpu).collect(),
            policies,
            guesses_reference: !rule.is_certain,
            capacities_lack_boost: rule.has_risen,
        }
    }

    /// The CPU with number `id`.
    #[must_use]
    pub fn cpu(&self, id: u32) -> Option<&Pcpu> {
        self.cpus.iter().find(|cpu| cpu.id == id)
    }

    /// Online CPUs.
    #[must_use]
    pub fn online(&self) -> CpuList {
        let online = self.cpus.iter().filter(|cpu| cpu.online);
        online.map(|cpu| cpu.id).collect()
    }

    /// The policy of a CPU.
    #[must_use]
    pub fn policy_of(&self, cpu: u32) -> Option<&CpufreqPolicy> {
        self.policies
            .iter()
            .find(|policy| policy.cpus.contains(cpu))
    }
}

impl Pcpu {
    /// Its capacity; 1024 if the host reports none.
    #[must_use]
    pub fn capacity_or_full(&self) -> u16 {
        self.capacity.unwrap_or(CAPACITY_SCALE)
    }
}

impl CpufreqPolicy {
    /// Its highest frequency in kHz: the driver's, that of boost even while boost is off; without
    /// either, that of its table.
    #[must_use]
    pub fn top_khz(&self) -> Option<u32> {
        let last = self.opps.last();
        let boost = last.filter(|opp| opp.boost).map(|opp| opp.khz);
        self.max_khz.max(boost).or(last.map(|opp| opp.khz))
    }
}

fn policies(root: &HostRoot) -> Vec<CpufreqPolicy> {
    let policies = topology::policies(root).into_iter();
    policies.map(|(id, cpus)| policy(root, id, cpus)).collect()
}

fn policy(root: &HostRoot, id: u32, cpus: CpuList) -> CpufreqPolicy {
    let file = |name: &str| format!("{CPUS}/cpufreq/policy{id}/{name}");
    let listed = ListedKhz {
        base: root.khz_list(file("scaling_available_frequencies")),
        boost: root.khz_list(file("scaling_boost_frequencies")),
    };
    let driver = root.text(file("scaling_driver")).unwrap_or_default();
    let has_hwp = || root.path(file("energy_performance_preference")).exists();
    CpufreqPolicy {
        id,
        without_events: match &*driver {
            // Without its registers the driver is not fast enough for adjust_perf().
            "amd-pstate" => has_flag(root, "cppc"),
            "intel_cpufreq" => has_hwp(),
            _ => false,
        },
        driver,
        governor: root.text(file("scaling_governor")).unwrap_or_default(),
        max_khz: root.number(file("cpuinfo_max_freq")).filter(|khz| *khz > 0),
        opps: opps(root, &cpus, &listed),
        cpus,
    }
}

/// What the driver's table has: in one file what it may choose at any time, in the other what only
/// boost adds. Both files are the same with boost on and off.
struct ListedKhz {
    base: Vec<u32>,
    boost: Vec<u32>,
}

/// The frequencies that the driver lists, else those of the energy model, else
/// those of the device tree: with what the other two know of each.
fn opps(root: &HostRoot, cpus: &CpuList, listed: &ListedKhz) -> Vec<HostOpp> {
    let model = energy_model::of_cpus(root, cpus);
    let all = [listed.base.as_slice(), &listed.boost].concat();
    let node = cpus
        .iter()
        .find_map(|cpu| opp_node::of_cpu(root, cpu, &all));
    let node = node.unwrap_or_default();
    let in_use = cpus.iter().map(|cpu| opp_node::kernel_voltages(root, cpu));
    let in_use: Vec<_> = in_use.flatten().collect();
    let mut khz: Vec<u32> = [
        all,
        model.iter().map(|(khz, _)| *khz).collect(),
        node.iter().map(|opp| opp.khz).collect(),
    ]
    .into_iter()
    .find(|khz| !khz.is_empty())
    .unwrap_or_default();
    khz.sort_unstable();
    khz.dedup();
    let opp = |khz| {
        let in_node = node.iter().find(|opp| opp.khz == khz);
        let in_model = model.iter().find(|(of, _)| *of == khz);
        HostOpp {
            khz,
            boost: listed.boost.contains(&khz) || in_node.is_some_and(|opp| opp.boost),
            uv: in_use
                .iter()
                .find(|(of, _)| *of == khz)
                .map(|(_, uv)| *uv)
                .or(in_node.and_then(|opp| opp.uv)),
            uw: in_model
                .map(|(_, uw)| *uw)
                .or(in_node.and_then(|opp| opp.uw)),
        }
    };
    let mut opps: Vec<HostOpp> = khz.into_iter().filter(|khz| *khz > 0).map(opp).collect();
    // A table has a voltage for all of its points or for none; power likewise.
    if opps.iter().any(|opp| opp.uv.is_none()) {
        opps.iter_mut().for_each(|opp| opp.uv = None);
    }
    if opps.iter().any(|opp| opp.uw.is_none()) {
        opps.iter_mut().for_each(|opp| opp.uw = None);
    }
    opps
}

#[cfg(test)]
mod tests {
    //! A fake tree gives the facts it holds; what it lacks is left out.

    use super::*;
    use crate::fakes::FakeHost;

    #[test]
    fn capacities_and_policies_are_the_trees() {
        let host = FakeHost::two_plus_two();
        let cpus = HostCpus::read(&host.root());
        let capacities: Vec<_> = cpus.cpus.iter().map(|cpu| cpu.capacity).collect();
        assert_eq!(capacities, [Some(329), Some(329), Some(1024), Some(1024)]);
        assert_eq!(cpus.online().to_string(), "0-3");
        let little = cpus.policy_of(1).unwrap();
        assert_eq!((little.id, little.max_khz), (0, Some(1_800_000)));
        assert_eq!(little.opps.len(), 4);
        assert_eq!(cpus.policy_of(3).unwrap().id, 2);
        assert_eq!(cpus.policy_of(4), None);
    }

    /// Boost can be switched while guests run, so the table has it even while it is off.
    #[test]
    fn boost_frequencies_end_the_table_whether_boost_is_on_or_off() {
        let host = FakeHost::two_plus_two();
        host.boost(2, "3000000 2900000 \n", false);
        for max_khz in ["2800000", "3000000"] {
            host.write(
                "sys/devices/system/cpu/cpufreq/policy2/cpuinfo_max_freq",
                max_khz,
            );
            let cpus = HostCpus::read(&host.root());
            let [little, big] = &cpus.policies[..] else {
                panic!()
            };
            assert!(little.opps.iter().all(|opp| !opp.boost));
            assert_eq!(little.top_khz(), Some(1_800_000));
            let ends = big.opps.iter().rev().take(3);
            let ends: Vec<_> = ends.map(|opp| (opp.khz, opp.boost)).collect();
            let expected = [(3_000_000, true), (2_900_000, true), (2_800_000, false)];
            assert_eq!((ends, big.opps.len()), (expected.to_vec(), 7));
            assert_eq!(big.top_khz(), Some(3_000_000));
        }
    }

    #[test]
    fn a_turbo_mode_point_of_the_device_tree_is_boost() {
        let host = FakeHost::two_plus_two();
        host.remove("sys/devices/system/cpu/cpufreq/policy0/scaling_available_frequencies");
        host.opp_node(0, &LITTLE);
        host.write(
            "sys/firmware/devicetree/base/opp-table-0/opp-1800000/turbo-mode",
            "",
        );
        let opps = HostCpus::read(&host.root()).policies[0].opps.clone();
        let boost: Vec<_> = opps.iter().map(|opp| opp.boost).collect();
        assert_eq!(boost, [false, false, false, true]);
    }

    #[test]
    fn drivers_with_adjust_perf_give_no_events() {
        let word = |driver: &str, file: &str| {
            let host = FakeHost::two_plus_two();
            let policy = "sys/devices/system/cpu/cpufreq/policy0";
            host.write(&format!("{policy}/scaling_driver"), driver);
            host.write(&file.replace("policy", policy), "flags\t: cppc\n");
            HostCpus::read(&host.root()).policies[0].events_by()
        };
        let preference = "policy/energy_performance_preference";
        for (driver, file, expected) in [
            ("amd-pstate", "proc/cpuinfo", Some("amd_pstate=disable")),
            ("amd-pstate", "other", None),
            ("intel_cpufreq", preference, Some("intel_pstate=no_hwp")),
            ("intel_cpufreq", "proc/cpuinfo", None),
            ("acpi-cpufreq", "proc/cpuinfo", None),
        ] {
            assert_eq!(word(driver, file), expected, "{driver}, {file}");
        }
    }

    #[test]
    fn threads_of_a_core_are_in_one_cluster_though_each_has_a_policy() {
        let host = FakeHost::two_plus_two();
        for (cpu, siblings) in [(0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")] {
            host.policy(cpu, &cpu.to_string(), "", "2800000");
            let path = format!("sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list");
            host.write(&path, siblings);
        }
        let cpus = HostCpus::read(&host.root()).cpus;
        let places: Vec<_> = cpus.iter().map(|cpu| (cpu.cluster, cpu.core)).collect();
        let [first, second] = [0, 2].map(|core| (Some(core), Some(core)));
        assert_eq!(places, [first, first, second, second]);
    }

    #[test]
    fn an_offline_cpu_is_present() {
        let host = FakeHost::two_plus_two();
        host.write("sys/devices/system/cpu/online", "0,2-3");
        let cpus = HostCpus::read(&host.root());
        assert!(!cpus.cpu(1).unwrap().online);
        assert_eq!(cpus.online().to_string(), "0,2-3");
    }

    #[test]
    fn an_empty_tree_gives_no_facts() {
        let host = FakeHost::empty();
        assert_eq!(HostCpus::read(&host.root()), HostCpus::default());
    }

    #[test]
    fn garbage_gives_no_facts() {
        let host = FakeHost::two_plus_two();
        host.write("sys/devices/system/cpu/cpu0/cpu_capacity", "4096");
        host.write("sys/devices/system/cpu/cpu1/cpu_capacity", "many");
        let policy = "sys/devices/system/cpu/cpufreq/policy0";
        host.write(
            &format!("{policy}/scaling_available_frequencies"),
            "fast 0 600000",
        );
        host.write(&format!("{policy}/cpuinfo_max_freq"), "-1");
        host.write("sys/devices/system/cpu/cpufreq/policy2/related_cpus", "?");
        let cpus = HostCpus::read(&host.root());
        assert_eq!((cpus.cpus[0].capacity, cpus.cpus[1].capacity), (None, None));
        assert_eq!(cpus.cpus[0].capacity_or_full(), 1024);
        assert_eq!(cpus.policies.len(), 1);
        assert_eq!(cpus.policies[0].opps.len(), 1);
        assert_eq!(cpus.policies[0].top_khz(), Some(600_000));
    }

    /// Voltage and power of the little policy's points.
    fn values(host: &FakeHost) -> Vec<(Option<u32>, Option<u32>)> {
        let opps = HostCpus::read(&host.root()).policies[0].opps.clone();
        opps.iter().map(|opp| (opp.uv, opp.uw)).collect()
    }

    const LITTLE: [(u32, u32, u32); 4] = [
        (600_000, 600_000, 1),
        (1_000_000, 675_000, 2),
        (1_400_000, 775_000, 3),
        (1_800_000, 900_000, 4),
    ];

    #[test]
    fn power_comes_from_the_energy_model_and_voltage_from_the_device_tree() {
        let host = FakeHost::two_plus_two();
        host.kernel("6.12.48");
        let power = LITTLE.map(|(khz, _, uw)| (khz, uw * 1000));
        host.opp_node(0, &LITTLE);
        assert_eq!(
            values(&host),
            LITTLE.map(|(_, uv, uw)| (Some(uv), Some(uw)))
        );
        host.energy_model(0, "0x1", &power);
        assert_eq!(
            values(&host),
            LITTLE.map(|(_, uv, uw)| (Some(uv), Some(uw * 1000)))
        );
    }

    #[test]
    fn a_value_that_not_all_points_have_is_left_out() {
        let host = FakeHost::two_plus_two();
        host.kernel("6.12.48");
        host.opp_node(0, &LITTLE[1..]);
        assert_eq!(values(&host), [(None, None); 4]);
        host.energy_model(0, "0x3", &LITTLE.map(|(khz, _, uw)| (khz, uw)));
        assert_eq!(values(&host), LITTLE.map(|(_, _, uw)| (None, Some(uw))));
    }

    #[test]
    fn without_a_drivers_list_the_energy_model_gives_the_frequencies() {
        let host = FakeHost::two_plus_two();
        host.kernel("6.12.48");
        host.remove("sys/devices/system/cpu/cpufreq/policy2/scaling_available_frequencies");
        host.energy_model(2, "0x1", &[(900_000, 5), (700_000, 4)]);
        let opps = HostCpus::read(&host.root()).policies[1].opps.clone();
        assert_eq!(
            opps.iter().map(|opp| opp.khz).collect::<Vec<_>>(),
            [700_000, 900_000]
        );
    }

    #[test]
    fn a_dump_without_lists_has_the_cpus_of_its_folders() {
        let host = FakeHost::two_plus_two();
        for list in ["present", "online"] {
            host.remove(&format!("sys/devices/system/cpu/{list}"));
        }
        assert_eq!(HostCpus::read(&host.root()).online().to_string(), "0-3");
        host.write("sys/devices/system/cpu/cpu2/online", "0\n");
        assert_eq!(HostCpus::read(&host.root()).online().to_string(), "0-1,3");
    }

    /// kHz of a point, the ends of its voltages' names with µV, and the bins that have it.
    type BinnedPoint<'a> = (u32, &'a [(&'a str, u32)], u32);

    /// Gives the little policy such points in the device tree.
    fn speed_bins(host: &FakeHost, points: &[BinnedPoint<'_>]) {
        let opps: Vec<_> = points.iter().map(|(khz, ..)| (*khz, 0, 1)).collect();
        host.opp_node(0, &opps);
        for (khz, voltages, bins) in points {
            let opp = format!("sys/firmware/devicetree/base/opp-table-0/opp-{khz}");
            host.remove(&format!("{opp}/opp-microvolt"));
            for (name, uv) in *voltages {
                host.write(&format!("{opp}/opp-microvolt{name}"), uv.to_be_bytes());
            }
            host.write(&format!("{opp}/opp-supported-hw"), bins.to_be_bytes());
        }
    }

    /// The table of Linux 6.12's sun50i-h616-cpu-opp.dtsi: MHz, the bins that have it, and mV, of
    /// some by bin.
    const H616: [(u32, u32, &str); 12] = [
        (480, 0x3f, "900"),
        (600, 0x12, "900"),
        (720, 0x2d, "900"),
        (792, 0x12, "1:900 4:940"),
        (936, 0x0d, "900"),
        (1008, 0x3f, "0:950 1:940 2:950 3:950 4:1020 5:900"),
        (1032, 0x20, "900"),
        (1104, 0x2d, "0:1000 2:1000 3:1000 5:950"),
        (1200, 0x3f, "0:1050 1:1020 2:1050 3:1050 4:1100 5:1020"),
        (1320, 0x1d, "1100"),
        (1416, 0x2d, "1100"),
        (1512, 0x2a, "1:1100 3:1100 5:1160"),
    ];

    /// MHz and mV that a chip of each bin has; bins 0 and 2 are alike.
    const H616_BINS: [&str; 5] = [
        "480:900 720:900 936:900 1008:950 1104:1000 1200:1050 1320:1100 1416:1100",
        "480:900 600:900 792:900 1008:940 1200:1020 1512:1100",
        "480:900 720:900 936:900 1008:950 1104:1000 1200:1050 1320:1100 1416:1100 1512:1100",
        "480:900 600:900 792:940 1008:1020 1200:1100 1320:1100",
        "480:900 720:900 1008:900 1032:900 1104:950 1200:1020 1416:1100 1512:1160",
    ];

    #[test]
    fn voltages_of_a_speed_bin_are_those_of_the_bin_whose_points_are_listed() {
        let number = |text: &str| text.parse::<u32>().unwrap();
        let voltage = |text: &str| match text.split_once(':') {
            Some((bin, mv)) => (format!("-speed{bin}"), number(mv) * 1000),
            None => (String::new(), number(text) * 1000),
        };
        for bin in H616_BINS {
            let host = FakeHost::two_plus_two();
            for (mhz, bins, voltages) in H616 {
                let voltages: Vec<_> = voltages.split(' ').map(voltage).collect();
                let named = voltages.iter().map(|(name, uv)| (&**name, *uv));
                let named: Vec<_> = named.collect();
                speed_bins(&host, &[(mhz * 1000, &named, bins)]);
            }
            let points = bin.split(' ').map(|point| point.split_once(':').unwrap());
            let khz: Vec<_> = points.clone().map(|(mhz, _)| format!("{mhz}000")).collect();
            let list = "sys/devices/system/cpu/cpufreq/policy0/scaling_available_frequencies";
            host.write(list, khz.join(" "));
            let uv = || -> Vec<_> { values(&host).into_iter().map(|(uv, _)| uv).collect() };
            let mv = points.clone().map(|(_, mv)| Some(number(mv) * 1000));
            assert_eq!(uv(), mv.collect::<Vec<_>>(), "{bin}");
            // The kernel's word counts more.
            for (mhz, _) in points.clone() {
                let opp = format!("sys/kernel/debug/opp/cpu0/opp:{mhz}000000");
                host.write(&format!("{opp}/supply-0/u_volt_target"), mhz);
            }
            let words = points.map(|(mhz, _)| Some(number(mhz)));
            assert_eq!(uv(), words.collect::<Vec<_>>(), "{bin}");
        }
    }

    #[test]
    fn voltages_of_bins_that_cannot_be_told_apart_are_left_out() {
        let host = FakeHost::two_plus_two();
        let bins = |uv: u32| [("-fast", 900_000), ("-slow", uv), ("", 1)];
        for (slow, expected) in [(900_000, Some(900_000)), (950_000, None)] {
            let voltages = bins(slow);
            let points = LITTLE.map(|(khz, ..)| (khz, &voltages[..], 1));
            speed_bins(&host, &points);
            let uv: Vec<_> = values(&host).into_iter().map(|(uv, _)| uv).collect();
            assert_eq!(uv, [expected; 4], "{slow}");
        }
    }

    #[test]
    fn power_of_kernels_before_6_0_is_in_milliwatts() {
        let model = LITTLE.map(|(khz, _, uw)| (khz, uw));
        for (kernel, flags, unit) in [
            ("5.15.167", None, Some(1000)),
            ("5.16.0", Some("0x1"), Some(1000)),
            ("5.19.17", Some("0x3"), Some(1000)),
            ("5.19.17", Some("0x4"), None),
            ("6.0.0", Some("0x1"), Some(1)),
            // The same bit is one unit or the other.
            ("", Some("0x1"), None),
        ] {
            let host = FakeHost::two_plus_two();
            host.kernel(kernel);
            host.energy_model(0, flags.unwrap_or_default(), &model);
            if flags.is_none() {
                host.remove("sys/kernel/debug/energy_model/cpu0/flags");
                host.write("sys/kernel/debug/energy_model/cpu0/units", "milliWatts\n");
            }
            let power: Vec<_> = values(&host).into_iter().map(|(_, uw)| uw).collect();
            let expected = LITTLE.map(|(.., uw)| unit.map(|unit| uw * unit));
            assert_eq!(power, expected, "{kernel} {flags:?}");
        }
    }

    #[test]
    fn power_in_another_scale_than_microwatts_is_left_out() {
        let host = FakeHost::two_plus_two();
        host.kernel("6.12.48");
        host.energy_model(0, "0x4", &[(600_000, 45_000)]);
        host.energy_model(2, "0x5", &[(700_000, 45_000)]);
        let cpus = HostCpus::read(&host.root());
        assert!(
            cpus.policies
                .iter()
                .all(|policy| policy.opps[0].uw.is_none())
        );
    }
}
