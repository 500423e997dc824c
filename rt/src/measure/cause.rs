// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What was in the way of a wake-up, from the host's trace: who ran, which interrupts, which idle
//! state was left, which frequency was climbed from, which exits were handled.
//!
//! Each is told with the time that it took of the window. An interrupt's isn't the thread's that it
//! interrupts; others overlap (on x86 a guest's exit holds the interrupt that caused it; arm64
//! traces the exit after that). The window is from when the wake-up was due to when it came. That of
//! a guest is known by the guest's clock, and is wider by what the two clocks may differ.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::trace::{Event, What};

/// A wake-up that came late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Late {
    /// The host's CPU.
    pub cpu: u32,
    /// When it came, by the host's `CLOCK_MONOTONIC`.
    pub at_us: u64,
    /// How late.
    pub latency_us: u64,
    /// How far off `at_us` may be.
    pub off_us: u64,
}

impl Late {
    fn window(&self) -> (u64, u64) {
        let before = self.latency_us.saturating_add(self.off_us);
        let to = self.at_us.saturating_add(self.off_us);
        (self.at_us.saturating_sub(before), to)
    }

    /// Whether the trace reaches back to when the wake-up was due: the oldest events go first.
    #[must_use]
    pub fn is_in(&self, events: &[Event]) -> bool {
        // Those of all CPUs have a buffer of their own, which may reach further back.
        let own = |what: &What| !matches!(what, What::Khz(_) | What::Moved { .. });
        let mut of_cpu = events
            .iter()
            .filter(|event| event.cpu == self.cpu && own(&event.what));
        of_cpu
            .next()
            .is_some_and(|first| first.at_us <= self.window().0)
    }
}

/// Kinds of what is in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// Another thread ran.
    OtherThread,
    /// An interrupt was handled.
    Interrupt,
    /// The CPU came out of an idle state.
    IdleExit,
    /// The CPU was below the frequency that it went to.
    FrequencyRamp,
    /// The host handled an exit of the guest.
    Exit,
    /// The thread was moved to this CPU, or away from it.
    Migration,
}

/// What was in the way, and for how long.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cause {
    /// Its kind.
    pub kind: Kind,
    /// Which thread, interrupt, state, frequency, reason.
    pub what: String,
    /// Time that it took within the window; 0 for a migration, whose time isn't traced.
    pub us: u64,
}

impl Cause {
    /// `interrupt arch_timer (4 µs)`
    pub(super) fn line(&self) -> String {
        let kind = match self.kind {
            Kind::OtherThread => "thread",
            Kind::Interrupt => "interrupt",
            Kind::IdleExit => "idle exit from",
            Kind::FrequencyRamp => "frequency ramp",
            Kind::Exit => "exit",
            Kind::Migration => "migration of",
        };
        format!("{kind} {} ({} µs)", self.what, self.us)
    }
}

/// The measured threads: their names, or that they run vCPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    names: BTreeSet<String>,
    tids: BTreeSet<u32>,
}

impl Measured {
    /// cyclictest on the host.
    #[must_use]
    pub fn cyclictest() -> Self {
        Self {
            names: ["cyclictest".to_owned()].into(),
            ..Self::default()
        }
    }

    /// All threads that enter a guest.
    #[must_use]
    pub fn vcpus(events: &[Event]) -> Self {
        let entered = events.iter().filter_map(|event| match event.what {
            What::Entry { tid } => Some(tid),
            _ => None,
        });
        Self {
            tids: entered.collect(),
            ..Self::default()
        }
    }

    fn has(&self, (name, tid): &(String, u32)) -> bool {
        self.names.contains(name) || self.tids.contains(tid)
    }
}

/// What was in the way of a late wake-up, what took longest first; none when the trace shows none.
/// `exit_us` has the exit latency of the CPU's idle states, by number.
#[must_use]
pub fn causes(
    events: &[Event],
    measured: &Measured,
    late: Late,
    exit_us: &BTreeMap<u32, u64>,
) -> Vec<Cause> {
    let mut tally = Tally {
        window: late.window(),
        took: BTreeMap::new(),
    };
    let mut open = Open {
        exit_us: exit_us.clone(),
        ..Open::default()
    };
    let concerns = |event: &&Event| {
        let left = matches!(event.what, What::Moved { from, .. } if from == late.cpu);
        event.cpu == late.cpu || left
    };
    for event in events.iter().filter(concerns) {
        if event.at_us > tally.window.1 {
            break;
        }
        open.step(event, measured, &mut tally);
    }
    // What goes on at the window's end is in its way until there.
    open.close(tally.window.1, &mut tally);
    let mut causes: Vec<Cause> = tally
        .took
        .into_iter()
        .map(|((kind, what), us)| Cause { kind, what, us })
        .collect();
    causes.sort_by_key(|cause| std::cmp::Reverse(cause.us));
    causes
}

