// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A device's state as plain data, for snapshots and migration.
//!
//! Not in it: tables and domains, which are configuration; what is in force on the host, which is
//! another host's business after a migration; and counters.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;

use crate::device::Device;
use crate::domain::Request;
use crate::ports::{Actuator, Events, Source};
use crate::regs::MAX_VCPUS;
use crate::units::{DomainId, Khz, VcpuId};

/// What a device remembers. Untrusted until it is a [`CheckedState`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct DeviceState {
    /// Each vCPU's page, in order.
    pub vcpus: Vec<VcpuState>,
    /// The newest request of each domain that has one.
    pub requests: Vec<RequestState>,
}

/// What a vCPU's page remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct VcpuState {
    /// perftbl_sel as last written; any value.
    pub perftbl_sel: u32,
    /// cur_perf as last shown, kHz; not 0.
    pub cur_perf_khz: u32,
}

/// A domain's newest request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RequestState {
    /// The domain's number.
    pub domain: u32,
    /// The vCPU whose register was written.
    pub vcpu: u16,
    /// The frequency, kHz; any value, 0 is no request. No ceiling: the guest writes it again.
    pub khz: u32,
}

/// A [`DeviceState`] that contradicts neither itself nor the register interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckedState(DeviceState);

/// Which rule a state breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// No vCPU, or more than a device can have.
    #[error("the state has {count} vCPUs; a device has 1 to {MAX_VCPUS}")]
    VcpuCount {
        /// vCPUs in the state.
        count: usize,
    },
    /// A vCPU that stands still.
    #[error("the state gives vCPU {vcpu} a cur_perf of 0 kHz")]
    ZeroPerf {
        /// Its number.
        vcpu: usize,
    },
    /// A domain twice.
    #[error("the state has two requests for domain {domain}")]
    TwoRequests {
        /// The domain.
        domain: DomainId,
    },
    /// A request by a vCPU that isn't there.
    #[error("the state has a request of vCPU {vcpu}, but only {count} vCPUs")]
    NoSuchVcpu {
        /// Its number.
        vcpu: VcpuId,
        /// vCPUs in the state.
        count: usize,
    },
    /// State of another device.
    #[error("the state has {count} vCPUs, the device {expected}")]
    OtherDevice {
        /// vCPUs in the state.
        count: usize,
        /// vCPUs of the device.
        expected: usize,
    },
    /// A request by a vCPU that isn't in the domain.
    #[error("the state has a request of vCPU {vcpu} for domain {domain}, which it isn't in")]
    NotAMember {
        /// The vCPU.
        vcpu: VcpuId,
        /// The domain.
        domain: DomainId,
    },
}

impl TryFrom<DeviceState> for CheckedState {
    type Error = StateError;

    fn try_from(state: DeviceState) -> Result<Self, StateError> {
        let count = state.vcpus.len();
        if count == 0 || count > MAX_VCPUS {
            return Err(StateError::VcpuCount { count });
        }
        if let Some(vcpu) = state.vcpus.iter().position(|v| v.cur_perf_khz == 0) {
            return Err(StateError::ZeroPerf { vcpu });
        }
        let mut seen = BTreeSet::new();
        for request in &state.requests {
            let vcpu = VcpuId(request.vcpu);
            if vcpu.index() >= count {
                return Err(StateError::NoSuchVcpu { vcpu, count });
            }
            let domain = DomainId(request.domain);
            if !seen.insert(domain) {
                return Err(StateError::TwoRequests { domain });
            }
        }
        Ok(Self(state))
    }
}

impl<A: Actuator, S: Source, E: Events> Device<A, S, E> {
    /// What the device remembers now. Consistent when no vCPU runs meanwhile.
    #[must_use]
    pub fn save(&self) -> DeviceState {
        let vcpus = self.vcpus.iter().map(|page| VcpuState {
            perftbl_sel: page.selected.load(Relaxed),
            cur_perf_khz: page.cur_perf.load(Relaxed),
        });
        let requests = self.domains.iter().filter_map(|domain| {
            let request = domain.newest().filter(Request::wants_frequency)?;
            Some(RequestState {
                domain: domain.id().0,
                vcpu: request.vcpu.0,
                khz: request.khz.0,
            })
        });
        DeviceState {
            vcpus: vcpus.collect(),
            requests: requests.collect(),
        }
    }

    /// Adopts a saved state and applies the guest's requests on this host. Call it after the
    /// threads are registered, before any vCPU runs. A refusal by the host is counted as for any
    /// request.
    ///
    /// # Errors
    /// Why the state is not one of this device; nothing is changed then.
    pub fn restore(&self, state: &CheckedState) -> Result<(), StateError> {
        let CheckedState(state) = state;
        self.check_fits(state)?;
        for (page, saved) in self.vcpus.iter().zip(&state.vcpus) {
            page.selected.store(saved.perftbl_sel, Relaxed);
            page.cur_perf.store(saved.cur_perf_khz, Relaxed);
        }
        for vcpu in (0..=u16::MAX).map(VcpuId).take(self.vcpus.len()) {
            self.show_memory(vcpu);
        }
        for saved in &state.requests {
            let request = Request::without_ceiling(VcpuId(saved.vcpu), None, Khz(saved.khz));
            let domain = self.domains.iter().find(|d| d.id().0 == saved.domain);
            if let Some(domain) = domain {
                self.request(domain, request);
            }
        }
        Ok(())
    }

    fn check_fits(&self, state: &DeviceState) -> Result<(), StateError> {
        let (count, expected) = (state.vcpus.len(), self.vcpus.len());
        if count != expected {
            return Err(StateError::OtherDevice { count, expected });
        }
        for request in &state.requests {
            let (vcpu, domain) = (VcpuId(request.vcpu), DomainId(request.domain));
            if self.config.vcpus[vcpu.index()].domain != domain {
                return Err(StateError::NotAMember { vcpu, domain });
            }
        }
        Ok(())
    }
}
