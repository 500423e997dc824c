// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where a machine's governors come to rest: at their minimum, or where a
//! server's reservation holds a small CPU; and what becomes of a repeat that
//! didn't start from there. Pure: from what the load programs answer.

use anyhow::{Context, Result};
use vcpufreq_host::SCHED_DEBUG;
use vcpufreq_load::settle;

use crate::observed::{Observed, Unsettled};

/// A policy above its minimum, on the host or in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SideAboveMinimum {
    /// `host` or `guest`.
    side: &'static str,
    policy: settle::AboveMinimum,
}

impl SideAboveMinimum {
    /// Reads what a load program of this side answers.
    pub fn read(side: &'static str, answer: &str) -> Result<Vec<Self>> {
        let policies: Vec<settle::AboveMinimum> =
            serde_json::from_str(answer).with_context(|| format!("not understood: '{answer}'"))?;
        let above = policies.into_iter().map(|policy| Self { side, policy });
        Ok(above.collect())
    }

    /// Whether it can't be lower.
    pub fn rests(&self) -> bool {
        self.policy.server.is_some()
    }

    /// What a policy of the host's rests at, in kHz.
    pub fn of_host(&self, policy: &str) -> Option<u32> {
        let own = self.side == "host" && self.policy.policy == policy && self.rests();
        u32::try_from(self.policy.khz).ok().filter(|_| own)
    }

    /// In a line, with what to change.
    pub fn text(&self) -> String {
        let settle::AboveMinimum {
            policy,
            khz,
            min_khz,
            server,
        } = &self.policy;
        let where_ = format!("{} {policy} at {khz} kHz, lowest {min_khz}", self.side);
        match server {
            Some((reserved, capacity)) => format!(
                "{where_}: the scheduler's fair or ext server reserves {reserved} of 1024, the CPUs' capacity is {capacity}; 0 in runtime of {SCHED_DEBUG}/{{fair,ext}}_server/cpu*/ frees them"
            ),
            None => where_,
        }
    }
}

/// How far governors came down in rounds of wake-ups.
#[derive(Debug, Default)]
pub struct Rounds {
    last: Vec<SideAboveMinimum>,
    same: u32,
}

/// Rounds in a row that change nothing: load tracking decays in one, what a
/// machine does at the start of a guest takes some.
const STEADY: u32 = 6;

impl Rounds {
    /// Whether another round is of use after one that left this.
    pub fn go_on(&mut self, above: Vec<SideAboveMinimum>) -> bool {
        self.same = if above == self.last { self.same + 1 } else { 1 };
        self.last = above;
        !self.settled() && self.same < STEADY
    }

    /// Whether nothing is above what it can come down to.
    pub fn settled(&self) -> bool {
        self.last.iter().all(SideAboveMinimum::rests)
    }

    /// What the last round left.
    pub fn above(self) -> Vec<SideAboveMinimum> {
        self.last
    }
}

/// Repeats in a row that may be taken anew because they didn't start settled.
const RETAKES: usize = 3;
/// A repeat that started from the settled state, or the last of some that
/// didn't: what else the machine does can't be foreseen. No figure is looked at.
pub fn settled(mut take: impl FnMut() -> Result<Observed>) -> Result<Observed> {
    let mut put_away = Vec::new();
    let mut lasted = false;
    loop {
        let mut observed = take()?;
        let again = |one: &mut Unsettled| {
            let lasts = std::mem::replace(&mut lasted, one.lasting) && one.lasting;
            !lasts && put_away.len() < RETAKES
        };
        match observed.unsettled.take_if(again) {
            Some(one) => put_away.push(one.why),
            None => {
                observed.put_away = put_away;
                return Ok(observed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! A reservation is a place to rest; any other policy that stays up ends the rounds.

    use serde_json::json;

    use super::*;

    fn above(policy: &str, khz: u64, server: Option<(u64, u64)>) -> SideAboveMinimum {
        let policy = json!({ "policy": policy, "khz": khz, "min_khz": 300_000, "server": server });
        let read = SideAboveMinimum::read("host", &json!([policy]).to_string());
        read.unwrap().remove(0)
    }

    #[test]
    fn answers_are_read() {
        let held = above("policy0", 574_000, Some((51, 161)));
        assert_eq!(held.of_host("policy0"), Some(574_000));
        let high = above("policy4", 851_000, None);
        assert_eq!(high.of_host("policy4"), None, "it can be lower");
        let text = held.text();
        assert!(
            text.starts_with("host policy0 at 574000 kHz, lowest 300000: "),
            "{text}"
        );
        assert!(
            text.contains("51 of 1024") && text.contains("capacity is 161"),
            "{text}"
        );
        assert_eq!(high.text(), "host policy4 at 851000 kHz, lowest 300000");
        assert_eq!(SideAboveMinimum::read("host", "[]").unwrap(), []);
        assert!(SideAboveMinimum::read("guest", "policy0").is_err());
    }

    #[test]
    fn a_reservation_is_settled_at_once() {
        let mut rounds = Rounds::default();
        assert!(!rounds.go_on(vec![above("policy0", 574_000, Some((51, 161)))]));
        assert!(rounds.settled());
        assert!(!Rounds::default().go_on(vec![]));
    }

    #[test]
    fn what_changes_gets_more_rounds_and_what_stays_does_not() {
        let mut rounds = Rounds::default();
        for khz in [900_000, 800_000] {
            assert!(rounds.go_on(vec![above("policy0", khz, None)]));
        }
        for _ in 1..STEADY {
            assert!(rounds.go_on(vec![above("policy0", 700_000, None)]));
        }
        assert!(
            !rounds.go_on(vec![above("policy0", 700_000, None)]),
            "all alike"
        );
        assert!(!rounds.settled());
    }
}
