// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Equal cycles: a guest needs more CPU time than the host for the same job, which is no governor's
//! doing. So a job has less work in guests, by as much as makes its CPU time that of the host where
//! all pCPUs are held at their highest frequency. It is measured in the guest without the bridge, for
//! all guests: what the bridge itself costs stays in its figures.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::machine::BenchMachine;
use crate::observed::Observed;

/// All of a job's work, in ten-thousandths.
pub const ALL_WORK: u64 = 10_000;
/// Before the start, a load rests: from so many µs before it to so many.
const REST_US: (u64, u64) = (400_000, 20_000);

/// What a job's work in guests is scaled by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobScale {
    /// In ten-thousandths.
    pub per_10_000: u64,
    /// The guest's CPU time with a first scale against the host's, in per mille: how near one
    /// measurement comes.
    pub first_try: u64,
}

/// The scales of jobs, by their scenarios' titles.
#[derive(Debug, Default)]
pub struct JobScales(BTreeMap<String, JobScale>);

impl JobScales {
    /// Sets a job's.
    pub fn insert(&mut self, title: String, scale: JobScale) {
        self.0.insert(title, scale);
    }

    /// A job's, in ten-thousandths: all of its work where none is set.
    pub fn scale_of(&self, title: &str) -> u64 {
        self.0.get(title).map_or(ALL_WORK, |one| one.per_10_000)
    }

    /// As JSON.
    pub fn json(&self) -> Value {
        let row = |(title, one): (&String, &JobScale)| {
            let scale =
                json!({ "work_per_10000": one.per_10_000, "first_try_permille": one.first_try });
            (title.clone(), scale)
        };
        Value::Object(self.0.iter().map(row).collect())
    }
}

/// The scale that makes a guest's CPU time the host's, from what it took with another scale.
pub fn rescaled(per_10_000: u64, host_us: u64, guest_us: u64) -> Option<u64> {
    (per_10_000 * host_us + guest_us / 2).checked_div(guest_us)
}

impl Observed {
    /// CPU time of the job from start to end, as at full speed, in µs: of all that the pCPUs ran, less
    /// what they run while the load rests.
    pub fn job_us(&self, machine: &BenchMachine) -> Option<u64> {
        let (start, end) = (self.start()?.us, self.mark("end")?.us);
        let rest = (start.checked_sub(REST_US.0)?, start - REST_US.1);
        let idle = self.charged(machine, rest).full_ns;
        let all = self.charged(machine, (start, end)).full_ns;
        let noise = idle * end.checked_sub(start)? / (rest.1 - rest.0);
        Some(all.saturating_sub(noise) / 1000)
    }
}

#[cfg(test)]
mod tests {
    //! A scale is the ratio of CPU times, on from the scale that was measured with; a machine's idle
    //! noise is no work.

    use super::*;
    use crate::measure_tests::{change, machine, observed, switch};

    #[test]
    fn a_scale_goes_on_from_the_one_before() {
        assert_eq!(rescaled(10_000, 950, 1000), Some(9_500));
        assert_eq!(rescaled(9_500, 1000, 1010), Some(9_406));
        assert_eq!(rescaled(10_000, 950, 0), None);
        let mut scales = JobScales::default();
        assert_eq!(scales.scale_of("a job"), 10_000);
        let scale = JobScale {
            per_10_000: 9_406,
            first_try: 1_010,
        };
        scales.insert("a job".to_owned(), scale);
        assert_eq!(scales.scale_of("a job"), 9_406);
        assert_eq!(scales.json()["a job"]["first_try_permille"], 1_010);
    }

    #[test]
    fn idle_noise_is_no_work() {
        let mut load = observed(1, &[(1, 2800)]);
        load.seen.changes.push(change(1, 0, 1800));
        for mark in &mut load.marks {
            mark.us += 1_000_000;
        }
        // Of the 380 ms of rest CPU 0 is busy for 38; then the load has CPU 1 from 1001 to 1009 ms,
        // and CPU 0 the same noise.
        load.seen.switches = vec![
            switch(700_000, 0, (0, 7)),
            switch(738_000, 0, (7, 0)),
            switch(1_001_000, 1, (0, 99)),
            switch(1_009_100, 1, (99, 0)),
        ];
        // The mark `end` is at 1005 ms, and CPU 0 has 329 of 1024 of the speed.
        let noise = 400 * 329 / 1024;
        let job = load.job_us(&machine()).unwrap();
        assert!(job.abs_diff(4_000 - noise) <= 1, "{job}");
    }
}
