// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sets of CPUs, in the two forms that the kernel's files have: lists and masks.

use std::{collections::BTreeSet, fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use vcpufreq_device::host::parse_cpu_list;

/// CPU numbers, rising and without doubles.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Cpus(BTreeSet<u32>);

impl Cpus {
    /// The set of one mask as the kernel writes it: hexadecimal words of 32 bits, the highest
    /// first, separated by commas. `None` for anything else.
    #[must_use]
    pub fn from_mask(text: &str) -> Option<Self> {
        let mut cpus = BTreeSet::new();
        for (word, digits) in (0_u32..).zip(text.trim().rsplit(',')) {
            let bits = u32::from_str_radix(digits, 16).ok()?;
            let set = (0..32).filter(|bit| bits >> bit & 1 == 1);
            cpus.extend(set.map(|bit| word * 32 + bit));
        }
        Some(Self(cpus))
    }

    /// The mask as the kernel reads it; `0` for the empty set.
    #[must_use]
    pub fn mask(&self) -> String {
        let words = self.0.last().map_or(0, |last| last / 32);
        let word = |number: u32| {
            let bits = self.0.iter().filter(|cpu| **cpu / 32 == number);
            bits.fold(0_u32, |word, cpu| word | 1 << (cpu % 32))
        };
        let mut text = format!("{:x}", word(words));
        for number in (0..words).rev() {
            text += &format!(",{:08x}", word(number));
        }
        text
    }

    /// Numbers, rising.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `cpu` is one of them.
    #[must_use]
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Those that are in both.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self(self.0.intersection(&other.0).copied().collect())
    }

    /// Those that are not in `other`.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        Self(self.0.difference(&other.0).copied().collect())
    }

    /// Those that are in one or both.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        Self(self.0.union(&other.0).copied().collect())
    }
}

impl FromIterator<u32> for Cpus {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse_cpu_list(text)
            .map(Self::from_iter)
            .ok_or_else(|| format!("'{}' is no list of CPUs; write one as 0,2-3", text.trim()))
    }
}

impl TryFrom<String> for Cpus {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<Cpus> for String {
    fn from(cpus: Cpus) -> Self {
        cpus.to_string()
    }
}

impl fmt::Display for Cpus {
    /// The kernel's list syntax, ranges joined.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cpus: Vec<u32> = self.iter().collect();
        for (n, run) in cpus.chunk_by(|a, b| a + 1 == *b).enumerate() {
            let comma = if n == 0 { "" } else { "," };
            match run {
                [one] => write!(f, "{comma}{one}")?,
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                [] => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    //! Promise: lists and masks are the kernel's, both ways.
    use super::*;

    #[test]
    fn masks_are_the_kernels() {
        for (list, mask) in [
            ("0-3", "f"),
            ("7", "80"),
            ("0-2,4-7", "f7"),
            ("32", "1,00000000"),
            ("0,31,63", "80000000,80000001"),
            ("", "0"),
        ] {
            let cpus: Cpus = list.parse().unwrap();
            assert_eq!(cpus.mask(), mask);
            assert_eq!(Cpus::from_mask(mask).unwrap(), cpus, "{mask}");
            assert_eq!(cpus.to_string(), list);
        }
        assert_eq!(Cpus::from_mask("00000000,0000000f").unwrap().mask(), "f");
        assert_eq!(Cpus::from_mask("g"), None);
    }
}
