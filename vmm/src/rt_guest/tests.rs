// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises: an impossible real-time guest is refused, with the cause in one line. Beside a
//! real-time vCPU, each vCPU writes requests of its own domain only.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering::Relaxed},
};

use vcpufreq_device::{
    Device, DeviceConfig, FEATURE_ANY_CPU, Khz, MmioRegion, NoEvents, PerfTable, REG_FEATURES,
    REGION_STRIDE, RegisterPages, VcpuSpec, fakes::FixedSource, region_size,
};
use vcpufreq_host::{ActuatorKind, CgroupTree as _, Placement, fakes::DirTree};
use vcpufreq_rt::{Partition, PartitionGuest, Profile};

use super::*;
use crate::{
    config::{
        VcpuConfig, resolve,
        rt::{check_run, floors},
    },
    options::RunArgs,
};
use vcpufreq_host::HostCpus;
use vcpufreq_host::fakes::FakeHost;

fn parts(toml: &str) -> Result<(Vec<VcpuConfig>, Vec<Util>), String> {
    let host = HostCpus::read(&FakeHost::two_plus_two().root());
    let options = RunArgs::of_toml(toml);
    let count = resolve::vcpu_count(&options.vcpus).unwrap();
    let vcpus = resolve::vcpus(&options.vcpus, &host, count).unwrap();
    let floors = floors(&options.bounds, &vcpus, &host.online());
    let checked = floors.and_then(|floors| check_run(&options, &floors).map(|()| floors));
    let floors = checked.map_err(|error| error.to_string())?;
    Ok((vcpus, floors))
}

/// Of guests with these CPUs.
fn applied(guests: &[(&str, &str)]) -> Record {
    let guest = |(name, cpus): &(&str, &str)| PartitionGuest {
        name: (*name).to_owned(),
        cpus: cpus.parse().unwrap(),
    };
    Record {
        boot_id: "boot".to_owned(),
        profile_name: "kvm-rt".to_owned(),
        profile: Profile::default(),
        partition: Partition {
            guests: guests.iter().map(guest).collect(),
            housekeeping: "0".parse().unwrap(),
        },
        owner: None,
        entries: Vec::new(),
    }
}

#[test]
fn pcpus_of_real_time_vcpus_alone() {
    let toml =
        "cpus=3\n[vcpu.0]\npin='0-1'\n[vcpu.1]\npin=3\nrt='fifo:1'\n[vcpu.2]\npin=2\nrt='rr:1'";
    let pcpus = |toml| parts(toml).map(|(vcpus, _)| rt_pcpus(&vcpus));
    assert_eq!(pcpus(toml).unwrap(), [3, 2]);
    assert!(pcpus("cpus=1").unwrap().is_empty());
}

#[test]
fn a_cpu_that_was_given_to_real_time_guests_is_for_real_time_vcpus() {
    let record = applied(&[("plc", "2-3"), ("hmi", "1")]);
    for (toml, said) in [
        ("[vcpu.0]\npin=3", Some("vCPU 0 is pinned to CPU 3")),
        ("[vcpu.0]\npin='0-1'", Some("real-time guest hmi")),
        (
            "cpus=2\n[vcpu.0]\npin=2\n[vcpu.1]\npin=3\nrt='fifo:1'",
            Some("real-time guest plc"),
        ),
        (
            "cpus=2\n[vcpu.0]\npin=0\n[vcpu.1]\npin=3\nrt='fifo:1'",
            None,
        ),
        ("cpus=2", None),
    ] {
        let (vcpus, _) = parts(toml).unwrap();
        let refused = check_others(&vcpus, &record).err();
        let line = refused.map(|error| error.to_string()).unwrap_or_default();
        assert!(line.contains(said.unwrap_or_default()), "{toml}: {line}");
        assert_eq!(line.is_empty(), said.is_none(), "{toml}: {line}");
        assert!(line.lines().count() <= 1, "{line}");
    }
}

#[test]
fn what_is_wrong_is_said() {
    for (toml, said) in [
        ("[vcpu.0]\nrt='fifo:1'", "pinned to one pCPU"),
        ("[vcpu.0]\nrt='fifo:1'\npin='2-3'", "pinned to one pCPU"),
        (
            "cpus=2\n[vcpu.0]\nrt='fifo:1'\npin=3\n[vcpu.1]\npin='2-3'",
            "pin vCPU 1 to another",
        ),
        (
            "cpus=4\n[vcpu.0-3]\nrt='rr:1'\n[vcpu.0]\npin=0\n[vcpu.1]\npin=1\n[vcpu.2]\npin=2\n[vcpu.3]\npin=3",
            "leave one",
        ),
        (
            "cpus=2\n[vcpu.0-1]\ndomain=0\n[vcpu.0]\nrt='fifo:1'\npin=2\n[vcpu.1]\npin=3",
            "domain 0 has real-time vCPUs and others",
        ),
        ("resume-latency-us='50'", "give --rt too"),
        ("hugepages='1G'", "512 MiB of memory is no multiple"),
        ("[vcpu.0]\npin=3\nfloor=2800001", "maximum of 2800000 kHz"),
        (
            "no-bridge=true\n[vcpu.0]\npin=3\nfloor=700000",
            "--no-bridge",
        ),
    ] {
        let line = parts(toml).unwrap_err();
        assert!(line.contains(said), "{said}: {line}");
    }
}

