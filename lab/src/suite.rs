// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `make test` and `make test-long`: every test of the project, counted.
//!
//! A test is a scenario on one emulated host, a test function of a crate, or
//! one of the checks on the sources. What can't be tried here is skipped
//! with its reason, and counted as skipped. No test is tried again because it failed. An emulated
//! host of the long set whose tests held isn't booted again for the same build: it would repeat
//! exactly. So a run that was broken off goes on with the next one.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use serde_json::{Value, json};
use vcpufreq_tests::ScenarioReport;

use crate::arch::Arch;
use crate::artifacts::Artifacts;
use crate::boot::Boot;
use crate::boots;
use crate::c_checks;
use crate::checks;
use crate::choice::RootPart;
use crate::demo;
use crate::draws;
use crate::kernel::Flavor;
use crate::out;
use crate::progress::{Step, above};
use crate::run::Options;
use crate::set::Set::{self, Instrumented, Long, Short};
use crate::unfetched::Unfetched;
use crate::verdict::{Counts, TestResult, Verdict, tell};
use crate::{shell_check, tools};

/// Runs a set's tests, or its emulated hosts alone, with a pause before each scenario; whether none
/// failed.
pub fn run(artifacts: &Artifacts, repo: &Path, set: Set, later_us: Option<u64>) -> Result<bool> {
    let started = Instant::now();
    let none = || Ok(Vec::new());
    let of_c = || c_checks::all(artifacts, repo);
    let packages = || c_checks::packages(artifacts, repo, &[Flavor::Standard, Flavor::Rt]);
    let of_rust = || {
        let mut tried = checks::sources(artifacts, repo, set)?;
        tried.extend(checks::crates(artifacts, repo, set)?);
        Ok(tried)
    };
    let first: [&Checks; 2] = match set {
        _ if later_us.is_some() => [&none, &none],
        Short => [&of_rust, &of_c],
        Long => [&of_rust, &packages],
        Instrumented => [&none, &none],
    };
    let boots = boots::of(set);
    let (tried, results) = boot_all(artifacts, repo, &boots, (later_us.unwrap_or(0), first))?;
    let file = match set {
        Short => "test.json",
        Long => "test-long.json",
        Instrumented => "test-instrumented.json",
    };
    out::write(repo, file, json!({ "results": results }))?;
    if let Some(us) = later_us {
        eprintln!("the emulated hosts alone, {us} us of pause before each scenario");
    }
    Ok(summary(&tried, started))
}

/// What one thread does before it boots hosts: checks that need none.
type Checks<'a> = dyn Fn() -> Result<Vec<TestResult>> + Sync + 'a;

/// Boots two hosts at a time, in this order: an emulated host keeps one CPU busy. So do the checks
/// that come first in each thread. What was tried, and all that the scenarios report, with the host
/// that each ran on. If a check can't be carried out, that ends all.
fn boot_all(
    artifacts: &Artifacts,
    repo: &Path,
    boots: &[&Boot],
    (later_us, first): (u64, [&Checks; 2]),
) -> Result<(Vec<TestResult>, Vec<Value>)> {
    let next = AtomicUsize::new(0);
    let pace = Mutex::new(SuiteProgress::of(boots));
    let tried = Mutex::new(Vec::new());
    let repeats = Mutex::new(Vec::new());
    let all = Mutex::new(Vec::new());
    let progress = OnceLock::new();
    let begin = || {
        let step = Step::start("emulated hosts");
        step.note(&format!("0 of {} have ended", boots.len()));
        step.expect(lock(&pace).left(Duration::ZERO));
        (step, Instant::now())
    };
    let carry_out = |checks: &Checks| {
        match checks() {
            Ok(mut news) => lock(&tried).append(&mut news),
            Err(error) => {
                next.store(boots.len(), Ordering::Relaxed);
                return Err(error);
            }
        }
        while let Some(boot) = boots.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (step, started) = progress.get_or_init(begin);
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
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads = first.map(|checks| scope.spawn(|| carry_out(checks)));
        let ends = threads.map(|thread| thread.join().map_err(|_| anyhow!("a panic of the lab")));
        ends.into_iter().try_for_each(|end| end?)
    })?;
    if let Some((step, _)) = progress.into_inner() {
        step.done();
    }
    let mut tried = tried.into_inner().unwrap_or_default();
    let repeats = repeats.into_inner().unwrap_or_default();
    match &repeats[..] {
        [] => (),
        all => tried.push(same(all)),
    }
    Ok((tried, all.into_inner().unwrap_or_default()))
}

const SAME: &str = "2+2: two runs give identical event logs";
/// Emulated hosts that run at the same time, each in a thread of its own.
const AT_A_TIME: u32 = 2;

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
fn same(results: &[Value]) -> TestResult {
    // One alone is none: the other's host failed.
    let held = results.len() > 1 && results.windows(2).all(|pair| pair[0] == pair[1]);
    TestResult::new(SAME, held, || "they differ".to_owned())
}

/// What came of one scenario: the tests that it makes, and its report.
struct ScenarioOutcome {
    scenario: String,
    tried: Vec<TestResult>,
    result: Value,
}

