// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The syntax of values: performance tables, memory sizes, ratios. From text to checked types.

use std::{fmt, num::NonZeroU32, str::FromStr};

use clap::builder::{PossibleValuesParser, TypedValueParser};
use vcpufreq_device::RateLimit;
use vcpufreq_dt::Opp;
use vcpufreq_host::{CpuList, CpuListError};

/// Takes one of these names for its value.
pub fn one_of<T: Clone + Send + Sync + 'static>(
    names: &'static [(&'static str, T)],
) -> impl TypedValueParser<Value = T> {
    let parser = PossibleValuesParser::new(names.iter().map(|(name, _)| *name));
    parser.try_map(|name| {
        let found = names.iter().find(|(known, _)| *known == name);
        found.map(|(_, value)| value.clone()).ok_or("unknown")
    })
}

/// A limit on requests: `PER_SECOND` or `PER_SECOND:BURST`; 0 is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate(pub Option<RateLimit>);

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("'{text}' is no limit; write N or N:BURST in requests a second, 0 for none");
        let (rate, burst) = match text.split_once(':') {
            Some((rate, burst)) => (rate, Some(burst.parse().map_err(|_| wrong())?)),
            None => (text, None),
        };
        let rate = rate.parse::<u32>().map_err(|_| wrong())?;
        // A tenth of a second's requests at once.
        let tenth = NonZeroU32::new(rate.div_ceil(10));
        Ok(Self(NonZeroU32::new(rate).zip(burst.or(tenth)).map(
            |(per_second, burst)| RateLimit { per_second, burst },
        )))
    }
}

/// A performance table as the user writes it: `KHZ[:UV[:UW]],...`. The rules of
/// a table (1 to 64 entries, rising) are checked where the vCPU is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table(pub Vec<Opp>);

impl FromStr for Table {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let entries = text.split(',').filter(|entry| !entry.trim().is_empty());
        entries.map(opp).collect::<Result<_, _>>().map(Self)
    }
}

/// KHZ, KHZ:UV or KHZ:UV:UW; UV may be empty where UW is known alone.
fn opp(entry: &str) -> Result<Opp, String> {
    let number = |text: &str| {
        text.trim().parse::<u32>().map_err(|_| {
            format!("'{entry}' is no table entry; write KHZ, KHZ:UV or KHZ:UV:UW as whole numbers")
        })
    };
    let known = |text: &str| (!text.is_empty()).then(|| number(text)).transpose();
    let (khz, uv, uw) = match entry.split(':').collect::<Vec<_>>()[..] {
        [khz] => (number(khz)?, None, None),
        [khz, uv] => (number(khz)?, Some(number(uv)?), None),
        [khz, uv, uw] => (number(khz)?, known(uv)?, Some(number(uw)?)),
        _ => return Err(format!("'{entry}' has more than KHZ:UV:UW")),
    };
    Ok(Opp { khz, uv, uw })
}

/// Memory of the guest in MiB: `512`, `512M` or `2G`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemSize(pub u64);

impl FromStr for MemSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, mib) = match text.strip_suffix(['G', 'g']) {
            Some(digits) => (digits, 1024),
            None => (text.strip_suffix(['M', 'm']).unwrap_or(text), 1),
        };
        let size = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(mib));
        size.map(Self)
            .ok_or_else(|| format!("'{text}' is no memory size; write MiB as 512, 512M or 2G"))
    }
}

/// Work per cycle of the vCPU against its pCPU, in thousandths: `0.75` is 750.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcRatio {
    /// Thousandths, 1..=64000.
    pub permille: u32,
}

impl FromStr for IpcRatio {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (whole, part) = text.split_once('.').unwrap_or((text, ""));
        let digits = whole.chars().chain(part.chars());
        let fits = (1..=2).contains(&whole.len()) && part.len() <= 3;
        let number = fits && digits.clone().all(|digit| digit.is_ascii_digit());
        let permille = format!("{whole}{part:0<3}").parse::<u32>();
        match permille {
            Ok(permille @ 1..=64_000) if number => Ok(Self { permille }),
            _ => Err(format!(
                "'{text}' is no ratio; write 0.001 to 64 with up to three decimals, as 0.75"
            )),
        }
    }
}

