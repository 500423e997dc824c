// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A bridge at one moment, and its counts in the end.

use std::sync::Arc;
use std::time::Duration;

use vcpufreq_device::{
    Accesses, Actuator, Clamp, CounterSnapshot, Device, DomainId, HistogramSnapshot, Khz, Source,
    VcpuId, VcpuSpec,
};
use vcpufreq_host::Tid;

use crate::event_stats::EventStats;
use crate::offload::OffloadState;
use crate::pcpu_load::{PcpuLoad, PcpuTarget};
use crate::tune::Tuning;

/// How the registers of a vCPU are reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessPath {
    /// Each access exits to the VMM.
    #[default]
    Exit,
    /// KVM answers reads, or requests of table entries.
    Ioeventfd,
    /// The backend of this name.
    Backend(&'static str),
}

/// A vCPU at one moment, and what was counted of it since the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VcpuSnapshot {
    /// Its performance domain.
    pub domain: DomainId,
    /// Its thread, while the guest has one.
    pub thread: Option<Tid>,
    /// How its registers are reached now.
    pub path: AccessPath,
    /// The pCPU that its thread is on, if that is known, and that one's frequency.
    pub pcpu: Option<(u32, Khz)>,
    /// The frequency that its domain requests.
    pub request: Option<Khz>,
    /// The last value of its cur_perf.
    pub cur_perf: Khz,
    /// The clamp of its domain's request, with the utilization that is added to it.
    pub clamp: Clamp,
    /// The utilization of its pCPU, if that is known.
    pub load: Option<PcpuLoad>,
    /// The target of its pCPU, with an actuator that sets targets.
    pub target: Option<PcpuTarget>,
    /// How the guest reached its registers.
    pub accesses: Accesses,
    /// What became of its requests.
    pub counters: CounterSnapshot,
    /// How long requests took until their clamp was in force.
    pub clamp_after: HistogramSnapshot,
    /// How long until the vCPU's frequency was another one.
    pub freq_after: HistogramSnapshot,
    /// How long each of its domain's requests was in force, 0 kHz for none, as
    /// [`Device::requested_for`]. A backend may add what it finds when it looks.
    pub requested: Vec<(Khz, Duration)>,
}

/// A virtual machine at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BridgeSnapshot {
    /// Its vCPUs, by number.
    pub vcpus: Vec<VcpuSnapshot>,
    /// Accesses behind the last vCPU's page.
    pub accesses_outside: u64,
    /// How often a policy was found to have left schedutil.
    pub governors_lost: u64,
    /// How many policies are under another governor than schedutil now.
    pub governors_off: u64,
    /// How often a vCPU's thread was found elsewhere than on its pCPUs.
    pub pins_lost: u64,
    /// What programs on the host have set beside the guest's requests.
    pub tunings: Vec<Tuning>,
    /// As [`RunningBackend::decided_by`](super::RunningBackend::decided_by).
    pub decided_by: Option<(String, [u64; 3])>,
}

/// What was counted of a virtual machine that has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Of all vCPUs together.
    pub counters: CounterSnapshot,
    /// Accesses behind the last vCPU's page.
    pub outside: u64,
    /// How often a policy was found to have left schedutil.
    pub governors_lost: u64,
    /// How often a vCPU's thread was found elsewhere than on its pCPUs.
    pub pins_lost: u64,
}

impl Totals {
    /// Of a device.
    pub fn read<A: Actuator, S: Source>(device: &Device<A, S, Arc<EventStats>>) -> Self {
        let vcpus = (0..u16::MAX).map_while(|vcpu| device.counters(VcpuId(vcpu)));
        let [governors_lost, pins_lost, _] = device.events().lost_on_host();
        Self {
            counters: vcpus.fold(CounterSnapshot::default(), std::ops::Add::add),
            outside: device.accesses_outside(),
            governors_lost,
            pins_lost,
        }
    }
}

