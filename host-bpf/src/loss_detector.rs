// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! When a VM's programs are lost: they don't see the guest's writes any more.
//!
//! The kernel doesn't run a program that it has preempted on the same CPU. So another VM, whose
//! vCPU is preempted in the program that all VMs share, can keep that program from this VM's
//! writes. The kernel counts such misses; they are subtracted.

#![forbid(unsafe_code)]

/// So many looks in a row that find nothing but writes that no program has seen.
const LOOKS_IN_VAIN: u32 = 2;

/// Decides from regular looks whether the programs are lost.
#[derive(Debug, Default)]
pub(crate) struct LossDetector {
    /// Writes that the programs had seen at the last look.
    seen: u64,
    /// Looks in a row that found missed writes alone.
    in_vain: u32,
    /// The writes that these looks found.
    missed: u64,
    /// The kernel's count of misses at the last look before these.
    skipped: u64,
}

impl LossDetector {
    /// Starts when the kernel has counted `skipped` misses.
    pub(crate) fn new(skipped: u64) -> Self {
        Self {
            skipped,
            ..Self::default()
        }
    }

    /// Takes what a look has found: `missed` new writes that no program has seen, `seen` writes
    /// in all that the programs have seen, and the kernel's count of misses, if it has one.
    /// Returns whether the programs are lost.
    pub(crate) fn add(
        &mut self,
        missed: u64,
        seen: u64,
        skipped: impl FnOnce() -> Option<u64>,
    ) -> bool {
        let alive = seen != self.seen;
        self.seen = seen;
        if alive {
            (self.in_vain, self.missed) = (0, 0);
        }
        if missed == 0 && self.in_vain > 0 {
            return false;
        }
        let skipped = skipped().unwrap_or(self.skipped);
        if missed == 0 || alive {
            self.skipped = skipped;
            return false;
        }
        self.in_vain += 1;
        self.missed += missed;
        // The kernel may have counted a miss before the look that finds its write.
        let explained = skipped.saturating_sub(self.skipped) + 1;
        self.in_vain >= LOOKS_IN_VAIN && self.missed > explained
    }
}

#[cfg(test)]
mod tests {
    //! Two looks in a row that find missed writes alone end the path. Misses that another VM has
    //! caused don't, however many there are.
    use super::*;

    #[test]
    fn programs_that_are_gone_are_found_at_the_second_look() {
        for counts in [None, Some(7)] {
            let mut detector = LossDetector::new(counts.unwrap_or(0));
            assert!(!detector.add(0, 5, || counts));
            assert!(!detector.add(1, 5, || counts));
            assert!(detector.add(1, 5, || counts));
        }
    }

    #[test]
    fn a_write_that_is_seen_in_between_begins_anew() {
        let mut detector = LossDetector::new(0);
        for seen in 1..100 {
            assert!(!detector.add(3, seen, || Some(0)));
            assert!(!detector.add(3, seen, || Some(0)));
        }
    }

    #[test]
    fn misses_of_other_vms_in_the_past_explain_nothing() {
        let mut detector = LossDetector::new(0);
        for skipped in 1..100 {
            assert!(!detector.add(0, 5, || Some(skipped)));
        }
        assert!(!detector.add(1, 5, || Some(99)));
        assert!(detector.add(1, 5, || Some(99)));
    }

    #[test]
    fn another_vm_pushes_none_off_its_path() {
        let mut detector = LossDetector::new(0);
        let mut skipped = 0;
        for _ in 0..100 {
            // The last write's count is there, and its signal comes with the next look.
            skipped += 10;
            assert!(!detector.add(10, 5, || Some(skipped)));
        }
        // The other one goes on, but these are more than it can explain.
        assert!(detector.add(50, 5, || Some(skipped + 10)));
    }
}
