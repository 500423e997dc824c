// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a run had to report in the end.

use std::fmt;

use vcpufreq_device::kvm::Totals;

use crate::vm::RunReport;

/// The counters of all vCPUs together, and those of the virtual machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    totals: Totals,
    unclaimed: u64,
    resets: u64,
}

impl Summary {
    /// Of a bridge that has ended, and its virtual machine's resets and accesses that no device
    /// claimed.
    pub fn new(totals: Totals, report: &RunReport) -> Self {
        Self {
            totals,
            unclaimed: report.unclaimed,
            resets: report.resets,
        }
    }

    /// Requests that the host refused.
    pub fn refused(&self) -> u64 {
        self.totals.counters.refused
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sum = &self.totals.counters;
        write!(
            f,
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
            sum.illegal + self.totals.outside,
            self.unclaimed,
            sum.source_failures,
            self.resets,
            self.totals.governors_lost,
            self.totals.pins_lost,
        )
    }
}

#[cfg(test)]
mod tests {
    //! Each count has its word.

    use vcpufreq_device::CounterSnapshot;

    use super::*;
    use crate::vm::ExitReason;

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
        let summary = Summary::new(totals, &report);
        assert_eq!(summary.refused(), 0);
        let text = summary.to_string();
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
