// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The form of a setting's code.

use super::{context::UnitContext, sheet::Sheet};
use crate::finding::Effect;

/// A setting's code.
pub(crate) struct Unit {
    pub name: &'static str,
    pub reason: &'static str,
    /// The changes that it needs; none when the profile doesn't ask for it.
    pub plan: fn(&UnitContext, &mut Sheet),
    /// Whether it does its work on the CPUs that it is for. For a switch that the kernel has once
    /// for all CPUs, its value is the effect: [`by_value`].
    pub effect: fn(&UnitContext) -> Effect,
}

/// The effect of a switch that holds for all CPUs.
pub(crate) fn by_value(_: &UnitContext) -> Effect {
    Effect::Effective
}
