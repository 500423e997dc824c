// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The frequencies that a profile sets: one for all policies, or one for each policy that it names.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A frequency in kHz, or the highest that the CPU has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Frequency {
    /// `cpuinfo_max_freq`.
    Max,
    /// `cpuinfo_min_freq`.
    Min,
    /// In kHz.
    #[serde(untagged)]
    Khz(u32),
}

/// Which policies get which frequency.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "a frequency is a number of kHz, 'min', 'max', or for single policies a table, as { policy0 = 1804800, policy4 = 'max' }"
)]
pub enum PolicyFrequencies {
    /// All policies of the CPUs that `frequency-cpus` names.
    All(Frequency),
    /// These policies, by their folders' names, whatever `frequency-cpus` names.
    Each(BTreeMap<String, Frequency>),
}

impl PolicyFrequencies {
    /// The frequency of a policy, such as `policy4`.
    pub(crate) fn get(&self, policy: &str) -> Option<Frequency> {
        match self {
            Self::All(frequency) => Some(*frequency),
            Self::Each(each) => each.get(policy).copied(),
        }
    }

    /// The first name that is no policy's.
    pub(crate) fn wrong_name(&self) -> Option<&str> {
        let is_policy = |name: &str| {
            let number = name.strip_prefix("policy").unwrap_or_default();
            !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
        };
        let Self::Each(each) = self else { return None };
        each.keys()
            .map(String::as_str)
            .find(|name| !is_policy(name))
    }
}
