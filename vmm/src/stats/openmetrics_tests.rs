// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: each family is there once, with the samples of all VMs; what is unknown has no
//! sample; buckets add up; the text is OpenMetrics to the letter, with its end mark; the
//! dashboard is JSON whose queries use metrics and variables that exist, and so do the alerts.

use std::collections::BTreeSet;

use serde_json::Value;

use super::*;
use crate::stats::{PolicyTimes, TuningStats};

fn vm(pid: u32) -> Stats {
    let mut vcpu = VcpuStats {
        asks_khz: Some(1_800_000),
        uclamp: (657, 1024),
        requested: vec![OppTime {
            khz: 600_000,
            us: 2_000_007,
        }],
        ..VcpuStats::default()
    };
    vcpu.counts.requests = 7;
    vcpu.clamp_after = Times {
        n: 6,
        buckets: vec![0, 0, 1, 2],
        ..Times::default()
    };
    Stats {
        pid,
        at_ns: 1,
        vcpus: vec![vcpu],
        accesses_outside: 3,
        policies: vec![PolicyTimes {
            policy: 0,
            cpus: "0".to_owned(),
            opps: vec![OppTime {
                khz: 600_000,
                us: 10_000,
            }],
            capped_khz: Some(1_400_000),
            boost_off_khz: None,
        }],
        governors_lost: 2,
        governors_off: 1,
        ..Stats::default()
    }
}

/// A strict reader of OpenMetrics 1.0 with counters, gauges and histograms.
#[derive(Default)]
struct Reader<'a> {
    /// Families and their types, the newest last.
    families: Vec<(&'a str, &'a str)>,
    /// The newest has samples.
    sampled: bool,
    seen: BTreeSet<&'a str>,
    /// Labels, bound and count of a histogram's last bucket, unless that is +Inf.
    bucket: Option<(&'a str, f64, f64)>,
}

impl<'a> Reader<'a> {
    /// The metadata of a family: each kind once, before its samples; a unit ends the name.
    fn metadata(&mut self, line: &'a str) -> Option<()> {
        let (kind, rest) = line.split_once(' ')?;
        let (name, value) = rest.split_once(' ')?;
        let newest = self.families.last().is_some_and(|of| of.0 == name) && !self.sampled;
        let ok = match kind {
            "TYPE" => self.families.iter().all(|of| of.0 != name) && self.bucket.is_none(),
            "UNIT" => newest && name.ends_with(&format!("_{value}")),
            "HELP" => newest && !value.contains(['\\', '"']),
            _ => false,
        };
        if kind == "TYPE" {
            self.families.push((name, value));
            self.sampled = false;
        }
        (ok && self.seen.insert(line.strip_suffix(value)?)).then_some(())
    }

    /// A sample of the newest family, with the suffix of its type, once.
    fn sample(&mut self, line: &'a str) -> Option<()> {
        let (series, value) = line.rsplit_once(' ')?;
        let (name, labels) = series.strip_suffix('}')?.split_once('{')?;
        let (family, kind) = *self.families.last()?;
        let suffix = match kind {
            "counter" => "_total",
            "gauge" => "",
            "histogram" => "_bucket",
            _ => return None,
        };
        let value: f64 = value.parse().ok().filter(|value| *value >= 0.0)?;
        self.sampled = true;
        if suffix == "_bucket" {
            self.bucket(labels, value)?;
        }
        let own = name.strip_suffix(suffix) == Some(family);
        let right = own && labels.split(',').all(is_label) && self.seen.insert(series);
        right.then_some(())
    }

    /// Bounds rise and counts don't fall, up to +Inf.
    fn bucket(&mut self, labels: &'a str, count: f64) -> Option<()> {
        let (of, le) = labels.strip_suffix('"')?.split_once(",le=\"")?;
        let le: f64 = le.parse().ok()?;
        let first = (of, f64::NEG_INFINITY, 0.0);
        let (before, below, fewer) = self.bucket.take().unwrap_or(first);
        self.bucket = le.is_finite().then_some((of, le, count));
        (before == of && le > below && count >= fewer).then_some(())
    }
}

fn is_label(label: &str) -> bool {
    let parts = label
        .split_once("=\"")
        .and_then(|(key, value)| Some((key, value.strip_suffix('"')?)));
    parts.is_some_and(|(key, value)| {
        let key = key.chars().all(|c| c.is_ascii_lowercase() || c == '_');
        key && !value.contains(['"', '\\'])
    })
}

