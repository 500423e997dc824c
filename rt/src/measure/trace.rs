// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's trace while a test runs: what can lengthen a wake-up, from a tracefs instance of its
//! own, so that nobody else's tracing is touched and nothing is left of it.

use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};
use vcpufreq_device::host::CpuList;

const INSTANCES: &str = "/sys/kernel/tracing/instances";
const PREFIX: &str = "vcpufreq-rt-";
/// Of each measured CPU; the oldest events go first.
const BUFFER_KIB: &str = "8192";
/// How long a CPU is looked at for whether it is ever idle.
const LOOK: Duration = Duration::from_secs(1);
/// Of the measured CPUs, but the last two. Not every kernel and processor has all of them:
/// interrupts of a CPU's own timer and of other CPUs are `irq` events or, on arm64, `ipi`, on x86
/// `irq_vectors`.
const EVENTS: [&str; 20] = [
    "sched/sched_switch",
    "irq/irq_handler_entry",
    "irq/irq_handler_exit",
    "power/cpu_idle",
    "kvm/kvm_entry",
    "kvm/kvm_exit",
    "ipi/ipi_entry",
    "ipi/ipi_exit",
    "irq_vectors/local_timer_entry",
    "irq_vectors/local_timer_exit",
    "irq_vectors/reschedule_entry",
    "irq_vectors/reschedule_exit",
    "irq_vectors/call_function_entry",
    "irq_vectors/call_function_exit",
    "irq_vectors/call_function_single_entry",
    "irq_vectors/call_function_single_exit",
    "irq_vectors/irq_work_entry",
    "irq_vectors/irq_work_exit",
    FREQUENCY,
    MIGRATION,
];
/// Of all CPUs, in an instance of their own: any CPU may change another's frequency, and a thread
/// that comes from another CPU is moved by that one.
const FREQUENCY: &str = "power/cpu_frequency";
const MIGRATION: &str = "sched/sched_migrate_task";
/// How the name of the other instance ends.
const ELSEWHERE: &str = "-elsewhere";
/// The state of `cpu_idle` when a CPU has left its idle state.
const AWAKE: u32 = u32::MAX;

/// What happened on a CPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// From the thread that ran until now to the one that runs from now on.
    Switch {
        /// Name and number.
        to: (String, u32),
    },
    /// A thread was moved to this CPU.
    Moved {
        /// Name and number.
        thread: (String, u32),
        /// Where it was before.
        from: u32,
    },
    /// An interrupt's handler begins.
    Interrupt(String),
    /// It ends.
    InterruptEnd,
    /// The CPU goes into an idle state.
    Idle(u32),
    /// It has come out of it.
    Awake,
    /// Its frequency is this from now on.
    Khz(u64),
    /// A guest is left.
    Exit {
        /// Why, as the architecture calls it.
        reason: String,
        /// The vCPU's thread.
        tid: u32,
    },
    /// A guest is entered.
    Entry {
        /// The vCPU's thread.
        tid: u32,
    },
}

/// What happened when and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// `CLOCK_MONOTONIC` in µs.
    pub at_us: u64,
    /// The CPU.
    pub cpu: u32,
    /// What.
    pub what: What,
}

/// Two instances; dropping it removes them.
#[derive(Debug)]
pub struct Trace {
    main: PathBuf,
    elsewhere: PathBuf,
}

