// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The example `attach`, on real KVM: the guest reads the frequency of its pCPU and requests one of
//! its table, by ioeventfd without an exit. The request reaches the device.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

use kvm_ioctls::Kvm;
use vcpufreq_bridge::AccessPath;
use vcpufreq_host::fakes::FakeHost;

#[path = "../examples/attach/main.rs"]
mod attach;

#[test]
fn a_guest_of_another_vmm_reads_and_asks_by_each_path() {
    let kvm = match Kvm::new().and_then(|kvm| kvm.create_vm().map(|_| kvm)) {
        Ok(kvm) => kvm,
        Err(error) => return println!("SKIP: no usable /dev/kvm: {error}"),
    };
    let host = FakeHost::of_this_machine(1_200_000, 1_800_000);
    for (ioeventfd, path, exits) in [
        (true, AccessPath::Ioeventfd, 0),
        (false, AccessPath::Exit, 2),
    ] {
        let builder = attach::builder(&host.root()).unwrap();
        let bridge = match ioeventfd {
            true => builder.ioeventfd(false).start(),
            false => builder.start(),
        };
        let bridge = bridge.unwrap();
        let seen = attach::run(&kvm, bridge).unwrap();
        assert_eq!((seen.0, seen.1, seen.2), (path, 1_200_000, exits));
        let counters = seen.3.counters;
        assert_eq!((counters.requests, counters.refused), (1, 0), "{path:?}");
    }
}
