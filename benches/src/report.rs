// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What came of it: `conditions` and `results` as JSON, and a table.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use crate::args::BenchArgs;
use crate::bounds;
use crate::cycles::JobScales;
use crate::derived;
use crate::duty_cycle;
use crate::machine::{BenchMachine, SCHEDUTIL};
use crate::metric::Metric;
use crate::needed::HostKhz;
use crate::observed::Observed;
use crate::residency;
use crate::row::Row;
use crate::scenario::{Hold, PLAIN, Scenario};
use crate::scenarios::SCENARIOS;
use crate::variant::Variant;

/// Everything that was measured.
#[derive(Debug)]
pub struct BenchReport {
    conditions: Map<String, Value>,
    results: Vec<Row>,
    failures: Vec<Value>,
    /// Of the first repeat, to draw.
    series: Vec<Value>,
    /// Times at frequencies, of all repeats.
    residency: Vec<Value>,
    clock_error_us: u64,
    /// How far a ramp of the guest may be from the host's, in µs.
    within_us: u64,
    /// What rests above its lowest frequency, and why.
    rest: BTreeSet<String>,
    /// The frequencies of each scenario's cases on the host.
    host: BTreeMap<String, HostKhz>,
}

/// A guest's vCPUs.
const VCPUS: &str = match cfg!(target_arch = "aarch64") {
    true => {
        "one for each pCPU, pinned to it, with its capacity; of plain and pinned without, of plain not pinned"
    }
    false => {
        "one for each pCPU, pinned to it, without capacities and frequency invariance; of plain not pinned"
    }
};

impl BenchReport {
    /// An empty one.
    pub fn new(machine: &BenchMachine, args: &BenchArgs) -> Self {
        let clusters: Vec<Value> = machine
            .clusters
            .iter()
            .map(|cluster| {
                json!({ "cpus": cluster.cpus, "capacity": cluster.capacity,
                    "min_khz": cluster.khz.0, "max_khz": cluster.khz.1 })
            })
            .collect();
        let conditions = json!({
            "host_kernel": machine.kernel, "board": machine.board, "governor": SCHEDUTIL,
            "clusters": clusters, "repeats": args.repeats.unwrap_or(PLAIN.repeats),
            "path": args.guest.path, "qemu": qemu_name(machine), "clamp": args.clamp, "speed_model": args.speed_switch.is_some(),
            "vcpus": VCPUS,
            "periodic_work_us": duty_cycle::DUTIES.map(|duty| duty_cycle::run_us(duty, machine.big())),
            "work_load": SCENARIOS.iter().filter(|one| one.name == "work" && one.hold == Hold::No)
                .map(|one| (one.case, one.steps.concat())).collect::<BTreeMap<_, _>>(),
            "version": env!("CARGO_PKG_VERSION"),
        });
        let Value::Object(conditions) = conditions else {
            unreachable!("an object, as written above")
        };
        Self {
            conditions,
            results: Vec::new(),
            failures: Vec::new(),
            series: Vec::new(),
            residency: Vec::new(),
            clock_error_us: 0,
            within_us: args.within_us,
            rest: BTreeSet::new(),
            host: BTreeMap::new(),
        }
    }

    /// Adds a scenario's repeats.
    pub fn add(
        &mut self,
        machine: &BenchMachine,
        scenario: &Scenario,
        variant: Variant,
        observed: &[Observed],
    ) {
        if variant == Variant::Host {
            if let Some(khz) = HostKhz::needed(machine, scenario, observed) {
                self.host.insert(scenario.title(), khz);
            }
        }
        let host = self.host.get(&scenario.title()).copied();
        for metric in scenario.metrics {
            let (_, unit) = metric.name();
            let each = || {
                observed
                    .iter()
                    .map(|one| metric.measure(machine, one, host))
                    .collect()
            };
            let values: Vec<_> = metric.of_all(machine, observed).unwrap_or_else(each);
            // Of too few frames there is no percentile.
            if values.is_empty() {
                continue;
            }
            self.results.push(Row {
                scenario: scenario.name,
                variant: variant.name(),
                metric: scenario.metric_name(*metric),
                unit,
                values,
                unsettled: observed
                    .iter()
                    .filter_map(|one| Some(one.unsettled.as_ref()?.why.clone()))
                    .collect(),
                retaken: observed
                    .iter()
                    .flat_map(|one| one.put_away.clone())
                    .collect(),
            });
        }
        for one in observed {
            self.clock_error_us = self.clock_error_us.max(one.clock_error_us);
            let rest = one
                .rest
                .iter()
                .map(|rest| format!("{}: {rest}", variant.name()));
            self.rest.extend(rest);
        }
        // There is nothing to see where frequencies are held.
        let (Some(first), Hold::No) = (observed.first(), scenario.hold) else {
            return;
        };
        let of = |what: &str, value: Value| {
            json!({
                "scenario": scenario.name, "title": scenario.title(),
                "variant": variant.name(), what: value,
            })
        };
        let series = first
            .series(machine)
            .map(|series| of("lines", json!(series)));
        self.series.extend(series);
        let times = residency::json(machine, observed).map(|times| of("times", times));
        self.residency.extend(times);
    }

    /// Adds the times of boots.
    pub fn add_times(&mut self, scenario: &Scenario, variant: Variant, values: Vec<Option<u64>>) {
        let metric = Metric::FirstProcess;
        self.results.push(Row {
            scenario: scenario.name,
            variant: variant.name(),
            metric: scenario.metric_name(metric),
            unit: metric.name().1,
            values,
            unsettled: Vec::new(),
            retaken: Vec::new(),
        });
    }

    /// Says by what jobs were scaled.
    pub fn set_scales(&mut self, scales: &JobScales) {
        self.conditions
            .insert("equal_cycles".to_owned(), scales.json());
    }

    /// Adds what can be derived from what was measured; once, at the end.
    pub fn derive(&mut self) {
        self.results.extend(derived::rows(&self.results));
    }

    /// Adds a scenario that could not be measured, and why.
    pub fn failed(&mut self, scenario: &Scenario, variant: Variant, why: &str) {
        let title = scenario.title();
        eprintln!("vcpufreq: {title} on {} failed: {why}", variant.name());
        self.failures.push(json!({
            "scenario": title, "variant": variant.name(), "error": why,
        }));
    }

    /// Whether everything was measured, from a settled state.
    pub fn complete(&self) -> bool {
        self.failures.is_empty() && self.results.iter().all(|row| row.unsettled.is_empty())
    }

    /// As JSON.
    pub fn json(&self) -> Value {
        let mut conditions = self.conditions.clone();
        conditions.insert("clock_error_us".to_owned(), self.clock_error_us.into());
        conditions.insert("rests_above_lowest".to_owned(), json!(self.rest));
        let mut report = json!({
            "conditions": conditions,
            "results": self.results.iter().map(Row::json).collect::<Vec<_>>(),
            "failures": self.failures,
            "series": self.series,
            "residency": self.residency,
        });
        let bounds = bounds::judge(&report, self.within_us);
        report["bounds"] = bounds.iter().map(bounds::Bound::json).collect();
        report
    }
}

/// The QEMU of the guests, without its folder.
fn qemu_name(machine: &BenchMachine) -> Option<String> {
    let name = machine.guest.qemu.as_deref()?.file_name()?;
    Some(name.to_string_lossy().into_owned())
}
