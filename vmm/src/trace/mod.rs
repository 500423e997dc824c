// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `vcpufreq trace`: what a guest requests, the clamps, the frequencies, its vCPUs' threads and its
//! exits, on one time axis, as a file for ui.perfetto.dev.
//!
//! ```text
//! tracefs, an instance of its own ─▶ lines ─┐
//! the VMM's stats, each 20 ms ─▶ samples ───┼▶ Timeline ─▶ JSON (Trace Event Format)
//! the guest's own trace, if there is one ───┘
//! ```
//! Other tracing goes on, and tracefs is left as it was.

mod cause;
mod exits;
mod guest;
mod offset;
mod timeline;

use std::{
    fs::{self, File},
    io::{BufWriter, Write as _},
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use clap::Args;
use vcpufreq_bench::{RecordedInstance, has_event};
use vcpufreq_host::{HostCpus, HostRoot, monotonic_ns};

use self::{
    guest::GuestTrace,
    timeline::{Recording, Timeline},
};
use crate::{
    lifecycle::state::StateDir,
    message::warn,
    path,
    stats::{Stats, VmmSocket, ask},
    tune::Lasts,
};

/// Of each pCPU's buffer: some 100,000 events.
const BUFFER_KIB: u32 = 8 << 10;
const NEEDED: [&str; 3] = [
    "power/cpu_frequency",
    "sched/sched_switch",
    "sched/sched_wakeup",
];
/// A kernel without KVM's events shows neither requests nor exits.
const WISHED: [&str; 3] = [ACCESSES, "kvm/kvm_exit", "kvm/kvm_entry"];
const ACCESSES: &str = "kvm/kvm_mmio";
/// Between two looks at the VMM's stats.
const SAMPLE: Duration = Duration::from_millis(20);

/// Options of `trace`.
#[derive(Debug, Args)]
pub struct TraceArgs {
    /// The VMM's process, as in `vcpufreq stats`
    pub pid: u32,
    /// For so long, as 500ms or 5s
    #[arg(long = "for", value_name = "TIME")]
    pub lasts: Lasts,
    /// The file that is written, for ui.perfetto.dev or chrome://tracing
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// The guest's own trace of this time with sched_switch and cpu_frequency, joined by its requests;
    /// text of tracefs or of trace-cmd report, on the clock mono. It is read when TIME is over
    #[arg(long, value_name = "FILE")]
    pub guest_trace: Option<PathBuf>,
}

/// Traces a VM; returns the exit code: 1 when events were lost.
///
/// # Errors
/// What keeps it from being traced, or the file from being written.
pub fn trace(args: &TraceArgs) -> anyhow::Result<u8> {
    let socket = VmmSocket::find(&StateDir::of_user()?, args.pid)?;
    let first = ask(&socket)?;
    if let Some(event) = NEEDED.iter().find(|event| !has_event(event)) {
        bail!(
            "no trace event {event} is to be had; mount tracefs at /sys/kernel/tracing, and run \
             as root"
        );
    }
    let cpus = HostCpus::read(&HostRoot::default());
    let mut policies = cpus.policies.iter();
    if let Some(policy) = policies.find(|policy| policy.events_by().is_some()) {
        warn(&format!(
            "{} changes frequencies without the event power/cpu_frequency: the trace has none of them",
            policy.driver
        ));
    }
    if args.guest_trace.is_some() {
        check_requests_are_traced(&first)?;
    }
    let own = RecordedInstance::alone(BUFFER_KIB)?;
    own.instance().enable(&NEEDED)?;
    for event in WISHED.iter().filter(|event| has_event(event)) {
        own.instance().enable(&[event])?;
    }
    // What is in it stays until the trace is complete.
    let shown = args.out.display();
    let is_new = !args.out.exists();
    let file = File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(&args.out);
    let file = file.with_context(|| format!("can't write {shown}; name another file"))?;
    own.instance().start()?;
    let since_us = monotonic_ns() / 1000;
    let samples = sample(&socket, args.lasts.0);
    own.instance().pause()?;
    let lost = own.instance().lost()?;
    let recording = Recording {
        since_us,
        lost,
        accesses: has_event(ACCESSES),
    };
    let mut timeline = Timeline::new(&first, recording);
    timeline.read(&own.instance().text()?)?;
    drop(own);
    let samples = samples?;
    samples.iter().for_each(|stats| timeline.sample(stats));
    let guests = args.guest_trace.as_deref();
    let joined = guests.map_or(Ok(()), |path| join(&mut timeline, path));
    if joined.is_err() && is_new {
        // Nothing is in it.
        let _ = fs::remove_file(&args.out);
    }
    joined?;
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    let mut out = BufWriter::new(file);
    serde_json::to_writer(&mut out, &timeline.finish())
        .map_err(std::io::Error::from)
        .and_then(|()| out.flush())
        .with_context(|| format!("can't write {shown}; make room"))?;
    if lost > 0 {
        warn(&format!(
            "{lost} events were lost, because they came faster than they could be kept; trace a \
             shorter time"
        ));
    }
    Ok(u8::from(lost > 0))
}

/// Requests in the host's trace tell the guest's clock: refuses a VM without any.
fn check_requests_are_traced(stats: &Stats) -> anyhow::Result<()> {
    let in_memory = [path::Path::Shm, path::Path::Ram];
    let mut vcpus = stats.vcpus.iter();
    ensure!(
        has_event(ACCESSES) && vcpus.any(|vcpu| !in_memory.contains(&vcpu.path)),
        "--guest-trace needs requests that KVM traces (event kvm/kvm_mmio); it traces none by shm or \
         ram, as QEMU's guests make them; leave it out"
    );
    Ok(())
}

fn join(timeline: &mut Timeline, path: &Path) -> anyhow::Result<()> {
    let guest = GuestTrace::read(path)?;
    ensure!(
        timeline.join(&guest),
        "{}: its cpu_frequency events don't tell the guest's clock, since they don't fit the vCPUs' \
         requests in one way alone; record both at once, while the load changes",
        path.display()
    );
    Ok(())
}

/// The VMM's stats meanwhile. One that ends ends the trace.
fn sample(socket: &VmmSocket, lasts: Duration) -> anyhow::Result<Vec<Stats>> {
    let until = Instant::now() + lasts;
    let mut samples = Vec::new();
    while Instant::now() < until {
        match ask(socket) {
            Ok(stats) => samples.push(stats),
            Err(error) if samples.is_empty() => return Err(error),
            Err(_) => break,
        }
        sleep(SAMPLE.min(until.saturating_duration_since(Instant::now())));
    }
    samples.extend(ask(socket).ok());
    Ok(samples)
}
