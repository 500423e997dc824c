// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Topologies of the emulated host: small TOML files, and the device-tree
//! source that they become.
//!
//! The source is appended to the emulator's own, so a node named here is
//! merged into the one of the same name there.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// CPUs that share a clock: one cpufreq policy.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopologyPolicy {
    /// For people.
    pub name: String,
    /// How many CPUs.
    pub cpus: u32,
    /// How many such policies, one after the other.
    #[serde(default = "one")]
    pub times: u32,
    /// Performance per MHz, as the property `capacity-dmips-mhz`. All policies have it, or none.
    pub dmips_mhz: Option<u32>,
    /// Of a host whose firmware chooses frequencies: what ACPI's CPPC tells.
    pub cppc: Option<TopologyCppc>,
    /// Frequencies of the OPPs, rising.
    pub khz: Vec<u32>,
    /// So many of the highest OPPs are for boost alone (`turbo-mode`).
    #[serde(default)]
    pub boost: usize,
    /// Supply voltages of the OPPs.
    pub uv: Vec<u32>,
    /// As the property `dynamic-power-coefficient`: the OPPs' powers, unless `uw` gives them.
    pub power_coefficient: Option<u32>,
    /// Powers of one busy CPU at the OPPs.
    pub uw: Option<Vec<u32>>,
}

/// What ACPI's CPPC tells of a CPU. The lab's hosts have device trees: there it is checked alone.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopologyCppc {
    /// `lowest_perf`.
    pub lowest_perf: u32,
    /// `nominal_perf`.
    pub nominal_perf: u32,
    /// `highest_perf`, which `cpu_capacity` is proportional to.
    pub highest_perf: u32,
    /// `lowest_freq`.
    pub lowest_mhz: u32,
    /// `nominal_freq`.
    pub nominal_mhz: u32,
}

/// An emulated host's CPUs.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// For people.
    pub description: String,
    /// How many CPUs each cluster has; without, each policy is one.
    pub clusters: Option<Vec<u32>>,
    /// In the order of the CPU numbers.
    #[serde(rename = "policy")]
    pub policies: Vec<TopologyPolicy>,
}

fn one() -> u32 {
    1
}

/// The largest board that is described here. With the interrupt controller of version 2 the
/// emulator takes eight.
pub const MAX_CPUS: u32 = 20;
/// OPPs of a policy, as the lab's cpufreq driver takes.
const MAX_OPPS: usize = 32;

/// Before the seed, where a topology is named.
const DRAWN: &str = "drawn:";

impl Topology {
    /// A topology by its name in `dir`, by its file, or by its seed as `drawn:SEED`.
    pub fn named(name: &str, dir: &Path) -> Result<Self> {
        if let Some(seed) = name.strip_prefix(DRAWN) {
            let seed = seed.parse();
            return Ok(Self::drawn(seed.with_context(|| {
                format!("topology '{name}': give a number, as in {DRAWN}1")
            })?));
        }
        let shipped = dir.join(format!("{name}.toml"));
        let file = Path::new(name);
        Self::load(if shipped.exists() { &shipped } else { file })
    }