/// A flag that speaks of vCPUs: `VCPUS=VALUE`, with a list on the left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PerVcpu<T> {
    /// The vCPUs that it holds for.
    pub vcpus: CpuList,
    /// What holds for each.
    pub value: T,
}

impl<T: FromStr<Err: fmt::Display>> FromStr for PerVcpu<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (vcpus, value) = text
            .split_once('=')
            .ok_or_else(|| format!("'{text}' lacks its vCPU; write VCPU=VALUE"))?;
        let vcpus: CpuList = vcpus.parse().map_err(|why: CpuListError| why.to_string())?;
        if vcpus.is_empty() {
            return Err(format!("'{text}' lacks its vCPU; write VCPU=VALUE"));
        }
        let value = value.parse().map_err(|why: T::Err| why.to_string())?;
        Ok(Self { vcpus, value })
    }
}

/// What these flags set for one vCPU: the last that names it counts.
pub fn of_vcpu<T>(flags: &[PerVcpu<T>], vcpu: u32) -> Option<&T> {
    let mut last_first = flags.iter().rev();
    let flag = last_first.find(|flag| flag.vcpus.contains(vcpu))?;
    Some(&flag.value)
}

/// The largest number of a vCPU that these flags name.
pub fn largest<T>(flags: &[PerVcpu<T>]) -> Option<u32> {
    flags.iter().flat_map(|flag| flag.vcpus.iter()).max()
}

#[cfg(test)]
mod tests {
    //! Each syntax gives its value, and nothing else is taken.

    use super::*;

    #[test]
    fn limits() {
        let rate = |text: &str| {
            let rate = text.parse::<Rate>().ok()?.0?;
            Some((rate.per_second.get(), rate.burst.get()))
        };
        assert_eq!(rate("5000"), Some((5000, 500)));
        assert_eq!(rate("5"), Some((5, 1)));
        assert_eq!(rate("100:3"), Some((100, 3)));
        assert_eq!("0".parse(), Ok(Rate(None)));
        for text in ["", "x", "-1", "5:0", "5:", "5000000000"] {
            let why = text.parse::<Rate>().unwrap_err();
            assert!(why.contains("N:BURST"), "{why}");
        }
    }

    #[test]
    fn a_table_carries_voltage_and_power() {
        let table: Table = "600000,1000000:675000,1400000:775000:175000"
            .parse()
            .unwrap();
        let opps: Vec<_> = table.0.iter().map(|o| (o.khz, o.uv, o.uw)).collect();
        let expected = [
            (600_000, None, None),
            (1_000_000, Some(675_000), None),
            (1_400_000, Some(775_000), Some(175_000)),
        ];
        assert_eq!(opps, expected);
        for bad in ["1:2:3:4", "1.5", "-1", "1;2", "4294967296"] {
            assert!(bad.parse::<Table>().is_err(), "{bad}");
        }
    }

    #[test]
    fn memory_is_in_mib() {
        let mib = |text: &str| text.parse::<MemSize>().map(|size| size.0);
        assert_eq!(mib("512"), Ok(512));
        assert_eq!(mib("512M"), Ok(512));
        assert_eq!(mib("2G"), Ok(2048));
        for bad in ["", "G", "1.5G", "-1", "512K", "99999999999999999999"] {
            assert!(mib(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_ratio_is_in_thousandths() {
        let permille = |text: &str| text.parse::<IpcRatio>().map(|ratio| ratio.permille);
        let rows = [
            ("1", 1000),
            ("0.75", 750),
            ("0.001", 1),
            ("1.25", 1250),
            ("64", 64_000),
        ];
        for (text, expected) in rows {
            assert_eq!(permille(text), Ok(expected), "{text}");
        }
        for bad in ["0", "0.0001", "64.001", "-1", "", ".5", "1e3", "+1", "1.+5"] {
            assert!(permille(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_flag_names_its_vcpus() {
        let pin: PerVcpu<CpuList> = "0-1=2-3".parse().unwrap();
        assert_eq!(pin.vcpus.as_slice(), [0, 1]);
        assert_eq!(pin.value.as_slice(), [2, 3]);
        for bad in ["0", "=1", "x=1", "0=x"] {
            assert!(bad.parse::<PerVcpu<CpuList>>().is_err(), "{bad}");
        }
    }
}
