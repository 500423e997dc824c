// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of the cgroup actuator, on a directory that stands for `/`: the place of a VM's groups,
//! what is made and written, the order, and the removal.
use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process;

use tempfile::TempDir;
use vcpufreq_device::fakes::FixedSource;
use vcpufreq_device::*;
use vcpufreq_host::fakes::DirTree;
use vcpufreq_host::*;

struct Host {
    dir: TempDir,
    tree: DirTree,
}

const MOUNTS: &str = "\
22 1 0:20 / /proc rw - proc proc rw
30 22 0:27 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate
";

impl Host {
    /// A root group with the cpu controller, and this process in `/unit`.
    fn new() -> Self {
        let host = Self {
            dir: tempfile::tempdir().expect("a directory"),
            tree: DirTree::default(),
        };
        host.write("proc/self/mountinfo", MOUNTS);
        host.write("proc/self/cgroup", "0::/unit\n");
        fs::create_dir_all(host.path("sys/fs")).expect("a directory");
        host.group("");
        // As the kernel's.
        fs::remove_file(host.cg("cgroup.type")).expect("a file");
        host.group("unit");
        host
    }

    /// This process in `/vms.slice/vm.service`, which systemd has handed over to it; `None` where
    /// the file system of the directory has no extended attributes.
    fn delegated() -> Option<Self> {
        let host = Self::new();
        host.set("cgroup.subtree_control", "cpu\n");
        for group in ["vms.slice", "vms.slice/vm.service"] {
            host.group(group);
        }
        host.set("vms.slice/cpu.uclamp.min", "max\n");
        host.set("vms.slice/cgroup.subtree_control", "cpu\n");
        let own = format!("{}\n", process::id());
        host.set("vms.slice/vm.service/cgroup.procs", &own);
        host.write("proc/self/cgroup", "0::/vms.slice/vm.service\n");
        host.mark("vms.slice/vm.service").then_some(host)
    }

