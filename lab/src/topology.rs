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

/// An operating performance point.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopologyOpp {
    /// Frequency in kHz.
    pub khz: u32,
    /// Supply voltage in µV.
    pub uv: u32,
    /// Power of one busy CPU in µW.
    pub uw: u32,
}

/// CPUs that share a clock: one cpufreq policy.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TopologyCluster {
    /// For people.
    pub name: String,
    /// How many CPUs.
    pub cpus: u32,
    /// Performance per MHz, as the property `capacity-dmips-mhz`.
    pub dmips_mhz: u32,
    /// Rising by frequency.
    pub opps: Vec<TopologyOpp>,
}

/// An emulated host's CPUs.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// For people.
    pub description: String,
    /// In the order of the CPU numbers.
    #[serde(rename = "cluster")]
    pub clusters: Vec<TopologyCluster>,
}

/// The emulated board has eight CPUs at most, as its interrupt controller's
/// first redistributor region and the lab's time allow.
pub const MAX_CPUS: u32 = 8;

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
        for cluster in &self.clusters {
            cluster
                .check()
                .with_context(|| format!("cluster '{}'", cluster.name))?;
        }
        Ok(())
    }

    /// Number of CPUs.
    pub fn cpus(&self) -> u32 {
        self.clusters.iter().map(|cluster| cluster.cpus).sum()
    }

    /// Device-tree source to append to the emulator's own.
    pub fn dts(&self) -> String {
        let mut cpus = String::new();
        let mut map = String::new();
        let mut tables = String::new();
        let mut cpu = 0;
        for (number, cluster) in self.clusters.iter().enumerate() {
            // Writing to a String cannot fail.
            let _ = write!(map, "cluster{number} {{ ");
            for core in 0..cluster.cpus {
                let _ = write!(map, "core{core} {{ cpu = <&{{/cpus/cpu@{cpu:x}}}>; }}; ");
                let _ = writeln!(
                    cpus,
                    "cpu@{cpu:x} {{ capacity-dmips-mhz = <{}>; operating-points-v2 = <&lab_opps{number}>; }};",
                    cluster.dmips_mhz
                );
                cpu += 1;
            }
            map.push_str("};\n");
            tables.push_str(&cluster.table_dts(number));
        }
        format!(
            "/ {{\ncpus {{\n/delete-node/ cpu-map;\n{cpus}}};\n}};\n/ {{\ncpus {{ cpu-map {{\n{map}}}; }};\n{tables}}};\n"
        )
    }
}

impl TopologyCluster {
    fn check(&self) -> Result<()> {
        ensure!(self.cpus > 0, "no CPUs");
        ensure!(self.dmips_mhz > 0, "dmips_mhz is 0");
        ensure!(!self.opps.is_empty(), "no OPPs");
        for pair in self.opps.windows(2) {
            let (low, high) = (pair[0].khz, pair[1].khz);
            ensure!(
                low < high,
                "OPPs don't rise: {low} kHz comes before {high} kHz"
            );
        }
        Ok(())
    }

    fn table_dts(&self, number: usize) -> String {
        let mut text = format!(
            "lab_opps{number}: opp-table-{number} {{ compatible = \"operating-points-v2\"; opp-shared;\n"
        );
        for opp in &self.opps {
            let hz = u64::from(opp.khz) * 1000;
            let _ = writeln!(
                text,
                "opp-{hz} {{ opp-hz = /bits/ 64 <{hz}>; opp-microvolt = <{}>; opp-microwatt = <{}>; }};",
                opp.uv, opp.uw
            );
        }
        text.push_str("};\n");
        text
    }
}

#[cfg(test)]
mod tests {
    //! Promises: every shipped topology is right; a wrong one is refused
    //! with the values that are wrong.
    use super::*;

    const ONE: &str =
        "description='x'\n[[cluster]]\nname='a'\ncpus=1\ndmips_mhz=1024\nopps=[OPPS]\n";

    #[test]
    fn shipped_topologies_load() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("topologies");
        let mut seen = 0;
        for entry in std::fs::read_dir(dir).unwrap() {
            Topology::load(&entry.unwrap().path()).unwrap();
            seen += 1;
        }
        assert!(seen >= 3);
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
    fn falling_opps_are_refused() {
        let text = ONE.replace("OPPS", "{khz=2,uv=1,uw=1},{khz=1,uv=1,uw=1}");
        let error = format!("{:#}", Topology::parse(&text).unwrap_err());
        assert!(error.contains("2 kHz comes before 1 kHz"), "{error}");
    }

    #[test]
    fn too_many_cpus_are_refused() {
        let text = ONE
            .replace("OPPS", "{khz=1,uv=1,uw=1}")
            .replace("cpus=1", "cpus=9");
        assert!(
            Topology::parse(&text)
                .unwrap_err()
                .to_string()
                .contains("9 CPUs")
        );
    }
}
