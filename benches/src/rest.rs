// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where a machine's governors come to rest: at their minimum, or where a
//! server's reservation holds a small CPU; and what becomes of a repeat that
//! didn't start from there. Pure: from what the load programs answer.

use anyhow::Result;

use crate::observed::{Observed, Unsettled};

/// A policy above its minimum, as a load program tells it (`settle.rs` there).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Above {
    /// `host` or `guest`.
    side: &'static str,
    /// `policy0`.
    policy: String,
    /// What it runs at, in kHz.
    khz: u32,
    /// Its minimum.
    min_khz: u32,
    /// Of 1024, what a server reserves, and the capacity: nothing lower can be had.
    server: Option<(u32, u32)>,
}

impl Above {
    /// Reads `policy0:1800000>600000` and `policy0:574000>300000(51/161)`.
    pub fn read(side: &'static str, answer: &str) -> Option<Vec<Self>> {
        let word = |word: &str| {
            let (policy, khz) = word.split_once(':')?;
            let (now, min) = khz.split_once('>')?;
            let (min, server) = min.split_once('(').unwrap_or((min, ""));
            let server = match server.strip_suffix(')') {
                Some(server) => {
                    let (reserved, capacity) = server.split_once('/')?;
                    Some((reserved.parse().ok()?, capacity.parse().ok()?))
                }
                None => None,
            };
            Some(Self {
                side,
                policy: policy.to_owned(),
                khz: now.parse().ok()?,
                min_khz: min.parse().ok()?,
                server,
            })
        };
        answer.split_whitespace().map(word).collect()
    }

    /// Whether it can't be lower.
    pub fn rests(&self) -> bool {
        self.server.is_some()
    }

    /// What a policy of the host's rests at, in kHz.
    pub fn of_host(&self, policy: &str) -> Option<u32> {
        (self.side == "host" && self.policy == policy && self.rests()).then_some(self.khz)
    }

    /// In a line, with what to change.
    pub fn text(&self) -> String {
        let (side, policy) = (self.side, &self.policy);
        let where_ = format!(
            "{side} {policy} at {} kHz, lowest {}",
            self.khz, self.min_khz
        );
        match self.server {
            Some((reserved, capacity)) => format!(
                "{where_}: the scheduler's fair or ext server reserves {reserved} of 1024, the CPUs' capacity is {capacity}; 0 in runtime of /sys/kernel/debug/sched/{{fair,ext}}_server/cpu*/ frees them"
            ),
            None => where_,
        }
    }
}

/// How far governors came down in rounds of wake-ups.
#[derive(Debug, Default)]
pub struct Rounds {
    last: Vec<Above>,
    same: u32,
}

/// Rounds in a row that change nothing: load tracking decays in one, what a
/// machine does at the start of a guest takes some.
const STEADY: u32 = 6;

impl Rounds {
    /// Whether another round is of use after one that left this.
    pub fn go_on(&mut self, above: Vec<Above>) -> bool {
        self.same = if above == self.last { self.same + 1 } else { 1 };
        self.last = above;
        !self.settled() && self.same < STEADY
    }

    /// Whether nothing is above what it can come down to.
    pub fn settled(&self) -> bool {
        self.last.iter().all(Above::rests)
    }

    /// What the last round left.
    pub fn above(self) -> Vec<Above> {
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
    //! A reservation is a place to rest; what else stays up is soon told.

    use super::*;

    fn above(answer: &str) -> Vec<Above> {
        Above::read("host", answer).unwrap()
    }

    #[test]
    fn answers_are_read() {
        let read = above("policy0:574000>300000(51/161) policy4:851000>500000");
        assert_eq!(read[0].of_host("policy0"), Some(574_000));
        assert_eq!(read[0].of_host("policy4"), None);
        assert_eq!(read[1].of_host("policy4"), None, "it can be lower");
        let text = read[0].text();
        assert!(
            text.starts_with("host policy0 at 574000 kHz, lowest 300000: "),
            "{text}"
        );
        assert!(
            text.contains("51 of 1024") && text.contains("capacity is 161"),
            "{text}"
        );
        assert_eq!(read[1].text(), "host policy4 at 851000 kHz, lowest 500000");
        assert_eq!(above(""), []);
        assert_eq!(Above::read("guest", "policy0"), None);
    }

    #[test]
    fn a_reservation_is_settled_at_once() {
        let mut rounds = Rounds::default();
        assert!(!rounds.go_on(above("policy0:574000>300000(51/161)")));
        assert!(rounds.settled());
        assert!(!Rounds::default().go_on(above("")));
    }

    #[test]
    fn what_changes_gets_more_rounds_and_what_stays_does_not() {
        let mut rounds = Rounds::default();
        for khz in [900_000, 800_000] {
            assert!(rounds.go_on(above(&format!("policy0:{khz}>600000"))));
        }
        for _ in 1..STEADY {
            assert!(rounds.go_on(above("policy0:700000>600000")));
        }
        assert!(!rounds.go_on(above("policy0:700000>600000")), "all alike");
        assert!(!rounds.settled());
    }
}
