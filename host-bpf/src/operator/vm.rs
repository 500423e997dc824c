// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VM, as the process that holds its policy sees it.

#![forbid(unsafe_code)]

use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use libbpf_rs::{MapCore as _, MapFlags, MapHandle};

use super::judge::{PolicyJudge, PolicyTrial};
use super::object::{AttachedPolicy, PolicyPlace};
use super::programs::VmPrograms;
use crate::error::BpfError;
use crate::layout::{POLICY_NAME, PolicyEntry, TABLE_MAX, VcpuEntry, VmEntry};
use crate::libbpf_log::refused;
use crate::mapped::{MapEntry, Mapped};

/// Kinds of vCPUs that a policy is tried on, at most.
const TRIALS: usize = 8;

/// A VM's programs and the policy that is in force for them. Dropping it has the built-in rule back.
#[derive(Debug)]
pub struct OperatorVm {
    /// The VMM's process.
    pid: u32,
    // Detached before the programs that it is on go.
    policy: Vec<AttachedPolicy>,
    /// The number of the policy that is in force, odd.
    number: u32,
    vm: Mapped<VmEntry>,
    vcpus: Mapped<VcpuEntry>,
    programs: VmPrograms,
    judge: PolicyJudge,
    /// What was counted when the policy came.
    before: [u64; 3],
}

impl OperatorVm {
    /// The VM of the VMM's process `pid`.
    ///
    /// # Errors
    /// [`BpfError::NoPrograms`] if it has no programs of this version, or this process may not open
    /// them; [`BpfError::Refused`].
    pub fn find(pid: u32) -> Result<Self, BpfError> {
        let programs = VmPrograms::find(pid)?;
        let found = Self {
            pid,
            policy: Vec::new(),
            number: 0,
            vm: mapped(&programs.vm)?,
            vcpus: mapped(&programs.vcpus)?,
            programs,
            judge: PolicyJudge::new()?,
            before: [0; 3],
        };
        found.check_runs()?;
        Ok(found)
    }

    /// Whether its policy decides: its VMM has neither taken it away nor lost the path.
    #[must_use]
    pub fn decides(&self) -> bool {
        let vm = self.vm.get(0);
        !self.policy.is_empty()
            && vm.is_some_and(|vm| vm.policy.load(SeqCst) == self.number)
            && self.check_runs().is_ok()
    }

    /// Whether requests still reach the programs.
    fn check_runs(&self) -> Result<(), BpfError> {
        let vm = self.vm.get(0).filter(|vm| vm.ended.load(SeqCst) == 0);
        vm.map(drop).ok_or(BpfError::NoPrograms(self.pid))
    }

    /// Tries a policy without putting it into force.
    ///
    /// # Errors
    /// [`BpfError::Policy`] and [`BpfError::Refused`]: why it is refused.
    pub fn judge(&self, object: &[u8]) -> Result<(), BpfError> {
        self.check_runs()?;
        self.judge.judge(object, &self.trials()?)
    }

    /// Puts a policy into force in the place of the one before, after a trial.
    ///
    /// # Errors
    /// As [`Self::judge`]; the one before stays, if requests still reach the programs.
    pub fn load(&mut self, object: &[u8], name: &str) -> Result<(), BpfError> {
        self.judge(object)?;
        let vm = self.vm.get(0).ok_or(BpfError::NoPrograms(self.pid))?;
        let number = vm.policy.load(SeqCst).wrapping_add(1) | 1;
        let mut policy: Vec<AttachedPolicy> = Vec::new();
        for program in &self.programs.asking {
            let place = PolicyPlace {
                program: program.as_fd(),
                calls: self.programs.calls.as_fd(),
                number,
            };
            policy.push(AttachedPolicy::new(object, place, policy.first())?);
        }
        let bytes = name.bytes().chain(std::iter::repeat(0));
        let bytes = bytes.take(POLICY_NAME);
        for (to, byte) in vm.policy_name.iter().zip(bytes) {
            to.store(byte, Relaxed);
        }
        self.before = self.all_counts();
        // From here on requests ask the new one.
        vm.policy.store(number, SeqCst);
        (self.policy, self.number) = (policy, number);
        // The VMM may have lost the path meanwhile: it says so first, then asks no policy.
        self.check_runs()
    }

