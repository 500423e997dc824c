// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's own trace: what a scenario claims is checked against it.

pub mod exits;
pub mod probe;

use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::time::TimeSpec;
use vcpufreq_bench::tracefs::{FrequencyEvent, Mmio, Switch, TraceLine, events, lost};

use crate::harness::sysfs;
use crate::harness::vmm::vcpu_name;

/// Where the kernel has it.
pub const TRACING: &str = "/sys/kernel/tracing";

/// A pCPU goes idle, from `power:cpu_idle`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Idle {
    /// CLOCK_MONOTONIC in µs.
    pub time_us: u64,
    /// The pCPU.
    pub cpu: u32,
}

/// The scheduler's tick on a pCPU, from `timer:hrtimer_expire_entry`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tick {
    /// CLOCK_MONOTONIC in µs.
    pub time_us: u64,
    /// The pCPU.
    pub cpu: u32,
}

/// A thread is woken, from `sched:sched_waking`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waking {
    /// The pCPU that wakes it.
    pub cpu: u32,
    /// The thread's name.
    pub thread: String,
}

/// A span of time, in µs of CLOCK_MONOTONIC.
pub type Span = (u64, u64);

/// What was seen, in order of time.
#[derive(Debug, Default)]
pub struct TraceEvents {
    /// All frequency changes.
    pub frequencies: Vec<FrequencyEvent>,
    /// All switches of threads.
    pub switches: Vec<Switch>,
    /// All reads of registers, when they were asked for.
    pub reads: Vec<Mmio>,
    /// All writes of registers, when they were asked for.
    pub writes: Vec<Mmio>,
    /// All entries to idle states, where these are traced.
    pub idles: Vec<Idle>,
    /// All ticks, where these are traced.
    pub ticks: Vec<Tick>,
    /// All wakings of threads, where these are traced.
    pub wakings: Vec<Waking>,
}

impl TraceEvents {
    /// From the trace's text.
    fn read(text: &str) -> Result<Self> {
        let mut seen = Self::default();
        for line in events(text) {
            seen.add(&line)?;
        }
        Ok(seen)
    }

    fn add(&mut self, line: &TraceLine) -> Result<()> {
        let TraceLine { time_us, cpu, .. } = *line;
        match line.event {
            "cpu_frequency" => self.frequencies.push(FrequencyEvent::read(line)?),
            "sched_switch" => self.switches.push(Switch::read(line)?),
            "kvm_mmio" if line.tail.starts_with("mmio read ") => self.reads.push(Mmio::read(line)?),
            "kvm_mmio" if line.tail.starts_with("mmio write ") => {
                self.writes.push(Mmio::read(line)?)
            }
            "cpu_idle" if line.number("state")? != LEAVES_IDLE => self.idles.push(Idle {
                time_us,
                cpu: line.number("cpu_id")?,
            }),
            "hrtimer_expire_entry" if line.tail.contains(TICK) => {
                self.ticks.push(Tick { time_us, cpu });
            }
            "sched_waking" => self.wakings.push(waking(line)?),
            _ => (),
        }
        Ok(())
    }

    /// When a thread ran.
    pub fn runs_of(&self, tid: i32) -> Vec<Span> {
        let mut runs = Vec::new();
        let mut since = None;
        for switch in &self.switches {
            if switch.next.1 == tid {
                since = Some(switch.time_us);
            } else if switch.prev.1 == tid {
                runs.extend(since.take().map(|from| (from, switch.time_us)));
            }
        }
        runs
    }

    /// Since when the thread that runs at `time` has run without a break;
    /// `time` itself when it doesn't run, or ran before the trace began.
    pub fn running_since(&self, tid: i32, time: u64) -> u64 {
        let own = |switch: &&Switch| switch.next.1 == tid || switch.prev.1 == tid;
        let mut before = self.switches.iter().filter(|switch| switch.time_us <= time);
        match before.rfind(own) {
            Some(switch) if switch.next.1 == tid => switch.time_us,
            _ => time,
        }
    }

    /// A pCPU's frequency at a moment, if it has changed since the trace began.
    pub fn frequency_at(&self, cpu: u32, time: u64) -> Option<u32> {
        let mut own = self.frequencies.iter().filter(|event| event.cpu == cpu);
        own.rfind(|event| event.time_us <= time)
            .map(|event| event.khz)
    }

