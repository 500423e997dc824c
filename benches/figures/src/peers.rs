// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! crosvm beside vcpufreq, from what the scenario `peer` left of two topologies.

use serde_json::Value;

use super::markdown::{head, row};
use super::paths::ns;
use vcpufreq_bench::report_json::rows;

/// A figure as people read it, and what it is compared by: less is better.
struct PeerFigure {
    text: String,
    size: f64,
}

/// A cell's word for a VMM, and how the names of its rows begin.
type Named = (&'static str, &'static str);

/// The figures of all rows of a VMM: more than one where its vCPUs differ.
type Figures = fn(&[&Value]) -> Option<Vec<PeerFigure>>;

const PEER: &[Named] = &[("", "crosvm sched_setattr")];
const PEER_WAYS: &[Named] = &[
    ("sched_setattr", "crosvm sched_setattr"),
    ("cgroup", "crosvm cgroup"),
];
/// A row for each pCPU that it can be tried on.
const PEER_EXACT: &[Named] = &[("", "crosvm exact ")];
const OURS: &[Named] = &[
    ("`exit`", "vcpufreq exit floor auto"),
    ("`ioeventfd`", "vcpufreq ioeventfd floor auto"),
    ("`bpf`", "vcpufreq bpf floor auto"),
];
const OUR_WAYS: &[Named] = &[
    ("sched_setattr", "vcpufreq exit floor thread"),
    ("cgroup", "vcpufreq exit floor auto"),
];
const OUR_EXACT: &[Named] = &[("", "vcpufreq bpf exact auto")];
/// A crosvm without its device, by `vcpufreq serve`.
const SERVED: &[Named] = &[("", "vcpufreq serves crosvm floor")];
const SERVED_EXACT: &[Named] = &[("", "vcpufreq serves crosvm exact")];

/// A row of the table.
struct Compared {
    what: &'static str,
    /// Which of the inputs.
    input: usize,
    crosvm: &'static [Named],
    ours: &'static [Named],
    served: &'static [Named],
    figures: Figures,
}

impl Compared {
    const fn paths(what: &'static str, figures: Figures) -> Self {
        Self {
            what,
            input: 0,
            crosvm: PEER,
            ours: OURS,
            served: SERVED,
            figures,
        }
    }
}

const TABLE: &[Compared] = &[
    Compared::paths("read of cur_perf, median [ns]", |seen| {
        times(&seen.first()?["read_ns"], median)
    }),
    Compared {
        crosvm: PEER_WAYS,
        ..Compared::paths("write with a new clamp, median (p99) [ns]", |seen| {
            times(&seen.first()?["write_ns"], with_p99)
        })
    },
    Compared::paths("write of the value in force, median [ns]", |seen| {
        times(&seen.first()?["rewrite_ns"], median)
    }),
    Compared::paths("exits to userspace in 1,000 reads, 1,000 writes", |seen| {
        exits(&seen.first()?["exits_to_userspace_of_1000"])
    }),
    Compared::paths(
        "time of a fixed job on a vCPU with the driver, against without",
        |seen| {
            let ratio = seen.first()?["work_with_driver_to_without"].as_f64()?;
            Some(vec![figure(format!("{ratio:.3}"), ratio)])
        },
    ),
    Compared {
        input: 1,
        ..Compared::paths(
            "vCPU just busy, `4+3+1`: OPPs at which the pCPU runs below the request",
            |seen| of_all(&parts(seen, "below_request"), ("opps_below", "opps")),
        )
    },
    Compared {
        input: 1,
        crosvm: PEER_EXACT,
        ours: OUR_EXACT,
        served: SERVED_EXACT,
        ..Compared::paths(
            "exact clamps, busy vCPU, `4+3+1`: OPPs not at the request",
            |seen| of_all(&parts(seen, "exact"), ("opps_wrong", "opps")),
        )
    },
    Compared {
        crosvm: PEER_WAYS,
        ours: OUR_WAYS,
        ..Compared::paths(
            "changes after which the frequency dips, vCPU just busy",
            |seen| of_all(&parts(seen, "dips"), ("dips", "changes")),
        )
    },
    Compared::paths("resident memory besides the guest's [KiB]", |seen| {
        kib(&seen.first()?["own"])
    }),
    Compared::paths(
        "the same after these measurements and an idle hour [KiB]",
        |seen| kib(&seen.first()?["own_after_an_hour"]),
    ),
];

