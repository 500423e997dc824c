// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The cgroups of a VM's vCPUs. libvirt makes one for each vCPU when QEMU answers, and QEMU answers once
//! it has its memory. The server waits for them if vCPUs are to be pinned. Later libvirt may move vCPUs
//! to others.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use vcpufreq_host::{
    ActuatorChoice, ActuatorFacts, ActuatorKind, AdoptedGroups, Chosen, HostRoot, Tid,
};

use super::Served;
use crate::message::warn;

/// How the name of libvirt's group for threads that run no vCPU ends, in procfs' words.
const EMULATOR: &str = "/emulator";

/// Whether libvirt has made groups for these threads of process `pid` that are to be pinned; true if
/// it does not manage that process.
pub fn are_placed(served: &Served, pid: u32, threads: &[Option<Tid>]) -> bool {
    let vcpus = threads.iter().zip(&served.vcpus);
    let pinned = vcpus.filter(|(_, vcpu)| !vcpu.pin.is_empty());
    let mut pinned = pinned.filter_map(|(tid, _)| *tid);
    !pinned.any(|tid| is_among_others(&served.host, pid, tid))
}

/// Whether this thread of process `pid` is in libvirt's group for threads that run no vCPU.
fn is_among_others(host: &HostRoot, pid: u32, tid: Tid) -> bool {
    let groups = host.text(format!("proc/{pid}/task/{tid}/cgroup"));
    groups.is_some_and(|groups| groups.lines().any(|line| line.ends_with(EMULATOR)))
}

/// The cgroups in which vCPUs were when the server chose what to clamp.
pub struct SeenGroups {
    pid: u32,
    threads: Vec<Option<Tid>>,
    /// In procfs' words.
    before: Option<Vec<String>>,
    /// The manager's groups that are clamped, if any.
    clamped: Option<Vec<PathBuf>>,
}

impl SeenGroups {
    /// Those of these threads of process `pid`.
    pub fn look(host: &HostRoot, pid: u32, threads: &[Option<Tid>]) -> Self {
        Self {
            pid,
            threads: threads.to_vec(),
            before: of_threads(host, pid, threads),
            clamped: None,
        }
    }

    /// The same, once it is chosen what clamps the VM; none if that are groups which the server
    /// makes itself.
    pub fn clamped_by(self, kind: &ActuatorKind) -> Option<Self> {
        match kind {
            ActuatorKind::Cgroup(_) | ActuatorKind::Partition(_) => None,
            ActuatorKind::Adopted(groups) => Some(Self {
                clamped: Some(paths(groups)),
                ..self
            }),
            _ => Some(self),
        }
    }

    /// Whether the manager's groups to clamp are others now.
    pub fn have_changed(&self, host: &HostRoot) -> bool {
        let now = of_threads(host, self.pid, &self.threads);
        // A VMM that is ending has no threads.
        if now.is_none() || now == self.before {
            return false;
        }
        let found = AdoptedGroups::find(host, self.pid, &self.threads);
        found.is_ok_and(|found| found.as_ref().map(paths) != self.clamped)
    }
}

/// What clamps the vCPUs of process `pid`. Groups that the VM's manager has made for them come first: it
/// knows its threads there.
///
/// # Errors
/// Why the actuator that the user wants can't be had.
pub fn choose(served: &Served, pid: u32, threads: &[Option<Tid>]) -> anyhow::Result<Chosen> {
    let parent = served.options.bridge.cgroup_parent.as_deref();
    if served.actuator == ActuatorChoice::Auto {
        match AdoptedGroups::find(&served.host, pid, threads) {
            Ok(Some(groups)) => {
                return Ok(Chosen {
                    kind: ActuatorKind::Adopted(groups),
                    reason: "each vCPU has a cgroup already".to_owned(),
                });
            }
            Ok(None) => {}
            Err(error) => warn(&format!(
                "the cgroups that the vCPUs have can't be clamped: {error}"
            )),
        }
    }
    let facts = ActuatorFacts::probe_for(&served.host, pid, parent);
    vcpufreq_host::choose(served.actuator, facts).map_err(|why| {
        anyhow!("{why}; change that, or let the VM only read what it gets (--actuator none)")
    })
}

