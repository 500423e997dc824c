// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Figures from figures: a governor's efficiency, and what a variant of `work`
//! is to the host's.

use crate::row::Row;
use crate::variant::Variant;
use crate::workloads::WORKLOADS;

/// In per mille, as all shares of the report.
const WHOLE: u64 = 1000;

/// All that can be derived from what was measured.
pub fn rows(measured: &[Row]) -> Vec<Row> {
    let mut found = Vec::new();
    for row in measured {
        let case = row.metric.strip_suffix(".took");
        if let (Some(case), "periodic") = (case, row.scenario) {
            found.extend(efficiency(measured, row, case));
        } else if row.scenario == "work"
            && !row.metric.ends_with("_at_max")
            && row.variant != Variant::Host.name()
        {
            found.extend(against_host(measured, row));
        } else if is_of_workload(row) && row.variant != Variant::Host.name() {
            found.extend(to_host(measured, row));
        }
    }
    let means: Vec<Row> = ["", "at_edge."]
        .iter()
        .flat_map(|case| Variant::ALL.map(|variant| (case, variant.name())))
        .filter_map(|(case, variant)| mean_efficiency(&found, case, variant))
        .collect();
    found.extend(means);
    found
}

/// Whether the host's cycles are in it, and a ratio to the host's means something.
fn is_of_workload(row: &Row) -> bool {
    let own = WORKLOADS.iter().filter(|one| one.name == row.scenario);
    let mut judged = own.flat_map(|one| one.metrics.iter().map(move |metric| (one, metric)));
    judged.any(|(one, metric)| metric.is_judged() && one.metric_name(*metric) == row.metric)
}

/// Over the duties: at a single one, where a load is near what an OPP gives, a
/// per cent of it decides between two frequencies.
fn mean_efficiency(rows: &[Row], case: &str, variant: &str) -> Option<Row> {
    let duty = format!("{case}duty");
    let of_variant = |row: &&Row| {
        row.variant == variant
            && row.metric.starts_with(&duty)
            && row.metric.ends_with(".efficiency")
    };
    let duties: Vec<&Row> = rows.iter().filter(of_variant).collect();
    let first = duties.first()?;
    let mean = |repeat: usize| {
        let values = duties.iter().map(|row| row.values.get(repeat).copied()?);
        values
            .sum::<Option<u64>>()?
            .checked_div(u64::try_from(duties.len()).ok()?)
    };
    let values = (0..first.values.len()).map(mean).collect();
    Some(like(first, format!("{case}efficiency"), values))
}

fn like(row: &Row, metric: String, values: Vec<Option<u64>>) -> Row {
    Row {
        scenario: row.scenario,
        variant: row.variant,
        metric,
        unit: "permille",
        values,
        unsettled: Vec::new(),
        retaken: Vec::new(),
    }
}

fn median(measured: &[Row], like: &Row, variant: &str, metric: &str) -> Option<u64> {
    let mut rows = measured.iter();
    rows.find(|row| {
        row.scenario == like.scenario && row.variant == variant && row.metric == metric
    })?
    .median()
}

/// rt-app's: of the time that the highest frequency saves over the lowest,
/// what the governor saves.
fn efficiency(measured: &[Row], took: &Row, case: &str) -> Option<Row> {
    let at = |hold: &str| {
        median(
            measured,
            took,
            took.variant,
            &format!("{case}.took_at_{hold}"),
        )
    };
    let (slow, fast) = (at("min")?, at("max")?);
    let saved = |us: u64| (slow.saturating_sub(us) * WHOLE).checked_div(slow.checked_sub(fast)?);
    let values = took.values.iter().map(|us| saved((*us)?)).collect();
    Some(like(took, format!("{case}.efficiency"), values))
}

/// The ratio to the host's median.
fn to_host(measured: &[Row], row: &Row) -> Option<Row> {
    let of_host = median(measured, row, Variant::Host.name(), &row.metric)?;
    let values = row.values.iter().map(|value| ratio((*value)?, of_host));
    Some(like(
        row,
        format!("{}_to_host", row.metric),
        values.collect(),
    ))
}

/// `value` in per mille of `of`, rounded.
fn ratio(value: u64, of: u64) -> Option<u64> {
    (value * WHOLE + of / 2).checked_div(of)
}