    /// As systemd marks a group with Delegate=.
    #[expect(unsafe_code, reason = "setxattr is C")]
    fn mark(&self, path: &str) -> bool {
        let path = CString::new(self.cg(path).as_os_str().as_bytes()).expect("a path");
        // SAFETY: both strings end with a zero, and the value is one byte long.
        let ret = unsafe {
            libc::setxattr(
                path.as_ptr(),
                c"user.delegate".as_ptr(),
                c"1".as_ptr().cast(),
                1,
                0,
            )
        };
        if ret != 0 {
            println!(
                "SKIP: no extended attributes in {}",
                self.dir.path().display()
            );
        }
        ret == 0
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn root(&self) -> HostRoot {
        HostRoot::at(self.dir.path())
    }

    /// A path in the cgroup tree.
    fn cg(&self, path: &str) -> PathBuf {
        self.path("sys/fs/cgroup").join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs::write(path, text).expect("a file");
    }

    fn group(&self, path: &str) {
        self.tree.make(&self.cg(path)).expect("a group");
    }

    fn set(&self, path: &str, text: &str) {
        fs::write(self.cg(path), text).expect("a control file");
    }

    fn get(&self, path: &str) -> String {
        let text = fs::read_to_string(self.cg(path)).expect("a control file");
        text.trim().to_owned()
    }

    /// In the root, which is named.
    fn place(&self) -> Placement {
        self.named("/sys/fs/cgroup").expect("a place")
    }

    fn error(&self) -> CgroupError {
        self.named("/sys/fs/cgroup").expect_err("no place")
    }

    fn named(&self, parent: &str) -> Result<Placement, CgroupError> {
        Placement::find(&self.root(), Some(Path::new(parent)))
    }

    /// By itself.
    fn found(&self) -> Result<Placement, CgroupError> {
        Placement::find(&self.root(), None)
    }

    /// Domains 7, 7 and 3, with a thread for the vCPUs 0 and 2.
    fn actuator(&self) -> CgroupActuator {
        let domains = [7, 7, 3].map(DomainId);
        let made = CgroupActuator::create(&self.tree, &self.place(), &domains);
        let actuator = made.expect("groups");
        for vcpu in [0, 2] {
            register(&actuator, vcpu);
        }
        actuator
    }
}

fn register(actuator: &CgroupActuator, vcpu: u16) {
    // Without uclamp, taking the thread's own clamp away fails, but only that.
    let answer = actuator.register_thread(VcpuId(vcpu), Tid::current());
    assert!(answer.is_ok() || uclamp_available().is_err(), "{answer:?}");
}

fn own_group() -> String {
    format!("vcpufreq.{}", process::id())
}

fn clamp(min: u16, max: u16) -> Clamp {
    let util = |value| Util::new(value).expect("on the scale");
    Clamp {
        min: util(min),
        max: util(max),
    }
}

fn no_groups_left(host: &Host) -> bool {
    let entries = fs::read_dir(host.cg("")).expect("the root group");
    let mut names = entries.map(|entry| entry.expect("an entry").file_name());
    !names.any(|name| name.to_string_lossy().starts_with(GROUP_PREFIX))
}

#[test]
fn the_place_is_in_the_processes_own_group_if_that_is_delegated() {
    let Some(host) = Host::delegated() else {
        return;
    };
    let place = host.found().unwrap();
    let own = host.cg("vms.slice/vm.service");
    assert_eq!((&place.parent, &place.origin), (&own, &own));
    assert!(place.enables_cpu);
    // Another process in it would be in the way. A limit keeps this one out of the group above,
    // which is its user's where that is not root.
    host.set("vms.slice/vm.service/memory.max", "4096\n");
    host.set("vms.slice/vm.service/cgroup.procs", "1\n");
    let error = host.found().unwrap_err();
    assert!(matches!(error, CgroupError::InternalProcesses { .. }));
}

#[test]
fn a_delegated_group_is_emptied_and_its_cap_lifted_until_the_end() {
    let Some(host) = Host::delegated() else {
        return;
    };
    let unit = "vms.slice/vm.service";
    let place = host.found().unwrap();
    // The guardian, which lives until it is killed, or its input ends with this test.
    let mut child = process::Command::new("cat")
        .stdin(process::Stdio::piped())
        .spawn()
        .unwrap();
    let both = format!("{}\n{}\n", process::id(), child.id());
    host.set(&format!("{unit}/cgroup.procs"), &both);
    let made = CgroupActuator::create(&host.tree, &place, &[DomainId(0)]);
    // The fake keeps the last one that was moved.
    let rest = host.get(&format!("{unit}/{}/rest/cgroup.procs", own_group()));
    assert_eq!(rest, child.id().to_string());
    child.kill().and_then(|()| child.wait()).unwrap();
    let record = made.unwrap().record().unwrap().clone();
    assert_eq!(host.get(&format!("{unit}/cgroup.subtree_control")), "+cpu");
    assert_eq!(host.get(&format!("{unit}/cpu.uclamp.min")), "max");
    remove(&host.tree, &record).unwrap();
    assert_eq!(host.get(&format!("{unit}/cgroup.subtree_control")), "-cpu");
    assert_eq!(host.get(&format!("{unit}/cpu.uclamp.min")), "0");
    assert!(!record.group.exists());
}

#[test]
fn a_cap_that_an_administrator_has_lifted_stays_lifted() {
    let Some(host) = Host::delegated() else {
        return;
    };
    let (unit, min) = (
        "vms.slice/vm.service",
        "vms.slice/vm.service/cpu.uclamp.min",
    );
    host.set(min, "max\n");
    let own = format!("{}\n", process::id());
    host.set(&format!("{unit}/cgroup.procs"), &own);
    let place = host.found().unwrap();
    let made = CgroupActuator::create(&host.tree, &place, &[DomainId(0)]).unwrap();
    remove(&host.tree, made.record().unwrap()).unwrap();
    assert_eq!(host.get(min).trim(), "max");
}

#[test]
fn a_namespaces_root_is_not_the_hosts() {
    let host = Host::new();
    host.write("proc/self/cgroup", "0::/\n");
    assert_eq!(host.found().unwrap().parent, host.cg(""));
    // The host's root has no type; a group that a namespace shows in its place has one.
    host.set("cgroup.type", "domain\n");
    let error = host.found().unwrap_err();
    assert!(matches!(error, CgroupError::NotDelegated { .. }), "{error}");
}

#[test]
fn a_place_beside_the_own_group_is_taken_if_it_is_delegated_and_nothing_limits() {
    let Some(host) = Host::delegated() else {
        return;
    };
    // As with DelegateSubgroup=.
    let (unit, own) = ("vms.slice/vm.service", "vms.slice/vm.service/vmm");
    host.group(own);
    host.set(&format!("{unit}/cgroup.procs"), "");
    host.set(&format!("{unit}/cpu.uclamp.min"), "max\n");
    host.write("proc/self/cgroup", &format!("0::/{own}\n"));
    let place = host.found().unwrap();
    assert_eq!((place.parent, place.origin), (host.cg(unit), host.cg(own)));
    host.set(&format!("{own}/memory.max"), "4096\n");
    let error = host.found().unwrap_err().to_string();
    assert!(error.contains("vmm has memory.max 4096"), "{error}");
}

#[test]
fn what_is_not_delegated_is_left_alone() {
    let host = Host::new();
    for group in ["user", "user/app", "user/app/shell"] {
        host.group(group);
        host.set(&format!("{group}/cpu.uclamp.min"), "max\n");
    }
    host.write("proc/self/cgroup", "0::/user/app/shell\n");
    // Below a manager's mark, the owner of a group doesn't matter.
    if !host.mark("user") {
        return;
    }
    let error = host.found().unwrap_err();
    assert!(matches!(error, CgroupError::NotDelegated { .. }), "{error}");
    for word in ["user/app/shell", "Delegate=cpu", "--cgroup-parent"] {
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn a_named_place_ends_no_limit() {
    let host = Host::new();
    host.group("unit/inner");
    host.write("proc/self/cgroup", "0::/unit/inner\n");
    assert_eq!(host.place().parent, host.cg(""));
    for (file, text) in [
        ("unit/memory.max", "1073741824\n"),
        ("unit/inner/cpu.max", "50000 100000\n"),
        ("unit/pids.max", "64\n"),
        ("unit/cpuset.cpus", "0-1\n"),
    ] {
        host.set(file, text);
        let error = host.error();
        assert!(matches!(error, CgroupError::LeavesLimit { .. }), "{file}");
        let (group, name) = file.rsplit_once('/').unwrap();
        let said = format!("{group} has {name} {}", text.trim());
        assert!(error.to_string().contains(&said), "{error}");
        fs::remove_file(host.cg(file)).unwrap();
    }
    // A limit above the named group stays in force.
    host.set("unit/memory.max", "4096\n");
    host.set("unit/cpu.uclamp.min", "max\n");
    let place = host.named("/sys/fs/cgroup/unit").unwrap();
    assert_eq!(place.parent, host.cg("unit"));
    for wrong in ["/proc", "/sys/fs/cgroup/none", "unit"] {
        let error = host.named(wrong).unwrap_err();
        assert!(matches!(error, CgroupError::NoGroup { .. }), "{error}");
    }
}

#[test]
fn a_process_in_the_root_group_finds_its_place_there() {
    let host = Host::new();
    host.write("proc/self/cgroup", "0::/\n");
    // The root may have processes.
    host.set("cgroup.procs", "1\n2\n");
    let place = host.found().unwrap();
    assert_eq!((&place.parent, &place.origin), (&host.cg(""), &host.cg("")));
}

#[test]
fn a_place_below_a_capped_group_is_not_used() {
    let host = Host::new();
    host.group("user");
    host.group("user/me");
    host.write("proc/self/cgroup", "0::/user/me\n");
    let error = host.named("/sys/fs/cgroup/user").unwrap_err();
    assert!(
        matches!(&error, CgroupError::Capped { value, .. } if value == "0.00"),
        "{error}"
    );
    assert!(
        error.to_string().contains("user/cpu.uclamp.min is 0.00"),
        "{error}"
    );
}

#[test]
fn what_makes_groups_impossible_is_said() {
    type Spoil = fn(&Host);
    let rows: [(&str, Spoil, &str); 6] = [
        (
            "no cgroup2",
            |h| h.write("proc/self/mountinfo", "22 1 0:20 / /proc rw - proc p rw\n"),
            "not mounted",
        ),
        (
            "only v1",
            |h| h.write("proc/self/cgroup", "1:cpu:/\n"),
            "not mounted",
        ),
        (
            "another namespace",
            |h| h.write("proc/self/cgroup", "0::/../../x\n"),
            "namespace",
        ),
        (
            "cpu controller in v1",
            |h| h.set("cgroup.controllers", "pids\n"),
            "no cpu controller",
        ),
        (
            "no procfs",
            |h| fs::remove_dir_all(h.path("proc")).expect("procfs"),
            "mountinfo",
        ),
        (
            "read-only tree",
            |h| fs::remove_file(h.cg("cgroup.subtree_control")).expect("a file"),
            "subtree_control",
        ),
    ];
    for (name, spoil, message) in rows {
        let host = Host::new();
        spoil(&host);
        let error = host.error().to_string();
        assert!(error.contains(message), "{name}: {error}");
        assert!(!error.contains('\n'), "{name}: one line");
    }
}

#[test]
fn a_parent_with_processes_or_of_another_type_is_not_used() {
    let host = Host::new();
    host.group("user");
    host.group("user/me");
    host.set("user/cpu.uclamp.min", "100.00\n");
    host.write("proc/self/cgroup", "0::/user/me\n");
    host.set("user/cgroup.procs", "99\n");
    let error = || host.named("/sys/fs/cgroup/user").unwrap_err();
    assert!(matches!(error(), CgroupError::InternalProcesses { .. }));
    host.set("user/cgroup.procs", "");
    host.set("user/cgroup.type", "domain threaded\n");
    assert!(matches!(error(), CgroupError::NotADomain { .. }));
    host.set("user/cgroup.type", "domain\n");
    fs::remove_file(host.cg("user/cpu.uclamp.min")).unwrap();
    assert!(matches!(error(), CgroupError::NoUclamp { .. }));
}

#[test]
fn blanks_in_the_mount_point_are_understood() {
    let host = Host::new();
    fs::rename(host.path("sys/fs/cgroup"), host.path("sys/fs/c g")).unwrap();
    host.write(
        "proc/self/mountinfo",
        "30 22 0:27 / /sys/fs/c\\040g rw - cgroup2 none rw\n",
    );
    let place = host.named("/sys/fs/c g").unwrap();
    assert_eq!(place.parent, host.path("sys/fs/c g"));
}

#[test]
fn groups_are_made_as_documented() {
    let host = Host::new();
    let actuator = host.actuator();
    let group = own_group();
    assert_eq!(actuator.record().unwrap().group, host.cg(&group));
    assert_eq!(host.get("cgroup.subtree_control"), "+cpu");
    assert_eq!(host.get(&format!("{group}/cgroup.subtree_control")), "+cpu");
    assert_eq!(host.get(&format!("{group}/cpu.uclamp.min")), "max");
    for child in ["rest", "domain3", "domain7"] {
        assert_eq!(
            host.get(&format!("{group}/{child}/cgroup.type")),
            "threaded"
        );
        assert_eq!(host.get(&format!("{group}/{child}/cgroup.pressure")), "0");
    }
    assert_eq!(
        host.get(&format!("{group}/cgroup.pressure")),
        "1",
        "the VM's"
    );
    let pid = process::id().to_string();
    assert_eq!(host.get(&format!("{group}/rest/cgroup.procs")), pid);
    assert_eq!(
        host.get(&format!("{group}/rest/cpu.uclamp.min")),
        "0.00",
        "not clamped"
    );
    let tid = Tid::current().to_string();
    assert_eq!(host.get(&format!("{group}/domain3/cgroup.threads")), tid);
    assert_eq!(host.get(&format!("{group}/domain7/cgroup.threads")), tid);
}

/// A kernel without PSI, or before 6.1.
struct NoPressure<'a>(&'a DirTree);

impl CgroupTree for NoPressure<'_> {
    fn make(&self, dir: &Path) -> std::io::Result<()> {
        self.0.make(dir)?;
        fs::remove_file(dir.join("cgroup.pressure"))
    }

    fn remove(&self, dir: &Path) -> std::io::Result<()> {
        self.0.remove(dir)
    }
}

#[test]
fn a_host_without_pressure_has_groups_all_the_same() {
    let host = Host::new();
    let domain = DomainId(0);
    CgroupActuator::create(&NoPressure(&host.tree), &host.place(), &[domain]).unwrap();
    let pressure = format!("{}/domain0/cgroup.pressure", own_group());
    assert!(!host.cg(&pressure).exists());
}

#[test]
fn a_guardian_knows_the_groups_before_they_are_made() {
    let host = Host::new();
    let record = host.place().record(process::id());
    assert_eq!(host.actuator().record(), Some(&record));
}

#[test]
fn a_demand_is_written_to_its_domains_group_only() {
    let host = Host::new();
    let actuator = host.actuator();
    let group = own_group();
    actuator.apply(DomainId(7), clamp(329, 329)).unwrap();
    assert_eq!(
        host.get(&format!("{group}/domain7/cpu.uclamp.min")),
        "032.13"
    );
    assert_eq!(
        host.get(&format!("{group}/domain7/cpu.uclamp.max")),
        "032.13"
    );
    assert_eq!(host.get(&format!("{group}/domain3/cpu.uclamp.min")), "0.00");
    let domain = DomainId(8);
    let error = actuator.apply(domain, clamp(1, 1));
    assert_eq!(error, Err(ActuateError::NoThread { domain }));
}

#[test]
fn a_floor_writes_the_minimum_alone() {
    let host = Host::new();
    let actuator = host.actuator();
    actuator.apply(DomainId(3), clamp(512, 1024)).unwrap();
    let group = own_group();
    assert_eq!(
        host.get(&format!("{group}/domain3/cpu.uclamp.min")),
        "050.00"
    );
    assert_eq!(
        host.get(&format!("{group}/domain3/cpu.uclamp.max")),
        "max",
        "untouched"
    );
}

/// A minimum that can't be written shows whether the maximum was written before it.
#[test]
fn the_maximum_goes_first_on_the_way_up_and_last_on_the_way_down() {
    let host = Host::new();
    let place = host.place();
    let domains = [DomainId(0)];
    let broken = BrokenMinimum(&host.tree);
    let actuator = CgroupActuator::create(&broken, &place, &domains).unwrap();
    register(&actuator, 0);
    let max = format!("{}/domain0/cpu.uclamp.max", own_group());

    let refused = actuator.apply(DomainId(0), clamp(300, 300));
    assert!(
        matches!(refused, Err(ActuateError::Refused { errno: 28, .. })),
        "{refused:?}"
    );
    assert_eq!(
        host.get(&max),
        "max",
        "down from 1024: the minimum first, which failed"
    );

    // A clamp with the same minimum as is in force gets the maximum down all the same.
    actuator.apply(DomainId(0), clamp(0, 300)).unwrap();
    assert_eq!(host.get(&max), "029.30");
    let refused = actuator.apply(DomainId(0), clamp(500, 500));
    assert!(refused.is_err());
    assert_eq!(host.get(&max), "048.83", "up: the maximum first");
}

/// Writes to the minimum of a domain find the disk full.
struct BrokenMinimum<'a>(&'a DirTree);

