// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The vcpufreq device in Cloud Hypervisor. `embed` copies this file into a source tree and puts the
//! calls to it there.
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError};
use std::{cell::Cell, io, os::fd::AsRawFd, thread};

use hypervisor::{DataMatch, IoEventAddress};
use seccompiler::SeccompRule;
use vcpufreq_bridge::{
    Attachment, Bridge, Embedder, IoEventFd, KvmVm, MemorySlot, MmioDevice, accesses_are_of,
};
use vcpufreq_device::VcpuId;
use vcpufreq_host::{HostRoot, Tid, mirror};
use vm_device::BusDeviceSync;

#[derive(Debug)]
struct Log;
impl Embedder for Log {
    fn warn(&self, text: &str) {
        log::warn!("cpufreq: {text}");
    }
}

struct Vm(Arc<dyn hypervisor::Vm>, u32);
impl KvmVm for Vm {
    fn map(&self, of: MemorySlot) -> io::Result<()> {
        let (guest, host) = (of.guest_address(), of.host_address() as *mut u8);
        let (size, read_only) = (of.size() as usize, of.flags() != 0);
        // SAFETY: the bridge keeps the pages until no vCPU runs.
        unsafe { self.0.create_user_memory_region(self.1, guest, size, host, read_only, false) }
            .map_err(io::Error::other)
    }
    fn unmap(&self, of: MemorySlot) -> io::Result<()> {
        let (guest, host) = (of.guest_address(), of.host_address() as *mut u8);
        let (size, read_only) = (of.size() as usize, of.flags() != 0);
        // SAFETY: as it was mapped.
        unsafe { self.0.remove_user_memory_region(self.1, guest, size, host, read_only, false) }
            .map_err(io::Error::other)
    }
    fn add_ioeventfd(&self, to: IoEventFd<'_>) -> io::Result<()> {
        let (address, value) = (IoEventAddress::Mmio(to.address), to.value.map(DataMatch::DataMatch32));
        self.0.register_ioevent(to.event, &address, value).map_err(io::Error::other)
    }
    fn remove_ioeventfd(&self, to: IoEventFd<'_>) -> io::Result<()> {
        let address = IoEventAddress::Mmio(to.address);
        self.0.unregister_ioevent_of(to.event, &address, to.value).map_err(io::Error::other)
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
static RUNNING: Mutex<Option<(Bridge, Attachment)>> = Mutex::new(None);
thread_local!(static PCPU: Cell<(i32, VcpuId)> = const { Cell::new((-1, VcpuId(0))) });

fn running() -> MutexGuard<'static, Option<(Bridge, Attachment)>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the bridge; what answers at `base` on the bus.
pub fn start(
    (vm, slot): (Arc<dyn hypervisor::Vm>, u32),
    base: u64,
    pins: Vec<Vec<u32>>,
) -> anyhow::Result<Arc<dyn BusDeviceSync>> {
    let config = mirror(&HostRoot::default(), &pins)?;
    // `ioeventfd(true)` on arm64 without FEAT_S2FWB.
    let bridge = Bridge::builder(base, config, Arc::new(Log)).pins(pins).ioeventfd(false).start()?;
    let (bus, attachment) = (bridge.mmio(), bridge.handle().attach(Vm(vm, slot)));
    let lost = attachment.lost().map(|lost| lost.try_clone()).transpose()?;
    *running() = Some((bridge, attachment));
    thread::Builder::new().name("cpufreq".to_owned()).spawn(move || {
        let Some(lost) = lost else { return };
        let mut poll = libc::pollfd { fd: lost.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd.
        while unsafe { libc::poll(&mut poll, 1, -1) } < 1 {}
        // Also signalled at the end; by exits nothing is lost any more.
        running().iter_mut().for_each(|(_, attachment)| attachment.fall_back());
    })?;
    Ok(Arc::new(Registers(bus)))
}

/// Called when the virtual machine has ended.
pub fn stop() {
    if let Some((bridge, attachment)) = running().take() {
        attachment.lost().map(|lost| lost.write(1));
        drop(attachment);
        log::info!("cpufreq: {:?}", bridge.stop().counters);
    }
}

/// Called once on a vCPU's thread, before it is confined.
pub fn on_vcpu_thread(vcpu: u32) -> anyhow::Result<()> {
    let vcpu = VcpuId(u16::try_from(vcpu)?);
    accesses_are_of(vcpu);
    PCPU.set((-1, vcpu));
    running().iter().try_for_each(|(bridge, _)| bridge.handle().register_thread(vcpu, Tid::current()))?;
    Ok(())
}

/// Called on a vCPU's thread before each KVM_RUN.
pub fn before_run() {
    // SAFETY: it reads no memory.
    let ((before, vcpu), now) = (PCPU.get(), unsafe { libc::sched_getcpu() });
    if before != now {
        PCPU.set((now, vcpu));
        running().iter().for_each(|(bridge, _)| bridge.handle().vcpu_moved(vcpu));
    }
}

/// A thread's rules, and the calls that the library makes there.
pub fn with(mut rules: Vec<(i64, Vec<SeccompRule>)>, calls: &[i64]) -> Vec<(i64, Vec<SeccompRule>)> {
    for call in calls {
        if !rules.iter().any(|(other, _)| other == call) {
            rules.push((*call, vec![]));
        }
    }
    rules
}
