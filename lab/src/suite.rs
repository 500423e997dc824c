// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `make test`: every test of the project, counted.
//!
//! A test is a scenario on one emulated host, a test function of a crate, or
//! one of the checks on the sources. What can't be tried here is skipped
//! with its reason, and counted as skipped.

use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::bounds;
use crate::checks;
use crate::kernel::Flavor::{self, Old, Rt, Standard};
use crate::parts::Parts;
use crate::run::Driver::{self, Mainline, Ours};
use crate::run::{DEFAULT_CPU, Options};

/// One boot of an emulated host and what is tried on it.
struct Boot {
    topology: &'static str,
    host: Flavor,
    guest: Flavor,
    driver: Driver,
    path: Option<&'static str>,
    cpu: &'static str,
    scenarios: &'static [&'static str],
}

const fn boot(topology: &'static str, scenarios: &'static [&'static str]) -> Boot {
    Boot {
        topology,
        host: Standard,
        guest: Standard,
        driver: Ours,
        path: None,
        cpu: DEFAULT_CPU,
        scenarios,
    }
}

/// The longest first, so that two at a time end at about the same time.
const BOOTS: &[Boot] = &[
    Boot {
        host: Rt,
        guest: Rt,
        ..boot("4+3+1", &["rt-latency"])
    },
    boot("2+2", &["kill"]),
    boot("2+2", &["flood"]),
    Boot {
        path: Some("kernel"),
        ..boot("2+2", &["kill", "flood"])
    },
    Boot {
        path: Some("exit"),
        ..boot("2+2", &["kill", "flood"])
    },
    boot(
        "4+3+1",
        &["capacity", "opps-exact", "opps-floor", "no-dip", "uclamp"],
    ),
    boot(
        "2+2",
        &[
            "boot",
            "doctor",
            "capacity",
            "governor",
            "opps-exact",
            "opps-floor",
            "no-dip",
            "demo",
        ],
    ),
    boot(
        "2+2",
        &[
            "domain",
            "unpinned",
            "driver",
            "restart",
            "host-fails",
            "pin-offline",
            "dip-by-actuator",
            "idle",
            "uclamp",
            "rt-app",
        ],
    ),
    Boot {
        guest: Rt,
        ..boot("2+2", &["boot", "governor", "opps-exact", "driver"])
    },
    // Not exact: on an RT host interrupts are threads, each of which lifts the
    // vCPU's uclamp.max for as long as it runs.
    Boot {
        host: Rt,
        guest: Rt,
        ..boot("2+2", &["boot", "capacity", "governor"])
    },
    Boot {
        host: Rt,
        guest: Rt,
        ..boot("4+3+1", &["rt-guest"])
    },
    // With the measuring programs, for which guests of the usual size have no room.
    Boot {
        host: Rt,
        guest: Rt,
        ..boot("2+2", &["rt-settings", "rt-loop"])
    },
    Boot {
        driver: Mainline,
        ..boot("2+2", &["governor", "opps-exact", "domain"])
    },
    // The path that the VMM chooses is the best one; the others are forced.
    boot(
        "2+2",
        &["no-exit", "two-guests", "stats", "paths", "fallbacks"],
    ),
    Boot {
        path: Some("kernel"),
        ..boot(
            "2+2",
            &[
                "no-exit",
                "order",
                "in-force",
                "opps-exact",
                "no-dip",
                "two-guests",
            ],
        )
    },
    Boot {
        driver: Mainline,
        ..boot("2+2", &["no-exit", "no-dip"])
    },
    Boot {
        path: Some("exit"),
        ..boot("2+2", &["opps-exact", "opps-floor", "no-dip", "restart"])
    },
    Boot {
        path: Some("exit"),
        driver: Mainline,
        ..boot("2+2", &["opps-exact"])
    },
    // Without FEAT_S2FWB.
    Boot {
        path: Some("kernel"),
        driver: Mainline,
        cpu: "cortex-a76",
        ..boot("2+2", &["boot", "no-exit", "opps-exact"])
    },
    boot(
        "2+2",
        &[
            "bpf-page",
            "bpf-requests",
            "bpf-arithmetic",
            "bpf-replace",
            "bpf-kfunc-refused",
            "bpf-two-vms",
            "bpf-many",
            "bpf-kill",
            "bpf-switch-cost",
            "bpf-dip",
        ],
    ),
    Boot {
        host: Rt,
        ..boot("2+2", &["bpf-page", "bpf-requests", "bpf-two-vms"])
    },
    // Debian stable's kernel has no uclamp.
    Boot {
        host: Old,
        ..boot(
            "2+2",
            &["bpf-page", "bpf-requests", "bpf-arithmetic", "no-uclamp"],
        )
    },
    boot("4+3+1", &["speed"]),
    boot("2+2", &["speed"]),
    boot("1", &["boot", "opps-exact", "governor"]),
    boot("2+2", &["bench:little-to-big:new-thread"]),
    boot("2+2", &["repeat"]),
    boot("2+2", &["repeat"]),
];

/// What came of one test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It held.
    Passed,
    /// It didn't, with what was seen.
    Failed(String),
    /// It can't be tried here, with the reason.
    Skipped(String),
}

