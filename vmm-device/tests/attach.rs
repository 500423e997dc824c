// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The example `attach`, on real KVM: the guest reads the frequency of its pCPU and requests one of
//! its table, by ioeventfd without an exit. The request reaches the device.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

use std::fs;

use kvm_ioctls::Kvm;
use vcpufreq_device::host::{HostRoot, Tid};
use vcpufreq_device::kvm::AccessPath;

#[path = "../examples/attach/main.rs"]
mod attach;

/// A directory that stands for a host whose pCPUs run at 1.2 of 1.8 GHz.
fn host() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let cpus = dir.path().join("sys/devices/system/cpu");
    let possible = fs::read_to_string("/sys/devices/system/cpu/possible").unwrap();
    let last = possible.trim().rsplit(['-', ',']).next().unwrap();
    for cpu in 0..=last.parse::<u32>().unwrap() {
        let cpufreq = cpus.join(format!("cpu{cpu}/cpufreq"));
        fs::create_dir_all(&cpufreq).unwrap();
        fs::write(cpufreq.join("scaling_cur_freq"), "1200000\n").unwrap();
        fs::write(cpufreq.join("cpuinfo_max_freq"), "1800000\n").unwrap();
    }
    fs::write(cpus.join("possible"), possible).unwrap();
    let tid = Tid::current();
    let task = dir.path().join(format!("proc/self/task/{tid}"));
    fs::create_dir_all(&task).unwrap();
    fs::copy(format!("/proc/self/task/{tid}/stat"), task.join("stat")).unwrap();
    dir
}

#[test]
fn a_guest_of_another_vmm_reads_and_asks_by_each_path() {
    let kvm = match Kvm::new().and_then(|kvm| kvm.create_vm().map(|_| kvm)) {
        Ok(kvm) => kvm,
        Err(error) => return println!("SKIP: no usable /dev/kvm: {error}"),
    };
    let host = host();
    for (ioeventfd, path, exits) in [
        (true, AccessPath::Ioeventfd, 0),
        (false, AccessPath::Exit, 2),
    ] {
        let bridge = attach::bridge(&HostRoot::at(host.path()), &[], ioeventfd).unwrap();
        let seen = attach::run(&kvm, bridge).unwrap();
        assert_eq!((seen.0, seen.1, seen.2), (path, 1_200_000, exits));
        let counters = seen.3.counters;
        assert_eq!((counters.requests, counters.refused), (1, 0), "{path:?}");
    }
}
