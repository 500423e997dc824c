// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! set_perf by hypercall once the path `bpf` is lost. KVM forwards to this
//! program what its filter said before the guest first ran, and set_perf isn't
//! in that: only the program on hypercalls still sees what is asked for. It stays
//! attached, and a thread here passes its requests on to the device.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{
    AtomicBool,
    Ordering::{Relaxed, SeqCst},
};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context;
use vcpufreq_device::kvm::budget::Budget;
use vcpufreq_device::{Khz, VcpuId, WriteReg, host};

use super::Shared;
use super::worker::SHARE;
use crate::{Event, Worker};

/// How soon the thread sees that it is to end.
const LOOK: Duration = Duration::from_millis(100);

/// The thread.
pub(super) struct Calls {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

/// Requests of a vCPU, and the last of them.
struct Asked {
    vcpu: VcpuId,
    domain: u32,
    khz: Khz,
    count: u64,
}

impl Calls {
    /// Starts it. What was asked for before `since_ns` the device has already.
    pub(super) fn start(
        shared: &Arc<Shared>,
        worker: Worker,
        since_ns: u64,
    ) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (shared, stopped) = (shared.clone(), stop.clone());
        let thread = Builder::new().name("calls".to_owned());
        let thread = thread
            .spawn(move || shared.serve_calls(&worker, since_ns, &stopped))
            .context("can't start the thread that carries out hypercalls")?;
        Ok(Self { stop, thread })
    }

    /// Ends it.
    pub(super) fn end(self) {
        self.stop.store(true, SeqCst);
        // A panic of that thread was reported when it happened.
        let _ = self.thread.join();
    }
}

impl Shared {
    fn serve_calls(&self, worker: &Worker, since_ns: u64, stop: &AtomicBool) {
        // Best effort: without these it is a thread like any other.
        let _ = host::stay_off(&self.pcpus_of_vcpus);
        let _ = host::clamp_current_thread_to_zero();
        let mut budget = Budget::new(SHARE, Instant::now());
        let mut cpu_before = host::thread_cpu_time();
        while !stop.load(SeqCst) {
            let mut asked: Vec<Asked> = match worker.wait(LOOK) {
                Ok(events) => events.filter_map(|event| asked(event, since_ns)).collect(),
                Err(error) => {
                    return self.diagnostics.warn(&format!(
                        "set_perf by hypercall goes to nobody from now on ({error}); restart the \
                         guest"
                    ));
                }
            };
            self.add_unreported(&mut asked);
            self.pass_on(&asked);
            let cpu = host::thread_cpu_time();
            let used = cpu.saturating_sub(cpu_before);
            cpu_before = cpu;
            std::thread::sleep(budget.after(used, Instant::now()));
        }
    }

    /// Adds what found no room among the events: the last of them counts.
    fn add_unreported(&self, asked: &mut Vec<Asked>) {
        for (vcpu, known) in (0..=u16::MAX).map(VcpuId).zip(&self.vcpus) {
            let unreported = self.host.counters(vcpu).map_or(0, |one| one.unreported);
            let news = unreported.saturating_sub(known.unreported.swap(unreported, Relaxed));
            if let Some(latest) = self.host.latest(vcpu).filter(|_| news > 0) {
                asked.push(Asked {
                    vcpu,
                    domain: known.domain,
                    khz: latest.khz,
                    count: news,
                });
            }
        }
    }

    /// The newest request of each domain is carried out, the others are counted.
    fn pass_on(&self, asked: &[Asked]) {
        let newest: BTreeMap<u32, usize> =
            (0..).zip(asked).map(|(n, one)| (one.domain, n)).collect();
        for (n, one) in (0..).zip(asked) {
            let Some(known) = self.vcpus.get(one.vcpu.index()) else {
                continue;
            };
            known.passed_on.fetch_add(one.count, Relaxed);
            self.device.count_in_kernel(one.vcpu, one.count);
            let last = newest.get(&one.domain) == Some(&n);
            let overtaken = one.count - u64::from(last);
            self.device.count_coalesced(one.vcpu, overtaken);
            if last {
                // The vCPU that calls asks for itself.
                let (by, khz) = (Some(one.vcpu), one.khz.0);
                self.device.write_by(by, one.vcpu, WriteReg::SetPerf, khz);
            }
        }
    }
}

fn asked(event: Event, since_ns: u64) -> Option<Asked> {
    match event {
        Event::Told(told) if told.at_ns >= since_ns => Some(Asked {
            vcpu: told.vcpu,
            domain: told.domain,
            khz: told.khz,
            count: 1,
        }),
        _ => None,
    }
}