/// A test and what came of it.
#[derive(Debug, Clone)]
pub struct Tried {
    /// Where and what.
    pub name: String,
    /// What came of it.
    pub verdict: Verdict,
}

impl Tried {
    /// From whether it held, and what to show when it didn't.
    pub fn new(name: impl Into<String>, held: bool, seen: impl FnOnce() -> String) -> Self {
        let verdict = if held {
            Verdict::Passed
        } else {
            Verdict::Failed(seen())
        };
        Self {
            name: name.into(),
            verdict,
        }
    }
}

/// Runs every test; whether none failed.
pub fn run(parts: &Parts, repo: &Path) -> Result<bool> {
    let started = Instant::now();
    let mut tried = checks::sources(parts, repo)?;
    tried.extend(checks::crates(parts, repo)?);
    tried.extend(boots(parts, repo));
    Ok(summary(&tried, started))
}

/// Boots two hosts at a time: an emulated host keeps one CPU busy.
fn boots(parts: &Parts, repo: &Path) -> Vec<Tried> {
    let next = AtomicUsize::new(0);
    let tried = Mutex::new(Vec::new());
    let repeats = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(boot) = BOOTS.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (mut news, results) = boot.carry_out(parts, repo);
                    if boot.scenarios == ["repeat"] {
                        lock(&repeats).extend(results);
                    }
                    lock(&tried).append(&mut news);
                }
            });
        }
    });
    let mut tried = tried.into_inner().unwrap_or_default();
    tried.push(same(&repeats.into_inner().unwrap_or_default()));
    tried
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A panic of the other thread is reported by the scope itself.
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Two runs of the same scenario on the same parts give the same events.
fn same(results: &[Value]) -> Tried {
    let held = matches!(results, [first, second] if first == second);
    Tried::new("2+2: two runs give identical event logs", held, || {
        format!("{} results, not the same", results.len())
    })
}

impl Boot {
    fn carry_out(&self, parts: &Parts, repo: &Path) -> (Vec<Tried>, Vec<Value>) {
        let options = Options {
            topology: self.topology.to_owned(),
            host: self.host,
            guest: self.guest,
            driver: self.driver,
            path: self.path.map(str::to_owned),
            cpu: self.cpu.to_owned(),
            limit_s: 1800,
            ..Options::of(self.scenarios)
        };
        let name = |scenario: &str| {
            format!(
                "lab {} host {:?} guest {:?} driver {:?} path {} {}: {scenario}",
                self.topology,
                self.host,
                self.guest,
                self.driver,
                self.path.unwrap_or("auto"),
                self.cpu,
            )
        };
        match options.report(parts, repo) {
            Ok(report) => {
                let each = report
                    .results
                    .iter()
                    .zip(&report.took_s)
                    .map(|(one, took_s)| {
                        let scenario = one["scenario"].as_str().unwrap_or("?");
                        format!("{scenario} {took_s:.0}")
                    });
                let each: Vec<String> = each.collect();
                println!("{:>4.0} s  {}", report.wall_s, name(&each.join(", ")));
                let mut tried = Vec::new();
                for result in &report.results {
                    let name = name(result["scenario"].as_str().unwrap_or("?"));
                    let bounds = bounds::of(&result["report"]);
                    tried.push(Tried::new(name.as_str(), result["held"] == true, || {
                        result.to_string()
                    }));
                    tried.extend(bounds.into_iter().map(|bound| {
                        let out_of_bound = || "it doesn't".to_owned();
                        Tried::new(format!("{name}: {}", bound.text), bound.held, out_of_bound)
                    }));
                }
                for one in &tried {
                    tell(one);
                }
                (tried, report.results)
            }
            Err(error) => {
                let failed = Tried::new(name(&self.scenarios.join(", ")), false, || {
                    format!("{error:#}")
                });
                tell(&failed);
                (vec![failed], Vec::new())
            }
        }
    }
}

/// Shows a test's outcome as it is known.
pub fn tell(tried: &Tried) {
    match &tried.verdict {
        Verdict::Passed => println!("ok       {}", tried.name),
        Verdict::Skipped(why) => println!("skipped  {}: {why}", tried.name),
        Verdict::Failed(seen) => println!("FAILED   {}: {seen}", tried.name),
    }
}

fn summary(tried: &[Tried], started: Instant) -> bool {
    let count =
        |wanted: fn(&Verdict) -> bool| tried.iter().filter(|one| wanted(&one.verdict)).count();
    let passed = count(|verdict| *verdict == Verdict::Passed);
    let failed = count(|verdict| matches!(verdict, Verdict::Failed(_)));
    let skipped = count(|verdict| matches!(verdict, Verdict::Skipped(_)));
    println!("\nin {} s:", started.elapsed().as_secs());
    for one in tried.iter().filter(|one| one.verdict != Verdict::Passed) {
        tell(one);
    }
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    failed == 0 && passed > 0
}

/// Runs a command; its output, and whether it succeeded.
pub fn output(command: &mut Command) -> Result<(bool, String)> {
    let output = command
        .output()
        .with_context(|| format!("cannot start {:?}", command.get_program()))?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.push_str(&String::from_utf8_lossy(&output.stderr));
    Ok((output.status.success(), text))
}