impl Trace {
    /// Makes it, and starts: of these CPUs alone, for loads on the others fill buffers that nobody
    /// looks at; and the frequency's changes and migrations to and from these, whichever CPU makes
    /// them.
    ///
    /// # Errors
    /// What the kernel refused; without root, everything.
    pub fn start(cpus: &CpuList) -> io::Result<Self> {
        remove_stale();
        let own = format!("{PREFIX}{}", std::process::id());
        let trace = Self {
            main: Path::new(INSTANCES).join(&own),
            elsewhere: Path::new(INSTANCES).join(own + ELSEWHERE),
        };
        for instance in trace.instances() {
            fs::create_dir(instance)?;
            fs::write(instance.join("tracing_on"), "0")?;
            fs::write(instance.join("trace_clock"), "mono")?;
        }
        trace.enlarge(cpus)?;
        fs::write(trace.main.join("tracing_cpumask"), cpus.mask())?;
        let filter = trace.elsewhere.join(format!("events/{MIGRATION}/filter"));
        fs::write(filter, to_or_from(cpus))?;
        for event in EVENTS {
            let of = match event {
                FREQUENCY | MIGRATION => &trace.elsewhere,
                _ => &trace.main,
            };
            let enable = of.join(format!("events/{event}/enable"));
            if enable.exists() {
                fs::write(enable, "1")?;
            }
        }
        trace.write("tracing_on", "1")?;
        Ok(trace)
    }

    /// Enlarges the buffers of the measured CPUs. A worker on each CPU does that for the kernel: where
    /// a real-time thread never sleeps, as a polling guest's, it would be waited for without end. There
    /// the buffer stays as instances have it, 1.4 MiB.
    fn enlarge(&self, cpus: &CpuList) -> io::Result<()> {
        let stat = || fs::read_to_string("/proc/stat");
        let before = stat()?;
        thread::sleep(LOOK);
        let after = stat()?;
        let free = |cpu: &u32| idle_ticks(&after, *cpu) > idle_ticks(&before, *cpu);
        for cpu in cpus.iter().filter(free) {
            let file = format!("per_cpu/cpu{cpu}/buffer_size_kb");
            fs::write(self.main.join(file), BUFFER_KIB)?;
        }
        Ok(())
    }

    /// Empties it.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn clear(&self) -> io::Result<()> {
        self.write("trace", "")
    }

    /// What it holds, in order of time; events of the next test aren't in it.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn events(&self) -> io::Result<Vec<Event>> {
        self.write("tracing_on", "0")?;
        let mut events = Vec::new();
        for instance in self.instances() {
            let bytes = fs::read(instance.join("trace"))?;
            events.extend(parse(&String::from_utf8_lossy(&bytes)));
        }
        events.sort_by_key(|event| event.at_us);
        self.write("tracing_on", "1")?;
        Ok(events)
    }

    fn instances(&self) -> [&Path; 2] {
        [&self.main, &self.elsewhere]
    }

    fn write(&self, file: &str, value: &str) -> io::Result<()> {
        let mut instances = self.instances().into_iter();
        instances.try_for_each(|instance| fs::write(instance.join(file), value))
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        for instance in self.instances() {
            // Fails only while somebody has one of its files open; the next report removes it then.
            let _ = fs::remove_dir(instance);
        }
    }
}

/// The time that a CPU was idle, of /proc/stat.
fn idle_ticks(stat: &str, cpu: u32) -> Option<u64> {
    let name = format!("cpu{cpu}");
    let mut lines = stat.lines().map(str::split_whitespace);
    let mut fields = lines.find_map(|mut line| (line.next()? == name).then_some(line))?;
    // After user, nice and system.
    fields.nth(3)?.parse().ok()
}

/// A filter for migrations of these CPUs' threads; of others there may be more than the buffer holds.
fn to_or_from(cpus: &CpuList) -> String {
    let ranges = cpus.ranges().map(|(first, last)| {
        let within = |field| format!("({field} >= {first} && {field} <= {last})");
        format!("{} || {}", within("orig_cpu"), within("dest_cpu"))
    });
    ranges.collect::<Vec<_>>().join(" || ")
}

