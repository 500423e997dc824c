// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest's own trace, as text of its tracefs or of `trace-cmd report`, on the host's time axis: which
//! thread is on each of its CPUs, and their frequencies. A guest may write anything: what can't be read
//! is left out.

use std::{collections::BTreeMap, fs::File, io::Read as _, path::Path};

use anyhow::{Context, bail};
use vcpufreq_bench::tracefs::{FrequencyEvent, Switch, events};

use super::offset::{ClockOffset, KhzAt};

/// More than a trace of a minute has. What is made of it takes some twenty times as much.
const MOST_MIB: u64 = 16;

/// What a guest has recorded, by its clock.
#[derive(Debug, Default)]
pub struct GuestTrace {
    switches: Vec<Switch>,
    /// By CPU, which is the vCPU of that number.
    changes: BTreeMap<u16, Vec<KhzAt>>,
}

/// A thread on a guest's CPU, by the host's clock.
#[derive(Debug, PartialEq, Eq)]
pub struct GuestSlice {
    /// The CPU.
    pub cpu: u16,
    /// The thread's name.
    pub name: String,
    /// Its number in the guest.
    pub tid: i32,
    /// From when to when it ran, in µs.
    pub ran_us: (u64, u64),
}

/// From the first to the last moment that is shown, in µs of the host's clock.
type Shown = (u64, u64);

impl GuestTrace {
    /// Reads it.
    ///
    /// # Errors
    /// When the file can't be read, or has too much.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        let mut text = Vec::new();
        let file = File::open(path).with_context(|| format!("can't read {shown}"))?;
        let most = MOST_MIB << 20;
        let bytes = file.take(most + 1).read_to_end(&mut text);
        if u64::try_from(bytes.with_context(|| format!("can't read {shown}"))?)? > most {
            bail!("{shown} has more than {MOST_MIB} MiB; record a shorter time");
        }
        Ok(Self::of_text(&String::from_utf8_lossy(&text)))
    }

    pub fn of_text(text: &str) -> Self {
        let mut all = Self::default();
        for line in events(text) {
            match line.event {
                "sched_switch" => all.switches.extend(Switch::read(&line)),
                "cpu_frequency" => {
                    let Ok(event) = FrequencyEvent::read(&line) else {
                        continue;
                    };
                    if let Ok(cpu) = u16::try_from(event.cpu) {
                        let changes = all.changes.entry(cpu).or_default();
                        changes.push((event.time_us, event.khz));
                    }
                }
                _ => {}
            }
        }
        all
    }

    /// How far its clock is ahead, by what the host has seen its vCPUs request.
    pub fn offset(&self, requests: &BTreeMap<u16, Vec<KhzAt>>) -> Option<ClockOffset> {
        ClockOffset::find(requests, &self.changes)
    }

    /// Each CPU's frequencies within `shown`.
    pub fn frequencies(&self, offset: ClockOffset, shown: Shown) -> Vec<(u16, KhzAt)> {
        let all = self.changes.iter();
        let all = all.flat_map(|(cpu, changes)| changes.iter().map(|at| (*cpu, *at)));
        let moved = all.filter_map(|(cpu, (us, khz))| {
            let us = on_host(us, offset).filter(|us| (shown.0..=shown.1).contains(us))?;
            Some((cpu, (us, khz)))
        });
        moved.collect()
    }

    /// Which threads ran within `shown`, without idle CPUs.
    pub fn slices(&self, offset: ClockOffset, shown: Shown) -> Vec<GuestSlice> {
        let mut running: BTreeMap<u32, &Switch> = BTreeMap::new();
        let mut slices = Vec::new();
        for switch in &self.switches {
            let Some(since) = running.insert(switch.cpu, switch) else {
                continue;
            };
            // Else what is between them is lost.
            if since.next.1 == switch.prev.1 {
                slices.extend(slice(since, switch, offset, shown));
            }
        }
        slices
    }
}

fn slice(since: &Switch, until: &Switch, offset: ClockOffset, shown: Shown) -> Option<GuestSlice> {
    let (name, tid) = &since.next;
    let [from, to] = [since, until].map(|of| on_host(of.time_us, offset));
    let ran_us = (from?.max(shown.0), to?.min(shown.1));
    (*tid != 0 && ran_us.0 < ran_us.1).then_some(GuestSlice {
        cpu: since.cpu.try_into().ok()?,
        name: name.clone(),
        tid: *tid,
        ran_us,
    })
}

