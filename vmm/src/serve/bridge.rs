// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The bridge of a served VM, in the VM's process: set up with the server's rights, then confined.

use std::{fs::File, sync::Arc};

use anyhow::Context;
use caps::Capability;
use vcpufreq_bridge::{
    Backend, Bridge, BridgeConfig, BridgeDevice, EventStats, Offered,
    shm::{AllVcpus, ShmBackend},
};
use vcpufreq_device::{Device, VcpuId};
use vcpufreq_host::{HostActuator, HostThread, SysfsSource, Tid};
use vmm_sys_util::eventfd::EventFd;

use super::{
    Served, SharedWithVmm,
    vm_process::{ERROR, Next, Order, ServerEnd},
};
use crate::{
    config::{resolve, rt_pcpus},
    events::{EventReport, EventWriter},
    kernel_version::host_headroom,
    message::warn,
    rt_guest::RtGuest,
    sandbox::{Confined, Limits, Sandbox},
    session::{AnsweringThreads, BridgeProgram, observe},
    stats::TimeInState,
    sys,
};

/// What a VM's process needs of its server.
pub struct BridgePlan<'a> {
    /// The VM.
    pub served: &'a Served,
    /// The server's process, by which a user knows the VM.
    pub server: u32,
    /// The VMM's process.
    pub vmm: u32,
    /// What the VMM has, too.
    pub shared: SharedWithVmm,
    /// The VMM's threads that run vCPUs; none of one that was unplugged.
    pub threads: &'a [Option<Tid>],
    /// The VM's real-time side.
    pub rt: &'a RtGuest,
    /// Whether clamps are set on these threads, which may be another user's.
    pub clamps_threads: bool,
}

/// A bridge at work.
struct StartedBridge {
    bridge: Bridge,
    answers: AnsweringThreads,
    events: Option<EventWriter>,
    lost: Arc<EventFd>,
    all: AllVcpus,
}

