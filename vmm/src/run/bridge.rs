// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The bridge of a guest of this program: what it is told, and where its texts, figures and
//! virtual machine's moments come from and go to.

use std::path::Path;
use std::sync::Arc;

use vcpufreq_device::host::monotonic_ns;
use vcpufreq_device::kvm::{
    AccessPath, Bridge, BridgeConfig, BridgeDevice, BridgeHandle, BridgeSnapshot, Diagnostics,
    IoeventfdPlan, Offered, Totals, VcpuSnapshot,
};

use crate::{
    config::{RunConfig, rt_pcpus},
    lifecycle::state::StateDir,
    message::warn,
    path,
    stats::{Measured, Server, Stats, VcpuStats},
    vm::{Cpufreq, kick_signal, layout::CPUFREQ_BASE},
};

/// The paths that the guest's accesses may take, the best first.
#[derive(Default)]
pub struct Plans {
    /// The path `bpf`, if it may be taken.
    pub backends: Vec<Offered>,
    /// The path `ioeventfd`.
    pub ioeventfd: Option<IoeventfdPlan>,
}

/// The path `bpf` by the programs in this object file; `only`: the user wants that one.
#[cfg(feature = "bpf")]
pub fn bpf_backend(object: &Path, only: bool) -> Vec<Offered> {
    vec![Offered {
        backend: Box::new(vcpufreq_host_bpf::BpfBackend::new(object.to_owned())),
        required: only.then(|| "--path bpf isn't possible".to_owned()),
    }]
}

/// None: this program is built without BPF.
#[cfg(not(feature = "bpf"))]
pub fn bpf_backend(_object: &Path, _only: bool) -> Vec<Offered> {
    Vec::new()
}

/// Writes a bridge's texts to stderr.
#[derive(Debug)]
struct Stderr {
    /// Whether to say why.
    explain: bool,
}

impl Diagnostics for Stderr {
    fn warn(&self, text: &str) {
        warn(text);
    }

    fn explain(&self, text: &str) {
        if self.explain {
            eprintln!("{text}");
        }
    }
}

/// A bridge that answers to `vcpufreq stats`.
pub struct GuestBridge {
    bridge: Bridge,
    stats: Option<Server>,
}

impl GuestBridge {
    /// Starts the bridge of `device` by the first of `plans` that the host doesn't refuse.
    ///
    /// # Errors
    /// What the host refused: memory, threads or open files; or the one path
    /// that the user wants.
    pub fn start(
        device: BridgeDevice,
        config: &RunConfig,
        plans: &Plans,
    ) -> anyhow::Result<(Self, Cpufreq)> {
        let of_guest = BridgeConfig {
            base: CPUFREQ_BASE,
            pins: config.vcpus.iter().map(|vcpu| vcpu.pin.clone()).collect(),
            rt_pcpus: rt_pcpus(&config.vcpus),
            kick: kick_signal(),
            ioeventfd: plans.ioeventfd,
        };
        let explain = config.options.explain;
        let diagnostics: Arc<dyn Diagnostics> = Arc::new(Stderr { explain });
        let bridge = Bridge::start(device, &of_guest, &plans.backends, &diagnostics)?;
        let cpufreq = Cpufreq {
            device: bridge.mmio(),
            size: bridge.size(),
            offload: bridge.offload(),
        };
        let stats = serve(bridge.handle());
        Ok((Self { bridge, stats }, cpufreq))
    }

    /// What the virtual machine's moments go to.
    pub fn handle(&self) -> BridgeHandle {
        self.bridge.handle()
    }

    /// Ends its threads; what was counted.
    pub fn stop(self) -> Totals {
        if let Some(stats) = self.stats {
            stats.stop();
        }
        self.bridge.stop()
    }
}

/// Answers to `vcpufreq stats` from now on; a guest runs without it too.
fn serve(bridge: BridgeHandle) -> Option<Server> {
    let serve = || {
        let path = StateDir::of_user()?.socket_path(std::process::id());
        anyhow::Ok(Server::start(&path, Arc::new(bridge))?)
    };
    let server = serve();
    if let Err(error) = &server {
        warn(&format!(
            "vcpufreq stats won't be answered: {error:#}; look at the directory's permissions"
        ));
    }
    server.ok()
}

impl Measured for BridgeHandle {
    fn stats(&self) -> Stats {
        let BridgeSnapshot {
            vcpus,
            accesses_outside,
            governors_lost,
            pins_lost,
        } = self.snapshot();
        let vcpus = (0..=u16::MAX).zip(vcpus);
        Stats {
            pid: std::process::id(),
            at_ns: monotonic_ns(),
            vcpus: vcpus.map(|(vcpu, of)| vcpu_stats(vcpu, of)).collect(),
            accesses_outside,
            governors_lost,
            pins_lost,
        }
    }
}

fn vcpu_stats(vcpu: u16, of: VcpuSnapshot) -> VcpuStats {
    VcpuStats {
        vcpu,
        domain: of.domain.0,
        path: match of.path {
            AccessPath::Exit => path::Path::Exit,
            AccessPath::Ioeventfd => path::Path::Ioeventfd,
            AccessPath::Backend(_) => path::Path::Bpf,
        },
        pcpu: of.pcpu.map(|(pcpu, _)| pcpu),
        pcpu_khz: of.pcpu.map(|(_, khz)| khz.0),
        asks_khz: of.asked.map(|khz| khz.0),
        gets_khz: of.cur_perf.0,
        uclamp: (of.clamp.min.get(), of.clamp.max.get()),
        accesses: of.accesses,
        counts: of.counters,
        clamp_after: of.clamp_after.into(),
        freq_after: of.freq_after.into(),
    }
}
