// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's own trace of its frequencies: what a scenario claims is
//! checked against it.

pub mod exits;
pub mod instance;

use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::time::TimeSpec;

use crate::harness::crosvm::vcpu_name;
use crate::harness::sysfs;

const TRACING: &str = "/sys/kernel/tracing";

/// A frequency change of a pCPU, from the tracepoint `power:cpu_frequency`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrequencyEvent {
    /// CLOCK_MONOTONIC in µs.
    pub time_us: u64,
    /// The pCPU.
    pub cpu: u32,
    /// The new frequency in kHz.
    pub khz: u32,
}

/// A pCPU goes from one thread to the next, from `sched:sched_switch`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Switch {
    /// CLOCK_MONOTONIC in µs.
    pub time_us: u64,
    /// The pCPU.
    pub cpu: u32,
    /// Name and number of the thread that ran until now.
    pub prev: (String, i32),
    /// And of the one that runs from now on.
    pub next: (String, i32),
}

/// A guest's access to a register, of a read its completion, from `kvm:kvm_mmio`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mmio {
    /// CLOCK_MONOTONIC in µs.
    pub time_us: u64,
    /// The pCPU that the vCPU was on.
    pub cpu: u32,
    /// Guest-physical address.
    pub address: u64,
    /// What it was told, or has written.
    pub value: u64,
}

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
pub struct Seen {
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

impl Seen {
    /// From the trace's text.
    fn read(text: &str) -> Result<Self> {
        let named = |name: &'static str| text.lines().filter(move |line| line.contains(name));
        Ok(Self {
            frequencies: named(": cpu_frequency: ")
                .map(parse)
                .collect::<Result<_>>()?,
            switches: named(": sched_switch: ")
                .map(parse_switch)
                .collect::<Result<_>>()?,
            reads: named(": kvm_mmio: mmio read ")
                .map(parse_mmio)
                .collect::<Result<_>>()?,
            writes: named(": kvm_mmio: mmio write ")
                .map(parse_mmio)
                .collect::<Result<_>>()?,
            idles: named(": cpu_idle: ")
                .filter(|line| !line.contains(LEAVES_IDLE))
                .map(parse_idle)
                .collect::<Result<_>>()?,
            ticks: named(TICK).map(parse_tick).collect::<Result<_>>()?,
            wakings: named(": sched_waking: ")
                .map(parse_waking)
                .collect::<Result<_>>()?,
        })
    }

