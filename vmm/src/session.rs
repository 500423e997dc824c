// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the process of a VM is to its user, whether it runs the VM or serves another VMM's: texts on
//! stderr, events in a file, and answers to `vcpufreq stats` and `tune`.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use vcpufreq_bridge::shm::{RAM, SHM};
use vcpufreq_bridge::{
    AccessPath, BridgeHandle, BridgeSnapshot, BridgeThread, Embedder, EventSink, EventStats,
    Tuning, VcpuSnapshot,
};
use vcpufreq_device::Khz;
use vcpufreq_host::{HostRoot, Tid, monotonic_ns};

use crate::{
    events::{self, EventWriter},
    lifecycle::{guardian::GuardianSocket, state::StateDir},
    message::warn,
    path,
    sandbox::{Confined, Sandbox},
    socket_thread::SocketThread,
    stats::{self, DeciderStats, OppTime, Stats, TimeInState, TuningStats, VcpuStats},
    tune,
};

/// This program, as its bridge sees it: texts go to stderr.
#[derive(Debug)]
pub struct BridgeProgram {
    /// Whether to print why.
    pub explain: bool,
    /// How the bridge's threads are confined.
    pub confined: Option<Arc<Confined>>,
    /// What may hold an operator's policy.
    pub guardian: Option<Arc<GuardianSocket>>,
}

impl Embedder for BridgeProgram {
    fn on_thread(&self, thread: BridgeThread) {
        let confined = self.confined.iter();
        confined.for_each(|confined| confined.enter_or_end(thread));
    }

    fn frequency_event(&self, _: &HostRoot, pcpu: u32) -> io::Result<Option<OwnedFd>> {
        let confined = self.confined.as_ref();
        confined.map_or(Ok(None), |confined| confined.frequency_event(pcpu))
    }

    fn policy_holder_has_ended(&self) -> bool {
        let guardian = self.guardian.as_ref();
        guardian.is_some_and(|guardian| guardian.is_lost())
    }

    fn warn(&self, text: &str) {
        warn(text);
    }

    fn explain(&self, text: &str) {
        if self.explain {
            eprintln!("{text}");
        }
    }
}

/// What answers to other programs.
pub struct AnsweringThreads {
    stats: Option<SocketThread>,
    tune: Option<SocketThread>,
}

impl AnsweringThreads {
    /// Starts the threads that answer `vcpufreq stats` and `tune` for process `pid`. If they cannot start,
    /// the guest runs without them.
    pub fn start(
        bridge: BridgeHandle,
        times: TimeInState,
        (pid, sandbox): (u32, Option<Arc<Sandbox>>),
    ) -> Self {
        Self {
            tune: answer_tune(bridge.clone(), (pid, sandbox.clone())),
            stats: answer_stats(bridge, times, (pid, sandbox)),
        }
    }

    /// Ends the threads.
    pub fn stop(self) {
        self.tune.into_iter().for_each(SocketThread::stop);
        self.stats.into_iter().for_each(SocketThread::stop);
    }
}

/// What is counted of so many vCPUs, and written to the file of --events.
///
/// # Errors
/// When the file's writer can't be started.
pub fn observe(
    file: Option<File>,
    vcpus: usize,
    sandbox: Option<Arc<Sandbox>>,
) -> anyhow::Result<(Arc<EventStats>, Option<EventWriter>)> {
    let Some(file) = file else {
        return Ok((Arc::new(EventStats::new(vcpus, None)), None));
    };
    let (queue, writer) =
        events::write_to(file, sandbox).context("can't start the writer of events")?;
    let queue: Box<dyn EventSink> = Box::new(queue);
    Ok((Arc::new(EventStats::new(vcpus, Some(queue))), Some(writer)))
}

fn answer_tune(
    bridge: BridgeHandle,
    (pid, sandbox): (u32, Option<Arc<Sandbox>>),
) -> Option<SocketThread> {
    let start = || {
        let path = StateDir::of_user()?.tune_socket_path(pid);
        anyhow::Ok(tune::start_taking_calls(&path, sandbox, bridge)?)
    };
    or_warned("tune", start())
}