fn on_host(us: u64, offset: ClockOffset) -> Option<u64> {
    us.checked_add_signed(offset.us.checked_neg()?)
}

#[cfg(test)]
mod tests {
    //! Promises: a guest's text is read in both forms, and what is no event of it left out; its events are
    //! where the host's clock has them, and none is outside of what is shown.

    use super::*;

    const AHEAD: ClockOffset = ClockOffset {
        us: 9_000_000,
        within_us: 20,
        pairs: 9,
    };
    const TRACEFS: &str = "# tracer: nop\n\
        \x20 <idle>-0 [001] d..2. 10.000000: sched_switch: prev_comm=swapper/1 prev_pid=0 prev_prio=120 prev_state=R ==> next_comm=a b next_pid=7 next_prio=120\n\
        \x20 a b-7 [001] d..2. 10.000100: cpu_frequency: state=1800000 cpu_id=1\n\
        \x20 a b-7 [001] d..2. 10.000300: sched_switch: prev_comm=a b prev_pid=7 prev_prio=120 prev_state=S ==> next_comm=swapper/1 next_pid=0 next_prio=120\n\
        \x20 <idle>-0 [001] d..2. 10.000400: sched_switch: prev_comm=swapper/1 prev_pid=0 prev_prio=120 prev_state=R ==> next_comm=c next_pid=8 next_prio=120\n\
        \x20 d-9 [001] d..2. 10.000900: sched_switch: prev_comm=d prev_pid=9 prev_prio=120 prev_state=S ==> next_comm=swapper/1 next_pid=0 next_prio=120\n";
    const REPORT: &str = "cpus=2\n\
        \x20         <idle>-0     [001]    10.000000: sched_switch:         swapper/1:0 [120] R ==> a b:7 [120]\n\
        \x20            a b-7     [001]    10.000100: cpu_frequency:        state=1800000 cpu_id=1\n\
        \x20            a b-7     [001]    10.000300: sched_switch:         a b:7 [120] S ==> swapper/1:0 [120]\n";

    #[test]
    fn both_forms_are_on_the_hosts_axis() {
        for text in [TRACEFS, REPORT] {
            let guest = GuestTrace::of_text(text);
            let ran = GuestSlice {
                cpu: 1,
                name: "a b".to_owned(),
                tid: 7,
                ran_us: (1_000_000, 1_000_300),
            };
            let all = (0, 2_000_000);
            // c was switched in, and d out: what was between is lost.
            assert_eq!(guest.slices(AHEAD, all), [ran]);
            let changes = [(1, (1_000_100, 1_800_000))];
            assert_eq!(guest.frequencies(AHEAD, all), changes);
        }
    }

    #[test]
    fn nothing_is_outside_of_what_is_shown() {
        let guest = GuestTrace::of_text(TRACEFS);
        let part = (1_000_200, 1_000_250);
        let ran: Vec<_> = guest
            .slices(AHEAD, part)
            .iter()
            .map(|of| of.ran_us)
            .collect();
        assert_eq!(ran, [part]);
        assert_eq!(guest.frequencies(AHEAD, part), []);
        // Before the host's clock began.
        let far = ClockOffset {
            us: 11_000_000,
            ..AHEAD
        };
        assert_eq!(guest.slices(far, (0, u64::MAX)), []);
        assert_eq!(guest.frequencies(far, (0, u64::MAX)), []);
    }

    #[test]
    fn garbage_has_no_events() {
        for text in [
            "",
            "\u{0}\u{fffd}[000]",
            "x-1 [000] d..2. 1.000002: sched_switch: what ==> that\n",
            "x-1 [000] d..2. 1.000002: cpu_frequency: state=-1 cpu_id=70000\n",
            "x-1 [000] d..2. 99999999999999999999.000002: cpu_frequency: state=1 cpu_id=1\n",
        ] {
            let guest = GuestTrace::of_text(text);
            assert_eq!(guest.slices(AHEAD, (0, u64::MAX)), [], "{text}");
            assert_eq!(guest.offset(&BTreeMap::new()), None, "{text}");
            assert!(guest.changes.is_empty(), "{text}");
        }
    }
}