    /// Reads and checks a topology file.
    fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the topology {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("topology {}", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let topology: Self = toml::from_str(text)?;
        topology.check()?;
        Ok(topology)
    }

    /// What the emulated board can be.
    pub fn check(&self) -> Result<()> {
        let cpus = self.cpus();
        ensure!(
            (1..=MAX_CPUS).contains(&cpus),
            "{cpus} CPUs: 1 to {MAX_CPUS} are possible"
        );
        let in_clusters = self.clusters().iter().sum::<u32>();
        ensure!(
            in_clusters == cpus,
            "the clusters have {in_clusters} CPUs, the policies {cpus}"
        );
        for policy in &self.policies {
            policy
                .check()
                .with_context(|| format!("policy '{}'", policy.name))?;
        }
        let with = self.policies.iter().filter(|one| one.dmips_mhz.is_some());
        ensure!(
            [0, self.policies.len()].contains(&with.count()),
            "some policies have dmips_mhz, others not"
        );
        Ok(())
    }

    /// Number of CPUs.
    pub fn cpus(&self) -> u32 {
        self.each_policy().map(|policy| policy.cpus).sum()
    }

    /// Each policy as often as it is there.
    fn each_policy(&self) -> impl Iterator<Item = &TopologyPolicy> {
        let times = |policy: &TopologyPolicy| usize::try_from(policy.times).unwrap_or_default();
        let each = self.policies.iter();
        each.flat_map(move |policy| std::iter::repeat_n(policy, times(policy)))
    }

    /// How many CPUs each cluster has.
    fn clusters(&self) -> Vec<u32> {
        let policies = || self.each_policy().map(|policy| policy.cpus).collect();
        self.clusters.clone().unwrap_or_else(policies)
    }

    /// The parameter of the lab's cpufreq driver on a host without a device tree. Capacities are in
    /// proportion to performance per MHz times the highest frequency without boost, as on Arm.
    pub fn parameter(&self) -> String {
        let capacity = |policy: &TopologyPolicy| {
            u64::from(policy.dmips_mhz.unwrap_or(1)) * u64::from(policy.reference_khz())
        };
        let all = || self.each_policy();
        let largest = match self.policies.iter().any(|one| one.dmips_mhz.is_some()) {
            true => all().map(capacity).max().unwrap_or(1),
            false => 0,
        };
        let mut cpu = 0;
        let each = all().map(|policy| {
            let last = cpu + policy.cpus - 1;
            let share = (capacity(policy) * 1024).checked_div(largest);
            let opps = policy.parameter();
            let text = format!("{cpu}-{last}/{}{opps}", share.unwrap_or(1024));
            cpu = last + 1;
            text
        });
        format!("policies={}", each.collect::<Vec<_>>().join(";"))
    }

    /// Device-tree source to append to the emulator's own.
    pub fn dts(&self) -> String {
        let mut cpus = String::new();
        let mut tables = String::new();
        let mut cpu = 0;
        for (number, policy) in self.each_policy().enumerate() {
            for _ in 0..policy.cpus {
                // The emulator counts its CPUs in decimal. Writing to a String cannot fail.
                let _ = write!(
                    cpus,
                    "cpu@{cpu} {{ operating-points-v2 = <&lab_opps{number}>; "
                );
                if let Some(dmips) = policy.dmips_mhz {
                    let _ = write!(cpus, "capacity-dmips-mhz = <{dmips}>; ");
                }
                cpus.push_str("};\n");
                cpu += 1;
            }
            tables.push_str(&policy.table_dts(number));
        }
        let map = self.map_dts();
        format!(
            "/ {{\ncpus {{\n/delete-node/ cpu-map;\n{cpus}}};\n}};\n/ {{\ncpus {{ cpu-map {{\n{map}}}; }};\n{tables}}};\n"
        )
    }

    fn map_dts(&self) -> String {
        let mut map = String::new();
        let mut cpu = 0;
        for (number, cpus) in self.clusters().into_iter().enumerate() {
            let _ = write!(map, "cluster{number} {{ ");
            for core in 0..cpus {
                let _ = write!(map, "core{core} {{ cpu = <&{{/cpus/cpu@{cpu}}}>; }}; ");
                cpu += 1;
            }
            map.push_str("};\n");
        }
        map
    }
}

impl TopologyPolicy {
    fn check(&self) -> Result<()> {
        ensure!(self.cpus > 0 && self.times > 0, "no CPUs");
        ensure!(self.dmips_mhz != Some(0), "dmips_mhz is 0");
        let opps = self.khz.len();
        ensure!(
            (1..=MAX_OPPS).contains(&opps),
            "{opps} OPPs: 1 to {MAX_OPPS} are possible"
        );
        ensure!(self.boost < opps, "all OPPs are for boost");
        ensure!(
            self.uv.len() == opps,
            "{opps} OPPs, {} voltages",
            self.uv.len()
        );
        ensure!(
            self.uw.is_some() != self.power_coefficient.is_some(),
            "give one of uw and power_coefficient"
        );
        let powers = self.uw().len();
        ensure!(powers == opps, "{opps} OPPs, {powers} powers");
        for pair in self.khz.windows(2) {
            let (low, high) = (pair[0], pair[1]);
            ensure!(
                low < high,
                "OPPs don't rise: {low} kHz comes before {high} kHz"
            );
        }
        self.check_power()?;
        self.cppc.as_ref().map_or(Ok(()), TopologyCppc::check)
    }

