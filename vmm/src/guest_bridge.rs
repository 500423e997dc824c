// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The bridge of a guest of this program: what it is told, and where its texts, figures and
//! virtual machine's moments come from and go to.

use std::path::PathBuf;
use std::sync::Arc;

use vcpufreq_device::VcpuId;
use vcpufreq_device::host::monotonic_ns;
use vcpufreq_device::kvm::{
    AccessPath, Bridge, BridgeConfig, BridgeDevice, BridgeHandle, BridgeSnapshot, Diagnostics,
    IoeventfdPlan, KvmOffload, Offered, Totals, VcpuSnapshot,
};

use crate::{
    config::{RunConfig, rt_pcpus},
    path::Path,
    run::warn,
    state::StateDir,
    stats::{Measured, Server, Stats, VcpuStats},
    vm::{Cpufreq, Hooks, kick_signal, layout::CPUFREQ_BASE},
};

/// How the path `bpf` is to be.
#[derive(Clone, Debug)]
pub struct BpfPlan {
    /// The object file with the programs.
    pub object: PathBuf,
}

/// The paths that the guest's accesses may take, the best first.
#[derive(Clone, Debug, Default)]
pub struct Plans {
    /// The path `bpf`.
    pub bpf: Option<BpfPlan>,
    /// The user wants that one.
    pub only_bpf: bool,
    /// The path `ioeventfd`.
    pub ioeventfd: Option<IoeventfdPlan>,
}

impl Plans {
    #[cfg(feature = "bpf")]
    fn backends(&self) -> Vec<Offered> {
        let offered = self.bpf.iter().map(|plan| Offered {
            backend: Box::new(vcpufreq_host_bpf::BpfBackend::new(plan.object.clone())),
            required: self
                .only_bpf
                .then(|| "--path bpf isn't possible".to_owned()),
        });
        offered.collect()
    }

    #[cfg(not(feature = "bpf"))]
    fn backends(&self) -> Vec<Offered> {
        Vec::new()
    }
}

/// How the path `bpf` would work here, or why it doesn't.
///
/// # Errors
/// What is missing, and what to do about it.
#[cfg(feature = "bpf")]
pub fn offer_bpf(plan: &BpfPlan) -> Result<String, String> {
    vcpufreq_host_bpf::offer(&plan.object)
}

/// How the path `bpf` would work here, or why it doesn't.
///
/// # Errors
/// Always: this program is built without BPF.
#[cfg(not(feature = "bpf"))]
pub fn offer_bpf(_plan: &BpfPlan) -> Result<String, String> {
    Err("this program is built without BPF (cargo build --features bpf)".to_owned())
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
        let explain = config.explain;
        let diagnostics: Arc<dyn Diagnostics> = Arc::new(Stderr { explain });
        let bridge = Bridge::start(device, &of_guest, &plans.backends(), &diagnostics)?;
        let cpufreq = Cpufreq {
            device: bridge.mmio(),
            size: bridge.size(),
            offload: bridge.offload(),
        };
        let stats = serve(bridge.handle());
        Ok((Self { bridge, stats }, cpufreq))
    }

    /// What the virtual machine tells.
    pub fn hooks(&self) -> Arc<dyn Hooks> {
        Arc::new(BridgeHooks {
            bridge: self.bridge.handle(),
        })
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

struct BridgeHooks {
    bridge: BridgeHandle,
}

impl Hooks for BridgeHooks {
    fn on_vcpu_thread_start(&self, _vcpu: VcpuId, _tid: i32) -> anyhow::Result<()> {
        Ok(())
    }

    fn on_vcpu_thread(&self, vcpu: VcpuId, tid: i32) -> anyhow::Result<()> {
        Ok(self.bridge.register_thread(vcpu, tid)?)
    }

    fn on_vcpu_moved(&self, vcpu: VcpuId) {
        self.bridge.vcpu_moved(vcpu);
    }

    fn on_reset(&self) {
        self.bridge.reset();
    }

    fn on_path_lost(&self) -> Option<Arc<KvmOffload>> {
        self.bridge.path_lost()
    }

    fn on_end(&self) {
        self.bridge.guest_ended();
    }

    fn on_warning(&self, text: &str) {
        warn(text);
    }
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
            AccessPath::Exit => Path::Exit,
            AccessPath::Ioeventfd => Path::Ioeventfd,
            AccessPath::Backend(_) => Path::Bpf,
        },
        pcpu: of.pcpu.map(|(pcpu, _)| pcpu),
        pcpu_khz: of.pcpu.map(|(_, khz)| khz.0),
        asks_khz: of.asked.map(|khz| khz.0),
        gets_khz: of.cur_perf.0,
        uclamp: (of.clamp.min.get(), of.clamp.max.get()),
        accesses: of.accesses.into(),
        counts: of.counters.into(),
        clamp_after: of.clamp_after.into(),
        freq_after: of.freq_after.into(),
    }
}
