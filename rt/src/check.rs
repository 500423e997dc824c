// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Checks that the plan's settings are set, and effective on their CPUs.

use serde::Serialize;

use vcpufreq_host::undo::ReadHost;

use crate::{
    finding::{Effect, Finding},
    plan::RtPlan,
    profile::Profile,
    settings::{self, UnitContext},
};

/// A setting as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// Its name.
    pub name: &'static str,
    /// How many files or threads it is about.
    pub of: usize,
    /// Those that aren't as wanted: name, value now, value wanted.
    pub unset: Vec<(String, String, String)>,
    /// Whether it does its work.
    #[serde(flatten)]
    pub effect: Effect,
}

impl Checked {
    /// Set and effective.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.unset.is_empty() && self.effect == Effect::Effective
    }
}

/// Whether nothing is left to do: every setting is set and effective, everything could be seen, and
/// neither a reboot nor anything by hand is needed. What this kernel or machine doesn't have, the
/// firmware's set-up, which can't be looked at, and notes don't count.
#[must_use]
pub fn is_ready(plan: &RtPlan, checked: &[Checked]) -> bool {
    let to_do = |finding: &Finding| matches!(finding, Finding::Reboot(_) | Finding::Hand(_));
    checked.iter().all(Checked::is_good)
        && plan.unseen.is_empty()
        && plan.cmdline.is_none()
        && !plan.findings.iter().any(to_do)
}

/// What is so of each setting of a plan, which shows the host as it is now.
#[must_use]
pub fn check(look: &dyn ReadHost, plan: &RtPlan, profile: &Profile) -> Vec<Checked> {
    let cx = UnitContext::new(look, &plan.partition, profile);
    let settings = plan.settings.iter().map(|setting| {
        let unset: Vec<_> = setting
            .changes
            .iter()
            .filter(|change| !change.is_set())
            .map(|change| {
                let now = change.now.clone().unwrap_or_else(|| "not there".to_owned());
                let want = change.want.clone().unwrap_or_default();
                (change.target.name(), now, want)
            })
            .collect();
        let effect = match settings::units().find(|unit| unit.name == setting.name) {
            Some(unit) if unset.is_empty() => (unit.effect)(&cx),
            _ => Effect::Not("it is not set".to_owned()),
        };
        Checked {
            name: setting.name,
            of: setting.changes.len(),
            unset,
            effect,
        }
    });
    settings.collect()
}
