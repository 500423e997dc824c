// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Promise of the findings: they list the host's facts that harm a real-time guest and that no
//! setting changes.

use vcpufreq_rt::{Partition, Profile, plan};

use crate::{
    fake::{CPU, FakeKernel},
    partition::{guest, planned},
};

#[test]
fn the_host_is_looked_at() {
    let host = FakeKernel::four();
    for (path, text) in [
        ("/proc/version", "Linux version 7.2 SMP PREEMPT"),
        ("/proc/swaps", "Filename\n/dev/sda2 partition 1 0 -2"),
        (
            "/sys/devices/system/cpu/cpu3/topology/thread_siblings_list",
            "1,3",
        ),
        ("/boot/config-7.2.12-rt", "CONFIG_NO_HZ_FULL=y"),
    ] {
        host.put(path, text);
    }
    let text = "kernel-config = ['PREEMPT_RT', 'NO_HZ_FULL']\nfirmware = ['turbo off']";
    let said = format!("{:?}", planned(&host, text).0.findings);
    for part in [
        "not PREEMPT_RT",
        "swapoff",
        "CPU 1 is a hyperthread of real-time CPU 3",
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