impl CgroupTree for BrokenMinimum<'_> {
    fn make(&self, dir: &Path) -> std::io::Result<()> {
        self.0.make(dir)?;
        let name = dir
            .file_name()
            .map(|name| name.to_string_lossy().into_owned());
        if name.is_some_and(|name| name.starts_with(DOMAIN_PREFIX)) {
            let min = dir.join("cpu.uclamp.min");
            fs::remove_file(&min)?;
            std::os::unix::fs::symlink("/dev/full", &min)?;
        }
        Ok(())
    }

    fn remove(&self, dir: &Path) -> std::io::Result<()> {
        self.0.remove(dir)
    }
}

#[test]
fn a_host_that_refuses_is_counted_and_asked_again() {
    let host = Host::new();
    let broken = BrokenMinimum(&host.tree);
    let actuator = CgroupActuator::create(&broken, &host.place(), &[DomainId(0)]).unwrap();
    register(&actuator, 0);
    let spec = VcpuSpec {
        table: PerfTable::try_from(vec![Khz(1000)]).unwrap(),
        capacity: Util::MAX,
        domain: DomainId(0),
    };
    let config = DeviceConfig::new(vec![spec]);
    let device = Device::new(config, actuator, FixedSource::default(), NoEvents).unwrap();
    for _ in 0..3 {
        device.write(VcpuId(0), WriteReg::SetPerf, 500);
    }
    let counters = device.counters(VcpuId(0)).unwrap();
    assert_eq!((counters.refused, counters.unchanged), (3, 0));
}

