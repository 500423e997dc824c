// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long after a QEMU guest has stored a request in its RAM the request is in force. Three readers
//! can see it: the server's thread, which reads the RAM; a program on the tracepoint kvm_exit of the
//! vCPU's thread; and a thread that a doorbell wakes (`shm`). The server has the first and the third.
//! The second isn't built: the vCPU's next exit is the soonest that such a program can see a store.
//!
//! A store in RAM leaves no trace. So the guest writes to a register of QEMU's right behind it, where
//! nothing is, and the host's trace has that. What carries the request out is in the server's events,
//! on the same clock.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use vcpufreq_bench::tracefs::{Instance, Mmio, events as lines};
use vcpufreq_tests::LabVerdict;

use crate::harness::access_cost::NAP_MS;
use crate::harness::plan::{GuestDevice, Plan, first_cpus, set_governor};
use crate::harness::policy::Policy;
use crate::harness::vm::{Setup, Vm, events};
use crate::harness::vmm::Vmm;

/// QueueSel of `virt`'s first virtio-mmio transport, which no device is behind: QEMU ignores writes.
const NOTHING: u64 = 0x0a00_0030;
/// Stores of each kind.
const STORES: usize = 100;
/// The same where there is a rest between them.
const STORES_AT_REST: usize = 40;
/// So long that the server's thread sleeps.
const REST_MS: u64 = 100;
/// A clamp that came so long before the traced write still answers its store: the emulator may run
/// another CPU's turn in between. In `Rests` it may be the answer to the store before, which has none
/// then.
const BEFORE_US: u64 = 500;
/// A tick of the guest's: by then each rise is in force.
const RISE_US: u64 = 4_000;
/// Of all rises together: of one state alone there are twenty, whose median is a draw.
const MEDIAN_RISE_US: u64 = 1_000;
/// By then each fall is.
const FALL_US: u64 = 20_000;
/// Of each CPU, for the exits of a busy vCPU.
const BUFFER_KIB: u32 = 8 * 1024;
const EVENTS: [&str; 2] = ["kvm/kvm_mmio", "kvm/kvm_exit"];

/// The readers: the thread of the server that reads RAM, a program at the vCPU's next exit, and a thread
/// that a doorbell wakes.
const SERVER: &str = "server";
const EXIT: &str = "exit";
const DOORBELL: &str = "doorbell";
const RISE: &str = "rise";
const FALL: &str = "fall";

/// What the vCPU does around its stores.
#[derive(Clone, Copy, PartialEq)]
enum Around {
    /// It is never idle.
    Busy,
    /// It idles after each, for less time than the server's thread stays awake.
    Naps,
    /// It idles, asks for its maximum, works for 20 ms, asks for its minimum, and idles again.
    Bursts,
    /// It idles for [`REST_MS`] after each, whatever it asks for. The server's thread then reads the
    /// request once the vCPU has run for 250 µs in all, and a sleeping vCPU's clamp has no effect: no
    /// bound is on it.
    Rests,
}

impl Around {
    const ALL: [Self; 4] = [Self::Busy, Self::Naps, Self::Bursts, Self::Rests];

    fn name(self) -> &'static str {
        match self {
            Self::Busy => "busy",
            Self::Naps => "naps",
            Self::Bursts => "bursts",
            Self::Rests => "rests",
        }
    }

    fn stores(self) -> usize {
        match self {
            Self::Busy | Self::Naps => STORES,
            Self::Bursts | Self::Rests => STORES_AT_REST,
        }
    }

    /// What the vCPU asks for in turn.
    fn requests(self, policy: &Policy) -> Vec<u32> {
        if self == Self::Bursts {
            return vec![policy.max(), policy.min()];
        }
        let up_and_down = policy.opps.iter().chain(policy.opps.iter().rev().skip(1));
        let mut khz: Vec<u32> = up_and_down.copied().collect();
        // The first one again is the next round's.
        khz.pop();
        khz
    }

    /// The guest's command for these stores of vCPU `vcpu`.
    fn deed(self, vcpu: usize, stores: &str) -> String {
        match self {
            Self::Busy | Self::Naps => format!("store-naps {vcpu} {NAP_MS} {stores}"),
            Self::Rests => format!("store-naps {vcpu} {REST_MS} {stores}"),
            Self::Bursts => format!("store-bursts {vcpu} {stores}"),
        }
    }
}

pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let mut all = Vec::new();
    for path in ["ram", "shm"] {
        let plan = Plan {
            driver: plan.driver.clone(),
            path: Some(path.to_owned()),
            vmm: Vmm::Qemu,
            protected: false,
        };
        let setup = plan.mirroring(&first_cpus(&policies));
        let mut guest = TimedGuest::boot(&plan, &setup.with(&["--rate-limit", "0"]), path)?;
        for (vcpu, policy) in policies.iter().enumerate() {
            for around in Around::ALL {
                all.extend(guest.measure((vcpu, policy), around)?);
            }
        }
        guest.vm.quit()?;
    }
    let rows: Vec<Value> = all.iter().map(StoreTimes::json).collect();
    let [rises, falls] = [RISE, FALL].map(|direction| of_server(&all, direction));
    let median = rises.get(rises.len() / 2).copied();
    let [rise, fall] = [&rises, &falls].map(|times| times.last().copied());
    let within = |us: Option<u64>, most| us.is_some_and(|us| us <= most);
    let readers = policies.len() * Around::ALL.len() * 2 * 3;
    Ok(LabVerdict::with_figures(json!({ "rows": rows }))
        .check_eq("each reader, vCPU and direction", &all.len(), readers)
        .check("the longest rise", within(rise, RISE_US), rise)
        .check("the median rise", within(median, MEDIAN_RISE_US), median)
        .check("the longest fall", within(fall, FALL_US), fall))
}

/// A guest whose requests are this scenario's alone.
struct TimedGuest {
    vm: Vm,
    device: GuestDevice,
    /// The reader that its server is.
    reader: &'static str,
}

/// How long a reader took to see a vCPU's rises or falls.
struct StoreTimes {
    reader: &'static str,
    vcpu: usize,
    around: Around,
    direction: &'static str,
    /// In µs, rising; [`u64::MAX`] of one that the next store overtook.
    us: Vec<u64>,
}

impl StoreTimes {
    /// Median, longest, how many were never seen; and by power of two, how many took less than it and at
    /// least its half.
    fn json(&self) -> Value {
        let count = self.us.partition_point(|us| *us != u64::MAX);
        let (seen, never) = self.us.split_at(count);
        let median = self.us.get(self.us.len() / 2);
        let mut below: BTreeMap<u64, usize> = BTreeMap::new();
        for us in seen {
            *below.entry((us + 1).next_power_of_two()).or_default() += 1;
        }
        let below: Vec<_> = below.into_iter().collect();
        json!({
            "reader": self.reader, "vcpu": self.vcpu, "around": self.around.name(),
            "direction": self.direction, "n": self.us.len(),
            "median_us": median.filter(|us| **us != u64::MAX), "longest_us": seen.last(),
            "never": never.len(), "count_below_us": below,
        })
    }
}

/// All times of the server's thread that a bound is on, rising.
fn of_server(all: &[StoreTimes], direction: &str) -> Vec<u64> {
    let own = all.iter().filter(|seen| {
        (seen.reader, seen.direction) == (SERVER, direction) && seen.around != Around::Rests
    });
    let mut us: Vec<u64> = own.flat_map(|seen| seen.us.iter().copied()).collect();
    us.sort_unstable();
    us
}

impl TimedGuest {
    fn boot(plan: &Plan, setup: &Setup, path: &'static str) -> Result<Self> {
        let mut vm = plan.guest(setup)?;
        for vcpu in 0..setup.pins.len() {
            set_governor(&mut vm, vcpu, "userspace")?;
        }
        let device = GuestDevice::of(&mut vm)?;
        let reader = match path {
            "ram" => SERVER,
            _ => DOORBELL,
        };
        Ok(Self { vm, device, reader })
    }

    /// A request and what the trace has of it: the doorbell, or the register behind.
    fn marked(&self, vcpu: usize) -> (String, u64) {
        let set_perf = self.device.set_perf(vcpu);
        match self.device.bell {
            Some((bell, _)) => (set_perf, bell),
            None => (format!("{set_perf},{NOTHING:#x},0x0"), NOTHING),
        }
    }

    fn measure(
        &mut self,
        (vcpu, policy): (usize, &Policy),
        around: Around,
    ) -> Result<Vec<StoreTimes>> {
        let (set_perf, mark) = self.marked(vcpu);
        let khz = around.requests(policy);
        if around == Around::Busy {
            self.vm.ask(format!("start busy busy {vcpu}"))?;
        }
        let before = events()?.len();
        let text = self.traced((vcpu, &set_perf), &khz, around)?;
        if around == Around::Busy {
            self.vm.ask("stop busy")?;
        }
        let (marks, exits) = marks_and_exits(&text, self.vm.vcpu_tid(vcpu)?, mark)?;
        let stores = around.stores();
        ensure!(marks.len() == stores, "{} of {stores} stores", marks.len());
        let applied = applied(vcpu, before)?;
        let seen = |reader, direction| {
            let (times, slack) = match reader {
                EXIT => (&exits, 0),
                _ => (&applied, BEFORE_US),
            };
            let each = seen_after(&marks, times, slack).into_iter().zip(0..);
            let each = each.filter(|(_, at)| direction_of(&khz, *at) == Some(direction));
            let mut us: Vec<u64> = each.map(|(us, _)| us).collect();
            us.sort_unstable();
            StoreTimes {
                reader,
                vcpu,
                around,
                direction,
                us,
            }
        };
        let readers = match self.reader {
            SERVER => vec![SERVER, EXIT],
            reader => vec![reader],
        };
        let of = |reader| [RISE, FALL].map(|direction| seen(reader, direction));
        Ok(readers.into_iter().flat_map(of).collect())
    }