    /// Linux has schedutil skip an OPP that takes no less power for a MHz than a higher one.
    fn check_power(&self) -> Result<()> {
        let points: Vec<_> = self.khz.iter().zip(self.uw()).collect();
        for pair in points.windows(2) {
            let ((low, low_uw), (high, high_uw)) = (pair[0], pair[1]);
            ensure!(
                u64::from(low_uw) * u64::from(*high) < u64::from(high_uw) * u64::from(*low),
                "power for a MHz doesn't rise from {low} to {high} kHz"
            );
        }
        Ok(())
    }

    /// Powers of the OPPs: those given, or what Linux makes of the coefficient (`_get_power()` of
    /// drivers/opp/of.c).
    fn uw(&self) -> Vec<u32> {
        let Some(coefficient) = self.power_coefficient else {
            return self.uw.clone().unwrap_or_default();
        };
        let each = self.khz.iter().zip(&self.uv).map(|(khz, uv)| {
            let mv = u64::from(uv / 1000);
            let uw = u64::from(coefficient) * mv * mv * u64::from(khz / 1000) / 1_000_000;
            u32::try_from(uw).unwrap_or(u32::MAX)
        });
        each.collect()
    }

    /// The highest frequency that is not for boost.
    fn reference_khz(&self) -> u32 {
        let lower = self.khz.len().saturating_sub(self.boost);
        self.khz[..lower].last().copied().unwrap_or_default()
    }

    /// The OPPs as the lab's cpufreq driver takes them.
    fn parameter(&self) -> String {
        let reference = self.reference_khz();
        let points = self.khz.iter().zip(self.uw());
        let opps = points.map(|(khz, uw)| {
            let boost = if *khz > reference { ":b" } else { "" };
            format!("/{khz}:{uw}{boost}")
        });
        opps.collect()
    }

