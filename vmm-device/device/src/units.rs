// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Units as types, so that a frequency is never taken for a capacity.
//!
//! Not here: rules about what a value may be in a given place. Those are with the thing that has
//! the rule ([`crate::PerfTable`], [`crate::DeviceConfig`]).

#![forbid(unsafe_code)]

use std::fmt;

/// A frequency, or performance on the same scale, in kHz. Any `u32` is a value of this type:
/// guests may ask for anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Khz(pub u32);

/// Utilization or capacity on the kernel's scale, 0..=1024
/// (`SCHED_CAPACITY_SCALE`; sysfs `cpu_capacity`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Util(u16);

/// Number of a vCPU, counted from 0. Also the number of its register page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VcpuId(pub u16);

/// Number of a performance domain: vCPUs with the same number form one cpufreq policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DomainId(pub u32);

impl Util {
    /// No utilization.
    pub const ZERO: Self = Self(0);
    /// The whole of the biggest CPU.
    pub const MAX: Self = Self(1024);

    /// `value`, if it is on the scale (0..=1024).
    #[must_use]
    pub const fn new(value: u16) -> Option<Self> {
        if value <= Self::MAX.0 {
            Some(Self(value))
        } else {
            None
        }
    }

    /// `value`, or 1024 when it is above that.
    #[must_use]
    pub fn saturating(value: u128) -> Self {
        u16::try_from(value).map_or(Self::MAX, |v| Self(v.min(Self::MAX.0)))
    }

    /// The value, 0..=1024.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }
}

impl VcpuId {
    /// As an index.
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Display for Khz {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} kHz", self.0)
    }
}

impl fmt::Display for Util {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for VcpuId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for DomainId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