/// Removes the instances of reports that were killed.
fn remove_stale() {
    for entry in fs::read_dir(INSTANCES).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let own = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let pid = own.map(|own| own.trim_end_matches(ELSEWHERE));
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            // Whoever can't remove it can't make one either, and is told so then.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// Reads a trace file; lines of other events are skipped.
#[must_use]
pub fn parse(text: &str) -> Vec<Event> {
    text.lines().filter_map(event).collect()
}

/// `   NAME-TID   [003] d..2.   12.345678: EVENT: FIELD=VALUE ...`
fn event(line: &str) -> Option<Event> {
    // Names can hold anything: from the event's own name on, and back from there.
    let (name, head, fields) = EVENTS.iter().find_map(|event| {
        let name = event.rsplit('/').next()?;
        let (head, fields) = line.split_once(&format!(": {name}: "))?;
        Some((name, head, fields))
    })?;
    let (head, time) = head.trim().rsplit_once(' ')?;
    let (thread, rest) = head.rsplit_once('[')?;
    let (seconds, micros) = time.split_once('.')?;
    let whole = seconds.parse::<u64>().ok()?.checked_mul(1_000_000)?;
    let at_us = whole.checked_add(micros.parse().ok()?)?;
    let mut cpu = rest.split_once(']')?.0.parse().ok()?;
    let tid = || thread.trim().rsplit_once('-')?.1.parse().ok();
    let what = match name {
        "sched_switch" => {
            let (_, next) = fields.rsplit_once(" ==> next_comm=")?;
            What::Switch {
                to: thread_of(next, " next_pid=")?,
            }
        }
        "sched_migrate_task" => {
            cpu = value(fields, "dest_cpu=")?.parse().ok()?;
            let comm = fields.strip_prefix("comm=")?;
            What::Moved {
                thread: thread_of(comm, " pid=")?,
                from: value(fields, "orig_cpu=")?.parse().ok()?,
            }
        }
        "irq_handler_entry" => What::Interrupt(fields.split_once("name=")?.1.trim().to_owned()),
        "irq_handler_exit" => What::InterruptEnd,
        "cpu_idle" => match value(fields, "state=")?.parse().ok()? {
            AWAKE => What::Awake,
            state => What::Idle(state),
        },
        "cpu_frequency" => {
            cpu = value(fields, "cpu_id=")?.parse().ok()?;
            What::Khz(value(fields, "state=")?.parse().ok()?)
        }
        "kvm_exit" => What::Exit {
            reason: reason(fields),
            tid: tid()?,
        },
        "kvm_entry" => What::Entry { tid: tid()? },
        // `(Rescheduling interrupts)`
        "ipi_entry" => What::Interrupt(fields.trim().trim_matches(['(', ')']).to_owned()),
        // x86's own vectors: `vector=236`.
        name => match name.strip_suffix("_entry") {
            Some(kind) => What::Interrupt(kind.to_owned()),
            None => What::InterruptEnd,
        },
    };
    Some(Event { at_us, cpu, what })
}

/// `NAME pid=TID ...`; a name can hold anything, what is behind it can't.
fn thread_of(text: &str, key: &str) -> Option<(String, u32)> {
    let (name, rest) = text.rsplit_once(key)?;
    let tid = rest.split_whitespace().next()?.parse().ok()?;
    Some((name.to_owned(), tid))
}

fn value<'a>(fields: &'a str, key: &str) -> Option<&'a str> {
    fields.split_whitespace().find_map(|f| f.strip_prefix(key))
}

