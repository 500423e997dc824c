// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The records that a later command acts on as root: what is read of one is written as the same.

use vcpufreq::lifecycle::record::VmmRecord;
use vcpufreq::lifecycle::served_vms::KeptVm;
use vcpufreq_rt::Record;

/// A record of a VMM's, of one that `serve` has served, and of `rt`.
pub fn records(data: &[u8]) {
    if let Ok(record) = serde_json::from_slice::<VmmRecord>(data) {
        let text = serde_json::to_vec(&record).expect("a record as text");
        let again = serde_json::from_slice(&text);
        assert_eq!(again.ok(), Some(record));
    }
    if let Ok(kept) = serde_json::from_slice::<KeptVm>(data) {
        let text = serde_json::to_vec(&kept).expect("a record as text");
        let again = serde_json::from_slice(&text);
        assert_eq!(again.ok(), Some(kept));
    }
    if let Ok(record) = serde_json::from_slice::<Record>(data) {
        let text = serde_json::to_vec(&record).expect("a record as text");
        assert_eq!(
            serde_json::from_slice::<Record>(&text).expect("what was written"),
            record
        );
    }
}