/// The ratio to the host's median, and the same divided by the ratio where all
/// pCPUs are held at their highest frequency: what virtualization itself costs
/// drops out of it.
fn against_host(measured: &[Row], row: &Row) -> Vec<Row> {
    let host = Variant::Host.name();
    let Some(of_host) = median(measured, row, host, &row.metric) else {
        return Vec::new();
    };
    let held = format!("{}_at_max", row.metric);
    let (own_held, host_held) = (
        median(measured, row, row.variant, &held),
        median(measured, row, host, &held),
    );
    let normal = |value: &Option<u64>| ratio((*value)? * host_held?, of_host * own_held?);
    let normalised = row.values.iter().map(normal).collect();
    let name = |what: &str| format!("{}_{what}", row.metric);
    let normalised = like(row, name("to_host_normalised"), normalised);
    to_host(measured, row)
        .into_iter()
        .chain([normalised])
        .collect()
}

#[cfg(test)]
mod tests {
    //! Worked numbers.

    use super::*;

    fn row(scenario: &'static str, variant: &'static str, metric: &str, values: &[u64]) -> Row {
        Row {
            scenario,
            variant,
            metric: metric.to_owned(),
            unit: "us",
            values: values.iter().copied().map(Some).collect(),
            unsettled: Vec::new(),
            retaken: Vec::new(),
        }
    }

    #[test]
    fn a_governor_as_good_as_the_highest_frequency_has_1000() {
        let measured = [
            row("periodic", "vm", "duty10.took", &[1000, 2500, 4000, 900]),
            row("periodic", "vm", "duty10.took_at_min", &[4000]),
            row("periodic", "vm", "duty10.took_at_max", &[1000]),
        ];
        let rows = rows(&measured);
        assert_eq!(rows.len(), 2);
        assert_eq!(
            (rows[1].metric.as_str(), rows[1].values[1]),
            ("efficiency", Some(500))
        );
        assert_eq!(rows[0].metric, "duty10.efficiency");
        assert_eq!(rows[0].values, [Some(1000), Some(500), Some(0), Some(1033)]);
    }

    #[test]
    fn duties_at_an_edge_have_a_mean_of_their_own() {
        let mut measured = Vec::new();
        for (duty, took) in [("duty10", 2500), ("at_edge.duty20", 1000)] {
            for (name, us) in [("took", took), ("took_at_min", 4000), ("took_at_max", 1000)] {
                measured.push(row("periodic", "vm", &format!("{duty}.{name}"), &[us]));
            }
        }
        let rows = rows(&measured);
        let means: Vec<_> = rows[2..]
            .iter()
            .map(|row| (row.metric.as_str(), row.values[0]))
            .collect();
        let expected = [
            ("efficiency", Some(500)),
            ("at_edge.efficiency", Some(1000)),
        ];
        assert_eq!(means, expected);
    }

    #[test]
    fn workloads_are_compared_without_a_normalisation() {
        let metrics = ["d90.frame_p95", "d90.late", "d90.energy"];
        let of = |variant, values: [u64; 3]| {
            let rows = metrics.into_iter().zip(values);
            rows.map(move |(metric, value)| row("demand", variant, metric, &[value]))
        };
        let measured: Vec<_> = of("host", [200, 0, 400])
            .chain(of("vm", [206, 3, 404]))
            .collect();
        let found = rows(&measured);
        let found: Vec<_> = found
            .iter()
            .map(|row| (row.metric.as_str(), row.values[0]))
            .collect();
        let expected = [
            ("d90.frame_p95_to_host", Some(1_030)),
            ("d90.energy_to_host", Some(1_010)),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn the_cost_of_virtualization_drops_out() {
        let measured = [
            row("work", "host", "io.score", &[100]),
            row("work", "host", "io.score_at_max", &[200]),
            row("work", "vm", "io.score", &[81]),
            row("work", "vm", "io.score_at_max", &[180]),
        ];
        let rows = rows(&measured);
        let found: Vec<_> = rows
            .iter()
            .map(|row| (row.metric.as_str(), row.values[0]))
            .collect();
        let expected = [
            ("io.score_to_host", Some(810)),
            ("io.score_to_host_normalised", Some(900)),
        ];
        assert_eq!(found, expected);
    }
}