    /// When a thread ran.
    pub fn runs_of(&self, tid: i32) -> Vec<Span> {
        let mut runs = Vec::new();
        let mut since = None;
        for switch in &self.switches {
            if switch.next.1 == tid {
                since = Some(switch.time_us);
            } else if switch.prev.1 == tid
                && let Some(from) = since.take()
            {
                runs.push((from, switch.time_us));
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
        let other =
            |(name, _): &(String, i32)| vcpu_name(name).is_none() && !name.starts_with("swapper/");
        let mut total = 0;
        for cpu in cpus {
            let mut since = span.0;
            let mut last_is_other = false;
            for switch in self.switches.iter().filter(|switch| switch.cpu == *cpu) {
                let time = switch.time_us.clamp(since, span.1);
                total += if other(&switch.prev) { time - since } else { 0 };
                since = time;
                last_is_other = other(&switch.next);
            }
            total += if last_is_other { span.1 - since } else { 0 };
        }
        total
    }
}

/// Tracing of frequencies and of who runs, on until it is stopped.
#[derive(Debug)]
pub struct Trace(());

/// Of each CPU's buffer, as tracefs prints it.
const BUFFER_KIB: &str = "4096";

/// `PWR_EVENT_EXIT` in place of a state.
const LEAVES_IDLE: &str = ": cpu_idle: state=4294967295 ";

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

    /// That of frequencies and of who runs, with the host's ticks.
    pub fn start_with_ticks() -> Result<Self> {
        Self::start_with(&["events/timer/hrtimer_expire_entry/enable"])
    }

    /// The same, with who is woken from where.
    pub fn start_with_wakings() -> Result<Self> {
        Self::start_with(&["events/sched/sched_waking/enable"])
    }

    fn start_with(more: &[&str]) -> Result<Self> {
        let own = |file: &str| format!("{TRACING}/{file}");
        if sysfs::text(own("buffer_size_kb"))?.trim() != BUFFER_KIB {
            sysfs::write(own("buffer_size_kb"), BUFFER_KIB)?;
            sysfs::write(own("trace_clock"), "mono")?;
        }
        sysfs::write(own("tracing_on"), 0)?;
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
    pub fn stop(self) -> Result<Seen> {
        sysfs::write(format!("{TRACING}/tracing_on"), 0)?;
        let text = sysfs::text(format!("{TRACING}/trace"))?;
        Seen::read(&text)
    }
}

/// How many events of a pCPU are no longer in the trace that was stopped, because newer ones took
/// their place, or never came there.
pub fn lost_on(cpu: u32) -> Result<u64> {
    let stats = sysfs::text(format!("{TRACING}/per_cpu/cpu{cpu}/stats"))?;
    lost(&stats).with_context(|| format!("CPU {cpu}'s trace: '{stats}'"))
}

/// `overrun: 0` and `dropped events: 0`, each on a line.
pub fn lost(stats: &str) -> Option<u64> {
    let of = |name: &str| {
        let mut lines = stats.lines();
        lines.find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok())
    };
    Some(of("overrun:")? + of("dropped events:")?)
}

/// CLOCK_MONOTONIC in µs, which the trace's times are in.
pub fn now_us() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
        .unwrap_or_else(|_| TimeSpec::new(0, 0));
    let now = Duration::from(now);
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

/// `  vcpu0-99  [000] d.h2.  12.345678: cpu_frequency: state=1800000 cpu_id=0`
fn parse(line: &str) -> Result<FrequencyEvent> {
    let (time_us, cpu, khz) = parse_power(line, "cpu_frequency")?;
    Ok(FrequencyEvent { time_us, cpu, khz })
}

/// `  <idle>-0  [002] d..1.  12.345678: cpu_idle: state=0 cpu_id=2`
fn parse_idle(line: &str) -> Result<Idle> {
    let (time_us, cpu, _) = parse_power(line, "cpu_idle")?;
    Ok(Idle { time_us, cpu })
}

/// `  vcpu0-99  [000] d.h1.  12.345678: hrtimer_expire_entry: hrtimer=0000000052
/// function=tick_nohz_handler now=12345670000`
fn parse_tick(line: &str) -> Result<Tick> {
    let wrong = || format!("trace line '{line}'");
    let (head, _) = line
        .split_once(": hrtimer_expire_entry: ")
        .with_context(wrong)?;
    Ok(Tick {
        time_us: time_us(head)?,
        cpu: cpu_of(head).with_context(wrong)?,
    })
}

/// `  lab-agent-1  [003] d.h3.  12.345678: sched_waking: comm=requests pid=99 prio=120
/// target_cpu=000`
fn parse_waking(line: &str) -> Result<Waking> {
    let wrong = || format!("trace line '{line}'");
    let (head, tail) = line.split_once(": sched_waking: ").with_context(wrong)?;
    let (name, _) = tail.rsplit_once(" pid=").with_context(wrong)?;
    Ok(Waking {
        cpu: cpu_of(head).with_context(wrong)?,
        thread: name.strip_prefix("comm=").with_context(wrong)?.to_owned(),
    })
}

/// Time, pCPU and state.
fn parse_power(line: &str, event: &str) -> Result<(u64, u32, u32)> {
    let wrong = || format!("trace line '{line}'");
    let (head, tail) = line
        .split_once(&format!(": {event}: "))
        .with_context(wrong)?;
    let value = |name: &str| -> Result<u32> {
        let mut words = tail.split_whitespace();
        let value = words.find_map(|word| word.strip_prefix(name));
        Ok(value.with_context(wrong)?.parse()?)
    };
    Ok((time_us(head)?, value("cpu_id=")?, value("state=")?))
}

/// `  vcpu0-99  [000] d..2.  12.345678: sched_switch: prev_comm=a b prev_pid=1
/// prev_prio=120 prev_state=S ==> next_comm=c next_pid=2 next_prio=120`
fn parse_switch(line: &str) -> Result<Switch> {
    let wrong = || format!("trace line '{line}'");
    let (head, tail) = line.split_once(": sched_switch: ").with_context(wrong)?;
    let cpu = cpu_of(head).with_context(wrong)?;
    let thread = |which: &str| -> Result<(String, i32)> {
        let (_, rest) = tail
            .split_once(&format!("{which}_comm="))
            .with_context(wrong)?;
        let (name, rest) = rest
            .split_once(&format!(" {which}_pid="))
            .with_context(wrong)?;
        let pid = rest.split(' ').next().with_context(wrong)?.parse()?;
        Ok((name.to_owned(), pid))
    };
    Ok(Switch {
        time_us: time_us(head)?,
        cpu,
        prev: thread("prev")?,
        next: thread("next")?,
    })
}

/// `  vcpu0-99  [000] ....1  12.345678: kvm_mmio: mmio read len 4 gpa 0xa000000
/// val 0x1b7740`
fn parse_mmio(line: &str) -> Result<Mmio> {
    let wrong = || format!("trace line '{line}'");
    let (head, tail) = line.split_once(": kvm_mmio: ").with_context(wrong)?;
    let value = |name: &str| -> Result<u64> {
        let mut words = tail.split_whitespace().skip_while(|word| *word != name);
        let digits = words.nth(1).and_then(|word| word.strip_prefix("0x"));
        Ok(u64::from_str_radix(digits.with_context(wrong)?, 16)?)
    };
    Ok(Mmio {
        time_us: time_us(head)?,
        cpu: cpu_of(head).with_context(wrong)?,
        address: value("gpa")?,
        value: value("val")?,
    })
}

/// The pCPU in a line's head. A name can hold brackets too: it is in the last ones.
fn cpu_of(head: &str) -> Option<u32> {
    let (_, cpu) = head.rsplit_once('[')?;
    cpu.split(']').next()?.parse().ok()
}

/// The time stamp that ends a line's head, in µs.
fn time_us(head: &str) -> Result<u64> {
    let stamp = head
        .split_whitespace()
        .last()
        .context("a trace line without a time")?;
    let (seconds, micros) = stamp
        .split_once('.')
        .with_context(|| format!("time '{stamp}'"))?;
    Ok(seconds.parse::<u64>()? * 1_000_000 + micros.parse::<u64>()?)
}

#[cfg(test)]
mod tests {
    //! Promises: a trace line is read as the kernel prints it; who ran is
    //! told apart.
    use super::*;

