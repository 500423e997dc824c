// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The bridge of one guest: the device, how its accesses get there, and the
//! threads that it needs.
//!
//! ```text
//! exit    vCPU thread ─▶ MmioRegion ─▶ device
//! ioeventfd KVM ─▶ eventfds ─▶ Worker ─▶ device ─▶ pages ─▶ KVM
//! bpf     KVM ─▶ programs ─▶ kernel module, or Worker ─▶ clamp; programs ─▶ pages ─▶ KVM
//! ```
//! A path that is lost while the guest runs gives way to the next one.

mod backend;
mod config;
mod guest;
mod handle;
mod inner;
mod ioeventfd;
mod pcpus;
mod retry;
mod snapshot;
mod tune;

use std::sync::Arc;

use vcpufreq_device::MmioRegion;

use crate::{
    cap_watch::CapWatch, error::PathError, host_watch::HostWatch, hotplug::Hotplug,
    maintenance::MaintenanceThread, mmio_device::MmioDevice,
};
pub use backend::{Backend, Offered, RunningBackend};
pub use config::BridgeConfig;
pub use guest::{BridgeDevice, GuestFacts};
pub use handle::BridgeHandle;
use inner::{BridgeInner, CurrentPath};
pub use ioeventfd::IoeventfdPlan;
pub use snapshot::{AccessPath, BridgeSnapshot, Totals, VcpuSnapshot};

/// A device with all that it needs while its guest runs. Its threads end when it is dropped.
pub struct Bridge {
    inner: Arc<BridgeInner>,
    maintenance: Option<MaintenanceThread>,
    size: u64,
}

impl Bridge {
    /// Starts the bridge by the first of `backends`, else the path `ioeventfd`, else the exit, that
    /// the host doesn't refuse.
    ///
    /// # Errors
    /// [`PathError::Refused`] for want of memory, threads or open files; [`PathError::Required`]
    /// when a backend that is required can't be started.
    pub fn start(
        device: BridgeDevice,
        config: &BridgeConfig,
        backends: &[Offered],
    ) -> Result<Self, PathError> {
        let device = Arc::new(device);
        let region = MmioRegion::new(device.clone());
        let size = region.size();
        let inner = BridgeInner::new(&device, Arc::new(region), config);
        let host = device.source().root();
        // In this order: what changes from here on is found, what changed before is looked up.
        let mut hotplug = Hotplug::of_host(host);
        device.source().refresh();
        let offload = inner.start_best(backends, size)?;
        inner.active().offload = offload.map(Arc::new);
        let mut watch = HostWatch::of_host(&config.pins, device.actuator().clamps(), host);
        let watched = inner.clone();
        let mut caps = CapWatch::of_host(&config.pins, host);
        let look = move || {
            watched.follow_pcpus(&hotplug.look());
            for vcpu in watched.device.actuator().refresh_deadline_threads() {
                watched.device.apply_again(vcpu);
                if let Some((_, path)) = &watched.active().backend {
                    path.apply_again(vcpu);
                }
            }
            let (stats, embedder) = (watched.device.events(), &*watched.guest.embedder);
            watch.look(stats, embedder, |vcpu| watched.thread(vcpu));
            watched.retry_bounds();
            let (device, thread) = (&watched.device, |vcpu| watched.thread(vcpu));
            let found = caps.look(&device.config().vcpus, &device.source().pcpus(), thread);
            for (domain, cap) in found {
                device.set_cap(domain, cap);
            }
        };
        let tuned = inner.clone();
        // It ends the path if this fails.
        let mut bridge = Self {
            maintenance: None,
            inner,
            size,
        };
        bridge.maintenance = Some(MaintenanceThread::start(
            device.clone(),
            &config.embedder,
            look,
            move || tuned.end_due_tunings(),
        )?);
        Ok(bridge)
    }

    /// For the threads of the virtual machine.
    #[must_use]
    pub fn handle(&self) -> BridgeHandle {
        BridgeHandle::new(&self.inner)
    }

    /// What answers an access that exits.
    #[must_use]
    pub fn mmio(&self) -> Arc<dyn MmioDevice> {
        self.inner.on_bus.clone()
    }

    /// Bytes of the registers, from [`BridgeConfig::base`] on.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Ends its threads; what was counted.
    #[must_use]
    pub fn stop(mut self) -> Totals {
        self.end();
        Totals::read(&self.inner.device)
    }

    fn end(&mut self) {
        let (ioeventfd, backends) = {
            let mut active = self.inner.active();
            active.ended = true;
            if let Some(offload) = active.offload.take() {
                // It ends a watch. A full counter is readable too.
                let _ = offload.lost.write(1);
            }
            let CurrentPath {
                ioeventfd,
                backend,
                lost,
                ..
            } = &mut *active;
            (ioeventfd.take(), [backend.take(), lost.take()])
        };
        // Without the lock: their threads have the embedder's calls in them.
        if let Some(path) = ioeventfd {
            path.stop(&self.inner.device);
        }
        for (_, path) in backends.into_iter().flatten() {
            path.end();
        }
        self.maintenance
            .take()
            .into_iter()
            .for_each(MaintenanceThread::stop);
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        self.end();
    }
}
