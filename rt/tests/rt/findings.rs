// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise of the findings: what of the host no setting changes, but a real-time guest suffers
//! from, is told.

use vcpufreq_rt::{Finding, Partition, Profile, plan};

use crate::{
    fake::{CGROUP, CPU, FakeKernel},
    partition::guest,
    settings::case,
};

#[test]
fn the_host_is_looked_at() {
    let host = FakeKernel::four();
    for (path, text) in [
        ("/proc/version", "Linux version 7.2 SMP PREEMPT"),
        ("/proc/swaps", "Filename\n/dev/sda2 partition 1 0 -2"),
        ("/proc/cpuinfo", "vendor_id : GenuineIntel"),
        (
            "/sys/devices/system/cpu/cpu3/topology/thread_siblings_list",
            "1,3",
        ),
        (
            "/sys/module/pcie_aspm/parameters/policy",
            "[default] performance",
        ),
        ("/sys/kernel/security/lsm", "capability,apparmor,bpf"),
        ("/sys/devices/system/node/node0/cpulist", "0-1"),
        ("/sys/devices/system/node/node1/cpulist", "2-3"),
        ("/sys/kernel/iommu_groups/0/type", "DMA-FQ"),
        ("/sys/module/kvm/parameters/nx_huge_pages", "Y"),
        ("/boot/config-7.2.12-rt", "CONFIG_NO_HZ_FULL=y"),
    ] {
        host.put(path, text);
    }
    host.smis(3, 0xffff_0000_0000_0007);
    let text = "module-options = ['kvm.nx_huge_pages=N']\nkernel-config = ['PREEMPT_RT', 'NO_HZ_FULL']\nfirmware = ['turbo off']";
    let profile = Profile::parse("test", text).unwrap();
    let partition = Partition::new(&host, vec![guest("plc", "3")], None, None).unwrap();
    let said = format!("{:?}", plan(&host, &partition, &profile).findings);
    for part in [
        "not PREEMPT_RT",
        "swapoff",
        "7 on CPU 3 since",
        "CPU 1 is a hyperthread of real-time CPU 3",
        "PCIe links",
        "apparmor",
        "CPUs are of node1",
        "iommu.passthrough",
        "options kvm nx_huge_pages=N",
        "lacks CONFIG_PREEMPT_RT",
        "turbo off",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("lacks CONFIG_NO_HZ_FULL"));
}

#[test]
fn two_real_time_cpus_of_one_core_are_told() {
    let host = FakeKernel::four();
    for cpu in [2, 3] {
        let siblings = format!("{CPU}/cpu{cpu}/topology/thread_siblings_list");
        host.put(&siblings, "2-3");
    }
    let told = |guests| {
        let partition = Partition::new(&host, guests, None, None).unwrap();
        let plan = plan(&host, &partition, &Profile::default());
        let lines: Vec<String> = plan.findings.iter().map(|one| format!("{one:?}")).collect();
        lines.join(" ")
    };
    let both = told(vec![guest("plc", "3"), guest("hmi", "2")]);
    assert_eq!(both.matches("hyperthread of").count(), 1, "{both}");
    assert!(both.contains("CPU 3 is a hyperthread of real-time CPU 2's core, real-time as well"));
    assert!(told(vec![guest("plc", "3")]).contains("CPU 2 is a hyperthread of real-time CPU 3"));
}

#[test]
fn interrupts_that_cannot_be_counted_are_unseen() {
    let host = FakeKernel::four();
    let cpus = "3".parse().unwrap();
    assert_eq!(vcpufreq_rt::smis(&host, &cpus), None, "not an Intel");
    assert!(case(&host, "").plan().unseen.is_empty());
    host.put("/proc/cpuinfo", "vendor_id : GenuineIntel");
    assert!(
        case(&host, "").plan().unseen[0]
            .why
            .contains("modprobe msr")
    );
    assert_eq!(vcpufreq_rt::smis(&host, &cpus), None);
    host.smis(3, 9);
    assert!(case(&host, "").plan().unseen.is_empty());
    assert_eq!(vcpufreq_rt::smis(&host, &cpus), Some([(3, 9)].into()));
}

#[test]
fn memory_and_cpus_of_other_nodes_are_told() {
    let host = FakeKernel::four();
    for (node, cpus) in [(0, "0-1"), (1, "2-3")] {
        let list = format!("/sys/devices/system/node/node{node}/cpulist");
        host.put(&list, cpus);
    }
    let found = |cpus: &str| {
        let partition = Partition::new(&host, vec![guest("plc", cpus)], None, None).unwrap();
        plan(&host, &partition, &Profile::default()).findings
    };
    assert!(
        matches!(&found("3")[..], [Finding::Note(_)]),
        "nothing runs"
    );
    let both = &found("1,3")[0];
    assert!(matches!(both, Finding::Hand(text) if text.contains("node0 and node1")));
    host.put(&format!("{CGROUP}/vcpufreq-rt.plc/cgroup.procs"), "700");
    let maps = |nodes: &str| {
        let small = "55e0 default file=/bin/x mapped=9 N0=9 kernelpagesize_kB=4";
        let text = format!("{small}\n7f00 default anon=65536 {nodes} kernelpagesize_kB=4");
        host.put("/proc/700/numa_maps", &text);
        found("3")
    };
    assert!(maps("N1=65536").is_empty());
    let far = &maps("N0=32768 N1=32768")[..];
    assert!(
        matches!(far, [Finding::Hand(text)] if text.contains("128 MiB of plc's memory are on node0")),
        "{far:?}"
    );
}
