// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How long after a QEMU guest has stored a request in its RAM the request is in force, by three
//! readers: the server's thread, which reads the RAM; a program on the tracepoint kvm_exit of the
//! vCPU's thread ([`ExitReader`]); and a thread that a doorbell wakes (`shm`). The server has the first
//! and the third. What each costs is beside.
//!
//! A store in RAM leaves no trace. So the guest writes to a register of QEMU's right before it, where
//! nothing is: the store follows when KVM enters the guest again, of which the trace has the time. What
//! carries the request out is in the server's events, on the same clock.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use vcpufreq_bench::tracefs::{Instance, Mmio, events as lines};
use vcpufreq_tests::LabVerdict;

use super::FREE;
use super::exit_reader::{Carried, ExitReader};
use super::ram::{BUSY, IDLE, turns};
use crate::harness::access_cost::NAP_MS;
use crate::harness::plan::{GuestDevice, Plan, first_cpus, last_of, let_load_decay, set_governor};
use crate::harness::policy::Policy;
use crate::harness::vm::{Vm, events};
use crate::harness::vmm::Vmm;

/// QueueSel of `virt`'s first virtio-mmio transport, which no device is behind: QEMU ignores writes.
const NOTHING: u64 = 0x0a00_0030;
/// Stores of each kind.
const STORES: usize = 100;
/// The same where there is a rest between them.
const STORES_AT_REST: usize = 40;
/// So long that the server's thread sleeps.
const REST_MS: u64 = 100;
/// A tick of the guest's: by then each rise is in force.
const RISE_US: u64 = 4_000;
/// Of all rises together: of one state alone there are twenty, whose median is a draw.
const MEDIAN_RISE_US: u64 = 1_000;
/// By then each fall is.
const FALL_US: u64 = 20_000;
/// Of each CPU, for the exits of a busy vCPU.
const BUFFER_KIB: u32 = 8 * 1024;
const EVENTS: [&str; 2] = ["kvm/kvm_mmio", "kvm/kvm_entry"];
/// Stores that are timed together, and how often.
const TIMED: u64 = 500;
const BATCHES: usize = 9;

/// The readers: the thread of the server that reads RAM; a program at the vCPU's exits, until it has
/// seen the request, and until a thread that it wakes has clamped; and a thread that a doorbell wakes.
const SERVER: &str = "server";
const SEEN: &str = "exit-seen";
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
    let (mut all, mut costs) = (Vec::new(), Vec::new());
    for path in ["ram", "shm"] {
        let mut guest = TimedGuest::boot(plan, &policies, path)?;
        all.extend(guest.measure_all(&policies)?);
        costs.push(guest.cost(&policies)?);
        if path == "ram" {
            guest.read_at_exits(policies.len())?;
            all.extend(guest.measure_all(&policies)?);
            costs.push(guest.cost(&policies)?);
        }
        guest.vm.kill()?;
    }
    let rows: Vec<Value> = all.iter().map(StoreTimes::json).collect();
    let [rises, falls] = [RISE, FALL].map(|direction| of_server(&all, direction));
    let median = rises.get(rises.len() / 2).copied();
    let [rise, fall] = [&rises, &falls].map(|times| times.last().copied());
    let within = |us: Option<u64>, most| us.is_some_and(|us| us <= most);
    let readers = policies.len() * Around::ALL.len() * 2 * 4;
    Ok(
        LabVerdict::with_figures(json!({ "rows": rows, "costs": costs }))
            .check_eq("each reader, vCPU and direction", &all.len(), readers)
            .check("the longest rise", within(rise, RISE_US), rise)
            .check("the median rise", within(median, MEDIAN_RISE_US), median)
            .check("the longest fall", within(fall, FALL_US), fall),
    )
}

/// A guest whose requests are this scenario's alone.
struct TimedGuest {
    vm: Vm,
    device: GuestDevice,
    by: RequestReader,
}

