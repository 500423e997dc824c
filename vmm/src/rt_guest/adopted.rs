// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VM's manager has set of its vCPUs' threads already, as libvirt by vcpusched and vcpupin: it
//! stays if it is what is wanted.

use anyhow::bail;
use vcpufreq_device::VcpuId;
use vcpufreq_host::{CpuList, SchedAttr, Tid, affinity_of};

use super::RtGuest;

impl RtGuest {
    /// Checks that what is set of a real-time vCPU's thread is what is wanted, or nothing. `others` are
    /// the pCPUs of the threads that run no vCPU.
    ///
    /// # Errors
    /// The contradiction; or the thread has ended.
    pub fn check_agrees(&self, vcpu: VcpuId, tid: Tid, others: &CpuList) -> anyhow::Result<()> {
        let Some(policy) = self.policy(vcpu) else {
            return Ok(());
        };
        check_policy(vcpu, &SchedAttr::of(tid)?, &policy.attr())?;
        check_pin(vcpu, &affinity_of(tid)?, (&self.cpus(), others))
    }
}

fn check_policy(vcpu: VcpuId, now: &SchedAttr, wanted: &SchedAttr) -> anyhow::Result<()> {
    let wanted = policy_text(wanted).unwrap_or_default();
    match policy_text(now).filter(|now| *now != wanted) {
        Some(now) => bail!(
            "vCPU {vcpu} is {now} already, and --rt makes it {wanted}; correct --rt, or its domain's <vcpusched>"
        ),
        None => Ok(()),
    }
}

/// A thread that has what the others have was not pinned by itself.
fn check_pin(
    vcpu: VcpuId,
    allowed: &CpuList,
    (cpus, others): (&CpuList, &CpuList),
) -> anyhow::Result<()> {
    if allowed.len() == 1 && allowed != others && allowed.and(cpus).is_empty() {
        bail!(
            "vCPU {vcpu} is pinned to CPU {allowed} already, and --pin gives it CPU {cpus}; correct --pin, or its domain's <vcpupin>"
        );
    }
    Ok(())
}

/// A real-time policy as --rt takes it.
fn policy_text(attr: &SchedAttr) -> Option<String> {
    match attr.policy {
        SchedAttr::FIFO => Some(format!("fifo:{}", attr.priority)),
        SchedAttr::RR => Some(format!("rr:{}", attr.priority)),
        SchedAttr::DEADLINE => {
            let [runtime, period] = [attr.runtime_ns, attr.period_ns].map(|ns| ns / 1000);
            Some(format!("deadline:{runtime}/{period}"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    //! Promise: a contradiction is one line that names both sides.
    use super::*;

    const FIFO: SchedAttr = SchedAttr {
        policy: SchedAttr::FIFO,
        priority: 2,
        size: 0,
        flags: 0,
        nice: 0,
        runtime_ns: 0,
        deadline_ns: 0,
        period_ns: 0,
        util_min: 0,
        util_max: 0,
    };

    #[test]
    fn the_same_policy_is_adopted_and_another_is_refused() {
        let deadline = SchedAttr::deadline(500_000, 1_000_000);
        let check = |now| check_policy(VcpuId(1), &now, &FIFO);
        check(FIFO).unwrap();
        check(SchedAttr::default()).unwrap();
        let lower = SchedAttr {
            priority: 1,
            ..FIFO
        };
        for (now, named) in [(lower, "is fifo:1"), (deadline, "is deadline:500/1000")] {
            let line = check(now).unwrap_err().to_string();
            assert!(line.contains(named) && line.contains("fifo:2"), "{line}");
            assert_eq!(line.lines().count(), 1);
        }
    }

    #[test]
    fn a_vcpus_own_pin_elsewhere_is_refused() {
        let list = |text: &str| text.parse::<CpuList>().unwrap();
        let check = |allowed, others| {
            let lists = (&list("3"), &list(others));
            check_pin(VcpuId(1), &list(allowed), lists).is_ok()
        };
        for (allowed, others, agrees) in [
            ("3", "0-2", true),
            ("0-2", "0-2", true),
            ("0", "0", true),
            ("2", "0-2", false),
        ] {
            assert_eq!(check(allowed, others), agrees, "{allowed} of {others}");
        }
    }
}
