// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The cgroups that a VMM's manager has made, one for each vCPU: libvirt's
//! `machine-qemu….scope/libvirt/vcpuN`. A server clamps these in the place of groups of its own.
//!
//! A group's effective minimum is capped by those above it, whose `cpu.uclamp.min` is 0 unless it is
//! raised: [`RaisedGroups`].

#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use vcpufreq_device::VcpuId;

use super::HostRoot;
use super::cgroup_error::CgroupError;
use super::cgroup_fs::{group_of, mount_point, read, write};
use super::raised_groups::RaisedGroups;
use super::sys::{Tid, effective_user};

const MIN: &str = "cpu.uclamp.min";
const MAX: &str = "cpu.uclamp.max";

/// Groups of a VM that are there, and what they hold.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct AdoptedGroups {
    /// The group of each vCPU, by number; none of one that was unplugged.
    vcpus: Vec<Option<GroupBefore>>,
}

/// A group's clamps as they were, in the kernel's form.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
struct GroupBefore {
    group: PathBuf,
    min: String,
    max: String,
}

impl AdoptedGroups {
    /// Those of the threads of process `pid` that run its vCPUs, as far as these have one; `None` if
    /// they haven't a group each, or one is another user's: that user could raise other groups
    /// beside it.
    ///
    /// # Errors
    /// [`CgroupError::NotMounted`] or [`CgroupError::OutsideNamespace`] when a thread's group is
    /// unknown, [`CgroupError::File`] when a file of it can't be read; as [`Self::capped`].
    pub fn find(
        root: &HostRoot,
        pid: u32,
        threads: &[Option<Tid>],
    ) -> Result<Option<Self>, CgroupError> {
        let mount = mount_point(root)?;
        let mut vcpus = Vec::new();
        for tid in threads {
            let Some(tid) = tid else {
                vcpus.push(None);
                continue;
            };
            let group = group_of(&root.path(format!("proc/{pid}/task/{tid}")), &mount)?;
            if group == mount || members(&group)? != [tid.to_string()] || !is_own(&group) {
                return Ok(None);
            }
            vcpus.push(Some(GroupBefore::read(&group)?));
        }
        let found = Self { vcpus };
        found.capped().map(|_| Some(found))
    }

    /// Those above that are to be raised, before the vCPUs' are clamped.
    ///
    /// # Errors
    /// As [`RaisedGroups::above`].
    pub fn capped(&self) -> Result<RaisedGroups, CgroupError> {
        RaisedGroups::above(self.of_vcpus())
    }

    /// All of them.
    pub fn of_vcpus(&self) -> impl Iterator<Item = &Path> {
        self.vcpus.iter().flatten().map(|before| &*before.group)
    }

    /// The one of `vcpu`.
    pub(super) fn of_vcpu(&self, vcpu: VcpuId) -> Option<&Path> {
        let before = self.vcpus.get(vcpu.index())?.as_ref();
        before.map(|before| &*before.group)
    }

    /// Puts their clamps back. What has gone with its VM needs nothing.
    ///
    /// # Errors
    /// [`CgroupError::File`] with the first clamp that can't be written (`EACCES`); the rest is put
    /// back all the same.
    pub fn put_back(&self) -> Result<(), CgroupError> {
        let all = self.vcpus.iter().flatten();
        all.map(GroupBefore::put_back).fold(Ok(()), Result::and)
    }
}

impl GroupBefore {
    fn read(group: &Path) -> Result<Self, CgroupError> {
        let text = |file| Ok(read(&group.join(file))?.trim().to_owned());
        Ok(Self {
            group: group.to_path_buf(),
            min: text(MIN)?,
            max: text(MAX)?,
        })
    }

    fn put_back(&self) -> Result<(), CgroupError> {
        let put = |file, text| match write(&self.group.join(file), text) {
            Err(_) if !self.group.exists() => Ok(()),
            put => put,
        };
        put(MIN, &self.min).and(put(MAX, &self.max))
    }
}

/// Whether the group is this user's.
fn is_own(group: &Path) -> bool {
    fs::metadata(group).is_ok_and(|found| found.uid() == effective_user())
}