#[test]
fn a_floor_is_a_clamp_as_a_request_would_be() {
    let toml = "cpus=2\n[vcpu.0]\npin=3\nfloor=1400000\nrt='fifo:1'\n[vcpu.1]\npin=0";
    let (vcpus, floors) = parts(toml).unwrap();
    let floors: Vec<u16> = floors.iter().map(|floor| floor.get()).collect();
    assert_eq!(floors, [512, 0]);
    assert_eq!([vcpus[0].rt, vcpus[1].rt], [Some(RtPolicy::Fifo(1)), None]);
}

#[test]
fn what_was_applied_is_not_asked_for_again() {
    let guest = |without_cpuset: Option<&str>| RtGuest {
        floors: Vec::new(),
        resume_latency: None,
        policies: Vec::new(),
        domains: Vec::new(),
        cpus: vec![3],
        partition: None,
        without_cpuset: without_cpuset.map(str::to_owned),
    };
    let line = guest(Some("iq-9075")).not_apart();
    assert!(
        line.contains("cpuset = \"isolated\"") && line.contains("iq-9075"),
        "{line}"
    );
    assert!(!line.contains("rt apply"), "{line}");
    assert!(guest(None).not_apart().contains("rt apply --guest NAME=3"));
}

fn of(toml: &str) -> RtGuest {
    let (vcpus, floors) = parts(toml).unwrap();
    RtGuest {
        floors,
        resume_latency: None,
        policies: vcpus.iter().map(|vcpu| vcpu.rt).collect(),
        domains: vcpus.iter().map(|vcpu| vcpu.domain).collect(),
        cpus: rt_pcpus(&vcpus),
        partition: None,
        without_cpuset: None,
    }
}

/// Whether any CPU may write, as the guest reads it of its second vCPU's register by an exit and
/// from its page: `bpf` and `ioeventfd` show the same pages.
fn any_cpu(actuator: HostActuator) -> [u32; 2] {
    let spec = |domain| VcpuSpec {
        table: PerfTable::try_from(vec![Khz(1000), Khz(2000)]).unwrap(),
        capacity: Util::MAX,
        domain: DomainId(domain),
    };
    let config = DeviceConfig::new(vec![spec(0), spec(1)]);
    let device = Device::new(config, actuator, FixedSource::default(), NoEvents).unwrap();
    let device = Arc::new(device);
    let words = usize::try_from(region_size(2)).unwrap() / 4;
    let memory: Box<[AtomicU32]> = (0..words).map(|_| AtomicU32::new(0)).collect();
    let memory = Arc::new(memory);
    let pages = RegisterPages::new(Box::new(memory.clone()), 2).unwrap();
    device.attach_pages(pages).unwrap();
    let offset = REGION_STRIDE + REG_FEATURES;
    let mut exited = [0; 4];
    MmioRegion::new(device).read(offset, &mut exited);
    let word = usize::try_from(offset / 4).unwrap();
    [
        u32::from_le_bytes(exited),
        u32::from_le(memory[word].load(Relaxed)),
    ]
    .map(|features| features & FEATURE_ANY_CPU)
}

// It was offered outside of partitions, and by the thread actuator.
#[test]
fn beside_a_real_time_vcpu_each_asks_for_its_own_domain_whatever_the_actuator() {
    let dir = tempfile::tempdir().unwrap();
    let tree = DirTree::default();
    let groups = |name: &str| {
        let parent = dir.path().join(name);
        tree.make(&parent).unwrap();
        ActuatorKind::Cgroup(Placement {
            process: std::process::id(),
            origin: parent.clone(),
            parent,
            enables_cpu: false,
            raises_min: false,
        })
    };
    let rt = "cpus=2\n[vcpu.0]\npin=3\nrt='fifo:1'\n[vcpu.1]\npin=0";
    let other = "cpus=2\n[vcpu.0]\npin=3\n[vcpu.1]\npin=0";
    for (toml, told) in [(rt, 0), (other, FEATURE_ANY_CPU)] {
        let guest = of(toml);
        for kind in [
            groups(if told == 0 { "rt" } else { "other" }),
            ActuatorKind::Thread,
            ActuatorKind::Nothing,
        ] {
            let actuator = HostActuator::build(&kind, &tree, &guest.domains).unwrap();
            let features = any_cpu(guest.actuator(actuator));
            assert_eq!(features, [told; 2], "{toml}: {kind:?}");
        }
    }
}

