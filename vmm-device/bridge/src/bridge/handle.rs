// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the threads of a virtual machine tell its bridge, and ask it.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use vcpufreq_device::VcpuId;
use vcpufreq_host::Tid;

use super::inner::BridgeInner;
use super::snapshot::BridgeSnapshot;
use crate::error::PathError;
use crate::offload::{Attachment, DetachError, KvmOffload, KvmVm};

/// A bridge, for the threads of its virtual machine.
#[derive(Clone)]
pub struct BridgeHandle(Arc<BridgeInner>);

impl BridgeHandle {
    pub(super) fn inner(&self) -> &BridgeInner {
        &self.0
    }

    pub(super) fn new(inner: &Arc<BridgeInner>) -> Self {
        Self(inner.clone())
    }

    /// Called once on each vCPU's thread `tid` before it runs the guest. A server registers the
    /// threads of another process, of a vCPU that was unplugged none.
    ///
    /// # Errors
    /// [`PathError::NotClamped`] when the actuator refuses the thread, [`PathError::Source`] when
    /// procfs doesn't show it, [`PathError::Backend`] when the path can't see its requests. The
    /// parts before that keep the thread; the guest must not start.
    pub fn register_thread(&self, vcpu: VcpuId, tid: Tid) -> Result<(), PathError> {
        let inner = &self.0;
        inner
            .device
            .actuator()
            .register_thread(vcpu, tid)
            .map_err(|error| PathError::NotClamped { vcpu, error })?;
        inner.device.source().register_thread(vcpu, tid)?;
        let active = inner.active();
        if let Some(path) = &active.ioeventfd {
            path.register_thread(vcpu, tid);
        }
        if let Some((_, path)) = &active.backend {
            path.register_thread(vcpu, tid)?;
        }
        drop(active);
        if let Some(slot) = inner.tids.get(vcpu.index()) {
            // A vCPU has one thread.
            let _ = slot.set(tid);
        }
        if let Some(has_thread) = inner.guest.threads.get(vcpu.index()) {
            has_thread.store(true, Relaxed);
        }
        Ok(())
    }

    /// Called on a vCPU's thread before it runs the guest on another pCPU than before: what the
    /// page shows is true again before the guest's next look at it.
    pub fn vcpu_moved(&self, vcpu: VcpuId) {
        // Without the lock, under which the maintenance thread follows pCPUs that come and go.
        if self.0.keeps_pages.load(Relaxed) {
            self.0.device.refresh(vcpu);
        }
    }

    /// The VMM gives up its rights now: lets go of what isn't this VM's alone. All vCPU threads are
    /// registered, and no vCPU runs.
    pub fn confine(&self) {
        let active = self.0.active();
        active.backend.iter().for_each(|(_, path)| path.confine());
    }

    /// The guest resets; no vCPU runs.
    pub fn reset(&self) {
        let inner = &self.0;
        // Pending requests are served first, so that the reset withdraws them too.
        let active = inner.active();
        if let Some(path) = &active.ioeventfd {
            path.drain(&inner.device);
        }
        if let Some((_, path)) = &active.backend {
            path.reset();
        }
        inner.device.reset();
    }

    /// The guest has ended; its threads end next, and where one is can't be read any more then.
    pub fn guest_ended(&self) {
        let threads = self.0.guest.threads.iter();
        threads.for_each(|has_thread| has_thread.store(false, Relaxed));
    }

    /// Makes `vm` answer what it can of the registers. A reset that makes a new virtual machine
    /// attaches that one, and drops the attachment of the last one before.
    #[must_use]
    pub fn attach(&self, vm: impl KvmVm + 'static) -> Attachment {
        let (bridge, warnings) = (self.clone(), self.0.guest.embedder.clone());
        let offload = self.0.active().offload.clone();
        Attachment::new(
            Arc::new(vm),
            offload.as_ref(),
            Box::new(move |detached| bridge.path_lost(&detached)),
            Box::new(move |text| warnings.warn(text)),
        )
    }

    /// Ends the path that was lost; `detached`: whether KVM's part of it was taken back. What KVM is
    /// to do from now on, if anything.
    fn path_lost(&self, detached: &Result<(), DetachError>) -> Option<Arc<KvmOffload>> {
        if let Err(error) = detached {
            self.0.guest.embedder.warn(&error.to_string());
        }
        let (backend, ioeventfd) = {
            let mut active = self.0.active();
            active.offload = None;
            (active.backend.take(), active.ioeventfd.take())
        };
        if let Some(path) = ioeventfd {
            self.0.ioeventfd_lost(path);
        }
        let next = self.0.backend_lost(backend?).map(Arc::new);
        self.0.active().offload.clone_from(&next);
        next
    }

    /// How it stands now.
    #[must_use]
    pub fn snapshot(&self) -> BridgeSnapshot {
        let inner = &self.0;
        {
            let active = inner.active();
            let paths = active.backend.iter().chain(&active.lost);
            paths.for_each(|(_, path)| path.sync_counters());
        }
        let mut snapshot = BridgeSnapshot::of(&inner.device, &inner.guest.state);
        snapshot.tunings = inner.active().tunings.all().to_vec();
        for (vcpu, of_vcpu) in (0..=u16::MAX).map(VcpuId).zip(&mut snapshot.vcpus) {
            of_vcpu.thread = inner.thread(vcpu);
            // Not held for all of them: a vCPU that has moved waits for it.
            let active = inner.active();
            for (_, path) in active.backend.iter().chain(&active.lost) {
                path.fill_snapshot(vcpu, of_vcpu);
            }
        }
        snapshot
    }
}