#[test]
fn a_domain_without_a_thread_is_refused() {
    let host = Host::new();
    let domain = DomainId(0);
    let actuator = CgroupActuator::create(&host.tree, &host.place(), &[domain]).unwrap();
    let answer = actuator.apply(domain, clamp(1, 1024));
    assert_eq!(answer, Err(ActuateError::NoThread { domain }));
}

#[test]
fn a_failure_half_way_leaves_nothing() {
    let host = Host::new();
    let domain = host.place().record(process::id()).domain(DomainId(1));
    host.tree.set_busy(vec![domain.clone()]);
    let made = CgroupActuator::create(&host.tree, &host.place(), &[DomainId(0), DomainId(1)]);
    let error = made.unwrap_err().to_string();
    assert!(error.contains(&*domain.to_string_lossy()), "{error}");
    assert!(no_groups_left(&host));
}

#[test]
fn removing_moves_processes_home_and_can_be_repeated() {
    let host = Host::new();
    let record = host.actuator().record().unwrap().clone();
    host.set(&format!("{}/cgroup.procs", own_group()), "4711\n");
    remove(&host.tree, &record).unwrap();
    assert_eq!(host.get("unit/cgroup.procs"), "4711");
    assert_eq!(
        host.get("cgroup.subtree_control"),
        "+cpu",
        "unit may rely on it by now"
    );
    assert!(no_groups_left(&host));
    remove(&host.tree, &record).unwrap();
}