/// Adds up times within the window.
struct Tally {
    window: (u64, u64),
    took: BTreeMap<(Kind, String), u64>,
}

impl Tally {
    fn add(&mut self, kind: Kind, what: &str, (from, to): (u64, u64)) {
        let us = to
            .min(self.window.1)
            .saturating_sub(from.max(self.window.0));
        if us > 0 {
            *self.took.entry((kind, what.to_owned())).or_default() += us;
        }
    }

    fn has_begun(&self, at_us: u64) -> bool {
        at_us >= self.window.0
    }
}

/// What has begun on the CPU and not ended.
#[derive(Default)]
struct Open {
    other: Option<(String, u64)>,
    interrupt: Option<(String, u64)>,
    idle: Option<u32>,
    /// Since when the CPU has been out of its idle states.
    awake_us: u64,
    khz: Option<u64>,
    exit_us: BTreeMap<u32, u64>,
    exit: Option<(String, u64)>,
}

impl Open {
    fn step(&mut self, event: &Event, measured: &Measured, tally: &mut Tally) {
        let now = event.at_us;
        let mut end = |kind, open: &mut Option<(String, u64)>| {
            if let Some((what, from)) = open.take() {
                tally.add(kind, &what, (from, now));
            }
        };
        match &event.what {
            What::Switch { to } => {
                end(Kind::OtherThread, &mut self.other);
                // A vCPU's thread that sleeps handles nothing.
                end(Kind::Exit, &mut self.exit);
                // Thread 0 is the CPU's own idle loop.
                if to.1 != 0 && !measured.has(to) {
                    self.other = Some((to.0.clone(), now));
                }
            }
            What::Interrupt(name) => {
                if let Some((thread, from)) = &self.other {
                    tally.add(Kind::OtherThread, thread, (*from, now));
                }
                self.interrupt = Some((name.clone(), now));
            }
            What::InterruptEnd => {
                end(Kind::Interrupt, &mut self.interrupt);
                if let Some((_, from)) = &mut self.other {
                    *from = now;
                }
            }
            What::Exit { reason, .. } => {
                // A guest that waits for an interrupt is idle.
                let idle = reason.starts_with("WF") || reason == "HLT";
                self.exit = (!idle).then(|| (reason.clone(), now));
            }
            What::Entry { .. } => end(Kind::Exit, &mut self.exit),
            What::Idle(state) => self.idle = Some(*state),
            // What it takes to come out is the state's own; that it was in there before is no harm.
            What::Awake => {
                self.awake_us = now;
                if let Some(state) = self.idle.take() {
                    let took = self.exit_us.get(&state).copied().unwrap_or(0);
                    let from = now.saturating_sub(took);
                    tally.add(Kind::IdleExit, &format!("state {state}"), (from, now));
                }
            }
            What::Khz(khz) => {
                if let Some(before) = self.khz.replace(*khz).filter(|before| before < khz) {
                    let ramp = format!("{before} → {khz} kHz");
                    tally.add(Kind::FrequencyRamp, &ramp, (self.awake_us, now));
                }
            }
            What::Moved { thread, from } => {
                if measured.has(thread) && tally.has_begun(now) {
                    let what = format!("{} from CPU {from} to {}", thread.0, event.cpu);
                    let key = (Kind::Migration, what);
                    tally.took.entry(key).or_default();
                }
            }
        }
    }

