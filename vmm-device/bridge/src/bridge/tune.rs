// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tunings of a bridge: what programs on the host set beside its guest's requests, by whatever path
//! these come.

use std::collections::BTreeMap;
use std::time::Duration;

use vcpufreq_device::{ActuateError, VcpuId};
use vcpufreq_host::monotonic_ns;

use super::handle::BridgeHandle;
use super::inner::{BridgeInner, CurrentPath};
use super::retry::Retry;
use crate::event_stats::HostEvent;
use crate::tune::{TuneClient, TuneEnd, TuneError, TuneRequest, Tuning};

impl BridgeHandle {
    /// Puts a floor or a ceiling into force, beside those that there are. Returns its handle. It ends
    /// by its time, by [`Self::untune`] or by [`Self::client_gone`].
    ///
    /// # Errors
    /// The first rule that `request` breaks, [`TuneError::NoClamps`], or [`TuneError::NotClamped`];
    /// nothing has changed then.
    pub fn tune(&self, request: TuneRequest, client: TuneClient) -> Result<u64, TuneError> {
        let inner = self.inner();
        if !inner.device.actuator().clamps() {
            return Err(TuneError::NoClamps);
        }
        let mut active = inner.active();
        let config = inner.device.config();
        let tuning = active
            .tunings
            .add(config, (request, client), monotonic_ns())?;
        if let Err(error) = inner.put_bounds(&mut active, tuning.request.vcpu) {
            active.tunings.take(|of| of.handle == tuning.handle);
            // A part of it may be in force.
            let _ = inner.put_bounds(&mut active, tuning.request.vcpu);
            return Err(TuneError::NotClamped(error));
        }
        inner.tuned(tuning);
        Ok(tuning.handle)
    }

    /// Has a tuning last for `lasts` from now on.
    ///
    /// # Errors
    /// [`TuneError::NoHandle`], [`TuneError::Lasts`]; nothing has changed then.
    pub fn retune(&self, handle: u64, lasts: Duration) -> Result<(), TuneError> {
        let inner = self.inner();
        let mut active = inner.active();
        active.tunings.extend(handle, lasts, monotonic_ns())?;
        let mut all = active.tunings.all().iter();
        let extended = all.find(|tuning| tuning.handle == handle);
        extended.into_iter().for_each(|tuning| inner.tuned(*tuning));
        Ok(())
    }

    /// Ends a tuning.
    ///
    /// # Errors
    /// [`TuneError::NoHandle`].
    pub fn untune(&self, handle: u64) -> Result<(), TuneError> {
        let ended = self
            .inner()
            .end_tunings(TuneEnd::Untuned, |tuning| tuning.handle == handle);
        match ended {
            0 => Err(TuneError::NoHandle { handle }),
            _ => Ok(()),
        }
    }

    /// Ends what a client has set that is gone.
    pub fn client_gone(&self, connection: u64) {
        self.inner().end_tunings(TuneEnd::Client, |tuning| {
            tuning.client.connection == connection
        });
    }

    /// What is in force now.
    #[must_use]
    pub fn tunings(&self) -> Vec<Tuning> {
        self.inner().active().tunings.all().to_vec()
    }

    /// Ends those whose time is over, as the bridge's thread does. How long the next one lasts.
    #[must_use]
    pub fn end_due_tunings(&self) -> Option<Duration> {
        self.inner().end_due_tunings()
    }
}

impl BridgeInner {
    /// As [`BridgeHandle::end_due_tunings`].
    pub fn end_due_tunings(&self) -> Option<Duration> {
        let now = monotonic_ns();
        self.end_tunings(TuneEnd::Time, |tuning| tuning.until_ns <= now);
        let active = self.active();
        let next = active
            .tunings
            .all()
            .iter()
            .map(|tuning| tuning.until_ns)
            .min()?;
        Some(Duration::from_nanos(next.saturating_sub(now)))
    }

    /// Ends those that `ends` picks; how many.
    fn end_tunings(&self, how: TuneEnd, ends: impl FnMut(&Tuning) -> bool) -> usize {
        let mut active = self.active();
        let ended = active.tunings.take(ends);
        for vcpu in one_of_each_domain(&ended) {
            // What is refused is tried again.
            let _ = self.put_bounds(&mut active, vcpu);
        }
        for tuning in &ended {
            let change = HostEvent::Untuned(*tuning, how);
            self.device.events().host_changed(change);
        }
        ended.len()
    }

    /// Has the device put all of them into force: it sets the clamps from now on.
    pub fn apply_tunings(&self) {
        let mut active = self.active();
        for vcpu in one_of_each_domain(active.tunings.all()) {
            let _ = self.put_bounds(&mut active, vcpu);
        }
    }

    /// Tries again what the host has refused, ever less often: the guest may never make a request that
    /// would apply it.
    pub(super) fn retry_bounds(&self) {
        let mut active = self.active();
        let retries = active.not_in_force.iter_mut();
        let due = retries.filter_map(|(domain, retry)| retry.is_due().then_some((*domain, *retry)));
        for (domain, retry) in due.collect::<Vec<_>>() {
            let _ = self.put_bounds(&mut active, retry.vcpu);
            if let Some(again) = active.not_in_force.get_mut(&domain) {
                *again = retry;
            }
        }
    }

    /// Puts what the tunings come to into force for the domain of `vcpu`.
    fn put_bounds(&self, active: &mut CurrentPath, vcpu: VcpuId) -> Result<(), ActuateError> {
        let config = self.device.config();
        let Some(spec) = config.vcpus.get(vcpu.index()) else {
            return Ok(());
        };
        let bounds = active.tunings.bounds(config, spec.domain);
        self.device.set_bounds(spec.domain, bounds);
        let mut backend = active.backend.iter();
        let applied = match backend.any(|(_, path)| path.set_bounds(vcpu, bounds)) {
            true => Some(Ok(())),
            false => self.device.apply_bounds(vcpu),
        };
        // `None`: another thread applies it, with what outcome isn't known. A domain without a thread may
        // have one again.
        let tries_again = match applied {
            None => true,
            Some(Err(error)) => !matches!(error, ActuateError::NotApplicable { .. }),
            Some(Ok(())) => false,
        };
        if tries_again {
            active.not_in_force.insert(spec.domain, Retry::new(vcpu));
        } else {
            active.not_in_force.remove(&spec.domain);
        }
        applied.unwrap_or(Ok(()))
    }

    fn tuned(&self, tuning: Tuning) {
        let events = self.device.events();
        events.host_changed(HostEvent::Tuned(tuning));
        // It may end before what the thread waits for.
        events.wake();
    }
}

fn one_of_each_domain(tunings: &[Tuning]) -> impl Iterator<Item = VcpuId> + use<> {
    let vcpus = tunings
        .iter()
        .map(|tuning| (tuning.domain, tuning.request.vcpu));
    vcpus.collect::<BTreeMap<_, _>>().into_values()
}
