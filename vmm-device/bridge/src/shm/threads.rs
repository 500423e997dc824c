// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Which threads of a VMM run its vCPUs, by their names: QEMU's `CPU 0/KVM` (or `/TCG`), Cloud
//! Hypervisor's `vcpu0`.

#![forbid(unsafe_code)]

use std::fs;

use vcpufreq_host::{HostRoot, Tid};

/// The threads of process `pid` that run vCPUs 0 to `vcpus` - 1, in this order; `None` for one that
/// isn't there, as before the VMM has started it, or while the vCPU is unplugged.
#[must_use]
pub fn vcpu_threads(root: &HostRoot, pid: u32, vcpus: u16) -> Vec<Option<Tid>> {
    let tasks = fs::read_dir(root.path(format!("proc/{pid}/task")));
    let mut found = vec![None; usize::from(vcpus)];
    for task in tasks.into_iter().flatten().flatten() {
        let Some(tid) = task.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A thread that ends meanwhile has no name.
        let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
        let slot = number(name.trim_end()).and_then(|vcpu| found.get_mut(vcpu));
        if let Some(slot) = slot {
            *slot = Tid::new(tid);
        }
    }
    found
}

/// The vCPU that a thread of this name runs.
fn number(name: &str) -> Option<usize> {
    let qemu = name.strip_prefix("CPU ").and_then(|rest| {
        let (number, accelerator) = rest.split_once('/')?;
        ["KVM", "TCG"].contains(&accelerator).then_some(number)
    });
    let other = name.strip_prefix("crosvm_").unwrap_or(name);
    qemu.or_else(|| other.strip_prefix("vcpu"))?.parse().ok()
}

#[cfg(test)]
mod tests {
    //! A VMM's vCPU threads are found by name.
    use super::*;
    use vcpufreq_host::fakes::FakeHost;

    fn host(names: &[(u32, &str)]) -> FakeHost {
        let host = FakeHost::empty();
        for (tid, name) in names {
            host.write(&format!("proc/7/task/{tid}/comm"), format!("{name}\n"));
        }
        host
    }

    #[test]
    fn threads_are_told_by_their_names() {
        for names in [
            ["CPU 0/KVM", "CPU 1/KVM"],
            ["CPU 0/TCG", "CPU 1/TCG"],
            ["vcpu0", "vcpu1"],
            ["crosvm_vcpu0", "crosvm_vcpu1"],
        ] {
            let host = host(&[
                (7, "qemu-system-aar"),
                (9, names[1]),
                (8, names[0]),
                (10, "worker"),
            ]);
            let found = vcpu_threads(&host.root(), 7, 2);
            assert_eq!(found, [8, 9].map(Tid::new));
        }
    }

    #[test]
    fn other_names_are_of_no_vcpu() {
        let host = host(&[(8, "CPU 0/KVM"), (9, "CPU x/KVM"), (10, "CPU 1/XEN")]);
        assert_eq!(vcpu_threads(&host.root(), 7, 2), [Tid::new(8), None]);
        assert_eq!(vcpu_threads(&host.root(), 99, 1), [None], "no such process");
    }
}