#[test]
fn the_controller_is_switched_off_again_when_nobody_else_is_there() {
    let host = Host::new();
    host.write("proc/self/cgroup", "0::/\n");
    host.tree.remove(&host.cg("unit")).unwrap();
    let record = host.actuator().record().unwrap().clone();
    remove(&host.tree, &record).unwrap();
    assert_eq!(host.get("cgroup.subtree_control"), "-cpu");
}

#[test]
fn a_home_that_is_gone_is_replaced_by_the_parent() {
    let host = Host::new();
    let record = host.actuator().record().unwrap().clone();
    host.set(&format!("{}/cgroup.procs", own_group()), "4711\n");
    host.tree.remove(&host.cg("unit")).unwrap();
    remove(&host.tree, &record).unwrap();
    assert_eq!(host.get("cgroup.procs"), "4711");
}

#[test]
fn a_group_whose_processes_are_still_ending_is_busy() {
    let host = Host::new();
    let record = host.actuator().record().unwrap().clone();
    host.tree.set_busy(vec![record.rest()]);
    assert!(matches!(
        remove(&host.tree, &record),
        Err(CgroupError::Busy { .. })
    ));
    host.tree.set_busy(vec![]);
    remove(&host.tree, &record).unwrap();
    assert!(no_groups_left(&host));
}

