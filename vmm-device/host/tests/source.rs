// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promises of the sysfs source, on a directory that stands for `/`: it follows the thread, opens
//! no file during a guest's read, and survives the loss of CPUs and drivers.
use std::fs;
use std::path::PathBuf;

use tempfile::TempDir;
use vcpufreq_device::fakes::NullActuator;
use vcpufreq_device::*;
use vcpufreq_host::{HostRoot, SourceSetupError, SysfsSource, Tid};

/// pCPUs 0 and 1 little, 2 and 3 big.
struct Host {
    dir: TempDir,
}

const CAPACITY: [u32; 4] = [329, 329, 1024, 1024];
const KHZ_MAX: [u32; 4] = [1_800_000, 1_800_000, 2_800_000, 2_800_000];
const TID: i32 = 4242;

impl Host {
    fn new() -> Self {
        let host = Self {
            dir: tempfile::tempdir().expect("a directory"),
        };
        host.write("sys/devices/system/cpu/possible", "0-3\n");
        for cpu in 0..4 {
            host.cpu(cpu, "cpu_capacity", CAPACITY[cpu]);
            host.cpu(cpu, "cpufreq/cpuinfo_max_freq", KHZ_MAX[cpu]);
            host.cpu(cpu, "cpufreq/scaling_cur_freq", KHZ_MAX[cpu]);
        }
        host.thread_on(0);
        host
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        fs::write(path, text).expect("a file");
    }

    fn cpu(&self, cpu: usize, file: &str, value: u32) {
        let path = format!("sys/devices/system/cpu/cpu{cpu}/{file}");
        self.write(&path, &format!("{value}\n"));
    }

    /// A thread with a name that looks like more fields, last seen on `cpu`.
    fn thread_on(&self, cpu: u32) {
        let zeros = "0 ".repeat(35);
        let text = format!("{TID} (vcpu) 7 (7 8) R {zeros}{cpu} 0 0 0\n");
        self.write(&format!("proc/self/task/{TID}/stat"), &text);
    }

    fn source(&self) -> SysfsSource {
        let source = SysfsSource::new(&HostRoot::at(self.dir.path()), 2).expect("cpufreq");
        let tid = Tid::new(TID).expect("a thread");
        source.register_thread(VcpuId(0), tid).expect("its stat");
        source
    }
}

#[test]
fn it_follows_a_thread_from_little_to_big() {
    let host = Host::new();
    let source = host.source();
    host.cpu(0, "cpufreq/scaling_cur_freq", 600_000);
    let little = PcpuPerf {
        pcpu: 0,
        khz: Khz(600_000),
        reference: Khz(1_800_000),
        capacity: Util::new(329).unwrap(),
    };
    assert_eq!(source.sample(VcpuId(0)), Ok(little));
    host.thread_on(2);
    let big = PcpuPerf {
        pcpu: 2,
        khz: Khz(2_800_000),
        reference: Khz(2_800_000),
        capacity: Util::MAX,
    };
    assert_eq!(source.sample(VcpuId(0)), Ok(big));
}

#[test]
fn a_guest_reads_its_pcpus_frequency_wherever_the_vcpu_is() {
    let host = Host::new();
    let spec = VcpuSpec {
        table: PerfTable::try_from(vec![Khz(2_800_000)]).unwrap(),
        capacity: Util::MAX,
        domain: DomainId(0),
    };
    let config = DeviceConfig::new(vec![spec]);
    let device = Device::new(config, NullActuator, host.source(), NoEvents).unwrap();
    let cur_perf = || device.read(VcpuId(0), ReadReg::CurPerf);
    assert_eq!(
        cur_perf(),
        899_609,
        "1.8 GHz of a little CPU are worth less"
    );
    host.thread_on(3);
    assert_eq!(cur_perf(), 2_800_000);
    host.write("sys/devices/system/cpu/cpu3/cpufreq/scaling_cur_freq", "");
    assert_eq!(cur_perf(), 2_800_000, "pCPU 3 went offline");
    host.thread_on(0);
    assert_eq!(cur_perf(), 899_609);
    assert_eq!(device.counters(VcpuId(0)).unwrap().source_failures, 1);
}

