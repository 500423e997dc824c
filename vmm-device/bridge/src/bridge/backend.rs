// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A path that a VMM offers besides exits and ioeventfds, such as BPF programs.

use std::sync::Arc;

use vcpufreq_device::{Clamp, PageMemory, VcpuId};
use vcpufreq_host::Tid;

use super::guest::{BridgeDevice, GuestFacts};
use super::snapshot::VcpuSnapshot;
use crate::error::BackendError;
use crate::mmio_device::MmioDevice;
use crate::offload::KvmOffload;

/// A path, as it is offered to a bridge.
pub trait Backend: Send + Sync {
    /// Its name.
    fn name(&self) -> &'static str;

    /// Starts it for `device`, and returns its part in KVM, if any.
    ///
    /// # Errors
    /// The backend's own error, such as a [`PathError`](crate::PathError). Nothing of it is
    /// left then, and the next path is taken unless this one is required.
    fn start(
        &self,
        device: &Arc<BridgeDevice>,
        guest: &GuestFacts,
    ) -> Result<(Box<dyn RunningBackend>, Option<KvmOffload>), BackendError>;
}

/// A path that runs. No method has a default: a backend that wraps another one would lose what it
/// doesn't forward.
pub trait RunningBackend: Send + Sync {
    /// The pages that KVM shows, as the device stores to them.
    fn memory(&self) -> Box<dyn PageMemory>;

    /// The device for accesses that exit, in the place of `inner`.
    fn region(&self, inner: Arc<dyn MmioDevice>) -> Arc<dyn MmioDevice>;

    /// Whether it keeps cur_perf in the pages true by itself; else the device does.
    fn keeps_cur_perf(&self) -> bool;

    /// Called on thread `tid`, which runs `vcpu` from now on.
    ///
    /// # Errors
    /// The backend's own error when the guest's requests on this thread would be lost.
    /// [`BridgeHandle::register_thread`](super::BridgeHandle::register_thread) returns it, and the
    /// guest doesn't start.
    fn register_thread(&self, vcpu: VcpuId, tid: Tid) -> Result<(), BackendError>;

    /// pCPUs `changed`: they have come or gone; the device's source has been refreshed.
    ///
    /// # Errors
    /// The backend's own error when one of them can't be followed: cur_perf may be untrue there.
    fn follow_pcpus(&self, changed: &[u32]) -> Result<(), BackendError>;

    /// Called once when all threads are registered, before the guest runs, by a VMM that gives up
    /// its rights now: lets go of what isn't this VM's alone.
    fn confine(&self);

    /// Takes the guest's requests back: it resets, and no vCPU runs.
    fn reset(&self);

    /// Puts the request of the domain of `vcpu` into force again: what it means to the host has
    /// changed. It counts as a request.
    fn apply_again(&self, vcpu: VcpuId);

    /// Keeps the clamps of the domain of `vcpu` within `bounds` from now on. Returns true if this
    /// backend sets the clamps; otherwise the device applies `bounds`.
    fn set_bounds(&self, vcpu: VcpuId, bounds: Clamp) -> bool;

    /// Ends it while the guest runs, and hands the guest's requests over to the device, which gets
    /// all new ones by now. Why it was lost.
    fn hand_over(&self) -> String;

    /// Ends it when no vCPU runs any more; the device's counters have all by then.
    fn end(&self);

    /// Adds what was counted here since the last call to the device's counters.
    fn sync_counters(&self);

    /// Adds what is known here of a vCPU, its counters aside.
    fn fill_snapshot(&self, vcpu: VcpuId, snapshot: &mut VcpuSnapshot);

    /// The name of an operator's policy that decides about requests in the place of the built-in rule,
    /// and of all that did since the start: how often they were asked, how many answers were outside
    /// of the VM's limits, and how many there were not.
    fn decided_by(&self) -> Option<(String, [u64; 3])>;
}

/// A backend, and whether another path may take its place.
pub struct Offered {
    /// The backend.
    pub backend: Box<dyn Backend>,
    /// What to say when it can't be started and nothing else will do; `None`: the next path is
    /// taken.
    pub required: Option<String>,
}
