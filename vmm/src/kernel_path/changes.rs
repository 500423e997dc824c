// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Wakes the worker when a cur_perf may have changed: a vCPU's thread has come
//! to another pCPU (the perf software event cpu-migrations), or a pCPU to
//! another frequency (the tracepoint `power:cpu_frequency`). Needs CAP_PERFMON
//! and tracefs; without, the worker looks at its period only.

use std::sync::{Arc, OnceLock};

use anyhow::Context;
use vcpufreq_device::{VcpuId, host::Tid};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::perf::{PerfEvent, Whose};
use crate::facts::HostTree;
use crate::vm::kick_signal;

const TRACEPOINT: &str = "sys/kernel/tracing/events/power/cpu_frequency/id";

/// The data of its events in the worker's epoll set.
pub const CHANGED: u64 = u64::MAX - 1;

/// What is watched. It ends with this.
#[derive(Debug)]
pub struct Changes {
    epoll: Arc<Epoll>,
    _frequencies: Vec<PerfEvent>,
    threads: Box<[OnceLock<PerfEvent>]>,
}

impl Changes {
    /// Watches the frequencies of `pcpus`; `epoll` hears of it.
    ///
    /// # Errors
    /// Why that can't be watched on this host.
    pub fn watch(
        host: &HostTree,
        epoll: &Arc<Epoll>,
        pcpus: &[u32],
        vcpus: u16,
    ) -> anyhow::Result<Self> {
        let id = host.number::<u64>(TRACEPOINT);
        let id = id.context("the tracepoint power:cpu_frequency can't be read (tracefs)")?;
        let event = |pcpu: &u32| {
            let event = PerfEvent::waking(id, Whose::Pcpu(*pcpu));
            let event = event.context("perf events aren't permitted (CAP_PERFMON)")?;
            hear(epoll, &event)?;
            Ok(event)
        };
        Ok(Self {
            epoll: epoll.clone(),
            _frequencies: pcpus.iter().map(event).collect::<anyhow::Result<_>>()?,
            threads: (0..vcpus).map(|_| OnceLock::new()).collect(),
        })
    }

    /// Watches where the thread of `vcpu` runs. It gets a signal itself, so that
    /// KVM_RUN returns on the new pCPU before the guest goes on there.
    ///
    /// # Errors
    /// What the kernel said.
    pub fn register_thread(&self, vcpu: VcpuId, tid: Tid) -> anyhow::Result<()> {
        let event = PerfEvent::migrations(tid).context("migrations can't be watched")?;
        let signalled = event.signal(tid, kick_signal());
        signalled.context("migrations can't be signalled")?;
        hear(&self.epoll, &event)?;
        if let Some(slot) = self.threads.get(vcpu.index()) {
            // A vCPU has one thread.
            let _ = slot.set(event);
        }
        Ok(())
    }
}

fn hear(epoll: &Epoll, event: &PerfEvent) -> anyhow::Result<()> {
    let when = EpollEvent::new(EventSet::IN, CHANGED);
    epoll
        .ctl(ControlOperation::Add, event.fd(), when)
        .context("can't watch a perf event")
}
