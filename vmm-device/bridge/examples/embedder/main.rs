// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A VMM with a bus, a KVM wrapper and confined threads of its own (foreign.rs) gets the device by
//! this file: `cargo run -p vcpufreq-bridge --features kvm --example embedder`, as root on
//! x86-64. tests/embedder.rs checks what it prints.

pub mod foreign;

use std::{io, sync::Arc, thread::JoinHandle};

use foreign::{BusDevice, Hypervisor};
use vcpufreq_bridge::{
    Bridge, BridgeBuilder, BridgeHandle, BridgeThread, BridgeWork, Embedder, IoEventFd, KvmVm,
    MemorySlot, MmioDevice,
};
use vcpufreq_device::{DeviceConfig, DomainId, Khz, PerfTable, Util, VcpuId, VcpuSpec};
use vcpufreq_host::HostRoot;

#[derive(Debug)]
struct Vmm;

impl Embedder for Vmm {
    fn warn(&self, text: &str) {
        foreign::log(text);
    }

    fn spawn(&self, thread: BridgeThread, body: BridgeWork) -> io::Result<JoinHandle<()>> {
        foreign::spawn(thread.name(), body, thread.syscalls())
    }
}

struct Vm(Arc<dyn Hypervisor>);

impl KvmVm for Vm {
    fn map(&self, slot: MemorySlot) -> io::Result<()> {
        let (guest, host) = (slot.guest_address(), slot.host_address());
        self.0.set_memory(guest, host, slot.size(), slot.flags())
    }

    fn unmap(&self, slot: MemorySlot) -> io::Result<()> {
        let (guest, host) = (slot.guest_address(), slot.host_address());
        self.0.set_memory(guest, host, 0, slot.flags())
    }

    fn add_ioeventfd(&self, to: IoEventFd<'_>) -> io::Result<()> {
        self.0.register_ioevent(to.event, to.address, to.value)
    }

    fn remove_ioeventfd(&self, to: IoEventFd<'_>) -> io::Result<()> {
        self.0.unregister_ioevent(to.event, to.address, to.value)
    }
}

struct Registers(Arc<dyn MmioDevice>);

impl BusDevice for Registers {
    fn read(&self, offset: u64, data: &mut [u8]) {
        self.0.read(offset, data);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.0.write(offset, data);
    }
}

/// A bridge of one vCPU, which is pinned to `pcpu`, at `base`.
fn builder(host: &HostRoot, base: u64, pcpu: u32) -> BridgeBuilder {
    let table = PerfTable::try_from(foreign::TABLE_KHZ.map(Khz).to_vec());
    let device = DeviceConfig::new(vec![VcpuSpec {
        table: table.expect("a table that rises"),
        capacity: Util::MAX,
        domain: DomainId(0),
    }]);
    let builder = Bridge::builder(base, device, Arc::new(Vmm)).host(host.clone());
    builder.pins(vec![vec![pcpu]]).ioeventfd(false)
}

/// What a vCPU's thread does before it is confined.
fn on_vcpu_thread(handle: &BridgeHandle) -> Result<(), vcpufreq_bridge::PathError> {
    handle.register_this_thread(VcpuId(0))
}

#[allow(dead_code)]
fn main() -> anyhow::Result<()> {
    foreign::run()
}
