// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The vcpufreq device in Cloud Hypervisor. `embed` copies this file into a source tree and puts the
//! calls to it there.
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::thread;

use anyhow::Context;
use hypervisor::kvm::KvmVm;
use vcpufreq_bridge::{Bridge, BridgeHandle, Embedder, KvmSlot, MmioDevice};
use vcpufreq_device::{REGION_ALIGN, VcpuId, region_size};
use vcpufreq_host::{HostRoot, mirror};
use vm_device::BusDeviceSync;

use crate::{device_manager::AddressManager, vm_config::CpusConfig};

#[derive(Debug)]
struct Log;
impl Embedder for Log {
    fn warn(&self, text: &str) {
        log::warn!("cpufreq: {text}");
    }
}

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

/// The bridge of the virtual machine that runs.
static RUNNING: Mutex<Option<Bridge>> = Mutex::new(None);

/// Starts the bridge; what answers on the bus.
pub fn start(of: &AddressManager, slot: u32, cpus: &CpusConfig) -> anyhow::Result<Arc<dyn BusDeviceSync>> {
    let mut pins = vec![vec![]; cpus.max_vcpus as usize];
    for of in cpus.affinity.iter().flatten() {
        pins[of.vcpu as usize] = of.host_cpus.iter().map(|cpu| *cpu as u32).collect();
    }
    let config = mirror(&HostRoot::default(), &pins)?;
    let vm = of.vm.as_any().downcast_ref::<KvmVm>().context("the hypervisor isn't KVM")?.fd.clone();
    let (size, align) = (region_size(u16::try_from(pins.len())?), Some(REGION_ALIGN));
    let base = of.allocator.lock().unwrap().allocate_platform_mmio_addresses(None, size, align);
    let base = base.context("no addresses for the registers")?.0;
    // `ioeventfd(true)` on arm64 without FEAT_S2FWB.
    let bridge = Bridge::builder(base, config, Arc::new(Log)).pins(pins).ioeventfd(false).start()?;
    let registers = Arc::new(Registers(bridge.mmio()));
    of.mmio_bus.insert(registers.clone(), base, size)?;
    let attachment = bridge.handle().attach(KvmSlot { vm, slot });
    thread::Builder::new().name("cpufreq".to_owned()).spawn(|| attachment.watch())?;
    log::info!("cpufreq: registers at {base:#x}");
    *RUNNING.lock().unwrap() = Some(bridge);
    Ok(registers)
}

/// Called when the virtual machine has ended.
pub fn stop() {
    if let Some(bridge) = RUNNING.lock().unwrap_or_else(PoisonError::into_inner).take() {
        log::info!("cpufreq: {:?}", bridge.stop().counters);
    }
}

/// Called once on a vCPU's thread, before it is confined. It calls the handle before each KVM_RUN.
pub fn on_vcpu_thread(vcpu: u32) -> anyhow::Result<Option<BridgeHandle>> {
    let handle = RUNNING.lock().unwrap().as_ref().map(Bridge::handle);
    if let Some(handle) = &handle {
        handle.register_this_thread(VcpuId(u16::try_from(vcpu)?))?;
    }
    Ok(handle)
}