fn members(group: &Path) -> Result<Vec<String>, CgroupError> {
    let threads = read(&group.join("cgroup.threads"))?;
    Ok(threads.split_whitespace().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    //! Groups that a manager made for each vCPU are clamped and put back, and no other group is.
    use super::*;
    use crate::CgroupActuator;
    use crate::fakes::FakeHost;
    use vcpufreq_device::{Actuator, Clamp, DomainId, Util};

    const MOUNT: &str = "sys/fs/cgroup";
    const SCOPE: &str = "machine.slice/machine-qemu.scope";

    /// A VM of libvirt's with threads 8 and 9.
    fn host() -> FakeHost {
        let host = FakeHost::empty();
        let mounts = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        host.write("proc/self/mountinfo", mounts);
        for (group, threads) in [
            ("machine.slice", ""),
            (SCOPE, ""),
            (&format!("{SCOPE}/libvirt"), ""),
            (&format!("{SCOPE}/libvirt/vcpu0"), "8\n"),
            (&format!("{SCOPE}/libvirt/vcpu1"), "9\n"),
        ] {
            host.write(&format!("{MOUNT}/{group}/cgroup.threads"), threads);
            host.write(&format!("{MOUNT}/{group}/{MIN}"), "0.00\n");
            host.write(&format!("{MOUNT}/{group}/{MAX}"), "max\n");
        }
        host.write(&format!("{MOUNT}/{SCOPE}/{MIN}"), "max\n");
        for (vcpu, tid) in [(0, 8), (1, 9)] {
            let line = format!("0::/{SCOPE}/libvirt/vcpu{vcpu}\n");
            host.write(&format!("proc/7/task/{tid}/cgroup"), line);
        }
        host
    }

    fn find(host: &FakeHost) -> Result<Option<AdoptedGroups>, CgroupError> {
        AdoptedGroups::find(&host.root(), 7, &[8, 9].map(Tid::new))
    }

    fn min(host: &FakeHost, group: &str) -> String {
        let text = host.root().text(format!("{MOUNT}/{group}/{MIN}"));
        text.unwrap()
    }

    #[test]
    fn a_domain_of_two_vcpus_is_clamped_in_both_groups_and_put_back() {
        let host = host();
        let groups = find(&host).unwrap().unwrap();
        let raised = groups.capped().unwrap();
        raised.raise().unwrap();
        let domain = DomainId(0);
        let actuator = CgroupActuator::adopt(&groups, &[domain, domain]).unwrap();
        // A kernel without uclamp refuses the last step, the thread's own clamp.
        let _ = actuator.register_thread(VcpuId(0), Tid::current());
        let clamp = Clamp {
            min: Util::new(512).unwrap(),
            max: Util::MAX,
        };
        actuator.apply(domain, clamp).unwrap();
        for (group, value) in [
            ("machine.slice", "max"),
            (&format!("{SCOPE}/libvirt"), "max"),
            (&format!("{SCOPE}/libvirt/vcpu0"), "50.00"),
            (&format!("{SCOPE}/libvirt/vcpu1"), "50.00"),
        ] {
            assert!(min(&host, group).contains(value), "{group}");
        }
        groups.put_back().unwrap();
        raised.put_back(&[]).unwrap();
        assert_eq!(find(&host).unwrap(), Some(groups));
        assert_eq!(min(&host, "machine.slice"), "0.00");
    }

    #[test]
    fn a_vcpu_that_was_unplugged_has_no_group() {
        let host = host();
        let threads = [None, Tid::new(9)];
        let groups = AdoptedGroups::find(&host.root(), 7, &threads);
        let groups = groups.unwrap().unwrap();
        groups.capped().unwrap().raise().unwrap();
        let domains = [DomainId(0), DomainId(1)];
        let actuator = CgroupActuator::adopt(&groups, &domains).unwrap();
        // As above.
        let _ = actuator.register_thread(VcpuId(1), Tid::current());
        let clamp = |util| Clamp {
            min: Util::new(util).unwrap(),
            max: Util::MAX,
        };
        assert!(actuator.apply(DomainId(0), clamp(1024)).is_err());
        actuator.apply(DomainId(1), clamp(512)).unwrap();
        let of = |vcpu| min(&host, &format!("{SCOPE}/libvirt/vcpu{vcpu}"));
        assert_eq!(of(0), "0.00");
        assert!(of(1).contains("50.00"));
        groups.put_back().unwrap();
        assert!(!of(1).contains("50.00"));
    }

    #[test]
    fn threads_without_a_group_each_have_none() {
        let host = host();
        host.write(
            &format!("{MOUNT}/{SCOPE}/libvirt/vcpu1/cgroup.threads"),
            "9\n10\n",
        );
        assert_eq!(find(&host).unwrap(), None);
    }

    #[test]
    fn another_users_groups_are_left_alone() {
        let host = host();
        let group = host.root().path(format!("{MOUNT}/{SCOPE}/libvirt/vcpu1"));
        if std::os::unix::fs::chown(group, Some(65534), None).is_err() {
            println!("SKIP: another user's group: takes root");
            return;
        }
        assert_eq!(find(&host).unwrap(), None);
    }

    #[test]
    fn the_last_vm_below_a_group_puts_back_what_was_there_before_the_first() {
        let host = host();
        let groups = find(&host).unwrap().unwrap();
        let first = groups.capped().unwrap();
        first.raise().unwrap();
        // Of another VM in the same slice.
        let mount = host.root().path(MOUNT);
        let other = mount.join("machine.slice/other.scope");
        host.write(&format!("{MOUNT}/machine.slice/other.scope/{MIN}"), "max");
        let mut second = RaisedGroups::above([&*other]).unwrap();
        assert_eq!(second, RaisedGroups::default());
        second.join(&first, [&*other]);
        assert!(second.paths().eq([mount.join("machine.slice")]));
        first.put_back(std::slice::from_ref(&second)).unwrap();
        let now = || ["machine.slice".to_owned(), format!("{SCOPE}/libvirt")];
        assert_eq!(now().map(|group| min(&host, &group)), ["max", "0.00"]);
        second.put_back(&[]).unwrap();
        assert_eq!(min(&host, "machine.slice"), "0.00");
    }

    #[test]
    fn a_group_with_threads_of_its_own_is_not_raised() {
        let host = host();
        host.write(&format!("{MOUNT}/machine.slice/cgroup.threads"), "4\n");
        let error = find(&host).unwrap_err();
        assert!(matches!(error, CgroupError::Capped { .. }), "{error}");
        assert_eq!(min(&host, &format!("{SCOPE}/libvirt")), "0.00");
    }
}
