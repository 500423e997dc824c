// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the threads of a virtual machine tell its bridge, and ask it.

use std::panic::UnwindSafe;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use vcpufreq_device::{CheckedState, DeviceState, VcpuId};
use vcpufreq_host::Tid;

use super::inner::BridgeInner;
use super::snapshot::BridgeSnapshot;
use crate::error::PathError;
use crate::mmio_device::{accesses_are_of, moved_vcpu};
use crate::offload::{Attachment, DetachError, KvmOffload, KvmVm};

/// A bridge, for the threads of its virtual machine.
#[derive(Clone)]
pub struct BridgeHandle(Arc<BridgeInner>);

/// A VMM may catch a panic of a vCPU's thread: what its locks guard is whole at each moment.
impl UnwindSafe for BridgeHandle {}

impl BridgeHandle {
    pub(super) fn inner(&self) -> &BridgeInner {
        &self.0
    }

    pub(super) fn new(inner: &Arc<BridgeInner>) -> Self {
        Self(inner.clone())
    }

    /// Called on each vCPU's thread before it runs the guest, once, or again when the vCPU was
    /// unplugged and is plugged again. The thread is pinned, and its accesses are those of `vcpu`.
    ///
    /// # Errors
    /// As [`Self::register_thread`].
    pub fn register_this_thread(&self, vcpu: VcpuId) -> Result<(), PathError> {
        accesses_are_of(vcpu);
        self.register_thread(vcpu, Tid::current())
    }

    /// Pins and registers the thread `tid`, which may be another process's: what it accesses counts as
    /// no vCPU's.
    ///
    /// # Errors
    /// [`PathError::NotPinned`] when it can't run on its pCPUs, [`PathError::NotClamped`] when the
    /// actuator refuses the thread, [`PathError::Source`] when procfs doesn't show it,
    /// [`PathError::Backend`] when the path can't see its requests. The parts before that keep the
    /// thread; the guest must not start.
    pub fn register_thread(&self, vcpu: VcpuId, tid: Tid) -> Result<(), PathError> {
        let inner = &self.0;
        inner.pin(vcpu, tid)?;
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
        inner.set_thread(vcpu, Some(tid));
        Ok(())
    }

    /// The vCPU is unplugged, and its thread has ended or ends next. The guest has withdrawn its
    /// request before.
    pub fn vcpu_unplugged(&self, vcpu: VcpuId) {
        self.0.set_thread(vcpu, None);
        self.0.device.actuator().unregister_thread(vcpu);
        self.0.device.source().unregister_thread(vcpu);
    }

    /// What the device remembers of the guest, for a snapshot or a migration. No vCPU runs. In shared
    /// memory the guest's requests are part of that memory.
    ///
    /// # Errors
    /// [`PathError::Missing`] by another path than `ioeventfd` and exits.
    pub fn save(&self) -> Result<DeviceState, PathError> {
        self.0.check_no_backend()?;
        self.0.drain();
        Ok(self.0.device.save())
    }

    /// Adopts a state and applies the guest's requests on this host. All threads are registered, and
    /// no vCPU has run. A refusal by the host counts as that of any request.
    ///
    /// # Errors
    /// As [`Self::save`]; [`PathError::State`] when it is no state of this device. Nothing has changed
    /// then.
    pub fn restore(&self, state: &DeviceState) -> Result<(), PathError> {
        self.0.check_no_backend()?;
        let checked = CheckedState::try_from(state.clone())?;
        Ok(self.0.device.restore(&checked)?)
    }

    /// Called on a vCPU's thread before each KVM_RUN. If the thread is on another pCPU than before,
    /// what the page shows is true again before the guest's next look at it.
    pub fn before_run(&self) {
        // Without the lock, under which the maintenance thread follows pCPUs that come and go.
        if let Some(vcpu) = moved_vcpu().filter(|_| self.0.keeps_pages.load(Relaxed)) {
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
        inner.drain();
        let active = inner.active();
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

    /// Installs the current path's slot and doorbells in `vm`. After a reset, drop the attachment of
    /// the last VM, then call it with the new one.
    #[must_use]
    pub fn attach(&self, vm: impl KvmVm + 'static) -> Attachment {
        let (bridge, warnings) = (self.clone(), self.0.guest.embedder.clone());
        let offload = self.0.active().offload.clone();
        Attachment::new(
            Arc::new(vm),
            offload.as_ref(),
            Box::new(move |lost, detached| bridge.path_lost(lost, &detached)),
            Box::new(move |text| warnings.warn(text)),
        )
    }

    /// Ends the path that was `lost`; `detached`: whether KVM's part of it was taken back. What KVM is
    /// to do from now on, if anything.
    fn path_lost(
        &self,
        lost: &Arc<KvmOffload>,
        detached: &Result<(), DetachError>,
    ) -> Option<Arc<KvmOffload>> {
        if let Err(error) = detached {
            self.0.guest.embedder.warn(&error.to_string());
        }
        let (backend, ioeventfd) = {
            let mut active = self.0.active();
            let current = active.offload.as_ref();
            if current.is_none_or(|current| !Arc::ptr_eq(current, lost)) {
                // Another attachment has fallen back, or the bridge has ended.
                return current.cloned();
            }
            active.offload = None;
            (active.backend.take(), active.ioeventfd.take())
        };
        if let Some(path) = ioeventfd {
            self.0.ioeventfd_lost(path);
        }
        let next = self.0.backend_lost(backend?).map(Arc::new);
        let mut active = self.0.active();
        if active.ended {
            // Nothing would end a watch of it.
            return None;
        }
        active.offload.clone_from(&next);
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
        let mut snapshot = BridgeSnapshot::take(&inner.device, &inner.guest.state);
        {
            let active = inner.active();
            snapshot.tunings = active.tunings.all().to_vec();
            let backend = active.backend.as_ref();
            snapshot.decided_by = backend.and_then(|(_, path)| path.decided_by());
        }
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
