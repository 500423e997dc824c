// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sets up a guest's bridge: its configuration, its path, and what the guest sees of it.

use std::sync::Arc;

use anyhow::Context as _;
use vcpufreq_bridge::shm::{SharedMemory, ShmBackend, ShmRegion};
use vcpufreq_bridge::{
    AccessPath, Backend, Bridge, BridgeConfig, BridgeDevice, BridgeHandle, GuestPages,
    IoeventfdPlan, MmioDevice, Offered, Totals, VcpuSnapshot,
};
use vcpufreq_dt::RegionKind;
use vcpufreq_host::HostRoot;
use vcpufreq_vm::{AttachHandler, Cpufreq, kick_signal, layout::CPUFREQ_BASE};

use crate::{
    config::{RunConfig, rt_pcpus},
    lifecycle::guardian::GuardianSocket,
    message::warn,
    sandbox::Confined,
    session::{AnsweringThreads, BridgeProgram},
    stats::TimeInState,
};

/// The paths that the guest's accesses may take, the best first.
#[derive(Default)]
pub struct Plans {
    /// The path `bpf`, if it may be taken.
    pub backends: Vec<Offered>,
    /// The path `ioeventfd`.
    pub ioeventfd: Option<IoeventfdPlan>,
    /// The path `shm` or `ram` alone, for the guest gets memory in the place of registers: its kind.
    pub memory: Option<RegionKind>,
}

/// What the path `bpf` makes of a request beside what else runs on the pCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BpfRequests {
    /// uclamp takes the maximum of the two.
    Maximum,
    /// Its clamp is the sum.
    Sum,
    /// The service `vcpufreq scx` adds it to the pCPU's utilization.
    Scx,
}

/// The path `bpf`; `only`: the user wants that one.
#[cfg(feature = "bpf")]
pub fn bpf_backend(only: bool, how: BpfRequests) -> Vec<Offered> {
    let backend = vcpufreq_host_bpf::BpfBackend::default();
    let backend = match how {
        BpfRequests::Maximum => backend,
        BpfRequests::Sum => backend.with_sum(true),
        BpfRequests::Scx => backend.by_scx(),
    };
    vec![Offered {
        backend: Box::new(backend),
        required: only.then(|| "--path bpf isn't possible".to_owned()),
    }]
}

/// None: this program is built without BPF.
#[cfg(not(feature = "bpf"))]
pub fn bpf_backend(_only: bool, _how: BpfRequests) -> Vec<Offered> {
    Vec::new()
}

/// A bridge that answers to `vcpufreq stats`.
pub struct GuestBridge {
    bridge: Bridge,
    answers: AnsweringThreads,
}

impl GuestBridge {
    /// Starts the bridge of `device` by the first of `plans` that the host doesn't refuse.
    ///
    /// # Errors
    /// As [`Bridge::start`]; when there is no memory to share or no more open files.
    pub fn start(
        device: BridgeDevice,
        (confined, guardian): (Option<&Arc<Confined>>, &Arc<GuardianSocket>),
        (config, plans): (&RunConfig, &Plans),
    ) -> anyhow::Result<(Self, Cpufreq)> {
        let of_guest = BridgeConfig {
            base: CPUFREQ_BASE,
            pins: config.vcpus.iter().map(|vcpu| vcpu.pin.clone()).collect(),
            rt_pcpus: rt_pcpus(&config.vcpus),
            kick: Some(kick_signal()),
            ioeventfd: plans.ioeventfd.clone(),
            embedder: Arc::new(BridgeProgram {
                explain: config.options.bridge.explain,
                confined: confined.cloned(),
                guardian: Some(guardian.clone()),
            }),
        };
        let shared = plans.memory.map(|kind| match kind {
            RegionKind::SharedMemory => SharedMemory::create(device.config()),
            RegionKind::Registers | RegionKind::GuestRam => {
                SharedMemory::in_place_of_registers(device.config())
            }
        });
        let shared = shared
            .transpose()
            .context("can't share memory with the guest")?;
        let shared = shared.map(Arc::new);
        let shm = shared.clone().map(shm_backend).transpose()?;
        let backends = shm
            .as_ref()
            .map_or(&plans.backends[..], std::slice::from_ref);
        let bridge = Bridge::start(device, &of_guest, backends)?;
        let guest_pages = plans
            .ioeventfd
            .as_ref()
            .and_then(|plan| plan.guest_pages.clone());
        let cpufreq = cpufreq(&bridge, shared, guest_pages);
        let sandbox = confined.map(|confined| confined.sandbox.clone());
        let pins = of_guest.pins.iter().map(|pin| &pin[..]);
        let times = TimeInState::start(&HostRoot::default(), pins);
        let answers =
            AnsweringThreads::start(bridge.handle(), times, (std::process::id(), sandbox));
        Ok((Self { bridge, answers }, cpufreq))
    }

    /// Has the guardian take calls of `vcpufreq policy`, if there is something to decide. If it
    /// can't, the built-in rule decides.
    pub fn take_policy_calls(&self, guardian: &GuardianSocket) {
        let vcpus = self.handle().snapshot().vcpus;
        let by_bpf = |vcpu: &VcpuSnapshot| vcpu.path == AccessPath::Backend("bpf");
        if !vcpus.iter().any(by_bpf) {
            return;
        }
        if let Err(error) = guardian.take_policy_calls() {
            warn(&format!(
                "vcpufreq policy won't be answered: {error}; look at the directory's permissions"
            ));
        }
    }

    /// What the virtual machine's moments go to.
    pub fn handle(&self) -> BridgeHandle {
        self.bridge.handle()
    }

    /// Ends its threads; what was counted.
    pub fn stop(self) -> Totals {
        self.answers.stop();
        self.bridge.stop()
    }
}

fn shm_backend(memory: Arc<SharedMemory>) -> anyhow::Result<Offered> {
    let backend = ShmBackend::of_own_guest(memory);
    let backend = backend.context("can't make an eventfd for each vCPU")?;
    Ok(Offered {
        required: Some(format!("--path {} isn't possible", backend.name())),
        backend: Box::new(backend),
    })
}

/// What the guest sees of `bridge`: registers, or memory.
fn cpufreq(
    bridge: &Bridge,
    shared: Option<Arc<SharedMemory>>,
    guest_pages: Option<Arc<GuestPages>>,
) -> Cpufreq {
    let handle = bridge.handle();
    let attach: AttachHandler = Arc::new(move |vm| handle.attach(vm));
    let registers = bridge.mmio();
    let (device, size): (Arc<dyn MmioDevice>, _) = match shared {
        // With a header and a doorbell, which registers have not.
        Some(memory) if memory.offset_in_ram().is_none() => {
            let region = ShmRegion::new(memory, registers);
            let size = region.size();
            (Arc::new(region), size)
        }
        _ => (registers, bridge.size()),
    };
    Cpufreq {
        device,
        size,
        attach,
        guest_pages,
    }
}