/// The names of the samples, or the line that is no OpenMetrics.
pub(in crate::stats) fn strictly_read(text: &str) -> Result<BTreeSet<&str>, String> {
    let mut reader = Reader::default();
    let lines = text.strip_suffix("# EOF\n").ok_or("no end mark")?;
    for line in lines.split_terminator('\n') {
        let read = match line.strip_prefix("# ") {
            Some(metadata) => reader.metadata(metadata),
            None => reader.sample(line),
        };
        read.ok_or_else(|| line.to_owned())?;
    }
    match reader.bucket {
        None => {}
        Some((of, ..)) => return Err(format!("{of} has no bucket +Inf")),
    }
    let series = reader
        .seen
        .into_iter()
        .filter_map(|one| one.split_once('{'));
    Ok(series.map(|(name, _)| name).collect())
}

#[test]
fn the_text_is_openmetrics_to_the_letter() {
    for vms in [&[][..], &[vm(41), vm(42)]] {
        let text = openmetrics(vms);
        strictly_read(&text).unwrap_or_else(|line| panic!("{line}\n{text}"));
    }
}

#[test]
fn what_is_no_openmetrics_is_found() {
    let text = openmetrics(&[vm(42)]);
    let line = "vcpufreq_requests_total{pid=\"42\",vcpu=\"0\"} 7\n";
    let twice = line.repeat(2);
    for (good, bad) in [
        ("# EOF\n", ""),
        ("# EOF\n", "\n# EOF\n"),
        (
            "# UNIT vcpufreq_pcpu_hertz hertz",
            "# UNIT vcpufreq_pcpu_hertz Hz",
        ),
        ("vcpufreq_requests_total{", "vcpufreq_requests{"),
        (
            "# TYPE vcpufreq_requests counter",
            "# TYPE vcpufreq_requests gauge",
        ),
        ("# TYPE vcpufreq_uclamp gauge", "# TYPE vcpufreq_pcpu gauge"),
        (line, &*twice),
        ("} 7\n", "} seven\n"),
        ("le=\"0.000000008\"} 3", "le=\"0.000000008\"} 0"),
        ("le=\"+Inf\"", "le=\"0.1\""),
        ("vcpu=\"0\",bound", "vcpu=0,bound"),
    ] {
        let other = text.replacen(good, bad, 1);
        assert!(
            text.contains(good) && strictly_read(&other).is_err(),
            "{bad}"
        );
    }
}

#[test]
fn each_family_is_there_once_with_the_samples_of_all_vms() {
    let text = openmetrics(&[vm(41), vm(42)]);
    let types = text.lines().filter(|line| line.starts_with("# TYPE "));
    let mut names: Vec<_> = types.collect();
    assert_eq!(
        names.len(),
        FAMILIES.len() + OF_VM.len() + OF_TIMES.len() + 4
    );
    names.dedup();
    names.sort_unstable();
    names.dedup();
    assert_eq!(
        names.len(),
        FAMILIES.len() + OF_VM.len() + OF_TIMES.len() + 4
    );
    for line in [
        "# TYPE vcpufreq_requests counter",
        "vcpufreq_requests_total{pid=\"41\",vcpu=\"0\"} 7",
        "vcpufreq_requests_total{pid=\"42\",vcpu=\"0\"} 7",
        "# UNIT vcpufreq_requested_hertz hertz",
        "vcpufreq_requested_hertz{pid=\"42\",vcpu=\"0\"} 1800000000",
        "vcpufreq_uclamp{pid=\"42\",vcpu=\"0\",bound=\"min\"} 657",
        "vcpufreq_accesses_outside_total{pid=\"42\"} 3",
        "vcpufreq_governors_lost_total{pid=\"42\"} 2",
        "vcpufreq_governors_off{pid=\"42\"} 1",
        "vcpufreq_capped_hertz{pid=\"42\",policy=\"0\"} 1400000000",
        "vcpufreq_requested_seconds_total{pid=\"42\",vcpu=\"0\",hertz=\"600000000\"} 2.000007",
    ] {
        assert!(text.lines().any(|one| one == line), "{line}\n{text}");
    }
    assert!(text.ends_with("\n# EOF\n"));
    assert!(!text.contains("vcpufreq_utilization{"), "unknown: {text}");
}

#[test]
fn a_tuning_is_one_sample_of_each_bound_that_it_has() {
    let mut vm = vm(42);
    vm.tunings = vec![TuningStats {
        handle: 7,
        ceiling_khz: Some(600_000),
        user: 1000,
        client: 99,
        ..TuningStats::default()
    }];
    let text = openmetrics(&[vm]);
    let line = "vcpufreq_tuned_hertz{pid=\"42\",vcpu=\"0\",handle=\"7\",bound=\"ceiling\",\
                user=\"1000\",client=\"99\"} 600000000";
    assert!(text.lines().any(|one| one == line), "{line}\n{text}");
    assert!(!text.contains("bound=\"floor\""), "{text}");
}

