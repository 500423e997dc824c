// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The bridge, seen by who asks for stats.

use std::sync::Arc;

use vcpufreq_device::{Actuator, Device, Source, VcpuId, VcpuSpec};

use crate::{
    path::Path,
    run::warn,
    run_report::Observer,
    state::StateDir,
    stats::{Measured, Server, Stats, VcpuStats},
    sys,
    vm::in_kernel::Taken,
};

/// Where the figures come from.
pub struct BridgeStats<A, S> {
    /// The device.
    pub device: Arc<Device<A, S, Arc<Observer>>>,
    /// Who sees its events.
    pub observer: Arc<Observer>,
    /// What KVM answers itself.
    pub taken: Arc<Taken>,
    /// Adds what another path than `exit` and `kernel` knows of a vCPU.
    pub more: Box<More>,
}

type More = dyn Fn(VcpuId, &mut VcpuStats) + Send + Sync;

impl<A: Actuator + 'static, S: Source + 'static> BridgeStats<A, S> {
    /// Answers to `vcpufreq stats` from now on; a guest runs without it too.
    pub fn serve(self) -> Option<Server> {
        let serve = || {
            let path = StateDir::of_user()?.socket_path(std::process::id());
            anyhow::Ok(Server::start(&path, Arc::new(self))?)
        };
        let server = serve();
        if let Err(error) = &server {
            warn(&format!(
                "vcpufreq stats won't be answered: {error:#}; look at the directory's permissions"
            ));
        }
        server.ok()
    }
}

impl<A: Actuator, S: Source> BridgeStats<A, S> {
    fn path(&self, spec: &VcpuSpec) -> Path {
        let table = spec.table.entries().len() > 1;
        match self.taken.reads() || (table && self.taken.writes()) {
            true => Path::Kernel,
            false => Path::Exit,
        }
    }

    fn vcpu(&self, vcpu: VcpuId, spec: &VcpuSpec) -> VcpuStats {
        let standing = self.device.standing(vcpu);
        let here = self.device.source().sample(vcpu).ok();
        let asked = standing.and_then(|standing| standing.asked);
        let mut stats = VcpuStats {
            vcpu: vcpu.0,
            domain: spec.domain.0,
            path: self.path(spec),
            pcpu: here.map(|pcpu| pcpu.pcpu),
            pcpu_khz: here.map(|pcpu| pcpu.khz.0),
            asks_khz: asked.map(|khz| khz.0),
            gets_khz: standing.map_or(0, |standing| standing.cur_perf.0),
            uclamp: standing.map_or((0, 0), |standing| {
                (standing.demand.min.get(), standing.demand.max.get())
            }),
            accesses: self.device.accesses(vcpu).unwrap_or_default().into(),
            counts: self.device.counters(vcpu).unwrap_or_default().into(),
            clamp_after: self.observer.clamp_after(vcpu).into(),
            freq_after: self.observer.freq_after(vcpu).into(),
        };
        (self.more)(vcpu, &mut stats);
        stats
    }
}

impl<A: Actuator, S: Source> Measured for BridgeStats<A, S> {
    fn stats(&self) -> Stats {
        let vcpus = (0..=u16::MAX).map(VcpuId).zip(&self.device.config().vcpus);
        let [governors_lost, pins_lost] = self.observer.lost_on_host();
        Stats {
            pid: std::process::id(),
            at_ns: sys::monotonic_ns(),
            vcpus: vcpus.map(|(vcpu, spec)| self.vcpu(vcpu, spec)).collect(),
            accesses_outside: self.device.accesses_outside(),
            governors_lost,
            pins_lost,
        }
    }
}

#[cfg(test)]
mod tests {
    //! What a guest asked for, and what became of it, is what the stats say.
    //! (That the path follows what KVM takes: `tests/kvm_x86_64`.)

    use vcpufreq_device::{
        ClampMode, DeviceConfig, DomainId, Headroom, Khz, MmioRegion, PerfTable, REG_SET_PERF,
        Report, Util, fakes,
    };

    use super::*;

    #[test]
    fn stats_are_of_the_device_and_its_events() {
        let observer = Arc::new(Observer::new(1, None));
        let config = DeviceConfig {
            vcpus: vec![VcpuSpec {
                table: PerfTable::try_from(vec![Khz(1000), Khz(2000)]).unwrap(),
                capacity: Util::MAX,
                domain: DomainId(3),
            }],
            mode: ClampMode::Floor,
            headroom: Headroom::None,
            report: Report::Exact,
            rate_limit: None,
        };
        let actuator = fakes::RecordingActuator::default();
        let source = fakes::FixedSource::default();
        let device = Device::new(config, actuator, source, observer.clone()).unwrap();
        let device = Arc::new(device);
        let region = MmioRegion::new(device.clone());
        for khz in [1000_u32, 1000, 2000] {
            region.write(REG_SET_PERF, &khz.to_le_bytes());
        }
        device.reset();
        let bridge = BridgeStats {
            device,
            observer,
            taken: Arc::default(),
            more: Box::new(|_, _| ()),
        };
        let stats = bridge.stats();
        let [vcpu] = &stats.vcpus[..] else {
            panic!("{stats:?}")
        };
        assert_eq!((vcpu.domain, vcpu.path), (3, Path::Exit));
        assert_eq!((vcpu.asks_khz, vcpu.uclamp), (None, (0, 1024)));
        assert_eq!(vcpu.accesses.writes_exited, 3);
        assert_eq!((vcpu.counts.requests, vcpu.counts.applied), (4, 3));
        // The reset's request has not arrived, so it took no time.
        assert_eq!(vcpu.clamp_after.n, 2);
    }
}