impl BridgeSnapshot {
    /// The device's state; `taken` is what KVM answers of it.
    pub fn take<A: Actuator, S: Source>(
        device: &Device<A, S, Arc<EventStats>>,
        taken: &OffloadState,
    ) -> Self {
        let vcpus = (0..=u16::MAX).map(VcpuId).zip(&device.config().vcpus);
        let [governors_lost, pins_lost, governors_off] = device.events().lost_on_host();
        Self {
            vcpus: vcpus
                .map(|(vcpu, spec)| VcpuSnapshot::take(device, taken, (vcpu, spec)))
                .collect(),
            accesses_outside: device.accesses_outside(),
            governors_lost,
            governors_off,
            pins_lost,
            tunings: Vec::new(),
            decided_by: None,
        }
    }
}

impl VcpuSnapshot {
    fn take<A: Actuator, S: Source>(
        device: &Device<A, S, Arc<EventStats>>,
        taken: &OffloadState,
        (vcpu, spec): (VcpuId, &VcpuSpec),
    ) -> Self {
        let domain_status = device.domain_status(vcpu);
        let here = device.source().sample(vcpu).ok();
        let events = device.events();
        let table = spec.table.entries().len() > 1;
        Self {
            domain: spec.domain,
            thread: None,
            path: match taken.reads() || (table && taken.writes()) {
                true => AccessPath::Ioeventfd,
                false => AccessPath::Exit,
            },
            pcpu: here.map(|here| (here.pcpu, here.khz)),
            request: domain_status.and_then(|domain_status| domain_status.requested),
            cur_perf: domain_status.map_or(Khz(0), |domain_status| domain_status.cur_perf),
            clamp: domain_status.map_or(Clamp::NONE, |domain_status| domain_status.clamp),
            load: None,
            target: None,
            accesses: device.accesses(vcpu).unwrap_or_default(),
            counters: device.counters(vcpu).unwrap_or_default(),
            clamp_after: events.clamp_after(vcpu),
            freq_after: events.freq_after(vcpu),
            requested: device.requested_for(vcpu).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    //! A snapshot has a guest's requests and their outcomes. (That the path follows what KVM takes:
    //! `tests/kvm_x86_64`.)

    use vcpufreq_device::{
        DeviceConfig, MmioRegion, PerfTable, REG_SET_PERF, Util, WriteReg, fakes,
    };

    use super::*;

    fn device(
        vcpus: u32,
    ) -> Arc<Device<fakes::RecordingActuator, fakes::FixedSource, Arc<EventStats>>> {
        let spec = |domain| VcpuSpec {
            table: PerfTable::try_from(vec![Khz(1000), Khz(2000)]).unwrap(),
            capacity: Util::MAX,
            domain: DomainId(domain),
        };
        let config = DeviceConfig::new((0..vcpus).map(|vcpu| spec(vcpu + 3)).collect());
        let stats = Arc::new(EventStats::new(config.vcpus.len(), None));
        let actuator = fakes::RecordingActuator::default();
        let source = fakes::FixedSource::default();
        Arc::new(Device::new(config, actuator, source, stats).unwrap())
    }

    #[test]
    fn a_snapshot_is_of_the_device_and_its_events() {
        let device = device(1);
        let region = MmioRegion::new(device.clone());
        for khz in [1000_u32, 1000, 2000] {
            region.write(REG_SET_PERF, &khz.to_le_bytes());
        }
        device.reset();
        let snapshot = BridgeSnapshot::take(&device, &OffloadState::default());
        let [vcpu] = &snapshot.vcpus[..] else {
            panic!("{snapshot:?}")
        };
        assert_eq!((vcpu.domain, vcpu.path), (DomainId(3), AccessPath::Exit));
        assert_eq!((vcpu.request, vcpu.clamp), (None, Clamp::NONE));
        assert_eq!(vcpu.accesses.writes_exited, 3);
        assert_eq!((vcpu.counters.requests, vcpu.counters.applied), (4, 3));
        // The reset's request has not arrived, so it took no time.
        assert_eq!(vcpu.clamp_after.n(), 2);
    }

    #[test]
    fn totals_are_over_all_vcpus() {
        let device = device(2);
        for (vcpu, khz) in [(0, 1000), (1, 2000), (1, 2000)] {
            device.write(VcpuId(vcpu), WriteReg::SetPerf, khz);
        }
        let counters = Totals::read(&device).counters;
        let counted = (counters.requests, counters.applied, counters.unchanged);
        assert_eq!((counted, counters.refused), ((3, 2, 1), 0));
    }
}
