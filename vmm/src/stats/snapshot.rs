// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VMM answers: its virtual machine at one moment.

use serde::{Deserialize, Serialize};
use vcpufreq_device::{Accesses, CounterSnapshot, HISTOGRAM_BUCKETS, HistogramSnapshot};

use crate::path::Path;

/// A virtual machine at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Process of the VMM.
    pub pid: u32,
    /// CLOCK_MONOTONIC when it was taken, ns.
    pub at_ns: u64,
    /// Its vCPUs, by number.
    pub vcpus: Vec<VcpuStats>,
    /// Accesses behind the last vCPU's page.
    pub accesses_outside: u64,
    /// How often a policy that the vCPUs may be on was found under another
    /// governor than schedutil, after schedutil.
    pub governors_lost: u64,
    /// How many of these policies are under another governor than schedutil now.
    pub governors_off: u64,
    /// How often a vCPU's thread was found to run elsewhere than on the pCPUs
    /// that it is pinned to.
    pub pins_lost: u64,
    /// What programs have set by `vcpufreq tune`, by handle.
    pub tunings: Vec<TuningStats>,
    /// The operator's policy that decides about requests; null: the built-in rule does.
    pub decided_by: Option<DeciderStats>,
    /// The cpufreq policies that vCPUs may be on.
    pub policies: Vec<PolicyTimes>,
}

/// A vCPU at one moment, and what was counted of it since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuStats {
    /// Its number.
    pub vcpu: u16,
    /// Its performance domain.
    pub domain: u32,
    /// Its thread, if it has one.
    pub tid: Option<i32>,
    /// How its registers are reached now: `ioeventfd` while KVM answers reads or requests of table
    /// entries. `accesses` counts those that exit.
    pub path: Path,
    /// The pCPU that its thread is on, if that is known.
    pub pcpu: Option<u32>,
    /// That pCPU's frequency, kHz.
    pub pcpu_khz: Option<u32>,
    /// Its domain's request, kHz.
    pub asks_khz: Option<u32>,
    /// The last cur_perf that it read, kHz.
    pub gets_khz: u32,
    /// The clamp of its domain's request, including additions, 0 to 1024.
    pub uclamp: (u16, u16),
    /// Utilization of its thread when it was last looked at, 0 to 1024; null
    /// without `--sum` and `scx`.
    pub own_util: Option<u16>,
    /// What `--sum` adds to its request, 0 to 1024: 1.25 times the utilization of everything else
    /// on its pCPU and, of each vCPU that waits there, what it requests above its own utilization.
    pub others_util: Option<u16>,
    /// The scx target of its pCPU: the sum over all runnable vCPUs there, and the part that the
    /// kernel was given; null with another actuator.
    pub target_sum: Option<u32>,
    /// See `target_sum`, 0 to 1024.
    pub target: Option<u16>,
    /// How the guest reached its registers.
    pub accesses: Accesses,
    /// What became of its requests.
    pub counts: CounterSnapshot,
    /// How long requests that changed the clamp took until it was in force. By `bpf`, from the
    /// guest's write on; by `exit`, from the arrival in the VMM. By `ioeventfd`, from the guest's
    /// write if writes are recorded, else from when the worker takes up the request. Time that the
    /// limit makes a request wait is in it. A request that is settled at the moment in which the
    /// next one arrives may have no time, so that `n` can be below `applied`.
    pub clamp_after: Times,
    /// From where `clamp_after` begins until the vCPU's frequency was another
    /// one. By `exit` and `ioeventfd` seen at the next read of cur_perf or look.
    pub freq_after: Times,
    /// How long a request of its domain for each entry of its table was in force, first for 0 kHz
    /// how long none was. By `bpf` as the worker sees it: requests that the module or the scheduler
    /// puts into force are seen every 100 ms.
    pub requested: Vec<OppTime>,
}

/// An operator's policy, of `vcpufreq policy load`; counts of all policies since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeciderStats {
    /// Its name.
    pub name: String,
    /// How often one was asked.
    pub asked: u64,
    /// Of these, answers outside of the VM's limits, which counted.
    pub bounded: u64,
    /// Of these, no answer: the built-in rule counted.
    pub silent: u64,
}

/// A floor, a ceiling or both that a program has set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TuningStats {
    /// Its number.
    pub handle: u64,
    /// The vCPU that was named; its whole domain is tuned.
    pub vcpu: u16,
    /// The floor, kHz.
    pub floor_khz: Option<u32>,
    /// The ceiling, kHz.
    pub ceiling_khz: Option<u32>,
    /// How long it holds still, ms.
    pub left_ms: u64,
    /// User of the program.
    pub user: u32,
    /// Process of the program.
    pub client: u32,
}

/// A histogram of times.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times {
    /// Times counted.
    pub n: u64,
    /// Half of them are below this, ns; a power of two.
    pub p50_below_ns: Option<u64>,
    /// 99 of 100 are below this, ns; a power of two.
    pub p99_below_ns: Option<u64>,
    /// Times from 0 ns, 1 ns, 2 ns, 4 ns and so on to the next bucket's, up to
    /// the last bucket that has any.
    pub buckets: Vec<u64>,
}

impl From<HistogramSnapshot> for Times {
    fn from(histogram: HistogramSnapshot) -> Self {
        let last = histogram.counts.iter().rposition(|&count| count > 0);
        let used = last.map_or(0, |last| (last + 1).min(HISTOGRAM_BUCKETS));
        Self {
            n: histogram.n(),
            p50_below_ns: histogram.below_ns(50),
            p99_below_ns: histogram.below_ns(99),
            buckets: histogram.counts[..used].to_vec(),
        }
    }
}

impl VcpuStats {
    /// Accesses that exited to the VMM.
    #[must_use]
    pub fn exits(&self) -> u64 {
        let accesses = &self.accesses;
        accesses.reads_exited.saturating_add(accesses.writes_exited)
    }
}

/// A time at an OPP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OppTime {
    /// The OPP, kHz; 0 where nothing was requested.
    pub khz: u32,
    /// How long, µs.
    pub us: u64,
}

/// How long the pCPUs of a cpufreq policy ran at each OPP since the start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyTimes {
    /// Its number, as in `policy4`.
    pub policy: u32,
    /// Its pCPUs, as `4-7`.
    pub cpus: String,
    /// In the kernel's order; empty where it doesn't count.
    pub opps: Vec<OppTime>,
    /// The highest frequency that they may have now, kHz, where that is below their own: for heat,
    /// or by a limit that firmware or a program has set.
    pub capped_khz: Option<u32>,
    /// The same, kHz, where the only cause is that boost is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boost_off_khz: Option<u32>,
}

#[cfg(test)]
mod tests {
    //! The list of times ends with the last bucket that has any.
    use vcpufreq_device::Histogram;

    use super::*;

    #[test]
    fn times_end_with_the_last_bucket() {
        let times = Times::from(HistogramSnapshot::default());
        assert_eq!(times, Times::default());
        let histogram = Histogram::default();
        histogram.record(2);
        assert_eq!(Times::from(histogram.snapshot()).buckets, [0, 0, 1]);
    }
}
