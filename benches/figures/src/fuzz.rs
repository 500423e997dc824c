// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The table of `fuzz/run` over all targets.

use serde_json::Value;

use super::markdown::{head, row};
use super::paths::ns as grouped;
use vcpufreq_bench::report_json::rows;

/// Of `out/fuzz.json`.
pub fn table(inputs: &[Value]) -> Option<String> {
    let report = inputs.first()?;
    let columns = [
        "target",
        "inputs",
        "operations, at least",
        "memory [MiB]",
        "time [s]",
    ];
    let mut text = head(&columns);
    let (mut sum, mut seconds) = (0.0, 0.0);
    for one in rows(report, "targets") {
        let number = |key: &str| one[key].as_f64();
        let (inputs, operations) = (number("inputs")?, number("operations")?);
        (sum, seconds) = (sum + operations, seconds + number("seconds")?);
        text += &row([
            format!("`{}`", one["target"].as_str()?),
            grouped(inputs),
            grouped(operations),
            one["mib"].to_string(),
            one["seconds"].to_string(),
        ]);
    }
    text += &format!(
        "\n{} operations in {:.2} machine hours.\n",
        grouped(sum),
        seconds / 3600.0,
    );
    Some(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn operations_add_up() {
        let of = |target: &str, operations: u64| {
            json!({
                "target": target, "inputs": 250, "operations": operations, "mib": 30, "seconds": 1800
            })
        };
        let report = json!({ "targets": [of("a", 1_250), of("b", 250)] });
        let text = table(&[report]).unwrap();
        assert!(text.contains("| `a` | 250 | 1,250 | 30 | 1800 |"), "{text}");
        assert!(
            text.ends_with("1,500 operations in 1.00 machine hours.\n"),
            "{text}"
        );
        assert_eq!(table(&[json!({ "targets": [{}] })]), None);
    }
}
