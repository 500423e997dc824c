// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a run had to report in the end.

use vcpufreq_bridge::Totals;

use vcpufreq_vm::RunReport;

/// The counters of all vCPUs of a bridge that has ended, and its virtual machine's resets and
/// accesses that no device claimed.
pub fn summary(totals: &Totals, report: &RunReport) -> String {
    let sum = &totals.counters;
    format!(
        "requests {}: applied {}, unchanged {}, superseded {}, coalesced {}, refused {}, \
         not applicable {}, delayed by the limit {}; illegal accesses {}, accesses of no device {}, \
         unreadable frequencies {}, resets {}, governors lost {}, pinnings lost {}",
        sum.requests,
        sum.applied,
        sum.unchanged,
        sum.superseded,
        sum.coalesced,
        sum.refused,
        sum.not_applicable,
        sum.limited,
        sum.illegal + totals.outside,
        report.unclaimed,
        sum.source_failures,
        report.resets,
        totals.governors_lost,
        totals.pins_lost,
    )
}

#[cfg(test)]
mod tests {
    //! Each count has its word.

    use vcpufreq_device::CounterSnapshot;

    use super::*;
    use vcpufreq_vm::ExitReason;

    #[test]
    fn each_count_has_its_word() {
        let counters = CounterSnapshot {
            requests: 3,
            applied: 2,
            unchanged: 1,
            illegal: 4,
            ..CounterSnapshot::default()
        };
        let totals = Totals {
            counters,
            outside: 1,
            governors_lost: 2,
            pins_lost: 1,
        };
        let report = RunReport {
            reason: ExitReason::PowerOff,
            resets: 3,
            unclaimed: 7,
            console_dropped: 0,
        };
        let text = summary(&totals, &report);
        assert!(text.contains(", refused 0, "), "{text}");
        assert!(
            text.starts_with("requests 3: applied 2, unchanged 1, "),
            "{text}"
        );
        assert!(
            text.contains("illegal accesses 5, accesses of no device 7, "),
            "{text}"
        );
        assert!(text.contains(", resets 3, "), "{text}");
        assert!(
            text.ends_with("governors lost 2, pinnings lost 1"),
            "{text}"
        );
    }
}