#[test]
fn what_a_dead_process_of_the_same_number_left_is_in_nobodys_way() {
    let host = Host::new();
    drop(host.actuator());
    drop(host.actuator());
}

#[test]
fn a_living_process_of_the_same_number_elsewhere_is_left_alone() {
    let host = Host::new();
    let place = host.place();
    host.group(&own_group());
    host.set(
        &format!("{}/cgroup.events", own_group()),
        "populated 1\nfrozen 0\n",
    );
    host.set(&format!("{}/cgroup.procs", own_group()), "4711\n");
    assert!(matches!(host.error(), CgroupError::Taken { .. }));
    let made = CgroupActuator::create(&host.tree, &place, &[DomainId(0)]);
    assert!(matches!(made.unwrap_err(), CgroupError::Taken { .. }));
    assert_eq!(host.get(&format!("{}/cgroup.procs", own_group())), "4711");
}

/// What a group that is being removed answers.
const ENODEV: i32 = 19;

/// Another process removes the group as soon as its first child is removed.
struct Overtaken<'a>(&'a Host);

impl CgroupTree for Overtaken<'_> {
    fn make(&self, dir: &Path) -> std::io::Result<()> {
        self.0.tree.make(dir)
    }

    fn remove(&self, _dir: &Path) -> std::io::Result<()> {
        fs::remove_dir_all(self.0.cg(&own_group()))?;
        Err(std::io::Error::from_raw_os_error(ENODEV))
    }
}