fn answer_stats(
    bridge: BridgeHandle,
    times: TimeInState,
    (pid, sandbox): (u32, Option<Arc<Sandbox>>),
) -> Option<SocketThread> {
    let start = || {
        let path = StateDir::of_user()?.socket_path(pid);
        let stats = move || stats(pid, &bridge, &times);
        anyhow::Ok(stats::start_answering(&path, sandbox, stats)?)
    };
    or_warned("stats", start())
}

/// The thread that answers this command; a VM goes on without it.
fn or_warned(command: &str, started: anyhow::Result<SocketThread>) -> Option<SocketThread> {
    let warned = started.inspect_err(|error| {
        warn(&format!(
            "vcpufreq {command} won't be answered: {error:#}; look at the directory's permissions"
        ));
    });
    warned.ok()
}

/// What is counted by now.
fn stats(pid: u32, bridge: &BridgeHandle, times: &TimeInState) -> Stats {
    let BridgeSnapshot {
        vcpus,
        accesses_outside,
        governors_lost,
        governors_off,
        pins_lost,
        tunings,
        decided_by,
    } = bridge.snapshot();
    let now_ns = monotonic_ns();
    let vcpus = (0..=u16::MAX).zip(vcpus);
    Stats {
        pid,
        at_ns: now_ns,
        vcpus: vcpus.map(|(vcpu, of)| vcpu_stats(vcpu, of)).collect(),
        accesses_outside,
        governors_lost,
        governors_off,
        pins_lost,
        tunings: tunings.iter().map(|of| tuning_stats(of, now_ns)).collect(),
        decided_by: decided_by.map(|(name, [asked, bounded, silent])| DeciderStats {
            name,
            asked,
            bounded,
            silent,
        }),
        policies: times.now(),
    }
}

fn tuning_stats(of: &Tuning, now_ns: u64) -> TuningStats {
    TuningStats {
        handle: of.handle,
        vcpu: of.request.vcpu.0,
        floor_khz: of.request.floor.map(|khz| khz.0),
        ceiling_khz: of.request.ceiling.map(|khz| khz.0),
        left_ms: of.until_ns.saturating_sub(now_ns).div_ceil(1_000_000),
        user: of.client.user,
        client: of.client.pid,
    }
}

fn vcpu_stats(vcpu: u16, of: VcpuSnapshot) -> VcpuStats {
    VcpuStats {
        vcpu,
        domain: of.domain.0,
        tid: of.thread.map(Tid::get),
        path: match of.path {
            AccessPath::Exit => path::Path::Exit,
            AccessPath::Ioeventfd => path::Path::Ioeventfd,
            AccessPath::Backend(SHM) => path::Path::Shm,
            AccessPath::Backend(RAM) => path::Path::Ram,
            AccessPath::Backend(_) => path::Path::Bpf,
        },
        pcpu: of.pcpu.map(|(pcpu, _)| pcpu),
        pcpu_khz: of.pcpu.map(|(_, khz)| khz.0),
        asks_khz: of.request.map(|khz| khz.0),
        gets_khz: of.cur_perf.0,
        uclamp: (of.clamp.min.get(), of.clamp.max.get()),
        own_util: of.load.map(|load| load.own.get()),
        others_util: of.load.map(|load| load.others.get()),
        target_sum: of.target.map(|of| of.sum),
        target: of.target.map(|of| of.target.get()),
        accesses: of.accesses,
        counts: of.counters,
        clamp_after: of.clamp_after.into(),
        freq_after: of.freq_after.into(),
        requested: of.requested.into_iter().map(opp_time).collect(),
    }
}

fn opp_time((khz, time): (Khz, Duration)) -> OppTime {
    OppTime {
        khz: khz.0,
        us: u64::try_from(time.as_micros()).unwrap_or(u64::MAX),
    }
}
