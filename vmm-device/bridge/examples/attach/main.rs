// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A virtual machine with the device on KVM:
//! `cargo run -p vcpufreq-bridge --features kvm --example attach`.
//!
//! Its guest reads cur_perf and asks for a frequency of its table. By ioeventfd neither exits.

pub mod guest;

use std::sync::Arc;

use kvm_ioctls::Kvm;
use vcpufreq_bridge::{AccessPath, Bridge, BridgeBuilder, KvmSlot, Totals};
use vcpufreq_device::{DeviceConfig, DomainId, Khz, PerfTable, Util, VcpuId, VcpuSpec};
use vcpufreq_host::HostRoot;
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

/// Guest address of the first register.
pub const BASE: u64 = 0x0a00_0000;

extern "C" fn kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// A bridge for one vCPU with a table of two frequencies, each access of which exits so far.
pub fn builder(host: &HostRoot) -> anyhow::Result<BridgeBuilder> {
    let config = DeviceConfig::new(vec![VcpuSpec {
        table: PerfTable::try_from(vec![Khz(600_000), Khz(1_800_000)])?,
        capacity: Util::MAX,
        domain: DomainId(0),
    }]);
    register_signal_handler(SIGRTMIN(), kick)?;
    let warn: fn(&str) = |text| eprintln!("warning: {text}");
    let bridge = Bridge::builder(BASE, config, Arc::new(warn)).host(host.clone());
    Ok(bridge.moved_signal(SIGRTMIN()))
}

/// Runs the guest. Returns the path, what the guest has read as cur_perf, its accesses that
/// exited, and all that was counted.
pub fn run(kvm: &Kvm, bridge: Bridge) -> anyhow::Result<(AccessPath, u32, usize, Totals)> {
    let vm = Arc::new(kvm.create_vm()?);
    let ram = guest::ram(&vm)?;
    let mut vcpu = guest::vcpu(&vm, &ram)?;
    let handle = bridge.handle();
    let free = KvmSlot { vm, slot: 1 };
    // A VMM calls `attachment.watch()`, or waits for `lost()` itself.
    let attachment = handle.attach(free);

    // On the thread of vCPU 0, before it runs the guest.
    handle.register_this_thread(VcpuId(0))?;
    // A VMM calls it before each KVM_RUN.
    handle.before_run();
    let exits = guest::run_vcpu(&mut vcpu, &*bridge.mmio())?;
    let path = handle.snapshot().vcpus[0].path;
    handle.guest_ended();
    drop(attachment);
    Ok((path, guest::cur_perf_read(&vcpu)?, exits, bridge.stop()))
}

#[allow(dead_code)]
fn main() -> anyhow::Result<()> {
    let bridge = builder(&HostRoot::default())?.ioeventfd(false).start()?;
    let (path, cur_perf, exits, totals) = run(&Kvm::new()?, bridge)?;
    println!("{path:?}: cur_perf {cur_perf} kHz, {exits} exits, {totals:?}");
    Ok(())
}