    /// How often a pCPU ticked in a span of time.
    pub fn ticks_on(&self, cpu: u32, span: Span) -> usize {
        let within = |tick: &&Tick| tick.cpu == cpu && (span.0..=span.1).contains(&tick.time_us);
        self.ticks.iter().filter(within).count()
    }

    /// For how long of a span these pCPUs ran anything but vCPUs, in µs.
    pub fn others_ran(&self, cpus: &[u32], span: Span) -> u64 {
        let other = |name: &str| vcpu_name(name).is_none() && !name.starts_with("swapper/");
        let ran = self.ran(cpus, span, other).into_iter();
        ran.map(|(from, to)| to - from).sum()
    }

    /// When in a span a vCPU's thread ran on these pCPUs.
    pub fn vcpus_ran(&self, cpus: &[u32], span: Span) -> Vec<Span> {
        self.ran(cpus, span, |name| vcpu_name(name).is_some())
    }

    /// When these pCPUs ran threads of such names. Of a pCPU without a switch nothing is known.
    fn ran(&self, cpus: &[u32], span: Span, such: impl Fn(&str) -> bool) -> Vec<Span> {
        let mut spans = Vec::new();
        for cpu in cpus {
            let mut since = span.0;
            let mut last = false;
            for switch in self.switches.iter().filter(|switch| switch.cpu == *cpu) {
                let time = switch.time_us.clamp(since, span.1);
                spans.extend(such(&switch.prev.0).then_some((since, time)));
                since = time;
                last = such(&switch.next.0);
            }
            spans.extend(last.then_some((since, span.1)));
        }
        spans
    }
}

/// Tracing of frequencies and context switches, on until it is stopped.
#[derive(Debug)]
pub struct Trace(());

/// Of each CPU's buffer, as tracefs prints it.
const BUFFER_KIB: &str = "4096";

/// `PWR_EVENT_EXIT` in place of a state.
const LEAVES_IDLE: u32 = u32::MAX;

/// `tick_nohz_handler()` of kernel/time/tick-sched.c.
const TICK: &str = " function=tick_nohz_handler ";

const EVENTS: [&str; 2] = [
    "events/power/cpu_frequency/enable",
    "events/sched/sched_switch/enable",
];

impl Trace {
    /// Starts with an empty buffer.
    ///
    /// What it sets stays set, the events too: to switch an event on or off
    /// patches the kernel's code, which is work on every CPU.
    pub fn start() -> Result<Self> {
        Self::start_with(&[])
    }

    /// The same, with what guests read from registers and write there.
    pub fn start_with_registers() -> Result<Self> {
        Self::start_with(&["events/kvm/kvm_mmio/enable"])
    }

    /// That, and when pCPUs go idle.
    pub fn start_with_registers_and_idle() -> Result<Self> {
        Self::start_with(&["events/kvm/kvm_mmio/enable", "events/power/cpu_idle/enable"])
    }

    /// Frequencies and context switches, with the host's ticks.
    pub fn start_with_ticks() -> Result<Self> {
        Self::start_with(&["events/timer/hrtimer_expire_entry/enable"])
    }

    /// The same, with wake-ups and their CPUs.
    pub fn start_with_wakings() -> Result<Self> {
        Self::start_with(&["events/sched/sched_waking/enable"])
    }

    fn start_with(more: &[&str]) -> Result<Self> {
        let own = |file: &str| format!("{TRACING}/{file}");
        if sysfs::text(own("buffer_size_kb"))?.trim() != BUFFER_KIB {
            sysfs::write(own("buffer_size_kb"), BUFFER_KIB)?;
            sysfs::write(own("trace_clock"), "mono")?;
        }
        off()?;
        sysfs::write(own("trace"), "")?;
        for event in EVENTS.iter().chain(more) {
            if sysfs::text(own(event))?.trim() != "1" {
                sysfs::write(own(event), 1)?;
            }
        }
        sysfs::write(own("tracing_on"), 1)?;
        Ok(Self(()))
    }

    /// What was seen since the start.
    pub fn stop(self) -> Result<TraceEvents> {
        off()?;
        let text = sysfs::text(format!("{TRACING}/trace"))?;
        TraceEvents::read(&text)
    }
}

/// Records no more, as the lab's own looks leave it.
pub fn off() -> Result<()> {
    sysfs::write(format!("{TRACING}/tracing_on"), 0)
}