    fn close(self, now: u64, tally: &mut Tally) {
        let running = self.other.filter(|_| self.interrupt.is_none());
        let open = [
            (Kind::OtherThread, running),
            (Kind::Interrupt, self.interrupt),
            (Kind::Exit, self.exit),
        ];
        for (kind, one) in open {
            if let Some((what, from)) = one {
                tally.add(kind, &what, (from, now));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! Promises: each kind is found, with the part of it that is in the window; the measured
    //! thread, the idle loop and other CPUs are none.
    use super::*;

    fn at(at_us: u64, what: What) -> Event {
        let cpu = 7;
        Event { at_us, cpu, what }
    }

    fn to(name: &str, tid: u32) -> What {
        let to = (name.to_owned(), tid);
        What::Switch { to }
    }

    fn late() -> Late {
        Late {
            cpu: 7,
            at_us: 1_000,
            latency_us: 100,
            off_us: 0,
        }
    }

    fn found(events: &[Event]) -> Vec<(Kind, String, u64)> {
        let causes = causes(events, &Measured::cyclictest(), late(), &[(2, 900)].into());
        let rows = causes.into_iter();
        rows.map(|one| (one.kind, one.what, one.us)).collect()
    }

    #[test]
    fn a_thread_that_ran_counts_from_the_due_time() {
        let events = [
            at(500, to("kworker/7:1", 20)),
            at(930, to("ktimers/7", 21)),
            at(950, to("cyclictest", 30)),
            at(2_000, to("later", 22)),
        ];
        assert_eq!(
            found(&events),
            [
                (Kind::OtherThread, "kworker/7:1".to_owned(), 30),
                (Kind::OtherThread, "ktimers/7".to_owned(), 20)
            ]
        );
        let elsewhere = events.map(|event| Event { cpu: 6, ..event });
        assert_eq!(found(&elsewhere), []);
    }

    #[test]
    fn an_interrupts_time_is_not_the_threads() {
        let interrupt = |name: &str| What::Interrupt(name.to_owned());
        let mut events = vec![
            at(910, to("ksoftirqd/7", 20)),
            at(920, interrupt("IPI")),
            at(960, What::InterruptEnd),
            at(970, interrupt("arch_timer")),
        ];
        let row = |kind, what: &str, us| (kind, what.to_owned(), us);
        let thread = row(Kind::OtherThread, "ksoftirqd/7", 20);
        let first = row(Kind::Interrupt, "IPI", 40);
        let until_the_end = row(Kind::Interrupt, "arch_timer", 30);
        assert_eq!(found(&events), [first.clone(), until_the_end, thread]);
        events.push(at(975, What::InterruptEnd));
        events.push(at(995, to("cyclictest", 30)));
        let thread = row(Kind::OtherThread, "ksoftirqd/7", 40);
        let timer = row(Kind::Interrupt, "arch_timer", 5);
        let found = found(&events);
        assert!(found.contains(&thread) && found.contains(&first) && found.contains(&timer));
    }

    #[test]
    fn idle_interrupt_and_ramp() {
        let events = [
            at(100, What::Khz(700)),
            at(400, What::Idle(2)),
            at(980, What::Awake),
            at(981, What::Interrupt("arch_timer".to_owned())),
            at(985, What::InterruptEnd),
            at(990, What::Khz(2_700)),
            at(995, to("cyclictest", 30)),
        ];
        let expected = [
            (Kind::IdleExit, "state 2".to_owned(), 80),
            (Kind::FrequencyRamp, "700 → 2700 kHz".to_owned(), 10),
            (Kind::Interrupt, "arch_timer".to_owned(), 4),
        ];
        assert_eq!(found(&events), expected);
    }

    #[test]
    fn exits_count_and_waiting_does_not() {
        let exit = |reason: &str| What::Exit {
            reason: reason.to_owned(),
            tid: 40,
        };
        let entry = || What::Entry { tid: 40 };
        let events = [
            at(800, exit("WFx")),
            at(905, entry()),
            at(910, exit("DABT_LOW")),
            at(940, entry()),
            // It asks to be woken later, and sleeps.
            at(950, exit("HVC64")),
            at(955, to("swapper/7", 0)),
            at(995, to("vcpu1", 40)),
        ];
        let measured = Measured::vcpus(&events);
        let causes = causes(&events, &measured, late(), &BTreeMap::new());
        let causes: Vec<(&str, u64)> = causes
            .iter()
            .map(|one| (one.what.as_str(), one.us))
            .collect();
        assert_eq!(causes, [("DABT_LOW", 30), ("HVC64", 5)]);
    }

    #[test]
    fn what_is_older_than_the_trace_is_not_in_it() {
        let events = [at(899, to("cyclictest", 30)), at(1_500, What::Awake)];
        assert!(late().is_in(&events));
        assert!(!late().is_in(&events[1..]));
        assert!(
            !late().is_in(&[at(901, What::Awake)]),
            "its beginning is lost"
        );
        let elsewhere = events.map(|event| Event { cpu: 6, ..event });
        assert!(!late().is_in(&elsewhere) && !late().is_in(&[]));
        let longer = [at(500, What::Khz(700)), at(901, What::Awake)];
        assert!(!late().is_in(&longer), "frequencies have their own buffer");
    }

    #[test]
    fn times_that_a_guest_made_up_are_no_panic() {
        let late = Late {
            at_us: u64::MAX,
            latency_us: u64::MAX,
            off_us: u64::MAX,
            ..late()
        };
        let events = [at(900, to("kworker/7:1", 20))];
        let found = causes(&events, &Measured::cyclictest(), late, &BTreeMap::new());
        assert_eq!(found.len(), 1);
        assert!(!late.is_in(&events));
    }

    #[test]
    fn a_migration_counts_without_time() {
        let moved = |name: &str, from, cpu| Event {
            at_us: 950,
            cpu,
            what: What::Moved {
                thread: (name.to_owned(), 30),
                from,
            },
        };
        let row = |what: &str| [(Kind::Migration, what.to_owned(), 0)];
        let events = [
            moved("other", 6, 7),
            moved("cyclictest", 6, 7),
            moved("cyclictest", 5, 6),
        ];
        assert_eq!(found(&events), row("cyclictest from CPU 6 to 7"));
        let away = [moved("cyclictest", 7, 6), moved("cyclictest", 6, 5)];
        assert_eq!(found(&away), row("cyclictest from CPU 7 to 6"));
    }
}