#[test]
fn on_its_own_thread_a_vcpu_asks_where_it_is() {
    let host = Host::new();
    host.write("sys/devices/system/cpu/possible", "0-127\n");
    for cpu in 0..128 {
        host.cpu(cpu, "cpufreq/cpuinfo_max_freq", 2_000_000);
        host.cpu(
            cpu,
            "cpufreq/scaling_cur_freq",
            1000 + u32::try_from(cpu).unwrap(),
        );
    }
    let tid = Tid::current();
    // procfs has a wrong value, and isn't read.
    host.write(&format!("proc/self/task/{tid}/stat"), "");
    let source = host.source();
    source.register_thread(VcpuId(1), tid).unwrap();
    // Any value of the file of this thread's pCPU.
    let sample = source.sample(VcpuId(1)).unwrap();
    assert_eq!(sample.khz, Khz(1000 + sample.pcpu));
    let elsewhere = std::thread::scope(|s| s.spawn(|| source.sample(VcpuId(1))).join().unwrap());
    let (vcpu, errno) = (VcpuId(1), 0);
    assert_eq!(elsewhere, Err(SourceError::NoPlace { vcpu, errno }));
}

#[test]
fn reading_opens_no_file() {
    let host = Host::new();
    let source = host.source();
    fs::remove_dir_all(host.path("sys")).unwrap();
    fs::remove_dir_all(host.path("proc")).unwrap();
    assert_eq!(source.sample(VcpuId(0)).unwrap().khz, Khz(1_800_000));
}

#[test]
fn unreadable_frequencies_are_errors_until_they_are_readable_again() {
    let host = Host::new();
    let source = host.source();
    for text in [
        "",
        "\n",
        "<unknown>\n",
        "-1\n",
        "99999999999\n",
        "1800000 garbage",
    ] {
        host.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", text);
        let error = SourceError::NoFrequency { pcpu: 0, errno: 0 };
        assert_eq!(source.sample(VcpuId(0)), Err(error), "{text:?}");
    }
    host.cpu(0, "cpufreq/scaling_cur_freq", 900_000);
    assert_eq!(source.sample(VcpuId(0)).unwrap().khz, Khz(900_000));
}

#[test]
fn a_place_that_makes_no_sense_is_an_error() {
    let host = Host::new();
    let source = host.source();
    for text in ["", "4242 (x", "4242 (x) R 1 2 3", ")"] {
        host.write(&format!("proc/self/task/{TID}/stat"), text);
        let (vcpu, errno) = (VcpuId(0), 0);
        let error = SourceError::NoPlace { vcpu, errno };
        assert_eq!(source.sample(VcpuId(0)), Err(error), "{text:?}");
    }
    host.thread_on(9);
    let error = SourceError::NoFrequency { pcpu: 9, errno: 0 };
    assert_eq!(
        source.sample(VcpuId(0)),
        Err(error),
        "a pCPU that isn't possible"
    );
}

#[test]
fn a_cpufreq_driver_loaded_anew_is_found_by_a_refresh() {
    let host = Host::new();
    let cpufreq = host.path("sys/devices/system/cpu/cpu0/cpufreq");
    fs::remove_dir_all(&cpufreq).unwrap();
    let source = host.source();
    let error = SourceError::NoFrequency { pcpu: 0, errno: 0 };
    assert_eq!(source.sample(VcpuId(0)), Err(error));
    host.cpu(0, "cpufreq/cpuinfo_max_freq", 1_000_000);
    host.cpu(0, "cpufreq/scaling_cur_freq", 500_000);
    assert_eq!(source.refresh(), 4);
    let sample = source.sample(VcpuId(0)).unwrap();
    assert_eq!(
        (sample.khz, sample.reference),
        (Khz(500_000), Khz(1_000_000))
    );
}

#[test]
fn a_cpu_that_comes_online_after_the_start_has_its_own_capacity() {
    let host = Host::new();
    // As Linux shows a CPU that is offline in a policy that isn't.
    host.write("sys/devices/system/cpu/online", "0,2-3\n");
    fs::remove_file(host.path("sys/devices/system/cpu/cpu1/cpu_capacity")).unwrap();
    let source = host.source();
    host.thread_on(1);
    let error = SourceError::NoFrequency { pcpu: 1, errno: 0 };
    assert_eq!(source.sample(VcpuId(0)), Err(error));
    host.write("sys/devices/system/cpu/online", "0-3\n");
    host.cpu(1, "cpu_capacity", CAPACITY[1]);
    assert_eq!(source.refresh(), 4);
    let capacity = source.sample(VcpuId(0)).unwrap().capacity;
    assert_eq!(capacity, Util::new(329).unwrap());
}

#[test]
fn without_capacities_all_cpus_are_the_biggest() {
    let host = Host::new();
    fs::remove_file(host.path("sys/devices/system/cpu/cpu0/cpu_capacity")).unwrap();
    assert_eq!(host.source().sample(VcpuId(0)).unwrap().capacity, Util::MAX);
}

