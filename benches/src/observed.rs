// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! One repeat, as it was observed: data that figures are read off.

use std::collections::BTreeMap;

use crate::load_log::Mark;

use crate::trace::RepeatEvents;

/// One repeat.
#[derive(Debug)]
pub struct Observed {
    /// From the host's trace.
    pub seen: RepeatEvents,
    /// The load's own.
    pub marks: Vec<Mark>,
    /// Frames of the first thread: when each began and ended, in µs.
    pub frames: Vec<(u64, u64)>,
    /// What its first thread did, by name.
    pub figures: BTreeMap<String, u64>,
    /// The threads that carried it: the load's own, or the vCPUs'.
    pub threads: Vec<i32>,
    /// Sum and target of the load's pCPU, sampled beside another repeat.
    pub targets: Option<[u64; 2]>,
    /// Each cluster's frequency when the trace began, in kHz.
    pub khz_before: Vec<u32>,
    /// What each cluster rests at, in kHz: its lowest frequency, or a server's reservation.
    pub khz_at_rest: Vec<u32>,
    /// The policies, of host and guest, that rest above their lowest.
    pub rest: Vec<String>,
    /// How far the marks can be off, in µs: the guest's clock is another.
    pub clock_error_us: u64,
    /// Why the state before wasn't the settled one.
    pub unsettled: Option<Unsettled>,
    /// The same of those that were taken before and put away for it.
    pub put_away: Vec<String>,
}

/// Why a repeat didn't start from the settled state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsettled {
    /// In one line.
    pub why: String,
    /// It stayed so for a while: where it does twice, to take the repeat anew is of no use.
    pub lasting: bool,
}
