// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `make test` and `make test-long`: every test of the project, counted.
//!
//! A test is a scenario on one emulated host, a test function of a crate, or
//! one of the checks on the sources. What can't be tried here is skipped
//! with its reason, and counted as skipped.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use serde_json::{Value, json};

use crate::artifacts::Artifacts;
use crate::boot::Boot;
use crate::boot::Set::{self, Instrumented, Long, Short};
use crate::boots;
use crate::c_checks;
use crate::checks;
use crate::demo;
use crate::out;
use crate::progress::{Step, above};
use crate::run::Options;
use crate::sampled::is_sampled;
use crate::verdict::{Counts, Tried, Verdict, tell};
use crate::{shell_check, tools};

/// Runs a set's tests, or its emulated hosts alone, with a pause before each scenario; whether none
/// failed. After `at_most` no host begins, and its scenarios count as skipped.
pub fn run(
    artifacts: &Artifacts,
    repo: &Path,
    set: Set,
    later_us: Option<u64>,
    at_most: Option<Duration>,
) -> Result<bool> {
    let started = Instant::now();
    let mut tried = Vec::new();
    if set == Short && later_us.is_none() {
        tried.extend(checks(artifacts, repo)?);
    }
    let mut boots = boots::of(set);
    if at_most.is_some() {
        let begin = first_of(&boots, out::build(repo));
        boots.rotate_left(begin);
    }
    let deadline = at_most.map(|at_most| started + at_most);
    let (of_boots, results) = boot_all(artifacts, repo, &boots, later_us.unwrap_or(0), deadline);
    tried.extend(of_boots);
    let file = match set {
        Short => "test.json",
        Long => "test-long.json",
        Instrumented => "test-instrumented.json",
    };
    let whole = !tried.iter().any(|one| one.verdict == no_time());
    out::write(repo, file, json!({ "whole": whole, "results": results }))?;
    if let Some(us) = later_us {
        eprintln!("the emulated hosts alone, {us} us of pause before each scenario");
    }
    Ok(summary(&tried, started))
}

/// The checks that need no emulated host. Those of the C code keep one CPU busy, cargo's the others.
fn checks(artifacts: &Artifacts, repo: &Path) -> Result<Vec<Tried>> {
    std::thread::scope(|scope| {
        let of_c = scope.spawn(|| c_checks::all(artifacts, repo));
        let mut tried = checks::sources(artifacts, repo)?;
        tried.extend(checks::crates(artifacts, repo)?);
        let of_c = of_c.join();
        tried.extend(of_c.map_err(|_| anyhow!("a panic in the checks of the C code"))??);
        Ok(tried)
    })
}

/// Where a set begins that may have no time for all of it: another host for another build, so that
/// all have their turn.
fn first_of(boots: &[&Boot], build: &str) -> usize {
    let mixed = |sum: u32, byte: u8| sum.wrapping_mul(31).wrapping_add(byte.into());
    usize::try_from(build.bytes().fold(0, mixed)).unwrap_or_default() % boots.len().max(1)
}

/// What a scenario is whose host had to begin too late.
fn no_time() -> Verdict {
    Verdict::Skipped("no time was left for its host".to_owned())
}

/// Boots two hosts at a time, in this order: an emulated host keeps one CPU busy. What was tried,
/// and all that the scenarios report, with the host that each ran on. None begins after `deadline`.
fn boot_all(
    artifacts: &Artifacts,
    repo: &Path,
    boots: &[&Boot],
    later_us: u64,
    deadline: Option<Instant>,
) -> (Vec<Tried>, Vec<Value>) {
    let step = Step::start("emulated hosts");
    let next = AtomicUsize::new(0);
    let pace = Mutex::new(SuiteProgress::of(boots));
    let tried = Mutex::new(Vec::new());
    let repeats = Mutex::new(Vec::new());
    let all = Mutex::new(Vec::new());
    step.note(&format!("0 of {} have ended", boots.len()));
    step.expect(lock(&pace).left(Duration::ZERO));
    let started = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..AT_A_TIME {
            scope.spawn(|| {
                while let Some(boot) = boots.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                        lock(&tried).extend(boot.not_begun());
                        continue;
                    }
                    lock(&pace).begins(boot);
                    let (mut news, results) = boot.carry_out(artifacts, repo, later_us);
                    if boot.scenarios == ["repeat"] {
                        lock(&repeats).extend(results.clone());
                    }
                    lock(&all).extend(results);
                    lock(&tried).append(&mut news);
                    let mut pace = lock(&pace);
                    pace.ends(boot);
                    step.note(&format!("{} of {} have ended", pace.ended, boots.len()));
                    step.expect(pace.left(started.elapsed()));
                }
            });
        }
    });
    step.done();
    let mut tried = tried.into_inner().unwrap_or_default();
    let repeats = repeats.into_inner().unwrap_or_default();
    match &repeats[..] {
        [] => (),
        // The other one had no time, or failed, which is a test of its own.
        [_] => tried.push(Tried {
            name: SAME.to_owned(),
            verdict: no_time(),
        }),
        all => tried.push(same(all)),
    }
    (tried, all.into_inner().unwrap_or_default())
}

