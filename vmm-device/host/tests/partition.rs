// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of groups in a real-time partition, and of floors, on a directory that stands for `/`.
//! Threads go to their groups. No request undercuts a floor. Removal takes these groups and nothing
//! else.
use std::fs;
use std::path::PathBuf;

use tempfile::TempDir;
use vcpufreq_device::*;
use vcpufreq_host::fakes::DirTree;
use vcpufreq_host::*;

const RT: DomainId = DomainId(1);
const OTHER: DomainId = DomainId(0);
const PID: u32 = 7;

struct Host {
    dir: TempDir,
    tree: DirTree,
}

impl Host {
    /// A partition as `vcpufreq rt apply` makes it.
    fn new() -> Self {
        let host = Self {
            dir: tempfile::tempdir().expect("a directory"),
            tree: DirTree::default(),
        };
        for path in ["", "origin", "top", "top/rt", "top/rest"] {
            host.tree.make(&host.path(path)).expect("a group");
        }
        host
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join("cgroup").join(path)
    }

    fn text(&self, path: &str) -> String {
        fs::read_to_string(self.path(path)).expect("a file")
    }

    fn groups(&self) -> PartitionGroups {
        PartitionGroups {
            top: self.path("top"),
            origin: self.path("origin"),
            pid: PID,
            process: PID,
            rt: vec![RT],
        }
    }

    fn made(&self) -> PartitionGroups {
        let groups = self.groups();
        groups.create(&self.tree, &[OTHER, RT, RT]).expect("groups");
        groups
    }

    fn actuator(&self, groups: &PartitionGroups) -> HostActuator {
        let kind = ActuatorKind::Partition(groups.clone());
        HostActuator::build(&kind, &self.tree, &[OTHER, RT]).expect("an actuator")
    }

    fn children(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(path))
            .expect("a directory")
            .flatten();
        let dirs = entries.filter(|entry| entry.path().is_dir());
        let mut names: Vec<_> = dirs
            .map(|entry| entry.file_name().into_string().expect("UTF-8"))
            .collect();
        names.sort();
        names
    }
}

fn util(value: u16) -> Util {
    Util::new(value).expect("at most 1024")
}

#[test]
fn a_limit_keeps_the_process_out_of_a_partition() {
    let host = Host::new();
    let root = HostRoot::at(host.dir.path());
    let procfs = host.dir.path().join("proc/self");
    fs::create_dir_all(&procfs).expect("a directory");
    let mounts = "30 22 0:27 / /cgroup rw - cgroup2 cgroup2 rw\n";
    fs::write(procfs.join("mountinfo"), mounts).expect("a file");
    fs::write(procfs.join("cgroup"), "0::/origin\n").expect("a file");
    let here = || PartitionGroups::here(&root, host.path("top"), PID, vec![RT]);
    assert_eq!(here().expect("groups").origin, host.path("origin"));
    fs::write(host.path("origin/pids.max"), "64\n").expect("a file");
    let error = here().expect_err("a limit").to_string();
    assert!(error.contains("origin has pids.max 64"), "{error}");
}

#[test]
fn real_time_domains_are_on_the_isolated_side() {
    let host = Host::new();
    host.made();
    assert_eq!(host.children("top/rt"), ["vcpufreq.7.domain1"]);
    assert_eq!(
        host.children("top/rest"),
        ["vcpufreq.7.domain0", "vcpufreq.7.rest"]
    );
    assert_eq!(
        host.text("top/rt/vcpufreq.7.domain1/cgroup.type"),
        "threaded"
    );
    assert_eq!(host.text("top/rest/vcpufreq.7.rest/cgroup.procs"), "7");
}

#[test]
fn removing_takes_this_vms_groups_and_no_others() {
    let host = Host::new();
    let groups = host.made();
    for other in ["top/rt/vcpufreq.70.domain1", "top/rest/mine"] {
        host.tree.make(&host.path(other)).expect("a group");
    }
    fs::write(host.path("top/cgroup.procs"), "7\n70\n").expect("a file");
    groups.remove(&host.tree).expect("removed");
    assert_eq!(host.children("top/rt"), ["vcpufreq.70.domain1"]);
    assert_eq!(host.children("top/rest"), ["mine"]);
    assert_eq!(host.text("origin/cgroup.procs"), "7");
    groups
        .remove(&host.tree)
        .expect("again, with nothing to do");
}

