// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian's Prometheus, with the settings that `docs/examples/` ships, scrapes the socket unit there:
//! its answers to queries are what the guest has requested. Each query of the dashboard has an answer.
//! A governor that is lost and a cap fire their alerts and no other, until they are gone.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use vcpufreq_bench::piped::Piped;
use vcpufreq_tests::LabVerdict;

use crate::harness::plan::{Plan, first_cpus, registers};
use crate::harness::policy::Policy;
use crate::harness::sysfs;
use crate::harness::systemctl::systemctl;
use crate::harness::vm::{Setup, Vm};
use crate::harness::wait::settled;

const SOCKET: &str = "vcpufreq-metrics.socket";
const PROMETHEUS: &str = "127.0.0.1:9090";
const DASHBOARD: &str = include_str!("../../../../docs/examples/grafana.json");
/// Requests of each vCPU, besides the last one.
const REQUESTS: u64 = 99;
/// Between two looks, and for what takes a scrape. Those come every 15 s.
const LOOK: Duration = Duration::from_secs(2);
const SCRAPED: Duration = Duration::from_secs(60);
/// Rules are evaluated once a minute, and a cap has to hold for another one.
const JUDGED: Duration = Duration::from_secs(240);
/// The alerts of the two changes that are made.
const ALERTS: [&str; 2] = ["VcpufreqCapInForce", "VcpufreqGovernorLost"];

pub fn run(_plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    systemctl(&["start", SOCKET])?;
    // Without a driver, which would make requests, too.
    let mut vm = Vm::boot(&Setup::mirroring(&first_cpus(&policies)))?;
    let (requests, hertz) = request(&mut vm, &policies)?;
    let prometheus = Piped::start(Command::new("/bin/prometheus").args([
        "--config.file=/etc/prometheus/prometheus.yml",
        "--storage.tsdb.path=/run/prometheus",
        &format!("--web.listen-address={PROMETHEUS}"),
    ]))?;
    let seen_requests = of_vcpus("vcpufreq_requests_total", &requests)?;
    let seen_hertz = of_vcpus("vcpufreq_requested_hertz", &hertz)?;
    let unanswered = unanswered()?;
    let before = firing(&[])?;
    let [first, .., last] = &policies[..] else {
        anyhow::bail!("this scenario is for a host with two policies")
    };
    let governor = format!("{}/scaling_governor", first.path);
    let cap = format!("{}/scaling_max_freq", last.path);
    sysfs::write(&governor, "performance")?;
    sysfs::write(&cap, last.min())?;
    let fired = firing(&ALERTS)?;
    sysfs::write(&governor, "schedutil")?;
    sysfs::write(&cap, last.max())?;
    let after = firing(&[])?;
    drop(prometheus);
    systemctl(&["stop", SOCKET])?;
    vm.quit()?;
    let wanted = BTreeSet::from(ALERTS.map(str::to_owned));
    let figures = json!({
        "requests": [requests, seen_requests], "hertz": [hertz, seen_hertz],
        "unanswered": unanswered, "firing": [before, fired, after],
    });
    Ok(LabVerdict::with_figures(figures)
        .check_eq("requests as made", &seen_requests, requests)
        .check_eq("frequencies as requested", &seen_hertz, hertz)
        .check_none("each query is answered", &unanswered)
        .check_eq("the alerts fire", &fired, wanted)
        .check("none fires before", before.is_empty(), &before)
        .check("none fires after", after.is_empty(), &after))
}

/// A value of each vCPU, by its number.
type OfVcpus = BTreeMap<String, u64>;

/// Each vCPU's requests in the end, and the last one in Hz.
fn request(vm: &mut Vm, policies: &[Policy]) -> Result<(OfVcpus, OfVcpus)> {
    let base = registers(vm)?;
    let (mut requests, mut hertz) = (OfVcpus::new(), OfVcpus::new());
    for (vcpu, policy) in policies.iter().enumerate() {
        let set_perf = base + 0x1000 * u64::try_from(vcpu)? + 4;
        let middle = policy.opps[policy.opps.len() / 2];
        let (low, high) = (policy.min(), policy.max());
        vm.ask(format!(
            "stores {vcpu} {set_perf:#x} {REQUESTS} {low} {high}"
        ))?;
        vm.ask(format!("stores {vcpu} {set_perf:#x} 1 {middle}"))?;
        requests.insert(vcpu.to_string(), REQUESTS + 1);
        hertz.insert(vcpu.to_string(), u64::from(middle) * 1000);
    }
    Ok((requests, hertz))
}

/// What Prometheus knows of a metric of each vCPU, as soon as that is as `wanted`.
fn of_vcpus(metric: &str, wanted: &OfVcpus) -> Result<OfVcpus> {
    let look = || {
        sleep(LOOK);
        let Ok(series) = query(metric) else {
            // It is starting.
            return Ok(OfVcpus::new());
        };
        let value = |one: &Value| -> Option<(String, u64)> {
            let vcpu = one["metric"]["vcpu"].as_str()?;
            Some((vcpu.to_owned(), one["value"][1].as_str()?.parse().ok()?))
        };
        let values = series.iter().map(value).collect::<Option<OfVcpus>>();
        values.with_context(|| format!("series of {metric}: {series:?}"))
    };
    settled(SCRAPED, look, |seen| seen == wanted)
}

/// The alerts that fire, as soon as they are as `wanted`.
fn firing(wanted: &[&str]) -> Result<BTreeSet<String>> {
    let look = || {
        sleep(LOOK);
        let alerts = query("ALERTS{alertstate=\"firing\"}")?;
        let name = |one: &Value| Some(one["metric"]["alertname"].as_str()?.to_owned());
        Ok(alerts.iter().filter_map(name).collect())
    };
    settled(JUDGED, look, |seen: &BTreeSet<String>| {
        seen.iter().eq(wanted.iter())
    })
}

/// Queries of the dashboard that Prometheus refuses. With `histogram_quantile` and rates some have no
/// series yet.
fn unanswered() -> Result<Vec<Value>> {
    let dashboard: Value = serde_json::from_str(DASHBOARD)?;
    let panels = dashboard["panels"].as_array().context("panels")?;
    let targets = panels
        .iter()
        .filter_map(|panel| panel["targets"].as_array());
    let mut unanswered = Vec::new();
    for target in targets.flatten() {
        let text = target["expr"].as_str().context("a query")?;
        let text = text
            .replace("$__rate_interval", "1m")
            .replace("$instance", ".*")
            .replace("$pid", ".*");
        if let Err(error) = query(&text) {
            unanswered.push(json!({ "query": text, "error": format!("{error:#}") }));
        }
    }
    Ok(unanswered)
}

/// Prometheus' answer to a query: series with their values now.
fn query(text: &str) -> Result<Vec<Value>> {
    let encoded = text.bytes().map(|byte| match byte.is_ascii_alphanumeric() {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    });
    let encoded: String = encoded.collect();
    let mut stream = TcpStream::connect(PROMETHEUS).context("connecting to Prometheus")?;
    // In HTTP/1.0 an answer has no chunks.
    write!(stream, "GET /api/v1/query?query={encoded} HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (_, body) = answer.split_once("\r\n\r\n").context("no answer")?;
    let body: Value = serde_json::from_str(body).with_context(|| format!("answer {body}"))?;
    ensure!(body["status"] == "success", "{text}: {body}");
    let series = body["data"]["result"].as_array();
    series.cloned().with_context(|| format!("{text}: {body}"))
}
