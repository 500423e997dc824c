// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The pause before a guest that has reset boots again. Booting is work of the VMM's main thread,
//! which is in no vCPU's cgroup: a guest that does nothing but reset would have a host CPU to
//! itself.

use std::time::Duration;

/// A guest that has run for so long starts anew.
const LASTED: Duration = Duration::from_secs(10);
/// The pause before the third boot in a row; each further one doubles it.
const SHORTEST: Duration = Duration::from_millis(10);
/// Loading a kernel takes some 10 ms: a hundredth of a CPU.
const LONGEST: Duration = Duration::from_secs(1);

/// How long the next pause will be.
#[derive(Debug, Default)]
pub struct Backoff {
    next: Duration,
}

impl Backoff {
    /// The pause after a reset, by a guest that ran for `ran` since it booted.
    pub fn after(&mut self, ran: Duration) -> Duration {
        if ran >= LASTED {
            self.next = Duration::ZERO;
        }
        let pause = self.next;
        self.next = (pause * 2).clamp(SHORTEST, LONGEST);
        pause
    }
}

#[cfg(test)]
mod tests {
    //! A reboot now and then is at once; a storm slows down to one boot a second.
    use super::*;

    #[test]
    fn resets_in_a_row_are_ever_further_apart() {
        let mut backoff = Backoff::default();
        let mut pauses = || backoff.after(Duration::ZERO).as_millis();
        let first: Vec<_> = (0..10).map(|_| pauses()).collect();
        assert_eq!(first, [0, 10, 20, 40, 80, 160, 320, 640, 1000, 1000]);
        assert_eq!(backoff.after(LASTED / 2), LONGEST);
        for _ in 0..2 {
            assert_eq!(backoff.after(LASTED), Duration::ZERO);
        }
        assert_eq!(backoff.after(Duration::ZERO), SHORTEST);
    }
}