/// Each row whose figures are all there.
pub fn table(inputs: &[Value]) -> Option<String> {
    let versions = inputs.iter().map(|input| &input["crosvm"]["version"]);
    let versions: Vec<&str> = versions.map(|it| it.as_str().unwrap_or("?")).collect();
    let first = *versions.first()?;
    // Two crosvms make no table.
    if versions.iter().any(|version| *version != first) {
        return None;
    }
    let kernel = inputs.first()?["kernel"].as_str()?;
    let compared: String = TABLE
        .iter()
        .filter_map(|it| compared(it, inputs.get(it.input)?))
        .collect();
    let table = head(&[
        "what (emulated)",
        "crosvm",
        "vcpufreq",
        "crosvm, registers in RAM by vcpufreq",
    ]);
    (!compared.is_empty())
        .then(|| format!("Host with Linux {kernel}, `{first}`.\n\n{table}{compared}"))
}

fn compared(one: &Compared, input: &Value) -> Option<String> {
    let crosvm = all_of(one, one.crosvm, input)?;
    let ours = all_of(one, one.ours, input)?;
    let sizes = crosvm.iter().flat_map(|(_, own)| own).map(|own| own.size);
    let most = sizes.reduce(f64::max)?;
    let served = all_of(one, one.served, input);
    let served = served.map_or("-".to_owned(), |served| cell(&served, most));
    let what = one.what.to_owned();
    Some(row([what, cell(&crosvm, most), cell(&ours, most), served]))
}

/// The figures of each of these.
fn all_of<'a>(
    one: &Compared,
    named: &'a [Named],
    input: &Value,
) -> Option<Vec<(&'a str, Vec<PeerFigure>)>> {
    let figures = |&(word, begin): &'a Named| {
        let own = rows(input, "rows").filter(|row| {
            let name = row["vmm"].as_str();
            name.is_some_and(|name| name.starts_with(begin))
        });
        let own: Vec<&Value> = own.map(|row| &row["measured"]).collect();
        Some((word, (one.figures)(&own)?))
    };
    named.iter().map(figures).collect()
}

/// `` `exit` 3; `ioeventfd`, `bpf` **7** ``: those over `most` are bold, words of equal ones together.
fn cell(all: &[(&str, Vec<PeerFigure>)], most: f64) -> String {
    let shown = |figure: &PeerFigure| match figure.size > most {
        true => format!("**{}**", figure.text),
        false => figure.text.clone(),
    };
    let mut groups: Vec<(Vec<&str>, String)> = Vec::new();
    for (word, figures) in all {
        let figures: Vec<String> = figures.iter().map(shown).collect();
        let text = figures.join(" and ");
        match groups.last_mut() {
            Some((words, same)) if *same == text => words.push(word),
            _ => groups.push((vec![word], text)),
        }
    }
    if let [(_, text)] = &groups[..] {
        return text.clone();
    }
    let groups = groups.iter();
    let groups = groups.map(|(words, text)| format!("{} {text}", words.join(", ")));
    groups.collect::<Vec<_>>().join("; ")
}

fn figure(text: String, size: f64) -> PeerFigure {
    PeerFigure { text, size }
}

/// Median and p99 of each vCPU, as `shown`; the slower one's where medians are within a tenth.
fn times(of_vcpus: &Value, shown: fn(f64, f64) -> String) -> Option<Vec<PeerFigure>> {
    let all = of_vcpus.as_array()?.iter();
    let all = all.map(|one| Some((one[0].as_f64()?, one[1].as_f64()?)));
    let mut all = all.collect::<Option<Vec<_>>>()?;
    let by_median = |a: &&(f64, f64), b: &&(f64, f64)| a.0.total_cmp(&b.0);
    let (least, most) = (
        *all.iter().min_by(by_median)?,
        *all.iter().max_by(by_median)?,
    );
    if most.0 <= 1.1 * least.0 {
        all = vec![most];
    }
    let figures = all.iter().map(|&(of, p99)| figure(shown(of, p99), of));
    Some(figures.collect())
}

fn median(median: f64, _p99: f64) -> String {
    ns(median)
}

fn with_p99(median: f64, p99: f64) -> String {
    format!("{} ({})", ns(median), ns(p99))
}

fn kib(own: &Value) -> Option<Vec<PeerFigure>> {
    let kib = own["vmm_kib"].as_f64()?;
    Some(vec![figure(ns(kib), kib)])
}

/// Of reads, of writes.
fn exits(seen: &Value) -> Option<Vec<PeerFigure>> {
    let count = |key: &str| seen[key].as_f64();
    let (reads, writes) = (count("reads")?, count("writes")?);
    let whole = |count: f64| match count < 100.0 {
        true => format!("{count}"),
        false => ns(count),
    };
    let text = format!("{}, {}", whole(reads), whole(writes));
    Some(vec![figure(text, reads + writes)])
}