impl Boot {
    /// Tries its scenarios; those that judge samples in several draws.
    fn carry_out(
        &self,
        artifacts: &Artifacts,
        repo: &Path,
        later_us: u64,
    ) -> (Vec<TestResult>, Vec<Value>) {
        if let Some(why) = self.lacks(artifacts) {
            let tried = TestResult::skipped(format!("lab {}", self.name()), why);
            tell(&tried);
            return (vec![tried], Vec::new());
        }
        if self.scenarios == [tools::SHELL] {
            let tried = shell_check::check(artifacts, repo);
            tell(&tried);
            return (vec![tried], Vec::new());
        }
        let (mut tried, mut results) = (Vec::new(), Vec::new());
        let mut add_result = |result: Value, later_us: u64| {
            let host = self.name();
            results.push(json!({ "result": result, "host": host, "later_us": later_us }));
        };
        let rt_app = artifacts.root.require(&[tools::RT_APP]);
        let (scenarios, lacking) = self.without_rt_app(rt_app.err().map(|why| why.to_string()));
        lacking.iter().for_each(tell);
        tried.extend(lacking);
        if !scenarios.is_empty() {
            match self.draw(artifacts, repo, later_us, &scenarios) {
                Ok(outcomes) => {
                    for one in outcomes {
                        one.tried.iter().for_each(tell);
                        tried.extend(one.tried);
                        add_result(one.result, later_us);
                    }
                }
                Err(not_tried) => {
                    let is_skipped = matches!(not_tried.verdict, Verdict::Skipped(_));
                    tried.push(not_tried);
                    if is_skipped {
                        return (tried, results);
                    }
                }
            }
        }
        let mut draws = vec![Vec::new(); self.sampled.len()];
        for number in 0..draws::DRAWS {
            let later_us = later_us + number as u64 * draws::LATER_US;
            let open = draws.iter_mut().zip(self.sampled);
            let open = open.filter(|(draws, _)| !draws::are_decided(draws));
            let (open, scenarios): (Vec<_>, Vec<&str>) = open.unzip();
            if scenarios.is_empty() {
                break;
            }
            let mut outcomes = self.draw(artifacts, repo, later_us, &scenarios);
            if let Err(not_tried) = &outcomes {
                if matches!(not_tried.verdict, Verdict::Skipped(_)) && number == 0 {
                    tried.push(not_tried.clone());
                    break;
                }
            }
            let mut tests_of = |scenario: &str| match &mut outcomes {
                Ok(all) => {
                    let at = all.iter().position(|one| one.scenario == scenario);
                    let outcome = at.map(|at| all.swap_remove(at));
                    outcome.map_or(Vec::new(), |one| {
                        add_result(one.result, later_us);
                        one.tried
                    })
                }
                // Its scenarios failed, each for that reason.
                Err(failed) => vec![TestResult {
                    name: format!("lab {}: {scenario}", self.name()),
                    verdict: failed.verdict.clone(),
                }],
            };
            for (draws, scenario) in open.into_iter().zip(scenarios) {
                draws.push(tests_of(scenario));
            }
        }
        let judged: Vec<_> = draws.iter().flat_map(|one| draws::judged(one)).collect();
        judged.iter().for_each(tell);
        tried.extend(judged);
        (tried, results)
    }

    /// Its scenarios, without the one that takes rt-app if that isn't there for this reason.
    fn without_rt_app(&self, lacks: Option<String>) -> (Vec<&'static str>, Option<TestResult>) {
        let needs = |name: &&str| *name == "rt-app";
        let mut scenarios = self.scenarios.to_vec();
        let why = lacks.filter(|_| scenarios.iter().any(needs));
        let skipped = why.map(|why| {
            scenarios.retain(|name| !needs(name));
            TestResult::skipped(format!("lab {}: rt-app", self.name()), why)
        });
        (scenarios, skipped)
    }

    /// Why its kernels aren't there.
    fn lacks(&self, artifacts: &Artifacts) -> Option<String> {
        let of_arch = match self.arch {
            Arch::Arm64 => Vec::new(),
            Arch::X86_64 => vec![RootPart::X86Guest, RootPart::X86Host],
        };
        let flavors = [self.host, self.guest].into_iter();
        let flavors = flavors.filter_map(|flavor| flavor.part(self.arch));
        let mut parts = flavors.chain(of_arch);
        let why = parts.find_map(|part| artifacts.root.lacks(part));
        why.map(str::to_owned)
    }