#[test]
fn two_that_clean_up_at_once_are_in_nobodys_way() {
    let host = Host::new();
    let record = host.actuator().record().unwrap().clone();
    remove(&Overtaken(&host), &record).unwrap();
    assert!(no_groups_left(&host));
}

#[test]
fn leftovers_are_groups_of_dead_processes_and_nobody_elses() {
    let host = Host::new();
    host.write("proc/30/comm", "alive");
    for group in [
        "unit/vcpufreq.20",
        "unit/vcpufreq.20/rest",
        "unit/vcpufreq.20/domain7",
        "vcpufreq.30",
        "vcpufreq.40",
        "vcpufreq.50",
        "vcpufreq.50/database",
        "vcpufreq.x",
        "vcpufreq.",
    ] {
        host.group(group);
    }
    host.set("vcpufreq.40/cgroup.events", "populated 1\nfrozen 0\n");
    let ran = "usage_usec 12\nuser_usec 3\n";
    host.set("unit/vcpufreq.20/cpu.stat", ran);
    host.set("vcpufreq.30/cpu.stat", ran);
    host.set("vcpufreq.40/cpu.stat", ran);
    host.set("vcpufreq.50/cpu.stat", ran);
    let found = leftovers(&host.root()).unwrap();
    let group = host.cg("unit/vcpufreq.20");
    assert_eq!(
        found,
        [Leftover {
            group: group.clone(),
            pid: 20
        }]
    );
    remove(&host.tree, &found[0].record()).unwrap();
    assert!(!group.exists());
}

/// A VMM of another PID namespace, between making its group and moving there, looked dead.
#[test]
fn a_group_that_is_just_being_made_is_no_leftover() {
    let host = Host::new();
    for group in ["vcpufreq.20", "vcpufreq.20/rest"] {
        host.group(group);
        assert_eq!(leftovers(&host.root()).unwrap(), []);
    }
    host.set("vcpufreq.20/cpu.stat", "usage_usec 1\nuser_usec 0\n");
    assert_eq!(leftovers(&host.root()).unwrap().len(), 1, "it has run");
}