const SAME: &str = "2+2: two runs give identical event logs";
/// Emulated hosts.
const AT_A_TIME: u32 = 2;

/// Pause before each scenario that makes a second draw. Not a multiple of a tick.
const SECOND_DRAW_US: u64 = 1_300;

/// How far the boots are, by the time that each takes about.
#[derive(Debug, Default)]
struct SuiteProgress {
    ended: usize,
    all_s: u32,
    ended_s: u32,
    running_s: u32,
}

impl SuiteProgress {
    fn of(boots: &[&Boot]) -> Self {
        Self {
            all_s: boots.iter().map(|boot| boot.about_s).sum(),
            ..Self::default()
        }
    }

    fn begins(&mut self, boot: &Boot) {
        self.running_s += boot.about_s;
    }

    fn ends(&mut self, boot: &Boot) {
        self.ended += 1;
        self.running_s -= boot.about_s;
        self.ended_s += boot.about_s;
    }

    /// How long the others take, when it took so long until now. Of those that run, half is done.
    fn left(&self, elapsed: Duration) -> Duration {
        if self.ended_s == 0 {
            return Duration::from_secs(self.all_s.into()) / AT_A_TIME;
        }
        let done = self.ended_s + self.running_s / 2;
        elapsed * (self.all_s - done) / done
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A panic of the other thread is reported by the scope itself.
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Two runs of the same scenario on the same artifacts give the same events.
fn same(results: &[Value]) -> Tried {
    let held = results.windows(2).all(|pair| pair[0] == pair[1]);
    Tried::new(SAME, held, || "they differ".to_owned())
}

/// What came of one scenario: the tests that it makes, and its report.
struct ScenarioOutcome {
    scenario: String,
    tried: Vec<Tried>,
    result: Value,
}

impl ScenarioOutcome {
    /// Whether it failed, and chance may be why.
    fn to_be_drawn_again(&self) -> bool {
        is_sampled(&self.scenario)
            && self.result["error"].is_null()
            && self.tried.iter().any(|one| !one.held())
    }
}

impl Boot {
    /// Its scenarios, when there is no time for them.
    fn not_begun(&self) -> Vec<Tried> {
        let host = self.name();
        let each = self.scenarios.iter().map(|scenario| Tried {
            name: format!("lab {host}: {scenario}"),
            verdict: no_time(),
        });
        each.collect()
    }

    /// Tries its scenarios. Those that judge samples and fail are drawn once more, which decides.
    fn carry_out(
        &self,
        artifacts: &Artifacts,
        repo: &Path,
        later_us: u64,
    ) -> (Vec<Tried>, Vec<Value>) {
        if self.scenarios == [tools::SHELL] {
            let tried = shell_check::check(artifacts, repo);
            tell(&tried);
            return (vec![tried], Vec::new());
        }
        let first = match self.draw(artifacts, repo, later_us, self.scenarios) {
            Ok(outcomes) => outcomes,
            Err(failed) => return (vec![failed], Vec::new()),
        };
        let again = first.iter().filter(|one| one.to_be_drawn_again());
        let again: Vec<&str> = again.map(|one| one.scenario.as_str()).collect();
        let mut second = Vec::new();
        if !again.is_empty() {
            // If its host fails, the first draw stands.
            let drawn = self.draw(artifacts, repo, later_us + SECOND_DRAW_US, &again);
            second = drawn.unwrap_or_default();
        }
        let (mut tried, mut results) = (Vec::new(), Vec::new());
        for one in first {
            let last = second.iter().position(|two| two.scenario == one.scenario);
            let Some(last) = last.map(|at| second.swap_remove(at)) else {
                tried.extend(one.tried);
                results.push(json!({ "result": one.result }));
                continue;
            };
            // What held at first counts as it does without a second draw.
            let held = |name: &str| {
                let mut both = one.tried.iter();
                both.any(|first| first.name == name && first.held())
            };
            tried.extend(last.tried.into_iter().map(|two| match held(&two.name) {
                true => two,
                false => two.in_a_second_draw(),
            }));
            results.push(json!({
                "result": last.result, "first_draw": one.result,
                "first_draw_later_us": later_us, "later_us": later_us + SECOND_DRAW_US,
            }));
        }
        for result in &mut results {
            result["host"] = self.name().into();
            if result["later_us"].is_null() {
                result["later_us"] = later_us.into();
            }
        }
        (tried, results)
    }

    /// Boots once, tries these scenarios, and shows what came of each.
    fn draw(
        &self,
        artifacts: &Artifacts,
        repo: &Path,
        later_us: u64,
        scenarios: &[&str],
    ) -> Result<Vec<ScenarioOutcome>, Tried> {
        let options = Options {
            topology: self.topology.to_owned(),
            host: self.host,
            guest: self.guest,
            driver: self.driver,
            path: self.path.map(str::to_owned),
            vmm: self.vmm,
            cpu: self.cpu.to_owned(),
            gic: self.gic,
            parallel: self.parallel,
            later_us,
            limit_s: 1800,
            about_s: Some(self.about_s.into()),
            ..Options::of(scenarios)
        };
        let host = self.name();
        let name = |scenario: &str| format!("lab {host}: {scenario}");
        let report = options.report(artifacts, repo).map_err(|error| {
            let what = name(&scenarios.join(", "));
            let failed = Tried::new(what, false, || format!("{error:#}"));
            tell(&failed);
            failed
        })?;
        let each = report.results.iter().zip(&report.took_s);
        let each = each.map(|(one, took_s)| {
            let scenario = one["scenario"].as_str().unwrap_or("?");
            format!("{scenario} {took_s:.0}")
        });
        let each: Vec<String> = each.collect();
        let line = format!("{:>4} s  {}", report.wall.as_secs(), name(&each.join(", ")));
        above(|| println!("{line}"));
        let wall_s = report.wall.as_secs();
        let outcomes = report.results.into_iter().map(|result| {
            let scenario = result["scenario"].as_str().unwrap_or("?").to_owned();
            ScenarioOutcome {
                tried: self.tests_of(&name(&scenario), &result, wall_s),
                scenario,
                result,
            }
        });
        let outcomes: Vec<ScenarioOutcome> = outcomes.collect();
        for one in outcomes.iter().flat_map(|one| &one.tried) {
            tell(one);
        }
        Ok(outcomes)
    }

    /// The tests that a scenario's result makes.
    fn tests_of(&self, name: &str, result: &Value, wall_s: u64) -> Vec<Tried> {
        let mut tried = vec![Tried::new(name, result["held"] == true, || {
            result.to_string()
        })];
        if result["scenario"] == "demo" {
            let shown = demo::complete(result.clone(), self.topology, wall_s);
            let lacks = demo::missing(&shown);
            let what = format!("{name}: demo.json has its keys");
            tried.push(Tried::new(what, lacks.is_empty(), || lacks.join(", ")));
        }
        let bounds = result["report"]["bounds"].as_array().into_iter().flatten();
        tried.extend(bounds.filter_map(|bound| {
            let out_of_bound = || "it doesn't".to_owned();
            let name = format!("{name}: {}", bound["text"].as_str()?);
            Some(Tried::new(name, bound["held"].as_bool()?, out_of_bound))
        }));
        tried
    }
}

/// Ends the run with what didn't pass, and the counts; whether none failed.
fn summary(tried: &[Tried], started: Instant) -> bool {
    println!("\nin {} s:", started.elapsed().as_secs());
    for one in tried {
        if !matches!(one.verdict, Verdict::Passed | Verdict::Kept) {
            tell(one);
        }
    }
    let counts = Counts::of(tried);
    println!("{counts}");
    counts.failed == 0 && counts.passed > 0
}

#[cfg(test)]
mod tests {
    //! Promises: the short set is short; a run without time for all begins with each host in its turn
    //! and counts the others as skipped; what is left follows the pace so far.
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_short_set_is_short() {
        let left = SuiteProgress::of(&boots::of(Short)).left(Duration::ZERO);
        assert!(left <= Duration::from_secs(10 * 60), "{left:?}");
    }

    #[test]
    fn each_host_has_its_turn_to_be_the_first() {
        let boots = boots::of(Long);
        let commits = (0..4096).map(|commit: u32| commit.wrapping_mul(2_654_435_761));
        let builds = commits.map(|commit| format!("{commit:09x}"));
        let firsts: BTreeSet<usize> = builds.map(|build| first_of(&boots, &build)).collect();
        assert_eq!(firsts.len(), boots.len());
        assert_eq!(first_of(&[], "unknown"), 0);
    }

    #[test]
    fn what_has_no_time_is_skipped() {
        let boot = boots::of(Long)[0];
        let counts = Counts::of(&boot.not_begun());
        assert_eq!((counts.passed, counts.skipped), (0, boot.scenarios.len()));
    }

    #[test]
    fn what_is_left_follows_the_pace() {
        let boots = boots::of(Short);
        let mut pace = SuiteProgress::of(&boots);
        let all = pace.left(Duration::ZERO);
        pace.begins(boots[0]);
        pace.ends(boots[0]);
        let took = Duration::from_secs(boots[0].about_s.into());
        // Alone and at twice the pace.
        assert_eq!(pace.left(took / 2) + took / 2, all);
        assert!(pace.left(took) > all - took);
    }
}
