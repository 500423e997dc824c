// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! When to try again what the host has refused.

use vcpufreq_device::VcpuId;

/// A domain whose bounds are to be put into force again.
#[derive(Clone, Copy)]
pub(super) struct Retry {
    /// One of its vCPUs.
    pub(super) vcpu: VcpuId,
    /// Looks of the maintenance thread, one a second, to skip after the next try.
    looks: u32,
    /// Looks to skip before it.
    left: u32,
}

impl Retry {
    const MOST_LOOKS: u32 = 64;

    /// At the next look first.
    pub(super) fn new(vcpu: VcpuId) -> Self {
        let (looks, left) = (1, 0);
        Self { vcpu, looks, left }
    }

    /// Whether it is time, at a look.
    pub(super) fn is_due(&mut self) -> bool {
        if self.left > 0 {
            self.left -= 1;
            return false;
        }
        self.left = self.looks;
        self.looks = (2 * self.looks).min(Self::MOST_LOOKS);
        true
    }
}

#[cfg(test)]
mod tests {
    //! Promise: tries come ever less often, and do not end.
    use super::*;

    #[test]
    fn tries_come_ever_less_often() {
        let mut retry = Retry::new(VcpuId(0));
        let tries: Vec<u32> = (0..200).filter(|_| retry.is_due()).collect();
        assert_eq!(tries, [0, 2, 5, 10, 19, 36, 69, 134, 199]);
    }
}