fn parts<'a>(seen: &[&'a Value], key: &str) -> Vec<&'a Value> {
    seen.iter().map(|one| &one[key]).collect()
}

/// `3 of 18`, over all; and how many of them ran below the request, where the parts name each.
fn of_all(parts: &[&Value], (wrong, of): (&str, &str)) -> Option<Vec<PeerFigure>> {
    let sum = |key: &str| {
        let counts = parts.iter().map(|part| part[key].as_u64());
        counts.sum::<Option<u64>>()
    };
    let (count, whole) = (sum(wrong)?, sum(of)?);
    let listed = parts.iter().flat_map(|part| rows(part, "wrong"));
    let below = listed.filter(|one| one["host_khz"].as_u64() < one["asked_khz"].as_u64());
    let below = match below.count() {
        0 => String::new(),
        below => format!(", {below} below"),
    };
    let text = format!("{count} of {whole}{below}");
    (whole > 0).then(|| vec![figure(text, count as f64 / whole as f64)])
}

#[cfg(test)]
mod tests {
    //! A row has both VMMs' figures, losses in bold; a row that lacks one isn't there.

    use serde_json::json;

    use super::*;

    fn vmm(name: &str, measured: Value) -> Value {
        json!({ "vmm": name, "measured": measured })
    }

    fn input(rows: &[Value]) -> Value {
        json!({ "crosvm": { "version": "crosvm 1" }, "kernel": "7.3", "rows": rows })
    }

    #[test]
    fn rows_have_what_was_measured() {
        let (exit, thread) = ("vcpufreq exit floor auto", "vcpufreq exit floor thread");
        let of = |kib: u32, first: u32, second: u32, exits: u32| {
            json!({
                "own": { "vmm_kib": kib }, "own_after_an_hour": { "vmm_kib": kib + 100 },
                "read_ns": [[first, 1], [second, 1]],
                "exits_to_userspace_of_1000": { "reads": exits, "writes": exits },
                "dips": { "dips": 60, "changes": 102 },
            })
        };
        let two = input(&[
            vmm("crosvm sched_setattr", of(6_028, 900, 990, 1025)),
            vmm(
                "crosvm cgroup",
                json!({ "dips": { "dips": 0, "changes": 102 } }),
            ),
            vmm(exit, of(5_344, 500, 1100, 1009)),
            vmm("vcpufreq ioeventfd floor auto", of(5_380, 12, 12, 0)),
            vmm("vcpufreq bpf floor auto", of(6_188, 12, 12, 0)),
            vmm(thread, json!({ "dips": { "dips": 78, "changes": 102 } })),
            vmm(
                "vcpufreq serves crosvm floor",
                json!({ "read_ns": [[11, 1], [11, 1]], "own": { "vmm_kib": 9_000 } }),
            ),
        ]);
        let wrong = json!([{ "asked_khz": 3, "host_khz": 2 }]);
        let exact = |wrong: &Value| {
            let count = wrong.as_array().map(Vec::len);
            json!({ "exact": { "opps": 9, "opps_wrong": count, "wrong": wrong } })
        };
        let four = input(&[
            vmm("crosvm exact 0", exact(&wrong)),
            vmm("crosvm exact 1", exact(&wrong)),
            vmm("vcpufreq bpf exact auto", exact(&json!([]))),
        ]);
        let table = table(&[two, four]).unwrap();
        assert!(table.starts_with("Host with Linux 7.3, `crosvm 1`.\n"));
        for part in [
            "| 990 | `exit` 500 and **1,100**; `ioeventfd`, `bpf` 12.0 | 11.0 |",
            "| 1,025, 1,025 | `exit` 1,009, 1,009; `ioeventfd`, `bpf` 0, 0 | - |",
            "| 2 of 18, 2 below | 0 of 9 | - |",
            "| sched_setattr 60 of 102; cgroup 0 of 102 | sched_setattr **78 of 102**; cgroup ",
            "| 6,028 | `exit` 5,344; `ioeventfd` 5,380; `bpf` **6,188** | **9,000** |",
            "idle hour [KiB] | 6,128 | `exit` 5,444; `ioeventfd` 5,480; `bpf` **6,288** |",
        ] {
            assert!(table.contains(part), "{part}: {table}");
        }
        assert!(!table.contains("in force"), "not measured: {table}");
    }

    #[test]
    fn without_figures_of_one_crosvm_there_is_no_table() {
        assert_eq!(table(&[input(&[]), input(&[])]), None);
        let mut other = input(&[]);
        other["crosvm"]["version"] = "crosvm 2".into();
        assert_eq!(table(&[input(&[]), other]), None);
        assert_eq!(table(&[json!({}), json!({})]), None);
    }
}
