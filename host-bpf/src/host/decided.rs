// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM whose clamps an operator's policy decides, as its VMM sees it.

#![forbid(unsafe_code)]

use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use vcpufreq_device::VcpuId;

use super::HostBpf;

impl HostBpf {
    /// Has an operator's policy decide again what `domain` requests, whose last request is of `vcpu`,
    /// or the built-in rule when the policy has gone. Whether the clamp has changed, which the caller
    /// then applies ([`Self::apply_pending`]).
    pub fn decide(&self, vcpu: VcpuId, domain: u32) -> bool {
        let (Some(domain), Some(vm)) = (self.domain(domain), self.vm.get(0)) else {
            return false;
        };
        let policy = vm.policy.load(SeqCst);
        let is_done = policy % 2 == 0 && domain.decided_by.load(SeqCst) == policy;
        let before = domain.clamp.load(SeqCst);
        // If it can't be run, the next look tries again.
        !is_done
            && self.programs().call("vcpufreq_decide", vcpu.0).is_ok()
            && domain.clamp.load(SeqCst) != before
    }

    /// The name of the operator's policy that decides; `None`: the built-in rule does, or this has no
    /// say any more.
    #[must_use]
    pub fn policy_name(&self) -> Option<String> {
        let vm = self.vm.get(0)?;
        let decides = self.has_policy() && vm.ended.load(SeqCst) == 0;
        decides.then(|| {
            let bytes = vm.policy_name.iter().map(|byte| byte.load(Relaxed));
            let bytes: Vec<u8> = bytes.take_while(|byte| *byte != 0).collect();
            String::from_utf8_lossy(&bytes).into_owned()
        })
    }

    /// The process that holds an operator's policy has ended without a word, and so the policy: the
    /// built-in rule decides, and nothing is asked.
    pub fn end_policy(&self) {
        if let Some(vm) = self.vm.get(0).filter(|_| self.has_policy()) {
            vm.policy.fetch_add(1, SeqCst);
        }
    }

    /// Whether a process holds an operator's policy of this VM.
    pub(super) fn has_policy(&self) -> bool {
        let vm = self.vm.get(0);
        vm.is_some_and(|vm| vm.policy.load(SeqCst) % 2 == 1)
    }

    /// Refuses policies from now on.
    pub(super) fn refuse_policies(&self) {
        if let Some(vm) = self.vm.get(0) {
            vm.ended.store(1, SeqCst);
        }
    }
}
