// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The vcpufreq device in Cloud Hypervisor: `embed` puts it and its calls into a source tree.
use std::sync::{Arc, Barrier, Mutex, PoisonError};

use anyhow::Context;
use hypervisor::kvm::KvmVm;
use vcpufreq_bridge::{Bridge, HostRoot, KvmSlot, MmioDevice, VcpuId, mirror};
use vm_device::BusDeviceSync;

/// Where layout.rs has no other device, below 4 GiB: a guest without paging gets there too.
const BASE: u64 = if cfg!(target_arch = "x86_64") { 0xf900_0000 } else { 0x0a00_0000 };
/// The bridge of the virtual machine that runs.
static RUNNING: Mutex<Option<Bridge>> = Mutex::new(None);

struct Registers(Arc<dyn MmioDevice>);
impl BusDeviceSync for Registers {
    fn read(&self, _base: u64, offset: u64, data: &mut [u8]) {
        self.0.read(offset, data);
    }
    fn write(&self, _base: u64, offset: u64, data: &[u8]) -> Option<Arc<Barrier>> {
        self.0.write(offset, data);
        None
    }
}

/// Starts the bridge, and puts the registers on the bus.
pub fn start(of: &mut super::DeviceManager) -> anyhow::Result<()> {
    let cpus = of.config.lock().unwrap().cpus.clone();
    let affinity = |vcpu| cpus.affinity.iter().flatten().filter(move |of| of.vcpu == vcpu);
    let pin = |vcpu| affinity(vcpu).flat_map(|of| &of.host_cpus).map(|cpu| *cpu as u32).collect();
    let pins: Vec<Vec<u32>> = (0..cpus.max_vcpus).map(pin).collect();
    let vm = of.address_manager.vm.as_any().downcast_ref::<KvmVm>().context("it isn't KVM")?;
    let log: fn(&str) = |text| log::warn!("cpufreq: {text}");
    let bridge = Bridge::builder(BASE, mirror(&HostRoot::default(), &pins)?, Arc::new(log));
    let bridge = bridge.pins(pins).ioeventfd(cfg!(target_arch = "aarch64")).start()?;
    let registers = Arc::new(Registers(bridge.mmio()));
    of.address_manager.mmio_bus.insert(registers.clone(), BASE, bridge.size())?;
    let slot = of.memory_manager.lock().unwrap().allocate_memory_slot();
    bridge.handle().attach(KvmSlot { vm: vm.fd.clone(), slot }).watch()?;
    of.bus_devices.push(registers);
    log::info!("cpufreq: registers at {BASE:#x}");
    *RUNNING.lock().unwrap() = Some(bridge);
    Ok(())
}

/// Called when the virtual machine has ended.
pub fn stop() {
    let bridge = RUNNING.lock().unwrap_or_else(PoisonError::into_inner).take();
    bridge.into_iter().for_each(|bridge| log::info!("cpufreq: {:?}", bridge.stop().counters));
}

/// Called on a vCPU's thread before its filter. `before_run` isn't: its pCPUs have one frequency.
pub fn on_vcpu_thread(vcpu: u32) -> anyhow::Result<()> {
    let handle = RUNNING.lock().unwrap().as_ref().map(Bridge::handle);
    handle.map_or(Ok(()), |handle| Ok(handle.register_this_thread(VcpuId(vcpu.try_into()?))?))
}