/// How many events of a pCPU are no longer in the trace that was stopped, because newer ones took
/// their place, or never came there.
pub fn lost_on(cpu: u32) -> Result<u64> {
    let stats = sysfs::text(format!("{TRACING}/per_cpu/cpu{cpu}/stats"))?;
    lost(&stats).with_context(|| format!("CPU {cpu}'s trace: '{stats}'"))
}

/// CLOCK_MONOTONIC in µs, which the trace's times are in.
pub fn now_us() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
        .unwrap_or_else(|_| TimeSpec::new(0, 0));
    let now = Duration::from(now);
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

/// `comm=requests pid=99 prio=120 target_cpu=000`
fn waking(line: &TraceLine) -> Result<Waking> {
    let name = line.tail.rsplit_once(" pid=").map(|(name, _)| name);
    let name = name.and_then(|name| name.strip_prefix("comm="));
    Ok(Waking {
        cpu: line.cpu,
        thread: line.known(name)?.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    //! Promises: a trace line is read as the kernel prints it, and threads are distinguished.
    use super::*;

    #[test]
    fn a_waking_of_the_trace() {
        let text = " init-1 [003] d.h3. 1.000002: sched_waking: comm=requests pid=99 prio=120 \
                    target_cpu=000";
        let waking = Waking {
            cpu: 3,
            thread: "requests".to_owned(),
        };
        assert_eq!(TraceEvents::read(text).unwrap().wakings, [waking]);
    }

    fn switched(cpu: u32, time_us: u64, prev: &str, next: &str) -> Switch {
        let thread = |name: &str| (name.to_owned(), 1);
        Switch {
            time_us,
            cpu,
            prev: thread(prev),
            next: thread(next),
        }
    }

    #[test]
    fn entries_to_idle_are_told_from_exits() {
        let text = "# tracer: nop\n\
                    <idle>-0 [002] d..1. 1.000002: cpu_idle: state=0 cpu_id=2\n\
                    <idle>-0 [002] d..1. 1.000009: cpu_idle: state=4294967295 cpu_id=2\n";
        let seen = TraceEvents::read(text).unwrap();
        let idle = Idle {
            time_us: 1_000_002,
            cpu: 2,
        };
        assert_eq!(seen.idles, [idle]);
    }

    #[test]
    fn ticks_are_told_from_other_timers() {
        let text = "   vcpu0-99 [002] d.h1. 1.000002: hrtimer_expire_entry: hrtimer=1 function=tick_nohz_handler now=1\n\
                    vcpu0-99 [002] d.h1. 1.000005: hrtimer_expire_entry: hrtimer=2 function=hrtimer_wakeup now=1\n\
                    vcpu1-98 [001] d.h1. 1.000009: hrtimer_expire_entry: hrtimer=3 function=tick_nohz_handler now=1\n";
        let seen = TraceEvents::read(text).unwrap();
        assert_eq!(seen.ticks_on(2, (1_000_002, 1_000_009)), 1);
        assert_eq!(seen.ticks_on(2, (1_000_003, 1_000_009)), 0);
        assert_eq!(seen.ticks_on(1, (1_000_002, 1_000_009)), 1);
    }

    #[test]
    fn a_thread_runs_since_it_was_switched_to() {
        let mut switches = vec![
            switched(0, 10, "swapper/0", "vcpu0"),
            switched(0, 20, "vcpu0", "init"),
        ];
        switches[0].prev.1 = 0;
        switches[1].next.1 = 2;
        let seen = TraceEvents {
            switches,
            ..TraceEvents::default()
        };
        assert_eq!(seen.running_since(1, 5), 5);
        assert_eq!(seen.running_since(1, 19), 10);
        assert_eq!(seen.running_since(1, 21), 21);
    }

    #[test]
    fn others_are_counted_within_the_span() {
        let switches = vec![
            switched(0, 10, "init", "vcpu0"),
            switched(1, 15, "swapper/1", "init"),
            switched(0, 20, "vcpu0", "kworker/0:1"),
            switched(0, 26, "kworker/0:1", "vcpu0"),
        ];
        let seen = TraceEvents {
            switches,
            ..TraceEvents::default()
        };
        // init until 10, the kworker from 20 to 25; then the other pCPU too.
        assert_eq!(seen.others_ran(&[0], (5, 25)), 10);
        assert_eq!(seen.others_ran(&[0, 1], (5, 25)), 20);
    }
}
