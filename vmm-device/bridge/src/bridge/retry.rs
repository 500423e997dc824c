// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! When to try again what the host has refused.

use vcpufreq_device::VcpuId;

/// A domain whose bounds are to be put into force again.
pub struct Retry {
    vcpu: VcpuId,
    /// Of the maintenance thread's looks, a second apart, so many before the try after the next.
    looks: u32,
    /// And before the next.
    left: u32,
}

impl Retry {
    const MOST_LOOKS: u32 = 64;

    /// At the next look first.
    pub fn new(vcpu: VcpuId) -> Self {
        let (looks, left) = (1, 0);
        Self { vcpu, looks, left }
    }

    /// The vCPU, if it is time.
    pub fn due(&mut self) -> Option<VcpuId> {
        if self.left > 0 {
            self.left -= 1;
            return None;
        }
        self.left = self.looks;
        self.looks = (2 * self.looks).min(Self::MOST_LOOKS);
        Some(self.vcpu)
    }
}
