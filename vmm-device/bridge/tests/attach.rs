// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The example `attach`, on real KVM: the guest reads the frequency of its pCPU and requests one of
//! its table, by ioeventfd without an exit. The request reaches the device. The end of a bridge ends the
//! watch of an attachment.
#![cfg(target_arch = "x86_64")]
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use kvm_ioctls::Kvm;
use vcpufreq_bridge::{AccessPath, KvmSlot};
use vcpufreq_host::fakes::FakeHost;

#[path = "../examples/attach/main.rs"]
mod attach;

fn kvm_or_skip() -> Option<Kvm> {
    let kvm = Kvm::new().and_then(|kvm| kvm.create_vm().map(|_| kvm));
    kvm.inspect_err(|error| println!("SKIP: no usable /dev/kvm: {error}"))
        .ok()
}

#[test]
fn a_handle_is_for_any_thread_and_outlives_a_panic_there() {
    fn is<T: Clone + Send + Sync + std::panic::UnwindSafe>() {}
    is::<vcpufreq_bridge::BridgeHandle>();
}

#[test]
fn a_watch_ends_with_its_bridge() {
    let Some(kvm) = kvm_or_skip() else { return };
    let host = FakeHost::of_this_machine(1_200_000, 1_800_000);
    let builder = attach::builder(&host.root()).unwrap();
    let bridge = builder.ioeventfd(false).start().unwrap();
    let vm = Arc::new(kvm.create_vm().unwrap());
    let attachment = bridge.handle().attach(KvmSlot { vm, slot: 1 });
    assert!(attachment.lost().is_some());
    let watch = attachment.watch().unwrap();
    drop(bridge);
    watch.join().unwrap();
}

#[test]
fn a_guest_of_another_vmm_reads_and_asks_by_each_path() {
    let Some(kvm) = kvm_or_skip() else { return };
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