    /// How often the policy was asked since it came, was bounded, and was silent.
    #[must_use]
    pub fn counts(&self) -> [u64; 3] {
        let (now, before) = (self.all_counts(), self.before);
        [0, 1, 2].map(|n| now[n].saturating_sub(before[n]))
    }

    fn all_counts(&self) -> [u64; 3] {
        let vcpus = self.vcpus.all().iter();
        let counts = vcpus.map(|vcpu| vcpu.counters.snapshot().decisions());
        counts.fold([0; 3], |all, one| [0, 1, 2].map(|n| all[n] + one[n]))
    }

    /// The VM's last requests and tables, each kind of vCPU once.
    fn trials(&self) -> Result<Vec<PolicyTrial>, BpfError> {
        let mut trials: Vec<PolicyTrial> = Vec::new();
        for (id, vcpu) in (0..).zip(self.vcpus.all()) {
            let key = u32::to_ne_bytes(id);
            let policy = self.programs.policies.lookup(&key, MapFlags::ANY);
            let policy = policy.map_err(refused("reading a policy"))?;
            let policy = policy.unwrap_or_default();
            // The register's low half.
            let [.., a, b, c, d] = vcpu.latest.load(SeqCst).to_be_bytes();
            let last = u32::from_be_bytes([a, b, c, d]);
            if let Some(known) = trials.iter_mut().find(|one| is_alike(&one.policy, &policy)) {
                known.requests.push(last);
            } else if trials.len() < TRIALS {
                let mut requests = table(&policy);
                requests.extend([0, last]);
                trials.push(PolicyTrial {
                    policy,
                    vcpu: id,
                    requests,
                });
            }
        }
        Ok(trials)
    }
}

impl Drop for OperatorVm {
    fn drop(&mut self) {
        if let Some(vm) = self.vm.get(0).filter(|_| !self.policy.is_empty()) {
            // Even: none.
            let none = self.number.wrapping_add(1);
            let _ = (vm.policy).compare_exchange(self.number, none, SeqCst, SeqCst);
        }
    }
}

/// Whether two policies answer alike: all but the domain's number.
fn is_alike(one: &[u8], other: &[u8]) -> bool {
    const DOMAIN: usize = std::mem::offset_of!(PolicyEntry, domain);
    let parts = |policy: &[u8]| {
        let (before, from) = policy.split_at_checked(DOMAIN)?;
        Some((before.to_vec(), from.get(4..)?.to_vec()))
    };
    parts(one) == parts(other)
}

/// The entries of a policy's table.
fn table(policy: &[u8]) -> Vec<u32> {
    const TABLE: usize = std::mem::offset_of!(PolicyEntry, table_khz);
    let entries = policy.get(TABLE..).unwrap_or_default().chunks_exact(4);
    let entries = entries.map(|bytes| u32::from_ne_bytes(bytes.try_into().unwrap_or_default()));
    entries.take(TABLE_MAX).filter(|khz| *khz != 0).collect()
}

fn mapped<T: MapEntry>(map: &MapHandle) -> Result<Mapped<T>, BpfError> {
    let (entries, size) = (map.max_entries(), map.value_size());
    let entries = usize::try_from(entries).unwrap_or(usize::MAX);
    if usize::try_from(size).ok() != Some(size_of::<T>()) {
        return Err(BpfError::Policy(
            "the VM is of another version; load it by that version's vcpufreq".to_owned(),
        ));
    }
    Mapped::new(map.as_fd(), entries).map_err(|error| BpfError::Refused {
        what: "mapping the memory of the BPF programs",
        why: error.to_string(),
    })
}
