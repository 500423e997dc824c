// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the host knows of a pCPU's vCPUs while a load lasts: samples of `vcpufreq stats`. To take them
//! costs time on other CPUs, so it is done beside a repeat of its own, which no figure is read off.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};
use serde_json::Value;
use vcpufreq_load::work::now_ns;

/// Between two samples.
const EVERY: Duration = Duration::from_millis(10);

/// What all runnable vCPUs of a pCPU add to its utilization.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetSample {
    /// When, in µs of CLOCK_MONOTONIC.
    pub us: u64,
    /// The pCPU.
    pub pcpu: u64,
    /// In 1/1024 of the highest capacity.
    pub sum: u64,
    /// How much of it the kernel got, 0 to 1024.
    pub target: u64,
}

/// Takes samples until it is asked for them.
#[derive(Debug)]
pub struct TargetSampler {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<Result<Vec<TargetSample>>>,
}

impl TargetSampler {
    /// Of the VMM with this process.
    pub fn start(vmm: u32) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let ended = ends.clone();
        let thread = spawn(move || {
            let mut samples = Vec::new();
            while !ended.load(Relaxed) {
                samples.extend(of_stats(&stats(vmm)?, now_ns() / 1000));
                sleep(EVERY);
            }
            Ok(samples)
        });
        Self { ends, thread }
    }

    /// All of them.
    pub fn samples(self) -> Result<Vec<TargetSample>> {
        self.ends.store(true, Relaxed);
        let samples = self.thread.join();
        samples.map_err(|_| anyhow!("the sampling thread panicked"))?
    }
}

fn stats(vmm: u32) -> Result<Value> {
    let program = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(program);
    let output = command.args(["stats", &vmm.to_string(), "--json"]).output();
    serde_json::from_slice(&output?.stdout).context("what vcpufreq stats prints")
}

/// Of each pCPU once: its vCPUs' rows are equal.
fn of_stats(stats: &Value, us: u64) -> Vec<TargetSample> {
    let rows = stats["vcpus"].as_array().into_iter().flatten();
    let samples = rows.filter_map(|row| {
        Some(TargetSample {
            us,
            pcpu: row["pcpu"].as_u64()?,
            sum: row["target_sum"].as_u64()?,
            target: row["target"].as_u64()?,
        })
    });
    let mut samples: Vec<_> = samples.collect();
    samples.sort_by_key(|sample| sample.pcpu);
    samples.dedup_by_key(|sample| sample.pcpu);
    samples
}

/// Means of sum and target of a pCPU between two times; `None` without a sample.
pub fn means(samples: &[TargetSample], pcpu: u32, (from, to): (u64, u64)) -> Option<[u64; 2]> {
    let own = samples
        .iter()
        .filter(|one| one.pcpu == u64::from(pcpu) && (from..to).contains(&one.us));
    let own: Vec<_> = own.collect();
    let count = u64::try_from(own.len()).ok().filter(|count| *count > 0)?;
    let of =
        |value: fn(&TargetSample) -> u64| own.iter().map(|one| value(one)).sum::<u64>() / count;
    Some([of(|one| one.sum), of(|one| one.target)])
}

#[cfg(test)]
mod tests {
    //! A pCPU counts once in a sample, and only what was sampled while the load lasted counts.
    use serde_json::json;

    use super::*;

    #[test]
    fn means_are_of_the_pcpu_while_the_load_lasts() {
        let row = |pcpu: Value, sum: u64, target: u64| json!({ "pcpu": pcpu, "target_sum": sum, "target": target });
        let stats = |sum, target| {
            let vcpus = [
                row(json!(2), sum, target),
                row(json!(2), sum, target),
                row(json!(3), 7, 7),
                row(json!(null), 9, 9),
                json!({ "pcpu": 2, "target_sum": null, "target": null }),
            ];
            json!({ "vcpus": vcpus })
        };
        let times = [(5, 100), (10, 1300), (19, 0), (20, 500)];
        let samples = times
            .map(|(us, sum)| of_stats(&stats(sum, sum.min(1024)), us))
            .concat();
        assert_eq!(samples.len(), 8);
        assert_eq!(means(&samples, 2, (10, 20)), Some([650, 512]));
        assert_eq!(means(&samples, 3, (10, 20)), Some([7, 7]));
        assert_eq!(means(&samples, 2, (11, 19)), None);
    }
}