    fn table_dts(&self, number: usize) -> String {
        let mut text = format!(
            "lab_opps{number}: opp-table-{number} {{ compatible = \"operating-points-v2\"; opp-shared;\n"
        );
        let points = self.khz.iter().zip(&self.uv).zip(self.uw());
        for (place, ((khz, uv), uw)) in points.enumerate() {
            let hz = u64::from(*khz) * 1000;
            let boost = match place + self.boost < self.khz.len() {
                true => "",
                false => " turbo-mode;",
            };
            let _ = writeln!(
                text,
                "opp-{hz} {{ opp-hz = /bits/ 64 <{hz}>; opp-microvolt = <{uv}>; opp-microwatt = <{uw}>;{boost} }};"
            );
        }
        text.push_str("};\n");
        text
    }
}

impl TopologyCppc {
    fn check(&self) -> Result<()> {
        let perf = [self.lowest_perf, self.nominal_perf, self.highest_perf];
        ensure!(
            perf[0] > 0 && perf.is_sorted(),
            "CPPC's performance {perf:?} doesn't rise"
        );
        let mhz = [self.lowest_mhz, self.nominal_mhz];
        ensure!(
            mhz[0] > 0 && mhz.is_sorted(),
            "CPPC's frequencies {mhz:?} don't rise"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    //! Promises: every shipped topology is right, and a real board's file names where its facts are
    //! from; the tree has what a file says; a wrong file is refused with the values that are wrong.
    use super::*;

    const ONE: &str = "description='x'\n[[policy]]\nname='a'\ncpus=1\ndmips_mhz=1024\n\
        khz=[1000000,2000000]\nuv=[500000,600000]\npower_coefficient=1000\n";

    fn shipped() -> Vec<(String, String)> {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies");
        let files = std::fs::read_dir(dir).unwrap();
        let files = files.map(|file| file.unwrap().path());
        let each = files.map(|path| {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read_to_string(path).unwrap())
        });
        each.collect()
    }

    fn refused(from: &str, to: &str) -> String {
        let text = ONE.replace(from, to);
        assert_ne!(text, ONE);
        format!("{:#}", Topology::parse(&text).unwrap_err())
    }

    #[test]
    fn shipped_topologies_load() {
        let all = shipped();
        for (name, text) in &all {
            Topology::parse(text).with_context(|| name.clone()).unwrap();
        }
        assert!(all.len() >= 15);
    }

    /// Not a board's name: a topology that is made up.
    const MADE_UP: [&str; 6] = ["1", "2+2", "4+3+1", "hybrid", "pc", "pixel6"];

    #[test]
    fn each_real_board_names_the_source_of_its_facts() {
        let all = shipped().into_iter();
        let boards = all.filter(|(name, _)| !MADE_UP.contains(&name.as_str()));
        let mut seen = 0;
        for (name, text) in boards {
            assert!(text.contains("\n# Source: "), "{name}");
            seen += 1;
        }
        assert!(seen >= 11);
    }

    #[test]
    fn the_coefficient_gives_the_power_that_linux_computes() {
        let text = ONE.replace(
            "[1000000,2000000]\nuv=[500000,600000]",
            "[1800000]\nuv=[950000]",
        );
        let topology = Topology::parse(&text.replace("=1000\n", "=228\n")).unwrap();
        assert_eq!(topology.policies[0].uw(), [370_386]);
    }

    #[test]
    fn boost_clusters_and_equal_policies_are_in_the_tree() {
        let text = ONE.replace("cpus=1", "cpus=2\ntimes=2\nboost=1");
        let text = text.replace("'x'", "'x'\nclusters=[1,3]");
        let dts = Topology::parse(&text).unwrap().dts();
        assert_eq!(dts.matches("opp-shared").count(), 2, "{dts}");
        assert_eq!(dts.matches("turbo-mode").count(), 2, "{dts}");
        let map = "cluster0 { core0 { cpu = <&{/cpus/cpu@0}>; }; };\ncluster1 { core0 { cpu = <&{/cpus/cpu@1}>; };";
        assert!(dts.contains(map), "{dts}");
        assert!(
            dts.contains("cpu@2 { operating-points-v2 = <&lab_opps1>"),
            "{dts}"
        );
    }

    #[test]
    fn a_pcs_driver_gets_the_same() {
        let one = ONE.replace("power_coefficient=1000", "uw=[100,300]");
        let text = one.replace("cpus=1", "cpus=2\ntimes=2\nboost=1");
        let parameter = Topology::parse(&text).unwrap().parameter();
        let opps = "/1024/1000000:100/2000000:300:b";
        assert_eq!(parameter, format!("policies=0-1{opps};2-3{opps}"));
        let small = one.split_once("[[").unwrap().1.replace("=1024", "=512");
        let parameter = Topology::parse(&format!("{one}[[{small}"))
            .unwrap()
            .parameter();
        assert_eq!(
            parameter,
            "policies=0-0/1024/1000000:100/2000000:300;1-1/512/1000000:100/2000000:300"
        );
    }

    #[test]
    fn a_board_without_capacities_has_none_in_the_tree() {
        let text = ONE.replace("dmips_mhz=1024\n", "");
        let dts = Topology::parse(&text).unwrap().dts();
        assert!(!dts.contains("capacity-dmips-mhz"), "{dts}");
    }

    #[test]
    fn a_seed_that_is_no_number_is_refused() {
        let error = Topology::named("drawn:x", Path::new("")).unwrap_err();
        assert_eq!(
            error.to_string(),
            "topology 'drawn:x': give a number, as in drawn:1"
        );
        assert!(Topology::named("drawn:1", Path::new("")).is_ok());
    }

    #[test]
    fn what_the_board_cannot_be_is_refused() {
        for (from, to, why) in [
            (
                "khz=[1000000,2000000]",
                "khz=[2000000,1000000]",
                "2000000 kHz comes before 1000000 kHz",
            ),
            ("uv=[500000,600000]", "uv=[500000]", "2 OPPs, 1 voltages"),
            (
                "uv=[500000,600000]",
                "uv=[500000,500000]",
                "from 1000000 to 2000000 kHz",
            ),
            ("power_coefficient=1000", "uw=[1]", "2 OPPs, 1 powers"),
            ("power_coefficient=1000", "", "give one of"),
            ("cpus=1", "cpus=21", "21 CPUs"),
            (
                "'x'",
                "'x'\nclusters=[2]",
                "the clusters have 2 CPUs, the policies 1",
            ),
            ("cpus=1", "cpus=1\nboost=2", "all OPPs are for boost"),
            (
                "cpus=1",
                "cpus=1\ncppc={lowest_perf=1,nominal_perf=3,highest_perf=2,lowest_mhz=1,nominal_mhz=2}",
                "[1, 3, 2] doesn't rise",
            ),
        ] {
            let error = refused(from, to);
            assert!(error.contains(why), "{to}: {error}");
        }
    }
}