#[test]
fn sum_and_target_of_a_pcpu_are_told_apart() {
    let mut vm = vm(42);
    (vm.vcpus[0].target_sum, vm.vcpus[0].target) = (Some(1300), Some(1024));
    let text = openmetrics(&[vm]);
    for line in [
        "vcpufreq_scx_demand{pid=\"42\",vcpu=\"0\"} 1300",
        "vcpufreq_scx_target{pid=\"42\",vcpu=\"0\"} 1024",
    ] {
        assert!(text.lines().any(|one| one == line), "{line}\n{text}");
    }
}

#[test]
fn buckets_add_up_to_all_times() {
    let text = openmetrics(&[vm(42)]);
    let own = text.lines().filter_map(|line| {
        line.strip_prefix("vcpufreq_clamp_seconds_bucket{pid=\"42\",vcpu=\"0\",le=")
    });
    let own: Vec<_> = own.collect();
    // Those without a time too.
    assert_eq!(own.len(), HISTOGRAM_BUCKETS, "{own:?}");
    let first = ["1\"} 0", "2\"} 0", "4\"} 1", "8\"} 3"].map(|end| format!("\"0.00000000{end}"));
    assert_eq!(own[..4], first);
    let last = ["\"274.877906944\"} 3", "\"+Inf\"} 6"];
    assert_eq!(own[HISTOGRAM_BUCKETS - 2..], last);
}

/// The metrics of a query of Prometheus that `text` of a VM has not, or that it has none.
fn absent<'a>(query: &'a str, there: &BTreeSet<&str>) -> Vec<&'a str> {
    let metrics = query.split(|c| !is_name(c));
    let mut metrics = metrics.filter(|word| word.starts_with("vcpufreq_"));
    let first = metrics.next().unwrap_or("no metric");
    let all = [first].into_iter().chain(metrics);
    all.filter(|name| !there.contains(name)).collect()
}

fn is_name(c: char) -> bool {
    c.is_ascii_lowercase() || c == '_'
}

#[test]
fn the_alerts_ask_for_metrics_that_are_there() {
    let text = openmetrics(&[vm(42)]);
    let there = strictly_read(&text).unwrap();
    let rules = include_str!("../../docs/examples/vcpufreq-rules.yml");
    let queries = rules
        .split("expr: ")
        .skip(1)
        .filter_map(|rest| rest.split_once("labels:"));
    let queries: Vec<_> = queries.map(|(query, _)| query).collect();
    assert_eq!(queries.len(), 4, "{queries:?}");
    for query in queries {
        let absent = absent(query, &there);
        assert!(absent.is_empty(), "{query}: {absent:?} of {there:?}");
    }
}

#[test]
fn the_dashboard_asks_for_metrics_that_are_there() {
    let mut vm = vm(42);
    let vcpu = &mut vm.vcpus[0];
    (vcpu.pcpu, vcpu.pcpu_khz) = (Some(0), Some(600_000));
    (vcpu.own_util, vcpu.others_util) = (Some(1), Some(2));
    let text = openmetrics(&[vm]);
    let there = strictly_read(&text).unwrap();
    let dashboard = include_str!("../../docs/examples/grafana.json");
    let dashboard: Value = serde_json::from_str(dashboard).unwrap();
    let variables = list(&dashboard["templating"]["list"]);
    let names: Vec<_> = variables.iter().map(|one| text_of(&one["name"])).collect();
    let panels = list(&dashboard["panels"]);
    assert!(panels.len() > 5, "{panels:?}");
    let targets = panels.iter().flat_map(|panel| list(&panel["targets"]));
    let queries = variables.iter().filter(|one| one["type"] == "query");
    let queries = queries.map(|one| text_of(&one["query"]));
    for query in targets
        .map(|target| text_of(&target["expr"]))
        .chain(queries)
    {
        let absent = absent(query, &there);
        assert!(absent.is_empty(), "{query}: {absent:?} of {there:?}");
        let used = query.split('$').skip(1);
        let used = used.filter_map(|rest| rest.split(|c| !is_name(c)).next());
        for name in used.filter(|name| !name.starts_with("__")) {
            assert!(names.contains(&name), "{query}: {names:?}");
        }
    }
}

/// A list with something in it.
fn list(value: &Value) -> &[Value] {
    let list = value.as_array().filter(|list| !list.is_empty());
    list.unwrap_or_else(|| panic!("no list: {value}"))
}

fn text_of(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}"))
}

#[test]
fn without_a_vm_there_are_no_samples() {
    let text = openmetrics(&[]);
    assert!(text.lines().all(|line| line.starts_with('#')), "{text}");
}