fn facts(uclamp: bool, place: Result<Placement, CgroupError>) -> ActuatorFacts {
    ActuatorFacts {
        uclamp: match uclamp {
            true => Ok(()),
            false => Err(std::io::Error::from_raw_os_error(95)),
        },
        cgroup: place,
    }
}

#[test]
fn groups_come_first_because_threads_dip() {
    let place = Host::new().place();
    let chosen = choose(ActuatorChoice::Auto, facts(true, Ok(place.clone()))).unwrap();
    assert_eq!(chosen.kind, ActuatorKind::Cgroup(place.clone()));
    assert!(chosen.reason.contains("without a dip"), "{}", chosen.reason);

    let chosen = choose(
        ActuatorChoice::Auto,
        facts(true, Err(CgroupError::NotMounted)),
    )
    .unwrap();
    assert_eq!(chosen.kind, ActuatorKind::Thread);
    assert!(chosen.reason.contains("not mounted"), "{}", chosen.reason);

    let chosen = choose(ActuatorChoice::Thread, facts(true, Ok(place))).unwrap();
    assert_eq!(chosen.kind, ActuatorKind::Thread);
}

#[test]
fn a_wish_that_the_host_cannot_grant_is_refused() {
    let error = choose(
        ActuatorChoice::Cgroup,
        facts(true, Err(CgroupError::NotMounted)),
    );
    assert!(error.unwrap_err().to_string().contains("mount it"));
    for wish in [
        ActuatorChoice::Auto,
        ActuatorChoice::Cgroup,
        ActuatorChoice::Thread,
    ] {
        let error = choose(wish, facts(false, Ok(Host::new().place())));
        assert!(
            error
                .unwrap_err()
                .to_string()
                .contains("CONFIG_UCLAMP_TASK")
        );
    }
}

#[test]
fn without_uclamp_requests_are_not_applicable() {
    let facts = facts(false, Ok(Host::new().place()));
    let chosen = choose(ActuatorChoice::Nothing, facts).unwrap();
    assert_eq!(chosen.kind, ActuatorKind::Nothing);
    let domains = [DomainId(7)];
    let actuator = HostActuator::build(&chosen.kind, &KernelTree, &domains).unwrap();
    actuator.register_thread(VcpuId(0), Tid::current()).unwrap();
    let refused = actuator.apply(DomainId(7), Clamp::NONE);
    assert!(matches!(refused, Err(ActuateError::NotApplicable { .. })));
    assert!(!actuator.clamps() && actuator.group(DomainId(7)).is_none());
}

/// Calls by which this thread reads and writes files in `deed`, and in finding that out; `None`
/// where the kernel doesn't count.
fn file_calls(deed: impl FnOnce()) -> Option<u64> {
    let counted = || {
        let text = fs::read_to_string("/proc/thread-self/io").ok()?;
        let count = |name| text.lines().find_map(|line| line.strip_prefix(name));
        let [reads, writes] = ["syscr: ", "syscw: "].map(count);
        Some(reads?.parse::<u64>().ok()? + writes?.parse::<u64>().ok()?)
    };
    let before = counted()?;
    deed();
    Some(counted()? - before)
}

#[test]
fn a_changed_request_is_one_call_of_the_host() {
    let host = Host::new();
    let (actuator, domain) = (host.actuator(), DomainId(7));
    let Some(own) = file_calls(|| ()) else {
        return println!("SKIP: this kernel doesn't count a thread's system calls");
    };
    for (clamp, calls) in [
        (clamp(300, 1024), 1),
        (clamp(300, 1024), 0),
        (clamp(500, 1024), 1),
        // Both files change.
        (clamp(200, 200), 2),
    ] {
        let all = file_calls(|| actuator.apply(domain, clamp).expect("a clamp"));
        assert_eq!(all, Some(own + calls), "{clamp:?}");
    }
}
