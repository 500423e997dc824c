// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a VM's manager has set of its vCPUs' threads already, as libvirt by vcpusched and vcpupin: it
//! stays if it is what is wanted.

use anyhow::bail;
use vcpufreq_device::VcpuId;
use vcpufreq_host::{CpuList, SchedAttr, Tid, affinity_of};

use super::RtGuest;
use crate::options::rt_values::RtPolicy;

impl RtGuest {
    /// Checks that a vCPU's thread, which is going to be pinned to `pin`, has nothing set, or what is
    /// wanted. One that isn't real-time and will not be pinned must keep off the real-time pCPUs by
    /// itself. `unpinned` are what threads without a pin of their own may have.
    ///
    /// # Errors
    /// The contradiction; or the thread has ended.
    pub fn check_agrees(
        &self,
        (vcpu, tid): (VcpuId, Tid),
        pin: &[u32],
        unpinned: &[CpuList; 2],
    ) -> anyhow::Result<()> {
        let (now, allowed) = (SchedAttr::read(tid)?, affinity_of(tid)?);
        match self.policy(vcpu) {
            Some(policy) => {
                check_policy(vcpu, &now, &policy.attr())?;
                let own = pin.iter().copied().collect();
                check_pin(vcpu, &allowed, (&own, unpinned))
            }
            None => check_ordinary(vcpu, &now, &allowed, pin.is_empty().then(|| self.cpus())),
        }
    }
}

/// `kept` are the pCPUs that it has to keep off by itself.
fn check_ordinary(
    vcpu: VcpuId,
    now: &SchedAttr,
    allowed: &CpuList,
    kept: Option<CpuList>,
) -> anyhow::Result<()> {
    if let Some(now) = policy_text(now) {
        bail!(
            "vCPU {vcpu} is {now} already, and --rt leaves it out; correct --rt, or its domain's <vcpusched>"
        );
    }
    let shared = kept.map(|cpus| allowed.and(&cpus)).unwrap_or_default();
    if !shared.is_empty() {
        bail!(
            "vCPU {vcpu} isn't real-time and may run on CPU {shared}, which is a real-time vCPU's alone; give --pin {vcpu}=PCPUS, or its domain a <vcpupin>"
        );
    }
    Ok(())
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

/// A thread that has what unpinned ones have was not pinned by itself.
fn check_pin(
    vcpu: VcpuId,
    allowed: &CpuList,
    (cpus, unpinned): (&CpuList, &[CpuList; 2]),
) -> anyhow::Result<()> {
    if !unpinned.contains(allowed) && allowed.and(cpus).is_empty() {
        bail!(
            "vCPU {vcpu} is pinned to CPU {allowed} already, and --pin gives it CPU {cpus}; correct --pin, or its domain's <vcpupin> or <vcpu cpuset>"
        );
    }
    Ok(())
}

/// What a manager has made of a vCPU's thread since that is served, if it isn't what `wanted` is.
pub fn changed_since(vcpu: VcpuId, now: &SchedAttr, wanted: Option<RtPolicy>) -> Option<String> {
    let wanted = wanted.and_then(|policy| policy_text(&policy.attr()));
    let now = policy_text(now);
    if now == wanted {
        return None;
    }
    let now = now.unwrap_or_else(|| "not real-time".to_owned());
    let given = wanted.map_or("doesn't name it".to_owned(), |policy| {
        format!("says {policy}")
    });
    Some(format!(
        "vCPU {vcpu} has become {now} while it is served, but --rt {given}; correct --rt, or its domain's \
         <vcpusched>"
    ))
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
            let unpinned = [list(others), list("0-2")];
            check_pin(VcpuId(1), &list(allowed), (&list("3"), &unpinned)).is_ok()
        };
        for (allowed, others, agrees) in [
            ("3", "0-2", true),
            ("0-2", "0-2", true),
            ("0-2", "0", true),
            ("0", "0", true),
            ("2", "0-2", false),
            ("1-2", "0-2", false),
        ] {
            assert_eq!(check(allowed, others), agrees, "{allowed} of {others}");
        }
    }

    // It was accepted, and moved without a line.
    #[test]
    fn a_vcpu_on_the_cpu_of_another_is_refused() {
        let own = Tid::current();
        let allowed = affinity_of(own).unwrap();
        let [first, second, ..] = *allowed.as_slice() else {
            println!("SKIP: this process may run on one CPU only");
            return;
        };
        let guest = RtGuest {
            floors: Vec::new(),
            resume_latency: None,
            policies: vec![Some(RtPolicy::Fifo(2)); 2],
            domains: Vec::new(),
            cpus: vec![first, second],
            partition: None,
            without_cpuset: None,
        };
        let checked = std::thread::spawn(move || {
            let tid = Tid::current();
            vcpufreq_host::pin(tid, &[first]).unwrap();
            let unpinned = [CpuList::default(), CpuList::default()];
            let check = |pin: u32| guest.check_agrees((VcpuId(0), tid), &[pin], &unpinned);
            check(first).unwrap();
            check(second).unwrap_err().to_string()
        });
        let line = checked.join().unwrap();
        let both = format!("pinned to CPU {first} already, and --pin gives it CPU {second};");
        assert!(line.contains(&both), "{line}");
    }

    #[test]
    fn a_policy_that_comes_later_is_told() {
        let fifo = Some(RtPolicy::Fifo(2));
        for (now, wanted, said) in [
            (FIFO, fifo, None),
            (SchedAttr::default(), None, None),
            (
                SchedAttr::default(),
                fifo,
                Some("has become not real-time while it is served, but --rt says fifo:2;"),
            ),
            (
                FIFO,
                Some(RtPolicy::Rr(1)),
                Some("vCPU 1 has become fifo:2 while it is served, but --rt says rr:1;"),
            ),
            (FIFO, None, Some("but --rt doesn't name it;")),
        ] {
            let line = changed_since(VcpuId(1), &now, wanted);
            assert_eq!(line.is_some(), said.is_some(), "{line:?}");
            let line = line.unwrap_or_default();
            assert!(line.contains(said.unwrap_or_default()), "{line}");
            assert!(line.lines().count() <= 1);
        }
    }

    #[test]
    fn an_ordinary_vcpu_is_ordinary_and_keeps_off() {
        let list = |text: &str| text.parse::<CpuList>().unwrap();
        let check = |now: &SchedAttr, allowed, kept: Option<&str>| {
            check_ordinary(VcpuId(0), now, &list(allowed), kept.map(list))
        };
        let normal = SchedAttr::default();
        check(&normal, "0-2", Some("3")).unwrap();
        check(&normal, "0-3", None).unwrap();
        for (now, allowed, named) in [
            (
                &normal,
                "0-3",
                "on CPU 3, which is a real-time vCPU's alone; give --pin 0=",
            ),
            (
                &FIFO,
                "0-2",
                "vCPU 0 is fifo:2 already, and --rt leaves it out",
            ),
        ] {
            let line = check(now, allowed, Some("3")).unwrap_err().to_string();
            assert!(line.contains(named), "{line}");
            assert_eq!(line.lines().count(), 1);
        }
    }
}