fn of_threads(host: &HostRoot, pid: u32, threads: &[Option<Tid>]) -> Option<Vec<String>> {
    let groups = threads.iter().flatten();
    let groups = groups.map(|tid| host.text(format!("proc/{pid}/task/{tid}/cgroup")));
    groups.collect()
}

fn paths(groups: &AdoptedGroups) -> Vec<PathBuf> {
    groups.of_vcpus().map(Path::to_owned).collect()
}

#[cfg(test)]
mod tests {
    //! Groups that libvirt makes after its VM has connected are found, and others are left alone.
    use vcpufreq_host::fakes::FakeHost;

    use super::*;

    const SCOPE: &str = "machine.slice/machine-qemu.scope/libvirt";

    /// Threads 8 and 9 of process 7 are in these groups of a scope.
    fn place(host: &FakeHost, groups: [&str; 2]) {
        for (tid, group) in [8, 9].into_iter().zip(groups) {
            let line = format!("0::/{SCOPE}{group}\n");
            host.write(&format!("proc/7/task/{tid}/cgroup"), line);
        }
        for group in ["", "/vcpu0", "/vcpu1", "/emulator"] {
            let members = [8, 9].into_iter().zip(groups);
            let members = members.filter(|(_, of)| *of == group);
            let members = members.map(|(tid, _)| format!("{tid}\n"));
            let own = (group == "/emulator").then(|| "7\n".to_owned());
            let members: String = members.chain(own).collect();
            let group = format!("sys/fs/cgroup/{SCOPE}{group}");
            host.write(&format!("{group}/cgroup.threads"), members);
        }
    }

    fn host() -> FakeHost {
        let host = FakeHost::empty();
        let mounts = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        host.write("proc/self/mountinfo", mounts);
        let [slice, scope] = ["machine.slice", "machine.slice/machine-qemu.scope"];
        for group in [slice, scope] {
            host.write(&format!("sys/fs/cgroup/{group}/cgroup.threads"), "");
        }
        for group in [slice, scope, SCOPE] {
            let clamps = [("min", "max"), ("max", "max")];
            for (clamp, value) in clamps {
                host.write(&format!("sys/fs/cgroup/{group}/cpu.uclamp.{clamp}"), value);
            }
        }
        for group in ["vcpu0", "vcpu1", "emulator"] {
            for (clamp, value) in [("min", "0.00"), ("max", "max")] {
                let file = format!("sys/fs/cgroup/{SCOPE}/{group}/cpu.uclamp.{clamp}");
                host.write(&file, value);
            }
        }
        host
    }

    #[test]
    fn groups_that_libvirt_makes_later_are_found() {
        let (host, threads) = (host(), [8, 9].map(Tid::new));
        let look = || SeenGroups::look(&host.root(), 7, &threads);
        place(&host, ["/emulator", "/emulator"]);
        let by_thread = look().clamped_by(&ActuatorKind::Thread).unwrap();
        let changed = |seen: &SeenGroups| seen.have_changed(&host.root());
        let waits = |tid| is_among_others(&host.root(), 7, Tid::new(tid).unwrap());
        assert!(!changed(&by_thread) && waits(8) && waits(9));
        place(&host, ["/vcpu0", "/emulator"]);
        assert!(!changed(&by_thread), "not all of them yet");
        assert!(!waits(8) && waits(9));
        place(&host, ["/vcpu0", "/vcpu1"]);
        assert!(changed(&by_thread) && !waits(9));
        let groups = AdoptedGroups::find(&host.root(), 7, &threads).unwrap();
        let adopted = ActuatorKind::Adopted(groups.unwrap());
        let adopted = look().clamped_by(&adopted).unwrap();
        assert!(!changed(&adopted));
        place(&host, ["/vcpu0", "/emulator"]);
        assert!(changed(&adopted), "a vCPU was moved");
        host.remove("proc/7");
        assert!(!changed(&adopted), "the VM has ended");
    }
}