/// What reads its requests.
enum RequestReader {
    /// The server, which is called so.
    Server(&'static str),
    Program(ExitReader),
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
    fn boot(plan: &Plan, policies: &[Policy], path: &'static str) -> Result<Self> {
        let plan = Plan {
            driver: plan.driver.clone(),
            path: Some(path.to_owned()),
            vmm: Vmm::Qemu,
            protected: false,
        };
        let setup = plan.mirroring(&first_cpus(policies));
        let mut vm = plan.guest(&setup.with(&["--rate-limit", "0"]))?;
        for vcpu in 0..policies.len() {
            set_governor(&mut vm, vcpu, "userspace")?;
        }
        let device = GuestDevice::of(&mut vm)?;
        let by = match path {
            "ram" => SERVER,
            _ => DOORBELL,
        };
        let by = RequestReader::Server(by);
        Ok(Self { vm, device, by })
    }

    /// The program takes the server's place.
    fn read_at_exits(&mut self, vcpus: usize) -> Result<()> {
        self.vm.kill_prefix()?;
        for vcpu in 0..vcpus {
            self.vm.settled_clamp(vcpu, FREE)?;
        }
        self.by = RequestReader::Program(ExitReader::start(&self.vm, &self.device)?);
        Ok(())
    }

    fn measure_all(&mut self, policies: &[Policy]) -> Result<Vec<StoreTimes>> {
        let mut all = Vec::new();
        for (vcpu, policy) in policies.iter().enumerate() {
            for around in Around::ALL {
                all.extend(self.measure((vcpu, policy), around)?);
            }
        }
        Ok(all)
    }

    fn measure(
        &mut self,
        (vcpu, policy): (usize, &Policy),
        around: Around,
    ) -> Result<Vec<StoreTimes>> {
        let khz = around.requests(policy);
        if around == Around::Busy {
            self.vm.ask(format!("start busy busy {vcpu}"))?;
        }
        let before = events()?.len();
        let text = self.traced(vcpu, &khz, around)?;
        if around == Around::Busy {
            self.vm.ask("stop busy")?;
        }
        let tid = self.vm.vcpu_tid(vcpu)?;
        let (marks, stores) = (marks(&text, tid)?, around.stores());
        ensure!(marks.len() == stores, "{} of {stores} stores", marks.len());
        let seen = |(reader, times): (_, Vec<u64>), direction| {
            let each = seen_after(&marks, &times).into_iter().zip(0..);
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
        let readers = match &self.by {
            RequestReader::Server(name) => vec![(*name, applied(vcpu, before)?)],
            RequestReader::Program(reader) => {
                let all = reader.carried().into_iter();
                let own: Vec<_> = all.filter(|one| one.tid == tid).collect();
                let of = |time: fn(&Carried) -> u64| own.iter().map(time).collect();
                vec![
                    (SEEN, of(|one| one.seen_us)),
                    (EXIT, of(|one| one.applied_us)),
                ]
            }
        };
        let both = |reader: (&'static str, Vec<u64>)| {
            [RISE, FALL].map(|direction| seen(reader.clone(), direction))
        };
        Ok(readers.into_iter().flat_map(both).collect())
    }

    /// What a request costs the vCPU beside a store, and how often the reader wakes beside a guest that
    /// idles, and one that is busy, without a request.
    fn cost(&mut self, policies: &[Policy]) -> Result<Value> {
        let (vcpu, policy) = last_of(policies)?;
        let request = self.device.set_perf(vcpu);
        let mut timed = |what: &str| {
            let values = format!("{} {}", policy.min(), policy.max());
            let stores = format!("stores {vcpu} {what} {TIMED} {values}");
            let batches = (0..BATCHES).map(|_| self.vm.number(&stores));
            let mut ns = batches.collect::<Result<Vec<_>>>()?;
            ns.sort_unstable();
            anyhow::Ok(ns[BATCHES / 2])
        };
        let (request, store) = (timed(&request)?, timed("memory")?);
        // The reader may sleep again.
        let_load_decay();
        let idle = self.woken(IDLE)?;
        for vcpu in 0..policies.len() {
            self.vm.ask(format!("start busy{vcpu} busy {vcpu}"))?;
        }
        let_load_decay();
        let busy = self.woken(BUSY)?;
        for vcpu in 0..policies.len() {
            self.vm.ask(format!("stop busy{vcpu}"))?;
        }
        let reader = match &self.by {
            RequestReader::Server(name) => name,
            RequestReader::Program(_) => EXIT,
        };
        Ok(json!({
            "reader": reader, "request_ns": request / TIMED, "store_ns": store / TIMED,
            "idle": idle, "busy": busy,
        }))
    }

    /// How often the reader's thread wakes in this time, and what the program does.
    fn woken(&self, time: Duration) -> Result<Value> {
        let wakeups = || match &self.by {
            RequestReader::Server(_) => turns(&self.vm),
            RequestReader::Program(reader) => Ok(reader.carried().len() as u64),
        };
        let looks = || match &self.by {
            RequestReader::Server(_) => Ok(None),
            RequestReader::Program(reader) => reader.looks().map(Some),
        };
        let (wakeups_before, looks_before) = (wakeups()?, looks()?);
        sleep(time);
        let (wakeups, looks) = (wakeups()? - wakeups_before, looks()?);
        let looks = looks.zip(looks_before);
        let program = looks.map(|(now, before)| now.since(before));
        Ok(json!({ "seconds": time.as_secs(), "wakeups": wakeups, "program": program }))
    }

    /// The trace of stores of these values in turn.
    fn traced(&mut self, vcpu: usize, khz: &[u32], around: Around) -> Result<String> {
        let trace = Instance::create("stores", BUFFER_KIB)?;
        trace.enable(&EVENTS)?;
        trace.start()?;
        let all: Vec<_> = khz.iter().map(u32::to_string).collect();
        let set_perf = self.device.set_perf(vcpu);
        let (count, all) = (around.stores(), all.join(" "));
        let stores = format!("{NOTHING:#x}:{set_perf} {count} {all}");
        self.vm.ask(around.deed(vcpu, &stores))?;
        // The server's events are written behind.
        sleep(Duration::from_millis(REST_MS));
        trace.stop()?;
        let text = trace.text()?;
        trace.remove()?;
        Ok(text)
    }
}

/// When a vCPU's thread entered its guest again after a write to [`NOTHING`], in µs.
fn marks(text: &str, tid: i32) -> Result<Vec<u64>> {
    let (mut marks, mut wrote) = (Vec::new(), false);
    for line in lines(text).filter(|line| line.tid() == Some(tid)) {
        let is_write = line.event == "kvm_mmio" && line.tail.starts_with("mmio write ");
        if is_write {
            wrote |= Mmio::read(&line)?.address == NOTHING;
        } else if line.event == "kvm_entry" && std::mem::take(&mut wrote) {
            marks.push(line.time_us);
        }
    }
    Ok(marks)
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

/// How long after each mark the first of `times` is, [`u64::MAX`] if the next mark is first.
fn seen_after(marks: &[u64], times: &[u64]) -> Vec<u64> {
    let ends = marks.iter().skip(1).copied().chain([u64::MAX]);
    let each = marks.iter().zip(ends).map(|(&mark, end)| {
        let first = times.iter().find(|time| (mark..end).contains(time));
        first.map_or(u64::MAX, |time| time - mark)
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
        assert_eq!(seen_after(&[100, 200, 300], &times), [30, 60, u64::MAX]);
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
