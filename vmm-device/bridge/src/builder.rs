// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A bridge with the parts that most VMMs want.

use std::ffi::c_int;
use std::sync::Arc;

use vcpufreq_device::{ConfigError, Device, DeviceConfig};
use vcpufreq_host::{
    ActuatorKind, CgroupError, HostActuator, HostRoot, KernelTree, NEEDS_UCLAMP, SourceSetupError,
    SysfsSource, uclamp_available,
};

use crate::bridge::{Backend, Bridge, BridgeConfig, IoeventfdPlan, Offered};
use crate::embedder::Embedder;
use crate::error::PathError;
use crate::event_stats::{EventSink, EventStats};

/// What a bridge is made of. Without more, each access exits, and the vCPUs' threads are clamped by
/// sched_setattr(2), if the host has uclamp.
pub struct BridgeBuilder {
    device: DeviceConfig,
    config: BridgeConfig,
    host: HostRoot,
    actuator: Option<ActuatorKind>,
    backends: Vec<Offered>,
    sink: Option<Box<dyn EventSink>>,
}

/// Why a bridge can't be built.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The registers.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The host's frequencies.
    #[error(transparent)]
    Source(#[from] SourceSetupError),
    /// The host's cgroups.
    #[error(transparent)]
    Cgroups(#[from] CgroupError),
    /// The pins are not those of the vCPUs.
    #[error("{pins} lists of pCPUs for {vcpus} vCPUs")]
    Pins {
        /// The lists.
        pins: usize,
        /// The vCPUs.
        vcpus: usize,
    },
    /// The threads, or a path.
    #[error(transparent)]
    Path(#[from] PathError),
}

impl Bridge {
    /// Begins a bridge for registers at guest address `base`.
    #[must_use]
    pub fn builder(base: u64, device: DeviceConfig, embedder: Arc<dyn Embedder>) -> BridgeBuilder {
        BridgeBuilder {
            config: BridgeConfig::new(base, device.vcpus.len(), embedder),
            device,
            host: HostRoot::default(),
            actuator: None,
            backends: Vec::new(),
            sink: None,
        }
    }
}

impl BridgeBuilder {
    /// Where `/sys` and `/proc` are.
    #[must_use]
    pub fn host(self, host: HostRoot) -> Self {
        Self { host, ..self }
    }

    /// The pCPUs that each vCPU is pinned to, by number; none: any. The bridge pins each thread that
    /// it gets.
    #[must_use]
    pub fn pins(mut self, pins: Vec<Vec<u32>>) -> Self {
        self.config.pins = pins;
        self
    }

    /// How vCPUs are clamped.
    #[must_use]
    pub fn actuator(self, kind: ActuatorKind) -> Self {
        let actuator = Some(kind);
        Self { actuator, ..self }
    }

    /// Has KVM finish reads and requests of table entries. `clean`: each store to the pages has to be
    /// cleaned out of the cache, as on Arm without FEAT_S2FWB.
    #[must_use]
    pub fn ioeventfd(mut self, clean: bool) -> Self {
        let guest_pages = None;
        self.config.ioeventfd = Some(IoeventfdPlan { clean, guest_pages });
        self
    }

    /// The signal that makes KVM_RUN return, whose handler has nothing to do: a vCPU that has moved
    /// to another pCPU reads the right frequency at once.
    #[must_use]
    pub fn moved_signal(mut self, signal: c_int) -> Self {
        self.config.kick = Some(signal);
        self
    }

    /// A path to try before these, such as BPF programs; the next one is taken when the host refuses
    /// it.
    #[must_use]
    pub fn backend(mut self, backend: impl Backend + 'static) -> Self {
        let (backend, required) = (Box::new(backend), None);
        self.backends.push(Offered { backend, required });
        self
    }

    /// Where requests and host changes are reported one by one.
    #[must_use]
    pub fn events(self, sink: Box<dyn EventSink>) -> Self {
        let sink = Some(sink);
        Self { sink, ..self }
    }

    /// Starts it.
    ///
    /// # Errors
    /// What the host or the configuration lacks; nothing of it is left then.
    pub fn start(self) -> Result<Bridge, StartError> {
        let (pins, vcpus) = (self.config.pins.len(), self.device.vcpus.len());
        if pins != vcpus {
            return Err(StartError::Pins { pins, vcpus });
        }
        let kind = self.actuator.unwrap_or_else(|| match uclamp_available() {
            Ok(()) => ActuatorKind::Thread,
            Err(error) => {
                let embedder = &self.config.embedder;
                embedder.warn(&format!("requests have no effect: {error}; {NEEDS_UCLAMP}"));
                ActuatorKind::Nothing
            }
        });
        self.device.check()?;
        let count = u16::try_from(self.device.vcpus.len()).unwrap_or(u16::MAX);
        let domains: Vec<_> = self.device.vcpus.iter().map(|vcpu| vcpu.domain).collect();
        let actuator = HostActuator::build(&kind, &KernelTree, &domains)?;
        let source = Arc::new(SysfsSource::new(&self.host, count)?);
        let stats = Arc::new(EventStats::new(count.into(), self.sink));
        let device = Device::new(self.device, actuator, source, stats)?;
        Ok(Bridge::start(device, &self.config, &self.backends)?)
    }
}