impl BridgePlan<'_> {
    /// Starts the bridge, which clamps by `actuator`, gives up all rights, and works until the
    /// server ends it. Returns what it has counted.
    ///
    /// # Errors
    /// What the host refused; when the events file is not complete.
    pub fn run(&self, actuator: HostActuator, server: &ServerEnd) -> anyhow::Result<String> {
        let confined = self.sandbox()?.map(|sandbox| {
            Arc::new(Confined {
                sandbox: Arc::new(sandbox),
                guardian: None,
            })
        });
        let running = self.start(actuator, confined.as_ref())?;
        if let Some(confined) = confined {
            running.bridge.handle().confine();
            confined.sandbox.enter_last(self.limits())?;
        }
        server.ready()?;
        loop {
            match server.next(sys::file_of(&running.lost))? {
                // The thread has ended in a panic, which was reported.
                Next::Lost => std::process::exit(ERROR.into()),
                Next::End => return end(running),
                Next::Order(Order::CarryOut) => running.all.carry_out(),
                Next::Order(Order::Withdraw) => running.all.withdraw(),
                Next::Order(Order::StartAnew) => running.bridge.handle().reset(),
            }
        }
    }

    fn sandbox(&self) -> anyhow::Result<Option<Sandbox>> {
        // The server has reported what the host lacks.
        let mut sandbox = Sandbox::by(self.served.options.sandbox, |_| ())?;
        if let Some(sandbox) = sandbox.as_mut().filter(|_| self.clamps_threads) {
            sandbox.keep(Capability::CAP_SYS_NICE)?;
        }
        Ok(sandbox)
    }

    fn limits(&self) -> Limits {
        let options = &self.served.options.bridge;
        Limits {
            vcpus: self.served.vcpus.len(),
            file_bytes: options.events.is_none().then_some(0),
        }
    }

    fn start(
        &self,
        actuator: HostActuator,
        confined: Option<&Arc<Confined>>,
    ) -> anyhow::Result<StartedBridge> {
        let served = self.served;
        let sandbox = confined.map(|confined| confined.sandbox.clone());
        let events = served.events.as_ref().map(File::try_clone).transpose();
        let events = events.context("no more files can be opened for --events")?;
        let (stats, events) = observe(events, served.vcpus.len(), sandbox.clone())?;
        let device = self.device(actuator, stats)?;
        let SharedWithVmm { memory, bells } = self.shared.clone();
        let backend =
            ShmBackend::new(memory, bells).context("can't make an eventfd for all vCPUs")?;
        let (lost, all) = (backend.lost(), backend.all_vcpus());
        let program = BridgeProgram {
            explain: served.options.bridge.explain,
            confined: confined.cloned(),
            guardian: None,
        };
        let config = BridgeConfig {
            pins: served.vcpus.iter().map(|vcpu| vcpu.pin.clone()).collect(),
            rt_pcpus: rt_pcpus(&served.vcpus),
            ..BridgeConfig::new(0, served.vcpus.len(), Arc::new(program))
        };
        let offered = Offered {
            backend: self.with_sums(Box::new(backend), &device),
            required: Some("the VM can't be served".to_owned()),
        };
        let bridge = Bridge::start(device, &config, &[offered])?;
        self.take_threads(&bridge)?;
        let lost = lost.get().cloned().context("the bridge has no worker")?;
        // What a server before this one was asked for.
        all.carry_out();
        let pins = served.vcpus.iter().map(|vcpu| &vcpu.pin[..]);
        let times = TimeInState::start(&served.host, pins);
        Ok(StartedBridge {
            answers: AnsweringThreads::start(bridge.handle(), times, (self.server, sandbox)),
            bridge,
            events,
            lost,
            all,
        })
    }

    /// With sums by BPF programs, if they are wanted.
    #[cfg(feature = "bpf")]
    fn with_sums(&self, backend: Box<dyn Backend>, device: &BridgeDevice) -> Box<dyn Backend> {
        let options = &self.served.options.bridge;
        let scx = options.actuator == crate::options::ActuatorWish::Scx;
        if !scx && options.sum != Some(true) {
            return backend;
        }
        let mut domains = device.config().domains().into_iter();
        if !scx && domains.any(|domain| device.actuator().group(domain).is_none()) {
            warn("--sum: no other load is added, since there are no cgroups for the clamps");
            return backend;
        }
        let sums = vcpufreq_host_bpf::SummedBackend::new(backend);
        Box::new(match scx {
            true => sums.by_scx(),
            false => sums,
        })
    }

    /// This program is built without BPF, and refuses --sum.
    #[cfg(not(feature = "bpf"))]
    fn with_sums(&self, backend: Box<dyn Backend>, _device: &BridgeDevice) -> Box<dyn Backend> {
        backend
    }

    fn take_threads(&self, bridge: &Bridge) -> anyhow::Result<()> {
        let handle = bridge.handle();
        for (vcpu, tid) in (0..).map(VcpuId).zip(self.threads) {
            let Some(tid) = tid else {
                // It would count as its domain's, of which others may go on.
                if !self.is_of_others(vcpu) {
                    self.shared.memory.withdraw(vcpu);
                }
                continue;
            };
            let thread = HostThread::of_process(&self.served.host, self.vmm, *tid)?;
            // Its pCPU is in the partition only.
            self.rt.enter_partition(vcpu, thread.tid()?)?;
            let pcpus = &self.served.vcpus[vcpu.index()].pin;
            if !pcpus.is_empty() {
                let pinned = thread.tid().and_then(|tid| vcpufreq_host::pin(tid, pcpus));
                pinned.with_context(|| format!("vCPU {vcpu} can't be pinned; correct --pin"))?;
            }
            self.rt.schedule(vcpu, thread.tid()?)?;
            // Takes the clamp away that a real-time thread starts with.
            handle.register_thread(vcpu, *tid)?;
        }
        Ok(())
    }

    /// Whether the request in the page of `vcpu`, which has no thread, belongs to plugged vCPUs: the
    /// driver stores a domain's request in its first vCPU's page.
    fn is_of_others(&self, vcpu: VcpuId) -> bool {
        let vcpus = &self.served.vcpus;
        let domain = vcpus[vcpu.index()].domain;
        let first = vcpus.iter().position(|other| other.domain == domain);
        let all = (0..).map(VcpuId).zip(self.threads).zip(vcpus);
        let left = all.filter(|((_, tid), other)| tid.is_some() && other.domain == domain);
        let requests = left.map(|((other, _), _)| self.shared.memory.requested(other));
        first == Some(vcpu.index()) && requests.max() == Some(0)
    }

    fn device(
        &self,
        actuator: HostActuator,
        stats: Arc<EventStats>,
    ) -> anyhow::Result<BridgeDevice> {
        let served = self.served;
        let (options, headroom) = (&served.options.bridge, host_headroom(&served.host));
        let mut config = resolve::bridge_device_config(&served.vcpus, options, headroom)?;
        if self.shared.memory.offset_in_ram().is_some() {
            config = config.without_steps();
        }
        let source = SysfsSource::new(&served.host, served.count()?)?.for_process(self.vmm);
        Ok(Device::new(config, actuator, Arc::new(source), stats)?)
    }
}

fn end(running: StartedBridge) -> anyhow::Result<String> {
    let handle = running.bridge.handle();
    handle.guest_ended();
    running.answers.stop();
    let totals = running.bridge.stop();
    handle.reset();
    let written = running.events.map(EventWriter::finish).transpose();
    let written = written.context("the events file is not complete")?;
    let dropped_some = written.filter(|written| written.dropped > 0);
    if let Some(EventReport { dropped, .. }) = dropped_some {
        warn(&format!(
            "events: {dropped} dropped because they came faster than they could be written"
        ));
    }
    let sum = totals.counters;
    Ok(format!(
        "requests {}, applied {}, unchanged {}, coalesced {}, refused {}, not applicable {}, \
         delayed by the limit {}",
        sum.requests,
        sum.applied,
        sum.unchanged,
        sum.coalesced,
        sum.refused,
        sum.not_applicable,
        sum.limited,
    ))
}
