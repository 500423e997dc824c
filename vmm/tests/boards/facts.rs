// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What is known of a board. The boards of `lab/topologies` have it in files.

use std::fs;
use std::iter::repeat_n;
use std::path::Path;

use serde::Deserialize;

/// A board's CPUs, as a file of `lab/topologies` has them.
#[derive(Clone, Debug, Deserialize)]
pub struct BoardFacts {
    /// How many CPUs each cluster has; without, each policy is one.
    clusters: Option<Vec<u32>>,
    #[serde(rename = "policy")]
    policies: Vec<PolicyFacts>,
}

/// CPUs that share a clock.
#[derive(Clone, Debug, Deserialize)]
pub struct PolicyFacts {
    pub cpus: u32,
    #[serde(default = "once")]
    pub times: u32,
    pub dmips_mhz: Option<u32>,
    pub cppc: Option<CppcFacts>,
    pub khz: Vec<u32>,
    #[serde(default)]
    pub boost: usize,
    pub uv: Vec<u32>,
    pub power_coefficient: Option<u32>,
    pub uw: Option<Vec<u32>>,
}

/// What ACPI's CPPC tells.
#[derive(Clone, Debug, Deserialize)]
pub struct CppcFacts {
    pub lowest_perf: u64,
    pub nominal_perf: u64,
    pub highest_perf: u64,
    pub lowest_mhz: u64,
    pub nominal_mhz: u64,
}

fn once() -> u32 {
    1
}

impl BoardFacts {
    /// Of these clusters, else one for each policy.
    pub fn new(clusters: Option<Vec<u32>>, policies: Vec<PolicyFacts>) -> Self {
        Self { clusters, policies }
    }

    /// All boards by name.
    pub fn all() -> Vec<(String, Self)> {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../lab/topologies");
        let files = fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
        let mut all: Vec<_> = files
            .map(|path| {
                let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
                let board = toml::from_str(&fs::read_to_string(&path).unwrap());
                (name, board.unwrap_or_else(|why| panic!("{path:?}: {why}")))
            })
            .collect();
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        all
    }

    /// Each policy as often as it is there, with its first CPU.
    pub fn policies(&self) -> Vec<(u32, PolicyFacts)> {
        let each = self.policies.iter();
        let each = each.flat_map(|one| repeat_n(one, usize::try_from(one.times).unwrap()));
        let mut first = 0;
        each.map(|policy| {
            first += policy.cpus;
            (first - policy.cpus, policy.clone())
        })
        .collect()
    }

    /// Whether any of its OPPs are for boost.
    pub fn has_boost(&self) -> bool {
        self.policies.iter().any(|policy| policy.boost > 0)
    }

    /// The CPUs of each cluster.
    pub fn clusters(&self) -> Vec<Vec<u32>> {
        let of_policies = || self.policies().iter().map(|(_, one)| one.cpus).collect();
        let sizes = self.clusters.clone().unwrap_or_else(of_policies);
        let mut first = 0;
        let ranges = sizes.into_iter().map(|size| {
            first += size;
            (first - size..first).collect()
        });
        ranges.collect()
    }
}

impl PolicyFacts {
    /// The OPPs that Linux lists without boost, and those for boost; none where firmware has a range.
    pub fn listed(&self) -> (&[u32], &[u32]) {
        match self.cppc {
            Some(_) => (&[], &[]),
            None => self.khz.split_at(self.khz.len() - self.boost),
        }
    }

    /// All of its OPPs.
    pub fn khz(&self) -> Vec<u32> {
        let (plain, boost) = self.listed();
        [plain, boost].concat()
    }

    /// The highest frequency that a vCPU can ask for: also that of boost while it is off, where the
    /// driver lists frequencies.
    pub fn top_khz(&self, boost: bool) -> u32 {
        let without = self.cppc.is_some() && !boost;
        let top = self.khz.len() - if without { self.boost } else { 0 };
        self.khz[top - 1]
    }

    /// Their powers: as given, else as `_get_power()` of Linux' drivers/opp/of.c.
    pub fn uw(&self) -> Vec<u32> {
        let by_coefficient = |coefficient: u32| {
            let points = self.khz.iter().zip(&self.uv);
            let power = points.map(|(khz, uv)| {
                let mv = u64::from(uv / 1000);
                u64::from(coefficient) * mv * mv * u64::from(khz / 1000) / 1_000_000
            });
            power.map(|uw| u32::try_from(uw).unwrap()).collect()
        };
        let given = || self.uw.clone().unwrap();
        self.power_coefficient.map_or_else(given, by_coefficient)
    }
}
