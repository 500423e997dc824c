// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The pages in Chromium, 1,280 and 400 pixels wide: no label is cut off, small, or on another, and
//! no table is wider than the page; and lines of a picture differ without colour. Of figures as long as
//! the bench and `rt report` have them.

use std::{
    env, fs,
    process::{Command, Stdio},
};

use serde_json::{Value, json};
use vcpufreq_bench::{latency_page, report_page};

const VARIANTS: [&str; 3] = ["host", "vm", "vm+bridge"];
/// Names, units and values of metrics.
const METRICS: [(&str, &str, [Option<u64>; 3]); 4] = [
    (
        "other_thread.to_fmin",
        "us",
        [Some(3_139_100), Some(3_143_100), None],
    ),
    (
        "contended.frames50.energy",
        "uJ",
        [Some(2_417_300), Some(2_448_900), Some(2_551_800)],
    ),
    (
        "steal_untold.work_at_max",
        "turns",
        [Some(14_200_000), Some(15_100_000), Some(15_300_000)],
    ),
    (
        "to_fmax",
        "us",
        [Some(100_400), Some(110_300), Some(111_200)],
    ),
];

fn bench() -> Value {
    let results = METRICS.iter().flat_map(|(metric, unit, values)| {
        VARIANTS.map(|variant| {
            json!({ "scenario": "step-down", "variant": variant, "metric": metric, "unit": unit,
                "values": values, "n": 3, "unsettled": ["why"],
                "median": values[1], "min": values[0], "max": values[2] })
        })
    });
    let of = |variant: &&str, what: &str, value: Value| json!({ "scenario": "step-down", "title": "step-down", "variant": variant, what: value });
    // 0 to 100 ms on a little CPU, then on a big one.
    let lines = json!({ "placement": [[-20_000, 1], [100_000, 3]], "end_us": 600_000,
        "frequency": [[-20_000, 600_000], [100_000, 2_850_000]], "requests": [[99_000, 2_850_000]] });
    // Only a guest with the bridge requests anything.
    let times = |variant: &str| {
        let requested = [[0, 1], [2_850_000, 9_999]];
        let requested = &requested[..if variant == "vm+bridge" { 2 } else { 0 }];
        json!({ "ran_us": [[600_000, 1], [2_850_000, 9_999]], "requested_us": requested,
            "own_us": 9_000, "others_us": 100, "target_sum": 1024, "target": 1024 })
    };
    let bound = |held: bool| {
        json!({ "held": held, "text": "step-down other_thread.to_fmin: vm+bridge 143.1 ms, \
        host 80.0 ms, within 8.0 ms (held in 5 of 5)" })
    };
    json!({
        "conditions": { "board": null, "work_load": { "io": "load io 60 /dev/nullb0 1200" }, "clusters": [
            { "cpus": [0, 1], "capacity": 160, "min_khz": 600_000, "max_khz": 1_800_000 },
            { "cpus": [2, 3], "capacity": 1024, "min_khz": 700_000, "max_khz": 2_850_000 }] },
        "results": results.collect::<Vec<_>>(), "failures": [], "bounds": [bound(true), bound(false)],
        "series": VARIANTS.each_ref().map(|variant| of(variant, "lines", lines.clone())),
        "residency": VARIANTS.each_ref().map(|variant| of(variant, "times", times(variant))),
    })
}

fn latencies(longest_us: u64) -> Value {
    let cpu = |cpu: u32| {
        json!({ "cpu": cpu, "samples": 59_970_010, "min_us": 1, "avg_us": 7, "p9999_us": 44, "max_us": longest_us,
            "histogram": { "1": 5, "6": 59_000_000, "7": 900_000, "40": 12, "44": 1 } })
    };
    let source = "https://vcpufreq.invalid/a/long/address/of/a/table/of/latencies/of/a/board";
    json!({
        "conditions": { "emulated": "QEMU", "published": [{ "source": source, "max_us": 40 }] },
        "budget_us": 60, "verdict": "exceeded",
        "runs": [{ "place": "host", "load": "idle", "latencies": [cpu(4), cpu(127)] }],
    })
}

#[test]
#[ignore = "for make test-long, which fetches a browser"]
fn nothing_is_cut_off_or_on_another() {
    let folder = tempfile::tempdir().expect("a folder");
    let name = "2026-03-04-a-long-name-of-a-report.json";
    let reports = [(name, 44), ("b.json", 12_345)];
    let reports = reports.map(|(name, longest_us)| (name.to_owned(), latencies(longest_us)));
    let path = "echo schedutil > /sys/devices/system/cpu/cpufreq/policy0/scaling_governor";
    let pages = [
        (
            "report",
            report_page(&[("doctor", path, true)], Some(&bench())),
        ),
        ("rt compare", latency_page(&reports)),
    ];
    let mut html = format!(
        "<!doctype html><meta charset=\"utf-8\"><script>{}</script>\n",
        include_str!("browser.js")
    );
    for (title, page) in &pages {
        let page = page.replace('&', "&amp;").replace('"', "&quot;");
        for width in [1280, 400] {
            html += &format!(
                "<iframe title=\"{title}\" width=\"{width}\" height=\"900\" srcdoc=\"{page}\"></iframe>\n"
            );
        }
    }
    fs::write(folder.path().join("frames.html"), html).expect("a file");
    let browser = env::var("VCPUFREQ_CHROMIUM");
    let output = Command::new(browser.as_deref().unwrap_or("chromium"))
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"])
        .args(["--user-data-dir=user", "frames.html"])
        // The lab's sees no other folder.
        .current_dir(&folder)
        .stderr(Stdio::null())
        .output();
    let Ok(output) = output else {
        let why = env::var("VCPUFREQ_NO_CHROMIUM");
        let why = why.as_deref().unwrap_or("there is no chromium");
        return println!("SKIP: the pages in a browser: {why}");
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let found = text
        .rsplit_once("<pre>looked\n")
        .and_then(|(_, rest)| rest.split_once("\nend"));
    let (found, _) = found.unwrap_or_else(|| panic!("{}: {text}", output.status));
    assert!(found.is_empty(), "{found}");
}