    #[test]
    fn a_line_of_the_trace() {
        let line = "           vcpu0-99      [000] d.h2.    12.345678: cpu_frequency: state=1800000 cpu_id=3";
        let event = FrequencyEvent {
            time_us: 12_345_678,
            cpu: 3,
            khz: 1_800_000,
        };
        assert_eq!(parse(line).unwrap(), event);
    }

    #[test]
    fn a_waking_of_the_trace() {
        let line = " lab-agent-1 [003] d.h3. 1.000002: sched_waking: comm=requests pid=99 prio=120 \
                    target_cpu=000";
        let waking = Waking {
            cpu: 3,
            thread: "requests".to_owned(),
        };
        assert_eq!(parse_waking(line).unwrap(), waking);
    }

    #[test]
    fn lost_events_are_counted() {
        let stats = "entries: 9\noverrun: 3\ncommit overrun: 0\nbytes: 5\ndropped events: 1\n";
        assert_eq!(lost(stats), Some(4));
        assert_eq!(lost("entries: 9"), None);
    }

    fn switch(cpu: u32, time_us: u64, prev: &str, next: &str) -> Switch {
        let thread = |name: &str| (name.to_owned(), 1);
        Switch {
            time_us,
            cpu,
            prev: thread(prev),
            next: thread(next),
        }
    }

    #[test]
    fn a_switch_of_the_trace() {
        let line = " kworker/0:1-11 [002] d..2.  1.000002: sched_switch: prev_comm=kworker/0:1 prev_pid=1 \
                    prev_prio=120 prev_state=I ==> next_comm=vcpu0 next_pid=1 next_prio=120";
        assert_eq!(
            parse_switch(line).unwrap(),
            switch(2, 1_000_002, "kworker/0:1", "vcpu0")
        );
    }

    #[test]
    fn a_read_of_the_trace() {
        let line = "   vcpu0-99  [002] ....1  1.000002: kvm_mmio: mmio read len 4 gpa 0xa001000 val 0x1b7740";
        let read = Mmio {
            time_us: 1_000_002,
            cpu: 2,
            address: 0xa00_1000,
            value: 1_800_000,
        };
        assert_eq!(parse_mmio(line).unwrap(), read);
    }

    #[test]
    fn entries_to_idle_are_told_from_exits() {
        let text = "# tracer: nop\n\
                    <idle>-0 [002] d..1. 1.000002: cpu_idle: state=0 cpu_id=2\n\
                    <idle>-0 [002] d..1. 1.000009: cpu_idle: state=4294967295 cpu_id=2\n";
        let seen = Seen::read(text).unwrap();
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
        let seen = Seen::read(text).unwrap();
        assert_eq!(seen.ticks_on(2, (1_000_002, 1_000_009)), 1);
        assert_eq!(seen.ticks_on(2, (1_000_003, 1_000_009)), 0);
        assert_eq!(seen.ticks_on(1, (1_000_002, 1_000_009)), 1);
    }

    #[test]
    fn a_thread_runs_since_it_was_switched_to() {
        let mut switches = vec![
            switch(0, 10, "swapper/0", "vcpu0"),
            switch(0, 20, "vcpu0", "init"),
        ];
        switches[0].prev.1 = 0;
        switches[1].next.1 = 2;
        let seen = Seen {
            switches,
            ..Seen::default()
        };
        assert_eq!(seen.running_since(1, 5), 5);
        assert_eq!(seen.running_since(1, 19), 10);
        assert_eq!(seen.running_since(1, 21), 21);
    }

    #[test]
    fn others_are_counted_within_the_span() {
        let switches = vec![
            switch(0, 10, "init", "vcpu0"),
            switch(1, 15, "swapper/1", "init"),
            switch(0, 20, "vcpu0", "kworker/0:1"),
            switch(0, 26, "kworker/0:1", "vcpu0"),
        ];
        let seen = Seen {
            switches,
            ..Seen::default()
        };
        // init until 10, the kworker from 20 to 25; then the other pCPU too.
        assert_eq!(seen.others_ran(&[0], (5, 25)), 10);
        assert_eq!(seen.others_ran(&[0, 1], (5, 25)), 20);
    }
}