    /// Boots once, and tries these scenarios.
    fn draw(
        &self,
        artifacts: &Artifacts,
        repo: &Path,
        later_us: u64,
        scenarios: &[&str],
    ) -> Result<Vec<ScenarioOutcome>, TestResult> {
        let options = Options {
            arch: self.arch,
            topology: self.topology.to_owned(),
            host: self.host,
            guest: self.guest,
            driver: self.driver,
            path: self.path.map(str::to_owned),
            vmm: self.vmm,
            cpu: self.cpu.to_owned(),
            gic: self.gic,
            protected: self.protected,
            parallel: self.parallel,
            later_us,
            about_s: Some(self.about_s.into()),
            // Two of `repeat` are one machine's, and both have to run.
            keeps: self.set == Long && self.scenarios != ["repeat"],
            parts: Some(self.parts),
            ..Options::of(scenarios)
        };
        let host = self.name();
        let name = |scenario: &str| format!("lab {host}: {scenario}");
        let report = options.report(artifacts, repo).map_err(|error| {
            let what = name(&scenarios.join(", "));
            let why = format!("{error:#}");
            let not_tried = match error.is::<Unfetched>() {
                true => TestResult::skipped(what, why),
                false => TestResult::new(what, false, || why),
            };
            tell(&not_tried);
            not_tried
        })?;
        let each = report.results.iter().zip(&report.took_s);
        let each = each.map(|(one, took_s)| format!("{} {took_s:.0}", one.scenario));
        let each: Vec<String> = each.collect();
        let how = if report.is_kept { "kept   " } else { "" };
        let line = format!(
            "{:>4} s  {how}{}",
            report.wall.as_secs(),
            name(&each.join(", "))
        );
        above(|| println!("{line}"));
        let wall_s = report.wall.as_secs();
        let outcomes = report.results.iter().map(|result| ScenarioOutcome {
            scenario: result.scenario.clone(),
            tried: match report.is_kept {
                true => kept(self.tests_of(&name(&result.scenario), result, wall_s)),
                false => self.tests_of(&name(&result.scenario), result, wall_s),
            },
            result: result.json(),
        });
        let outcomes: Vec<ScenarioOutcome> = outcomes.collect();
        Ok(outcomes)
    }

    /// The tests that a scenario's result makes.
    fn tests_of(&self, name: &str, result: &ScenarioReport, wall_s: u64) -> Vec<TestResult> {
        let verdict = &result.verdict;
        let mut tried = vec![TestResult::new(name, verdict.held(), || {
            verdict.failed().join("; ")
        })];
        if result.scenario == "demo" {
            let shown = demo::complete(result.json(), self.topology, wall_s);
            let lacks = demo::missing(&shown);
            let what = format!("{name}: demo.json has its keys");
            tried.push(TestResult::new(what, lacks.is_empty(), || lacks.join(", ")));
        }
        let bounds = verdict.get("report")["bounds"].as_array();
        let bounds = bounds.into_iter().flatten();
        tried.extend(bounds.filter_map(|bound| {
            let out_of_bound = || "it doesn't".to_owned();
            let name = format!("{name}: {}", bound["text"].as_str()?);
            Some(TestResult::new(
                name,
                bound["held"].as_bool()?,
                out_of_bound,
            ))
        }));
        tried
    }
}

/// Tests of an earlier run.
fn kept(mut tests: Vec<TestResult>) -> Vec<TestResult> {
    let passed = tests.iter_mut().filter(|one| one.held());
    passed.for_each(|one| one.verdict = Verdict::Kept);
    tests
}

/// Ends the run with what didn't pass, and the counts; whether none failed.
fn summary(tried: &[TestResult], started: Instant) -> bool {
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
    //! Promises: the short set is short; what is left follows the pace so far; a failure names the
    //! checks that failed.
    use vcpufreq_tests::LabVerdict;

    use super::*;

    #[test]
    fn a_failure_names_its_checks() {
        let report = ScenarioReport {
            scenario: "stats".to_owned(),
            verdict: LabVerdict::default()
                .check("each is counted", false, 3)
                .check_none("nothing is left", &["a file"]),
        };
        let tried = boots::of(Short)[0].tests_of("stats", &report, 1);
        let seen = "each is counted: 3; nothing is left: [\"a file\"]";
        assert_eq!(tried[0].verdict, Verdict::Failed(seen.to_owned()));
    }

    #[test]
    fn without_rt_app_its_scenario_alone_is_skipped() {
        let takes = |boot: &&&Boot| boot.scenarios.contains(&"rt-app");
        let boots = boots::of(Long);
        let boot = boots.iter().find(takes).unwrap();
        let (all, none) = boot.without_rt_app(None);
        assert!(all == boot.scenarios && none.is_none());
        let (others, skipped) = boot.without_rt_app(Some("trixie lacks it".to_owned()));
        assert_eq!(others.len() + 1, all.len());
        let skipped = skipped.unwrap();
        assert!(skipped.name.ends_with(": rt-app"), "{skipped:?}");
        assert_eq!(skipped.verdict, Verdict::Skipped("trixie lacks it".into()));
    }

    #[test]
    fn what_failed_is_not_kept() {
        let failed = || "no".to_owned();
        let tests = [true, false].map(|held| TestResult::new("stats", held, failed));
        let verdicts: Vec<_> = kept(tests.into())
            .into_iter()
            .map(|one| one.verdict)
            .collect();
        assert_eq!(verdicts, [Verdict::Kept, Verdict::Failed(failed())]);
    }

    #[test]
    fn the_short_set_is_short() {
        // Of the 15 minutes of `make test`, lints and the crates' tests take up to 5.
        let left = SuiteProgress::of(&boots::of(Short)).left(Duration::ZERO);
        assert!(left <= Duration::from_secs(10 * 60), "{left:?}");
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
