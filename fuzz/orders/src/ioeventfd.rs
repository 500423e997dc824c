// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The writes of a guest that wait for the worker: the library's `PendingWrites`, with a stand-in for
//! the eventfds of a domain.

#[path = "../../../vmm-device/bridge/src/ioeventfd/pending_writes.rs"]
mod pending_writes;
mod domain_writes {
    pub use crate::ioeventfd::FakeWrites as DomainWrites;
}
mod worker {
    pub use vcpufreq_bridge::ioeventfd::RequestQueue;
}

use std::os::fd::RawFd;

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering::Relaxed};
use vcpufreq_device::fakes::{FixedSource, NullActuator};
use vcpufreq_device::{
    Actuator, Device, DeviceConfig, DomainId, Events, Khz, NoEvents, PerfTable, Source, Util,
    VcpuId, VcpuSpec,
};

use pending_writes::PendingWrites;
use worker::RequestQueue;

/// What a guest has signalled, and its host.
#[derive(Default)]
struct Signals {
    /// The last value that no look has found, kHz; 0: there is none.
    waiting: AtomicU32,
    in_force: AtomicU32,
}

/// The writes of a domain. A drain looks once: what it finds is carried out by a later one that finds
/// nothing more, which no signal announces.
pub struct FakeWrites {
    signals: Arc<Signals>,
    found: u32,
}

impl FakeWrites {
    pub fn can_be_used(&self) -> bool {
        true
    }

    pub fn fd(&self) -> RawFd {
        -1
    }

    pub fn drain(&mut self, _: &Device<impl Actuator, impl Source, impl Events>) -> bool {
        let khz = self.signals.waiting.swap(0, Relaxed);
        if khz == 0 {
            self.signals.in_force.store(self.found, Relaxed);
        } else {
            self.found = khz;
        }
        khz == 0
    }
}

type SceneDevice = Device<NullActuator, FixedSource, NoEvents>;

/// A vCPU whose writes wait.
pub struct WritesScene {
    signals: Arc<Signals>,
    pending: std::sync::Arc<PendingWrites>,
    device: SceneDevice,
}

impl WritesScene {
    pub fn new() -> Self {
        let signals = Arc::new(Signals::default());
        let writes = FakeWrites {
            signals: signals.clone(),
            found: 0,
        };
        let vcpu = VcpuSpec {
            table: PerfTable::try_from(vec![Khz(1), Khz(2)]).expect("a table"),
            capacity: Util::MAX,
            domain: DomainId(0),
        };
        let (config, source) = (DeviceConfig::new(vec![vcpu]), FixedSource::default());
        Self {
            signals,
            pending: PendingWrites::new(vec![writes], vec![0]),
            device: Device::new(config, NullActuator, source, NoEvents).expect("a device"),
        }
    }

    /// The guest writes.
    pub fn signal(&self, khz: u32) {
        self.signals.waiting.swap(khz, Relaxed);
    }

    /// A write of the guest exits.
    pub fn exit(&self) {
        let mut writes = self.pending.of_vcpu(VcpuId(0)).expect("its domain");
        self.pending.drain_locked(&mut writes, &self.device);
    }

    /// The worker's, which wakes by a signal, and when writes were left.
    pub fn turn(&self) {
        if self.signals.waiting.load(Relaxed) != 0 {
            self.pending.drain_one(0, &self.device);
        }
        self.pending.finish(&self.device);
    }

    /// After the worker's last turn.
    pub fn check(&self) {
        let is_unfinished = || RequestQueue::<SceneDevice>::is_unfinished(&*self.pending);
        while self.signals.waiting.load(Relaxed) != 0 || is_unfinished() {
            self.turn();
        }
        assert_eq!(self.signals.in_force.load(Relaxed), 2, "kHz in force");
    }
}
