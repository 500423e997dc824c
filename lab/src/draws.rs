// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Scenarios that judge samples: times, shares, or frequencies at moments that they don't choose.
//!
//! A run repeats exactly, so a pause before a scenario makes another draw of what depends on chance.
//! One rule judges each test of such a scenario: it holds if it held in [`DRAWS`] draws but one. So a
//! scenario isn't drawn any more once each of its tests has held that often, or has failed twice. The
//! bench draws itself, in its repeats, and judges each of its bounds by the same rule.

use crate::verdict::{TestResult, Verdict};

/// How often each is drawn at most.
pub const DRAWS: usize = 3;

/// The pauses before the draws differ by this. Not a multiple of a tick.
pub const LATER_US: u64 = 1_300;

/// Whether another draw would change no verdict on a scenario's tests.
pub fn are_decided(draws: &[Vec<TestResult>]) -> bool {
    let decided = |name: &&str| {
        let held = held_in(name, draws);
        held + 1 >= DRAWS || draws.len() - held > 1
    };
    let names = names(draws);
    let none = names.is_empty() && draws.len() <= 1;
    !none && names.iter().all(decided)
}

/// What came of a scenario's draws: the tests of each. One that a draw lacks did not hold there, as
/// none does in a draw whose host failed.
pub fn judged(draws: &[Vec<TestResult>]) -> Vec<TestResult> {
    let all = names(draws).into_iter().map(|name| of_one(name, draws));
    all.collect()
}

fn names(draws: &[Vec<TestResult>]) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for one in draws.iter().flatten() {
        if !names.contains(&&*one.name) {
            names.push(&one.name);
        }
    }
    names
}

fn held_in(name: &str, draws: &[Vec<TestResult>]) -> usize {
    let held = |draw: &&Vec<TestResult>| draw.iter().any(|one| one.name == name && one.held());
    draws.iter().filter(held).count()
}

fn of_one(name: &str, draws: &[Vec<TestResult>]) -> TestResult {
    let of = |draw: &Vec<TestResult>| draw.iter().find(|one| one.name == name).cloned();
    let results: Vec<Option<TestResult>> = draws.iter().map(of).collect();
    let held = held_in(name, draws);
    let seen = results
        .iter()
        .enumerate()
        .filter_map(|(number, one)| match one {
            None => Some(format!("draw {}: no result", number + 1)),
            Some(one) => match &one.verdict {
                Verdict::Failed(seen) => Some(format!("draw {}: {seen}", number + 1)),
                _ => None,
            },
        });
    let seen: Vec<String> = seen.collect();
    let name = format!("{name}: held in {held} of {} draws", draws.len());
    let all = results.iter().flatten();
    let is_kept = held == draws.len() && all.clone().all(|one| one.verdict == Verdict::Kept);
    let judged = TestResult::new(name, held + 1 >= DRAWS, || seen.join("; "));
    TestResult {
        verdict: if is_kept {
            Verdict::Kept
        } else {
            judged.verdict
        },
        ..judged
    }
}

#[cfg(test)]
mod tests {
    //! Promises: a test holds if it held in all draws but one; the report says in how many; a draw
    //! whose host failed counts against each test; there is no draw that could change nothing; what
    //! each draw has from an earlier run is kept.
    use super::*;

    fn draw(held: bool) -> Vec<TestResult> {
        vec![TestResult::new("no-dip", held, || "2 dips".to_owned())]
    }

    #[test]
    fn one_draw_may_fail() {
        let tried = judged(&[draw(true), draw(false), draw(true)]);
        assert_eq!(tried.len(), 1);
        assert_eq!(tried[0].name, "no-dip: held in 2 of 3 draws");
        assert_eq!(tried[0].verdict, Verdict::Passed);
    }

    #[test]
    fn it_is_kept_if_each_draw_is() {
        let kept = || {
            let mut draw = draw(true);
            draw[0].verdict = Verdict::Kept;
            draw
        };
        let verdict = |draws: &[Vec<TestResult>]| judged(draws)[0].verdict.clone();
        assert_eq!(verdict(&[kept(), kept()]), Verdict::Kept);
        assert_eq!(verdict(&[kept(), draw(true)]), Verdict::Passed);
        assert_eq!(verdict(&[kept(), draw(false), kept()]), Verdict::Passed);
        assert!(matches!(
            verdict(&[draw(false), draw(false)]),
            Verdict::Failed(_)
        ));
    }

    #[test]
    fn two_draws_may_not() {
        let tried = judged(&[draw(false), draw(true), draw(false)]);
        assert_eq!(tried[0].name, "no-dip: held in 1 of 3 draws");
        let seen = "draw 1: 2 dips; draw 3: 2 dips";
        assert_eq!(tried[0].verdict, Verdict::Failed(seen.to_owned()));
    }

    #[test]
    fn a_third_draw_decides_between_two() {
        for (first, second, decided) in [
            (true, true, true),
            (false, false, true),
            (true, false, false),
            (false, true, false),
        ] {
            let draws = [draw(first), draw(second)];
            assert_eq!(are_decided(&draws), decided, "{first} {second}");
            if decided {
                let held = judged(&draws)[0].verdict == Verdict::Passed;
                assert_eq!(held, first);
            }
        }
        assert!(!are_decided(&[]) && !are_decided(&[draw(true)]));
        assert!(!are_decided(&[Vec::new()]) && are_decided(&[Vec::new(), Vec::new()]));
        let other = TestResult::new("other", true, String::new);
        let half = [vec![draw(true).remove(0), other.clone()], vec![other]];
        assert!(!are_decided(&half));
    }

    #[test]
    fn a_draw_without_result_counts_as_failed() {
        let tried = judged(&[draw(true), Vec::new(), draw(true)]);
        assert_eq!(tried[0].verdict, Verdict::Passed);
        let tried = judged(&[Vec::new(), draw(true), Vec::new()]);
        let Verdict::Failed(seen) = &tried[0].verdict else {
            panic!("{tried:?}");
        };
        assert!(seen.contains("draw 3: no result"), "{seen}");
    }
}
