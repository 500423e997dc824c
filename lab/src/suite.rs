// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `make test`: every test of the project, counted.
//!
//! A test is a scenario on one emulated host, a test function of a crate, or
//! one of the checks on the sources. What can't be tried here is skipped
//! with its reason, and counted as skipped.

use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::Result;
use serde_json::{Value, json};

use crate::artifacts::Artifacts;
use crate::bounds;
use crate::checks;
use crate::demo;
use crate::kernel::Flavor::{self, Old, Rt, Standard};
use crate::paths_kvm::Kvm;
use crate::paths_report;
use crate::progress::{Step, above};
use crate::run::Driver::{self, Mainline, Ours};
use crate::run::{DEFAULT_CPU, Options};
use crate::verdict::{Counts, Tried, Verdict, tell};
use crate::{shell, tools};

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

/// What is tried on a topology that was drawn: each OPP, and each ramp three times. Without the
/// scheduler's servers, whose share is above most OPPs of a small CPU.
const DRAWN: &[&str] = &[
    "opps-exact:fair-server-off",
    "bench:big-ramp:step-down:new-thread:little-to-big:--variant=host:--variant=vm+bridge:--repeats=3:fair-server-off",
];

/// The longest first, so that two at a time end at about the same time.
const BOOTS: &[Boot] = &[
    Boot {
        host: Rt,
        guest: Rt,
        ..boot("4+3+1", &["rt-latency"])
    },
    boot("2+2", &["kill", "flood"]),
    Boot {
        path: Some("kernel"),
        ..boot("2+2", &["kill", "flood"])
    },
    Boot {
        path: Some("exit"),
        ..boot("2+2", &["kill", "flood", "opps-exact", "no-dip"])
    },
    boot(
        "4+3+1",
        &[
            "capacity",
            "opps-exact",
            "opps-floor",
            "uclamp",
            "speed",
            "speed-guest",
        ],
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
            "domain:both",
            "unpinned",
            "driver",
            "restart",
            "host-fails",
            "pin-offline",
            "guest-facts",
            "dip-by-actuator",
            "thread-actuator",
            "idle",
            "uclamp",
            "rt-app",
            "rt-standard",
        ],
    ),
    Boot {
        guest: Rt,
        ..boot("2+2", &["governor", "opps-exact", "driver"])
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
        ..boot(
            "2+2",
            &["rt-settings", "rt-irqbalance", "rt-causes", "rt-loop"],
        )
    },
    Boot {
        driver: Mainline,
        ..boot("2+2", &["governor", "opps-exact", "no-exit"])
    },
    // The path that the VMM chooses is the best one; the others are forced.
    boot(
        "2+2",
        &[
            "no-exit",
            "stats",
            "memory",
            "paths",
            "flood:worker",
            "flood:uart",
            "fallbacks",
        ],
    ),
    Boot {
        path: Some("kernel"),
        ..boot(
            "2+2",
            &[
                "no-exit",
                "order",
                "in-force",
                "unpinned",
                "unpinned:rt",
                "opps-exact",
                "no-dip",
                "two-guests",
            ],
        )
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
        ..boot("2+2", &["no-exit", "opps-exact"])
    },
    boot(
        "2+2",
        &[
            "bpf-page",
            "bpf-requests",
            "bpf-arithmetic",
            "bpf-replace",
            "bpf-kfunc-refused",
            "bpf-limits",
            "bpf-meddling",
            "bpf-two-vms",
            "bpf-many",
            "bpf-kill",
            "bpf-ends",
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
    boot("2+2", &["default-run", "hotplug"]),
    // Its init system is systemd.
    boot("2+2", &["systemd"]),
    // A host whose fair servers hold its little CPUs above their lowest OPPs.
    boot(
        "pixel6",
        &[
            "doctor",
            "opps-exact",
            "opps-floor",
            "no-dip",
            "unpinned",
            "doctor:fair-server-off",
            "opps-exact:fair-server-off",
            "ext-server",
        ],
    ),
    Boot {
        driver: Mainline,
        ..boot(
            "pixel6",
            &[
                "opps-exact",
                "opps-exact:fair-server-off",
                "opps-floor",
                "unpinned",
            ],
        )
    },
    boot("2+2", &["bench:little-to-big", "speed", "ramps"]),
    // Hosts that nothing else here has in mind, with CPUs so small that a server's
    // reservation would be above most of their OPPs.
    boot("drawn:1", DRAWN),
    boot("drawn:2", DRAWN),
    boot("drawn:3", DRAWN),
    boot("1", &["opps-exact", "governor"]),
    boot("1", &[tools::SHELL]),
    boot("2+2", &["repeat"]),
    boot("2+2", &["repeat"]),
];

/// Runs every test, or the emulated hosts alone, with a pause before each scenario; whether none
/// failed.
pub fn run(artifacts: &Artifacts, repo: &Path, later_us: Option<u64>) -> Result<bool> {
    let started = Instant::now();
    let mut tried = Vec::new();
    if later_us.is_none() {
        tried.extend(checks::sources(artifacts, repo)?);
        tried.extend(checks::crates(artifacts, repo)?);
    }
    let (of_boots, results) = boots(artifacts, repo, later_us.unwrap_or(0));
    tried.extend(of_boots);
    let out = repo.join("out");
    fs::create_dir_all(&out)?;
    fs::write(out.join("test.json"), serde_json::to_vec_pretty(&results)?)?;
    if let Some(us) = later_us {
        eprintln!("the emulated hosts alone, {us} us of pause before each scenario");
    }
    Ok(summary(&tried, started))
}

/// Boots two hosts at a time: an emulated host keeps one CPU busy. What was tried, and all that
/// the scenarios report, with the host that each ran on.
fn boots(artifacts: &Artifacts, repo: &Path, later_us: u64) -> (Vec<Tried>, Vec<Value>) {
    let step = Step::start("emulated hosts");
    let next = AtomicUsize::new(0);
    let ended = AtomicUsize::new(0);
    let tried = Mutex::new(Vec::new());
    let repeats = Mutex::new(Vec::new());
    let all = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(boot) = BOOTS.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (mut news, results) = boot.carry_out(artifacts, repo, later_us);
                    let host = boot.name();
                    let named = results.iter().map(
                        |result| json!({ "host": host, "later_us": later_us, "result": result }),
                    );
                    lock(&all).extend(named);
                    if boot.scenarios == ["repeat"] {
                        lock(&repeats).extend(results);
                    }
                    lock(&tried).append(&mut news);
                    let ended = ended.fetch_add(1, Ordering::Relaxed) + 1;
                    step.note(&format!("{ended} of {} have ended", BOOTS.len()));
                }
            });
        }
    });
    step.done();
    let mut tried = tried.into_inner().unwrap_or_default();
    tried.push(same(&repeats.into_inner().unwrap_or_default()));
    (tried, all.into_inner().unwrap_or_default())
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
    fn name(&self) -> String {
        format!(
            "{} host {:?} guest {:?} driver {:?} path {} {}",
            self.topology,
            self.host,
            self.guest,
            self.driver,
            self.path.unwrap_or("auto"),
            self.cpu,
        )
    }

    /// How far a guest's ramps may be from the host's.
    fn ticks_us(&self) -> u64 {
        if self.scenarios == DRAWN {
            bounds::THREE_TICKS_US
        } else {
            bounds::TWO_TICKS_US
        }
    }

    fn carry_out(
        &self,
        artifacts: &Artifacts,
        repo: &Path,
        later_us: u64,
    ) -> (Vec<Tried>, Vec<Value>) {
        if self.scenarios == [tools::SHELL] {
            let tried = shell::check(artifacts, repo);
            tell(&tried);
            return (vec![tried], Vec::new());
        }
        let options = Options {
            topology: self.topology.to_owned(),
            host: self.host,
            guest: self.guest,
            driver: self.driver,
            path: self.path.map(str::to_owned),
            cpu: self.cpu.to_owned(),
            later_us,
            limit_s: 1800,
            ..Options::of(self.scenarios)
        };
        let host = self.name();
        let name = |scenario: &str| format!("lab {host}: {scenario}");
        match options.report(artifacts, repo) {
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
                let line = format!("{:>4} s  {}", report.wall.as_secs(), name(&each.join(", ")));
                above(|| println!("{line}"));
                let mut tried = Vec::new();
                for result in &report.results {
                    let scenario = result["scenario"].as_str().unwrap_or("?");
                    let name = name(scenario);
                    let bounds = bounds::of(&result["report"], self.ticks_us());
                    tried.push(Tried::new(name.as_str(), result["held"] == true, || {
                        result.to_string()
                    }));
                    if scenario == "demo" {
                        let shown =
                            demo::complete(result.clone(), self.topology, report.wall.as_secs());
                        let lacks = demo::missing(&shown);
                        let what = format!("{name}: demo.json has its keys");
                        tried.push(Tried::new(what, lacks.is_empty(), || lacks.join(", ")));
                    }
                    if scenario == "paths" {
                        let shown = paths_report::report(
                            result,
                            &Value::Null,
                            Kvm::skipped("not its turn"),
                        );
                        let wrong = paths_report::wrong(&shown);
                        let what = format!("{name}: paths.json has its keys");
                        tried.push(Tried::new(what, wrong.is_empty(), || wrong.join(", ")));
                    }
                    tried.extend(bounds.into_iter().filter_map(|bound| {
                        let out_of_bound = || "it doesn't".to_owned();
                        let name = format!("{name}: {}", bound.text);
                        Some(Tried::new(name, bound.held?, out_of_bound))
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
