// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sets of CPUs, in the two forms that the kernel's files have: lists and masks.

#![forbid(unsafe_code)]

use std::{fmt, str::FromStr};

use thiserror::Error;

/// CPU numbers, rising and without doubles, in the kernel's list syntax: `0,2-3`.
///
/// As text: decimal numbers up to 65,535 and ranges of them, in any order, separated by commas,
/// with white space around the whole. Empty text is the empty set. Some kernels (5.15) end the
/// lists and masks of `topology/` with a NUL, which is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct CpuList(Vec<u32>);

/// A text is no list of CPUs.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("'{0}' is no list of CPUs; write one as 0,2-3")]
pub struct CpuListError(String);

impl CpuList {
    /// The set of one mask as the kernel writes it: hexadecimal words of 32 bits, the highest
    /// first, separated by commas. `None` for anything else.
    #[must_use]
    pub fn from_mask(text: &str) -> Option<Self> {
        let mut cpus = Vec::new();
        for (word, digits) in (0_u32..).zip(trimmed(text).rsplit(',')) {
            let bits = u32::from_str_radix(digits, 16).ok()?;
            let set = (0..32).filter(|bit| (bits >> bit) & 1 == 1);
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
            bits.fold(0_u32, |word, cpu| word | (1 << (cpu % 32)))
        };
        let mut text = format!("{:x}", word(words));
        for number in (0..words).rev() {
            text += &format!(",{:08x}", word(number));
        }
        text
    }

    /// Numbers, rising.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// Numbers, rising.
    #[must_use]
    pub fn as_slice(&self) -> &[u32] {
        &self.0
    }

    /// First and last of each row of numbers without a gap, rising.
    pub fn ranges(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        let rows = self.0.chunk_by(|a, b| a + 1 == *b);
        rows.filter_map(|row| Some((*row.first()?, *row.last()?)))
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether `cpu` is one of them.
    #[must_use]
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.binary_search(&cpu).is_ok()
    }

    /// Those that are in both.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        self.iter().filter(|cpu| other.contains(*cpu)).collect()
    }

    /// Those that are not in `other`.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        self.iter().filter(|cpu| !other.contains(*cpu)).collect()
    }

    /// Those that are in one or both.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        self.iter().chain(other.iter()).collect()
    }
}

impl FromIterator<u32> for CpuList {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        let mut cpus: Vec<u32> = cpus.into_iter().collect();
        cpus.sort_unstable();
        cpus.dedup();
        Self(cpus)
    }
}

impl IntoIterator for CpuList {
    type Item = u32;
    type IntoIter = std::vec::IntoIter<u32>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

/// A number of at most 16 bits; `u16::from_str` takes a sign, too.
fn number(text: &str) -> Option<u16> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

fn range(text: &str) -> Option<impl Iterator<Item = u32>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (number(first)?, number(last)?);
    (first <= last).then(|| (first..=last).map(u32::from))
}

fn trimmed(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || c == '\0')
}

impl FromStr for CpuList {
    type Err = CpuListError;

    fn from_str(text: &str) -> Result<Self, CpuListError> {
        let text = trimmed(text);
        let mut cpus = Vec::new();
        for part in text.split(',').filter(|_| !text.is_empty()) {
            cpus.extend(range(part).ok_or_else(|| CpuListError(text.to_owned()))?);
        }
        Ok(cpus.into_iter().collect())
    }
}

impl fmt::Display for CpuList {
    /// The kernel's list syntax, ranges joined.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, (first, last)) in self.ranges().enumerate() {
            let comma = if n == 0 { "" } else { "," };
            match last - first {
                0 => write!(f, "{comma}{first}")?,
                _ => write!(f, "{comma}{first}-{last}")?,
            }
        }
        Ok(())
    }
}

#[cfg(feature = "serde")]
mod with_serde {
    //! As text; one CPU also as a number.
    use std::fmt;

    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    use super::CpuList;

    impl Serialize for CpuList {
        fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
            to.collect_str(self)
        }
    }

    struct Visitor;

    impl de::Visitor<'_> for Visitor {
        type Value = CpuList;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of CPUs as \"0,2-3\"")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<CpuList, E> {
            text.parse().map_err(E::custom)
        }

        fn visit_i64<E: de::Error>(self, cpu: i64) -> Result<CpuList, E> {
            self.visit_str(&cpu.to_string())
        }

        fn visit_u64<E: de::Error>(self, cpu: u64) -> Result<CpuList, E> {
            self.visit_str(&cpu.to_string())
        }
    }

    impl<'de> Deserialize<'de> for CpuList {
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
            from.deserialize_any(Visitor)
        }
    }
}

#[cfg(test)]
mod tests {
    //! Lists and masks are the kernel's, both ways, and nothing else is taken.
    use super::*;

    #[test]
    fn lists_are_the_kernels() {
        let cases: [(&str, &[u32]); 7] = [
            ("0-3\n", &[0, 1, 2, 3]),
            ("0-3\n\0", &[0, 1, 2, 3]),
            ("0", &[0]),
            ("0-1,4,6-7", &[0, 1, 4, 6, 7]),
            ("3,1,1-2\n", &[1, 2, 3]),
            ("65535", &[65_535]),
            ("\n", &[]),
        ];
        for (text, cpus) in cases {
            assert_eq!(
                text.parse::<CpuList>().unwrap().as_slice(),
                cpus,
                "{text:?}"
            );
        }
    }

    #[test]
    fn what_is_no_list_is_refused_with_its_text() {
        for text in [
            "a",
            "3-1",
            "-1",
            "1-",
            "+1",
            "0x1",
            "65536",
            "0-99999999",
            "0,,1",
            "0,",
            ",",
            "0 1",
            "0, 1",
            "0 -1",
            "1-2-3",
            "0;1",
            "4294967296",
            "0-2:1/2",
            "all",
        ] {
            let error = text.parse::<CpuList>().unwrap_err().to_string();
            let expected = format!("'{text}' is no list of CPUs; write one as 0,2-3");
            assert_eq!(error, expected);
        }
    }

    #[test]
    fn a_list_prints_as_it_reads() {
        for text in ["0", "0-3", "0,2-3", "0,2,4-6,9", ""] {
            assert_eq!(text.parse::<CpuList>().unwrap().to_string(), text);
        }
    }

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
            let cpus: CpuList = list.parse().unwrap();
            assert_eq!(cpus.mask(), mask);
            assert_eq!(CpuList::from_mask(mask).unwrap(), cpus, "{mask}");
        }
        assert_eq!(CpuList::from_mask("00000000,0000000f").unwrap().mask(), "f");
        assert_eq!(CpuList::from_mask("f\n\0").unwrap().mask(), "f");
        assert_eq!(CpuList::from_mask("g"), None);
    }

    #[test]
    fn sets_are_joined_and_cut() {
        let list = |text: &str| text.parse::<CpuList>().unwrap();
        let (a, b) = (list("0-3"), list("2,5"));
        assert_eq!(a.and(&b), list("2"));
        assert_eq!(a.or(&b), list("0-3,5"));
        assert_eq!(a.without(&b), list("0-1,3"));
        assert!(a.contains(3) && !a.contains(4));
    }
}
