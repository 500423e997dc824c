// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VMM's answer, checked. A guest may have taken the VMM over: what it answers reaches root's terminal
//! and Prometheus. So an answer has a largest size, each field a type and a range, and no text but
//! lists of pCPUs. A number of 64 bits may be any: sums of them end at the largest.

use std::collections::BTreeSet;

use thiserror::Error;
use vcpufreq_bridge::TUNINGS_AT_MOST;
use vcpufreq_device::{HISTOGRAM_BUCKETS, MAX_VCPUS, PERFTBL_MAX_LEN, Util};

use super::{OppTime, Stats, VcpuStats};

/// More than a VM's answer has: with 512 vCPUs of 64 OPPs, whose numbers are the largest, 3 MB.
pub const MOST_BYTES: usize = 4 << 20;
/// What all answers that come, and the metrics of all that have come, may have together: the service of
/// the metrics has 64 MiB, and an answer that breaks a rule may take 16 MiB to read. The largest VM has 9 MB
/// of metrics.
pub const MOST_OF_ALL: usize = 24 << 20;
/// About how many bytes of metrics the largest VM has for each byte of its answer.
pub const METRICS_OF_TEXT: usize = 3;
/// More than a sample has in the metrics.
const SAMPLE: usize = 104;
/// Samples of a vCPU besides its requests' times.
const OF_VCPU: usize = 26 + 2 * HISTOGRAM_BUCKETS;
/// More policies and OPPs of them than a host has: 512 of 64.
const MOST_OPPS: usize = 512 * 64;

/// An answer isn't a VMM's. The text has nothing of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BadAnswer {
    /// It has more bytes than the largest VM needs.
    #[error("it has more than {MOST_BYTES} bytes")]
    TooLong,
    /// It is no JSON, or has other fields.
    #[error("line {line}, column {column} isn't of this version")]
    Unreadable {
        /// Its line.
        line: usize,
        /// And the column there.
        column: usize,
    },
    /// A value that no VMM has.
    #[error("{0}")]
    Broken(&'static str),
}

/// What VMM `pid` has answered. The number is the one that it was asked by, whatever it answers.
///
/// # Errors
/// The first rule that the answer breaks.
pub fn read_answer(text: &[u8], pid: u32) -> Result<Stats, BadAnswer> {
    if text.len() > MOST_BYTES {
        return Err(BadAnswer::TooLong);
    }
    let stats: Stats = serde_json::from_slice(text).map_err(|error| BadAnswer::Unreadable {
        line: error.line(),
        column: error.column(),
    })?;
    check(&stats)?;
    Ok(Stats { pid, ..stats })
}

fn check(stats: &Stats) -> Result<(), BadAnswer> {
    let vcpus = &stats.vcpus;
    let few = (vcpus.iter()).all(|vcpu| usize::from(vcpu.vcpu) < MAX_VCPUS);
    holds(few, "a vCPU's number is too high")?;
    // Else a series would be there twice, and Prometheus refuse all of them.
    let rise = vcpus.windows(2).all(|two| two[0].vcpu < two[1].vcpu);
    holds(rise, "its vCPUs' numbers don't rise")?;
    vcpus.iter().try_for_each(check_vcpu)?;
    let tunings = &stats.tunings;
    let rise = (tunings.windows(2)).all(|two| two[0].handle < two[1].handle);
    holds(rise, "its tunings' handles don't rise")?;
    holds(tunings.len() <= TUNINGS_AT_MOST, "it has too many tunings")?;
    let name = stats.decided_by.iter().all(|by| is_name(&by.name));
    holds(name, "a policy's name is none")?;
    let policies = &stats.policies;
    let rise = (policies.windows(2)).all(|two| two[0].policy < two[1].policy);
    holds(rise, "its policies' numbers don't rise")?;
    let few = opps_of(stats) <= MOST_OPPS;
    holds(few, "its policies have too many OPPs")?;
    let lists = policies.iter().all(|policy| is_cpu_list(&policy.cpus));
    holds(lists, "a policy's pCPUs are no list of numbers")?;
    policies.iter().try_for_each(|policy| once(&policy.opps))
}

/// Its policies, and their OPPs.
fn opps_of(stats: &Stats) -> usize {
    let policies = stats.policies.iter();
    policies.map(|policy| 1 + policy.opps.len()).sum()
}

/// How many bytes of metrics it has, or fewer.
pub fn size_of(stats: &Stats) -> usize {
    let vcpus = stats.vcpus.iter();
    let of_vcpus = vcpus.map(|vcpu| OF_VCPU + vcpu.requested.len());
    (of_vcpus.sum::<usize>() + opps_of(stats) + 2 * stats.tunings.len()) * SAMPLE
}

fn check_vcpu(vcpu: &VcpuStats) -> Result<(), BadAnswer> {
    let known = [vcpu.own_util, vcpu.others_util, vcpu.target];
    let mut utils = [vcpu.uclamp.0, vcpu.uclamp.1]
        .into_iter()
        .chain(known.into_iter().flatten());
    holds(
        utils.all(|util| util <= Util::MAX.get()),
        "a utilization is above 1024",
    )?;
    let times = [&vcpu.clamp_after, &vcpu.freq_after];
    let few = times.map(|times| times.buckets.len() <= HISTOGRAM_BUCKETS);
    holds(few == [true; 2], "a histogram has too many buckets")?;
    // And for no request.
    let few = vcpu.requested.len() <= PERFTBL_MAX_LEN as usize + 1;
    holds(few, "a vCPU has too many OPPs")?;
    once(&vcpu.requested)
}

/// Whether each OPP is there once.
fn once(times: &[OppTime]) -> Result<(), BadAnswer> {
    let mut seen = BTreeSet::new();
    let once = times.iter().all(|time| seen.insert(time.khz));
    holds(once, "an OPP is there twice")
}

/// Whether it is plain text, as `vcpufreq policy load` makes a name.
fn is_name(text: &str) -> bool {
    text.len() < 32 && text.bytes().all(|byte| byte.is_ascii_graphic())
}

/// Whether it has what a list of CPUs has, and no more than a file of sysfs. Its numbers are for a
/// reader alone.
fn is_cpu_list(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_digit() || b",-".contains(&byte);
    text.len() <= 4096 && text.bytes().all(plain)
}

fn holds(rule: bool, broken: &'static str) -> Result<(), BadAnswer> {
    rule.then_some(()).ok_or(BadAnswer::Broken(broken))
}

#[cfg(test)]
#[path = "answer_tests.rs"]
pub(super) mod tests;