#[test]
fn an_unregistered_vcpu_is_an_error() {
    let host = Host::new();
    let source = host.source();
    for vcpu in [VcpuId(1), VcpuId(2)] {
        assert_eq!(source.sample(vcpu), Err(SourceError::NoThread { vcpu }));
    }
    let tid = Tid::new(TID).unwrap();
    let error = source.register_thread(VcpuId(2), tid).unwrap_err();
    assert!(
        matches!(error, SourceSetupError::NoSuchVcpu { .. }),
        "{error}"
    );
    let error = source
        .register_thread(VcpuId(1), Tid::new(1).unwrap())
        .unwrap_err();
    assert!(
        error.to_string().contains("proc/self/task/1/stat"),
        "{error}"
    );
}

#[test]
fn a_host_without_frequencies_is_refused_with_the_place_that_lacks_them() {
    let host = Host::new();
    let root = HostRoot::at(host.dir.path());
    for cpu in 0..4 {
        let cpufreq = format!("sys/devices/system/cpu/cpu{cpu}/cpufreq");
        fs::remove_dir_all(host.path(&cpufreq)).unwrap();
    }
    let error = SysfsSource::new(&root, 1).unwrap_err();
    assert!(error.to_string().contains("cpufreq driver"), "{error}");
    fs::remove_dir_all(host.path("sys")).unwrap();
    let error = SysfsSource::new(&root, 1).unwrap_err();
    assert!(error.to_string().contains("possible"), "{error}");
}

#[test]
fn thread_numbers_are_above_0() {
    assert_eq!(Tid::new(0), None);
    assert_eq!(Tid::new(-1), None);
    assert_eq!(Tid::current(), Tid::current());
}

#[test]
fn a_thread_of_another_process_is_found_there() {
    let host = Host::new();
    let zeros = "0 ".repeat(35);
    let text = format!("77 (vcpu) R {zeros}2 0 0 0\n");
    host.write("proc/70/task/77/stat", &text);
    let source = SysfsSource::new(&HostRoot::at(host.dir.path()), 1).expect("cpufreq");
    let source = source.for_process(70);
    let tid = Tid::new(77).expect("a thread");
    source.register_thread(VcpuId(0), tid).expect("its stat");
    assert_eq!(source.sample(VcpuId(0)).map(|here| here.pcpu), Ok(2));
    let own = Tid::new(TID).expect("a thread");
    assert!(source.register_thread(VcpuId(0), own).is_err());
}

#[test]
fn pcpus_that_are_online_say_what_they_can_do() {
    let host = Host::new();
    host.write("sys/devices/system/cpu/online", "0-1,3\n");
    fs::remove_file(host.path("sys/devices/system/cpu/cpu2/cpu_capacity")).expect("a file");
    host.cpu(3, "cpufreq/scaling_cur_freq", 700_000);
    let source = host.source();
    let tops = source.pcpus();
    let numbers: Vec<_> = tops.iter().map(|top| top.pcpu).collect();
    assert_eq!(numbers, [0, 1, 3]);
    assert_eq!(
        (tops[0].reference, tops[0].capacity.get()),
        (Khz(1_800_000), 329)
    );
    assert_eq!((source.khz(3), source.khz(2)), (Some(Khz(700_000)), None));
}

#[test]
fn a_frequency_of_boost_is_above_the_one_that_the_capacity_refers_to() {
    let host = Host::new();
    host.write("proc/sys/kernel/osrelease", "6.12.48\n");
    host.thread_on(2);
    host.cpu(2, "cpufreq/cpuinfo_max_freq", 3_000_000);
    host.cpu(2, "cpufreq/scaling_available_frequencies", 2_800_000);
    host.cpu(2, "cpufreq/scaling_boost_frequencies", 3_000_000);
    host.write("sys/devices/system/cpu/cpufreq/policy2/related_cpus", "2");
    for (file, khz) in [("available", "2800000"), ("boost", "3000000")] {
        let path = format!("sys/devices/system/cpu/cpufreq/policy2/scaling_{file}_frequencies");
        host.write(&path, khz);
    }
    host.cpu(2, "cpufreq/scaling_cur_freq", 3_000_000);
    let sample = host.source().sample(VcpuId(0)).unwrap();
    assert_eq!(
        (sample.khz, sample.reference),
        (Khz(3_000_000), Khz(2_800_000))
    );
}