/// A server makes them for a VM of another process, which may have started others.
#[test]
fn another_process_goes_in_and_home_with_what_it_has_started() {
    let host = Host::new();
    let groups = PartitionGroups {
        process: 8,
        ..host.groups()
    };
    groups.create(&host.tree, &[RT]).expect("groups");
    let rest = "top/rest/vcpufreq.7.rest";
    assert_eq!(host.text(&format!("{rest}/cgroup.procs")), "8");
    fs::write(host.path("top/cgroup.procs"), "8\n").expect("a file");
    groups.remove(&host.tree).expect("removed");
    assert_eq!(host.text("origin/cgroup.procs"), "8");
    assert_eq!(host.children("top/rest"), [""; 0]);
    groups.create(&host.tree, &[RT]).expect("groups");
    fs::write(host.path("top/cgroup.procs"), "9\n").expect("a file");
    fs::write(host.path(&format!("{rest}/cgroup.threads")), "9\n").expect("a file");
    groups.remove(&host.tree).expect("removed");
    assert_eq!(host.text("origin/cgroup.procs"), "9");
}

#[test]
fn what_a_vcpus_thread_has_started_leaves_its_group() {
    let host = Host::new();
    let groups = host.made();
    let vcpu = Tid::current();
    let other = vcpu.get() + 1;
    let members = groups.domain(RT).join("cgroup.threads");
    let rest = groups.rest().join("cgroup.threads");
    fs::write(&members, format!("{vcpu}\n")).expect("a file");
    fs::write(&rest, "").expect("a file");
    groups.keep_others_out(&[vcpu]);
    assert_eq!(fs::read_to_string(&rest).expect("a file"), "");
    fs::write(&members, format!("{vcpu}\n{other}\n")).expect("a file");
    groups.keep_others_out(&[vcpu]);
    assert_eq!(
        fs::read_to_string(&rest).expect("a file"),
        other.to_string()
    );
}

#[test]
fn a_partition_that_is_gone_is_no_error() {
    let host = Host::new();
    let groups = host.made();
    fs::remove_dir_all(host.path("top")).expect("removed");
    groups.remove(&host.tree).expect("nothing to do");
}

#[test]
fn a_partition_with_threads_is_taken() {
    let host = Host::new();
    fs::write(host.path("top/rt/cgroup.events"), "populated 0\n").expect("a file");
    assert!(!PartitionGroups::is_taken(&host.path("top")));
    fs::write(host.path("top/rt/cgroup.events"), "populated 1\nfrozen 0\n").expect("a file");
    assert!(PartitionGroups::is_taken(&host.path("top")));
}

/// One that asks for another domain would exit with that vCPU's run queue locked.
#[test]
fn real_time_guests_ask_by_their_own_vcpus() {
    let host = Host::new();
    let groups = host.made();
    let within = host.actuator(&groups);
    assert!(!within.serves_any_vcpu());
    let others = HostActuator::build(&ActuatorKind::Nothing, &host.tree, &[OTHER, RT]);
    assert!(others.expect("an actuator").serves_any_vcpu());
}

#[test]
fn no_request_undercuts_a_floor() {
    let host = Host::new();
    let groups = host.made();
    let actuator = host.actuator(&groups);
    let actuator = actuator.with_floors(vec![Util::ZERO, util(512)]);
    let group = groups.domain(RT);
    fs::write(group.join("cgroup.threads"), "").expect("a file");
    // Without uclamp, taking the thread's own clamp away fails, but only that.
    let registered = actuator.register_thread(VcpuId(1), Tid::current());
    assert!(registered.is_ok() || uclamp_available().is_err());
    let written = |name: &str| {
        let text = fs::read_to_string(group.join(name)).expect("a file");
        text.trim().trim_start_matches('0').to_owned()
    };
    if registered.is_ok() {
        assert_eq!(written("cpu.uclamp.min"), "50.00", "from the beginning");
    }
    for (min, max, floor, ceiling) in [
        (100, 1024, "50.00", ""),
        (768, 1024, "75.00", ""),
        (0, 1024, "50.00", ""),
        (100, 100, "50.00", "50.00"),
        (768, 768, "75.00", "75.00"),
    ] {
        let clamp = Clamp {
            min: util(min),
            max: util(max),
        };
        actuator.apply(RT, clamp).expect("applied");
        assert_eq!(written("cpu.uclamp.min"), floor, "{min}..{max}");
        if !ceiling.is_empty() {
            assert_eq!(written("cpu.uclamp.max"), ceiling, "{min}..{max}");
        }
    }
}