/// arm64: `TRAP: HSR_EC: 0x0024 (DABT_LOW), PC: ...`, `IRQ: HSR_EC: ...`; x86: `vcpu 0 reason HLT
/// rip ...`.
fn reason(fields: &str) -> String {
    let x86 = fields.split_once("reason ").map(|(_, rest)| rest);
    if let Some(word) = x86.and_then(|rest| rest.split_whitespace().next()) {
        return word.to_owned();
    }
    let kind = fields.split(':').next().unwrap_or_default();
    let class = fields
        .split_once('(')
        .and_then(|(_, rest)| rest.split_once(')'));
    match (kind, class) {
        ("TRAP", Some((class, _))) => class.to_owned(),
        _ => kind.trim().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    //! Promise: each event comes out with its time, its CPU and what it was, whatever threads are
    //! called.
    use super::*;

    #[test]
    fn idle_time_is_the_cpus_own() {
        let stat = "cpu  9 9 9 9 9\ncpu1 1 2 3 44 5\ncpu11 1 2 3 55 5\nintr 7\n";
        let found = [1, 11, 2].map(|cpu| idle_ticks(stat, cpu));
        assert_eq!(found, [Some(44), Some(55), None]);
    }

    #[test]
    fn a_filter_has_each_range_of_cpus_once() {
        let cpus = "2-3,7".parse().unwrap();
        assert_eq!(
            to_or_from(&cpus),
            "(orig_cpu >= 2 && orig_cpu <= 3) || (dest_cpu >= 2 && dest_cpu <= 3) || \
             (orig_cpu >= 7 && orig_cpu <= 7) || (dest_cpu >= 7 && dest_cpu <= 7)"
        );
    }

    #[test]
    fn events_of_each_kind() {
        let text = "\
# tracer: nop
          <idle>-0       [007] d..2.    12.000001: cpu_idle: state=2 cpu_id=7
          <idle>-0       [007] d..2.    12.000900: cpu_idle: state=4294967295 cpu_id=7
          <idle>-0       [007] dnh3.    12.000901: irq_handler_entry: irq=11 name=arch_timer
          <idle>-0       [007] dnh3.    12.000903: irq_handler_exit: irq=11 ret=handled
 a [1] b: c-31    [007] d..2.    12.000910: sched_switch: prev_comm=a [1] b: c prev_pid=31 prev_prio=120 prev_state=S ==> next_comm=cyclictest next_pid=99 next_prio=19
           vcpu1-40      [002] .....    12.000911: kvm_exit: TRAP: HSR_EC: 0x0001 (WFx), PC: 0xffff
           vcpu1-40      [002] .....    12.000912: kvm_entry: PC: 0xffff
           vcpu1-40      [002] .....    12.000913: kvm_exit: IRQ: HSR_EC: 0x0000 (UNKNOWN), PC: 0xffff
              sh-50      [000] d..2.    12.000920: cpu_frequency: state=2707200 cpu_id=7
          <idle>-0       [007] d.h1.    12.000922: local_timer_entry: vector=236
          <idle>-0       [007] d.h1.    12.000923: local_timer_exit: vector=236
          <idle>-0       [007] d.h1.    12.000924: ipi_entry: (Rescheduling interrupts)
          <idle>-0       [007] d.h1.    12.000925: ipi_exit: (Rescheduling interrupts)
              sh-50      [000] d..2.    12.000921: sched_migrate_task: comm=my task pid=60 prio=120 orig_cpu=0 dest_cpu=7
";
        let events = parse(text);
        let found: Vec<(u64, u32, &What)> = events
            .iter()
            .map(|one| (one.at_us - 12_000_000, one.cpu, &one.what))
            .collect();
        let reason = |text: &str| What::Exit {
            reason: text.to_owned(),
            tid: 40,
        };
        let expected = [
            (1, 7, &What::Idle(2)),
            (900, 7, &What::Awake),
            (901, 7, &What::Interrupt("arch_timer".to_owned())),
            (903, 7, &What::InterruptEnd),
            (
                910,
                7,
                &What::Switch {
                    to: ("cyclictest".to_owned(), 99),
                },
            ),
            (911, 2, &reason("WFx")),
            (912, 2, &What::Entry { tid: 40 }),
            (913, 2, &reason("IRQ")),
            (920, 7, &What::Khz(2_707_200)),
            (922, 7, &What::Interrupt("local_timer".to_owned())),
            (923, 7, &What::InterruptEnd),
            (
                924,
                7,
                &What::Interrupt("Rescheduling interrupts".to_owned()),
            ),
            (925, 7, &What::InterruptEnd),
            (
                921,
                7,
                &What::Moved {
                    thread: ("my task".to_owned(), 60),
                    from: 0,
                },
            ),
        ];
        assert_eq!(found, expected);
    }
}