    /// The trace of stores of these values in turn.
    fn traced(
        &mut self,
        (vcpu, set_perf): (usize, &str),
        khz: &[u32],
        around: Around,
    ) -> Result<String> {
        let trace = Instance::create("stores", BUFFER_KIB)?;
        trace.enable(&EVENTS)?;
        trace.start()?;
        let all: Vec<_> = khz.iter().map(u32::to_string).collect();
        let stores = format!("{set_perf} {} {}", around.stores(), all.join(" "));
        self.vm.ask(around.deed(vcpu, &stores))?;
        // The server's events are written behind.
        sleep(Duration::from_millis(REST_MS));
        trace.stop()?;
        let text = trace.text()?;
        trace.remove()?;
        Ok(text)
    }
}

/// When a vCPU's thread wrote to `mark`, and when it left its guest, in µs.
fn marks_and_exits(text: &str, tid: i32, mark: u64) -> Result<(Vec<u64>, Vec<u64>)> {
    let (mut marks, mut exits) = (Vec::new(), Vec::new());
    for line in lines(text).filter(|line| line.tid() == Some(tid)) {
        let is_write = line.event == "kvm_mmio" && line.tail.starts_with("mmio write ");
        if line.event == "kvm_exit" {
            exits.push(line.time_us);
        } else if is_write && Mmio::read(&line)?.address == mark {
            marks.push(line.time_us);
        }
    }
    Ok((marks, exits))
}

/// When the server has put requests of this vCPU into force, in µs, from event `first` on.
fn applied(vcpu: usize, first: usize) -> Result<Vec<u64>> {
    let all = events()?;
    let own = all.iter().skip(first).filter(|event| {
        event["event"] == "applied" && event["vcpu"].as_u64() == u64::try_from(vcpu).ok()
    });
    let times = own.map(|event| Some(event["t_ns"].as_u64()? / 1000));
    let times: Option<_> = times.collect();
    times.context("an event without t_ns")
}

/// Whether store `at` of those that go through `khz` again and again asks for more than the one before,
/// or for less. The first has none before it.
fn direction_of(khz: &[u32], at: usize) -> Option<&'static str> {
    let of = |at: usize| khz[at % khz.len()];
    let rises = of(at) > of(at.checked_sub(1)?);
    Some(if rises { RISE } else { FALL })
}

/// How long after each mark the first of `times` is, [`u64::MAX`] if the next mark is first. What is
/// `slack` before a mark is of it, too.
fn seen_after(marks: &[u64], times: &[u64], slack: u64) -> Vec<u64> {
    let ends = marks.iter().skip(1).copied().chain([u64::MAX]);
    let each = marks.iter().zip(ends).map(|(&mark, end)| {
        let [after, to] = [mark, end].map(|time| time.saturating_sub(slack));
        let first = times.iter().find(|time| (after + 1..=to).contains(time));
        first.map_or(u64::MAX, |time| time.saturating_sub(mark))
    });
    each.collect()
}

#[cfg(test)]
mod tests {
    //! Promise: each store has the first answer before the next one, or none; bounds are on the server's
    //! thread, on requests of a vCPU that goes on.
    use super::*;

    #[test]
    fn each_store_has_its_own_answer() {
        let times = [95, 130, 140, 260];
        let marks = [100, 200, 300];
        assert_eq!(seen_after(&marks, &times, 10), [0, 60, u64::MAX]);
        assert_eq!(seen_after(&marks, &times, 0), [30, 60, u64::MAX]);
    }

    #[test]
    fn rises_are_told_from_falls() {
        let directions: Vec<_> = (0..6).map(|at| direction_of(&[1, 2, 3, 2], at)).collect();
        let [rise, fall] = [RISE, FALL].map(Some);
        assert_eq!(directions, [None, rise, rise, fall, fall, rise]);
    }

    fn seen(
        reader: &'static str,
        around: Around,
        direction: &'static str,
        us: &[u64],
    ) -> StoreTimes {
        let us = us.to_vec();
        StoreTimes {
            reader,
            vcpu: 0,
            around,
            direction,
            us,
        }
    }

    #[test]
    fn bounds_are_on_the_server_alone() {
        let all = [
            seen(SERVER, Around::Busy, RISE, &[5, 9]),
            seen(SERVER, Around::Naps, RISE, &[7, u64::MAX]),
            seen(SERVER, Around::Rests, RISE, &[8]),
            seen(SERVER, Around::Busy, FALL, &[4]),
            seen(EXIT, Around::Busy, RISE, &[6]),
        ];
        assert_eq!(of_server(&all, RISE), [5, 7, 9, u64::MAX]);
        assert_eq!(of_server(&all, FALL), [4]);
        let json = all[1].json();
        assert_eq!(
            (&json["longest_us"], &json["never"]),
            (&7.into(), &1.into())
        );
        assert_eq!(json["count_below_us"], json!([[8, 1]]));
    }
}