/// A host with a VM's process 8, in the group `vm`.
fn with_vm() -> FakeHost {
    let host = FakeHost::two_plus_two();
    let mounts = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
    host.write("proc/self/mountinfo", mounts);
    host.write("proc/8/cgroup", "0::/vm\n");
    host.write("sys/fs/cgroup/vm/cgroup.procs", "8\n");
    host
}

/// What a server makes of that VM, whose second vCPU is real-time.
fn served(host: &FakeHost, applied: Option<&Record>) -> Result<RtGuest, String> {
    let toml = "cpus=2\n[vcpu.0]\npin=0\n[vcpu.1]\npin=3\nrt='fifo:1'";
    let (vcpus, floors) = parts(toml).unwrap();
    let wish = RtWish {
        vcpus: &vcpus,
        floors: &floors,
        resume_latency: None,
    };
    let checked = RtGuest::check_host(&wish, &host.root(), applied);
    let guest = RtGuest::of_process(&wish, &host.root(), applied, 8);
    let guest = guest.map_err(|error| error.to_string());
    // What only the VM's process shows is seen later.
    assert!(checked.is_ok() || guest.is_err());
    guest
}

#[test]
fn another_programs_vm_goes_from_its_group_into_the_partition() {
    let (host, record) = (with_vm(), applied(&[("plc", "3")]));
    host.write(
        "sys/fs/cgroup/vcpufreq-rt.plc/rt/cgroup.events",
        "populated 0\n",
    );
    let guest = served(&host, Some(&record)).unwrap();
    let changes = guest.changes(&host.root());
    let [JournalEntry::Partition(partition)] = &changes[..] else {
        panic!("{changes:?}");
    };
    assert_eq!(partition.process, 8);
    assert_eq!(partition.origin, host.root().path("sys/fs/cgroup/vm"));
    assert!(guest.clamped_in_partition(ActuatorChoice::Auto).is_some());
    assert!(guest.clamped_in_partition(ActuatorChoice::Thread).is_none());
    host.write("sys/fs/cgroup/vm/pids.max", "64\n");
    assert!(
        served(&host, Some(&record))
            .unwrap_err()
            .contains("pids.max 64")
    );
    host.write("sys/fs/cgroup/vm/pids.max", "max\n");
    host.write(
        "sys/fs/cgroup/vcpufreq-rt.plc/rt/cgroup.events",
        "populated 1\n",
    );
    assert!(
        served(&host, Some(&record))
            .unwrap_err()
            .contains("a guest runs")
    );
}

/// Before its VMM is started, which would have to be ended otherwise.
#[test]
fn a_deadline_vcpu_has_a_root_domain_of_its_own() {
    let (host, record) = (with_vm(), applied(&[("plc", "3")]));
    let rt = "sys/fs/cgroup/vcpufreq-rt.plc/rt/cpuset.cpus.partition";
    let runtime = "proc/sys/kernel/sched_rt_runtime_us";
    for (kind, runtime_us, is_refused) in [
        ("isolated", "950000", true),
        ("root", "950000", false),
        ("isolated", "-1", false),
    ] {
        host.write(rt, format!("{kind}\n"));
        host.write(runtime, format!("{runtime_us}\n"));
        let toml = "cpus=2\n[vcpu.0]\npin=0\n[vcpu.1]\npin=3\nrt='deadline:500/1000'";
        let (vcpus, floors) = parts(toml).unwrap();
        let wish = RtWish {
            vcpus: &vcpus,
            floors: &floors,
            resume_latency: None,
        };
        let checked = RtGuest::check_host(&wish, &host.root(), Some(&record));
        let said = checked.err().map(|why| why.to_string());
        let named = said
            .as_ref()
            .is_some_and(|line| line.contains("vCPU 1 can't be SCHED_DEADLINE"));
        assert_eq!(named, is_refused, "{kind} {runtime_us}: {said:?}");
    }
}

// Threads of it that the server does not know would run there.
#[test]
fn another_programs_vm_is_real_time_only_on_cpus_that_are_set_apart() {
    let (host, record) = (with_vm(), applied(&[("plc", "3")]));
    let none = served(&host, None).unwrap_err();
    assert!(none.contains("rt apply --guest NAME=3"), "{none}");
    let no_cpuset = served(&host, Some(&record)).unwrap_err();
    assert!(no_cpuset.contains("kvm-rt") && no_cpuset.contains("isolcpus=3"));
    host.write("sys/devices/system/cpu/isolated", "2-3\n");
    assert!(served(&host, None).is_err(), "nothing was applied");
    let guest = served(&host, Some(&record)).unwrap();
    assert!(guest.changes(&host.root()).is_empty());
}
