// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Exits of guests to userspace, by the address that was accessed: from the
//! host's tracepoints `kvm:kvm_mmio` and `kvm:kvm_userspace_exit`, and KVM's
//! own statistics beside them.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::ops::Range;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use vcpufreq_bench::tracefs::{Instance, TraceLine};

use crate::harness::architecture::HERE;
use crate::harness::sysfs;
use crate::harness::vmm::vcpu_name;

const EVENTS: [&str; 2] = ["kvm/kvm_mmio", "kvm/kvm_userspace_exit"];
/// A thread waits for a lock, with PREEMPT_RT also for a spinlock. The kernel doesn't show the first
/// thread that waits for a raw spinlock.
const LOCKS: [&str; 2] = ["lock/contention_begin", "kvm/kvm_entry"];
/// KVM's functions that carry out an access to a device, on Arm and on any machine.
const ACCESSING: [&str; 2] = ["io_mem_abort", "kvm_io_bus_write"];
/// For each CPU: 100,000 writes are 5 MB.
const BUFFER_KIB: u32 = 32 * 1024;

/// Accesses to one address.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct TracedAccesses {
    /// That trapped into KVM.
    pub trapped: u64,
    /// That KVM handed to userspace.
    pub exited: u64,
}

/// Watches the exits of all guests until it is stopped.
#[derive(Debug)]
pub struct Exits {
    trace: Instance,
    /// KVM's count of such exits so far.
    counted: u64,
}

/// What was seen.
#[derive(Debug)]
pub struct SeenExits {
    by_address: BTreeMap<u64, TracedAccesses>,
    /// What each thread accessed.
    by_thread: BTreeMap<(String, u64), u64>,
    /// KVM's own count of accesses that it handed to userspace meanwhile.
    pub counted: u64,
    interrupted: BTreeMap<String, u64>,
    lock_waits: BTreeMap<(String, u64), LockWaits>,
}

/// Of a vCPU's thread between two stays in its guest, in which it accessed an address.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct LockWaits {
    /// How often that was.
    pub looked_at: u64,
    /// Waits for a lock in the access itself: the functions that led to each, the innermost first. The
    /// scheduler, or KVM's interrupt controller, may wait before and after it.
    pub waits: Vec<String>,
}

impl Exits {
    /// Starts to watch.
    pub fn watch() -> Result<Self> {
        Self::watch_events(&EVENTS, |_| Ok(()))
    }

    /// The same, and waits for locks.
    pub fn watch_with_locks() -> Result<Self> {
        Self::watch_events(&[EVENTS, LOCKS].concat(), |trace| {
            trace.with_stack(LOCKS[0])
        })
    }

    fn watch_events(
        events: &[&str],
        prepare: impl FnOnce(&Instance) -> Result<()>,
    ) -> Result<Self> {
        let trace = Instance::create("exits", BUFFER_KIB)?;
        prepare(&trace)?;
        trace.enable(events)?;
        quiet_consoles();
        let counted = kvm_statistic(HERE.mmio_exits)?;
        trace.start()?;
        Ok(Self { trace, counted })
    }

    /// What was seen since the start; an error when the trace isn't complete.
    pub fn stop(self) -> Result<SeenExits> {
        quiet_consoles();
        let counted = kvm_statistic(HERE.mmio_exits)? - self.counted;
        self.trace.stop()?;
        let lost = self.trace.lost()?;
        ensure!(lost == 0, "{lost} events of the guests' exits are lost");
        let mut counter = ExitCounter::default();
        for line in BufReader::new(self.trace.open()?).lines() {
            counter.text(&line?)?;
        }
        self.trace.remove()?;
        Ok(SeenExits {
            by_address: counter.by_address,
            by_thread: counter.by_thread,
            counted,
            interrupted: counter.interrupted,
            lock_waits: counter.lock_waits,
        })
    }
}

impl SeenExits {
    /// At these addresses together.
    pub fn at(&self, addresses: Range<u64>) -> TracedAccesses {
        let range = self.by_address.range(addresses);
        range.fold(TracedAccesses::default(), |sum, (_, one)| TracedAccesses {
            trapped: sum.trapped + one.trapped,
            exited: sum.exited + one.exited,
        })
    }

    /// Accesses to an address by threads of other names; a name is that of one guest only.
    pub fn by_others_than(&self, name: &str, address: u64) -> u64 {
        let others = self
            .by_thread
            .iter()
            .filter(|((thread, at), _)| *at == address && !is_called(thread, name));
        others.map(|(_, count)| count).sum()
    }

    /// How often a signal made a vCPU's thread leave KVM; its name is that of one guest only.
    pub fn interrupted(&self, name: &str) -> u64 {
        let all = self.interrupted.iter();
        all.filter(|(thread, _)| is_called(thread, name))
            .map(|(_, count)| count)
            .sum()
    }

    /// Waits of a vCPU's thread at accesses to this address; its name is that of one guest only.
    pub fn lock_waits(&self, name: &str, address: u64) -> LockWaits {
        let all = self.lock_waits.iter();
        let its = all.filter(|((thread, at), _)| *at == address && is_called(thread, name));
        its.fold(LockWaits::default(), |mut sum, (_, one)| {
            sum.looked_at += one.looked_at;
            sum.waits.extend_from_slice(&one.waits);
            sum
        })
    }

    /// At all addresses together.
    pub fn all(&self) -> TracedAccesses {
        self.at(0..u64::MAX)
    }

    /// Whether KVM counts as many exits to userspace as were traced.
    pub fn agrees(&self) -> bool {
        self.all().exited == self.counted
    }

    /// A row for each address.
    pub fn json(&self) -> Value {
        let rows = self.by_address.iter().map(|(address, one)| {
            json!({ "address": format!("{address:#x}"), "trapped": one.trapped, "exited": one.exited })
        });
        rows.collect()
    }
}

/// Whether a trace's `NAME-TID` is of the vCPU `name`.
fn is_called(thread: &str, name: &str) -> bool {
    thread
        .rsplit_once('-')
        .and_then(|(own, _)| vcpu_name(own))
        .as_deref()
        == Some(name)
}

/// Sums up lines of the trace.
#[derive(Debug, Default)]
struct ExitCounter {
    by_address: BTreeMap<u64, TracedAccesses>,
    by_thread: BTreeMap<(String, u64), u64>,
    /// What each thread accessed last.
    last: BTreeMap<String, u64>,
    /// By thread.
    interrupted: BTreeMap<String, u64>,
    /// Since each thread was in its guest: what it accessed, and its waits for locks.
    outside: BTreeMap<String, (Option<u64>, Vec<String>)>,
    lock_waits: BTreeMap<(String, u64), LockWaits>,
    /// The thread that waits for a lock, and the functions so far that led to it.
    waiting: Option<(String, String)>,
}

impl ExitCounter {
    /// An event, or one of the functions ` => kvm_io_bus_write` that led to the one above.
    fn text(&mut self, text: &str) -> Result<()> {
        if let Some(line) = TraceLine::read(text) {
            return self.line(&line);
        }
        let function = text.trim().strip_prefix("=> ");
        if let (Some(function), Some((_, led))) = (function, &mut self.waiting) {
            led.push_str(function);
            led.push(' ');
        }
        if function.is_some_and(|name| ACCESSING.contains(&name)) {
            if let Some((thread, led)) = self.waiting.take() {
                self.outside.entry(thread).or_default().1.push(led);
            }
        }
        Ok(())
    }

    /// `kvm_mmio: mmio write len 4 gpa 0xa000004 val 0x1`
    /// `kvm_userspace_exit: reason KVM_EXIT_MMIO (6)`
    /// `contention_begin: 00000000c0ffee00 (flags=RT)`
    fn line(&mut self, line: &TraceLine) -> Result<()> {
        let thread = line.thread;
        self.waiting = None;
        let reason = line.tail.split_whitespace().nth(1);
        match (line.event, reason) {
            ("kvm_mmio", _) => {
                let address = line.hex("gpa")?;
                self.by_address.entry(address).or_default().trapped += 1;
                *self
                    .by_thread
                    .entry((thread.to_owned(), address))
                    .or_default() += 1;
                self.last.insert(thread.to_owned(), address);
                self.outside.entry(thread.to_owned()).or_default().0 = Some(address);
            }
            ("contention_begin", _) => self.waiting = Some((thread.to_owned(), String::new())),
            ("kvm_entry", _) => {
                if let Some((Some(address), mut waits)) = self.outside.remove(thread) {
                    let at = (thread.to_owned(), address);
                    let sum = self.lock_waits.entry(at).or_default();
                    sum.looked_at += 1;
                    sum.waits.append(&mut waits);
                }
            }
            ("kvm_userspace_exit", Some("KVM_EXIT_MMIO")) => {
                let address = line.known(self.last.get(thread))?;
                self.by_address.entry(*address).or_default().exited += 1;
            }
            ("kvm_userspace_exit", Some("KVM_EXIT_INTR")) => {
                *self.interrupted.entry(thread.to_owned()).or_default() += 1;
            }
            _ => (),
        }
        Ok(())
    }
}

/// The last answer of a guest is on its console before it has read its own
/// registers for the last time; no exit shall be counted by one alone.
fn quiet_consoles() {
    std::thread::sleep(Duration::from_millis(100));
}

/// A sum over all guests that there are.
pub fn kvm_statistic(name: &str) -> Result<u64> {
    sysfs::number(format!("/sys/kernel/debug/kvm/{name}"))
}

#[cfg(test)]
mod tests {
    //! An exit is put down to what its thread accessed last, and so is a wait for a lock on the way.
    use super::*;

    fn seen(lines: &[&str]) -> SeenExits {
        let mut counter = ExitCounter::default();
        for line in lines {
            counter.text(line).unwrap();
        }
        SeenExits {
            by_address: counter.by_address,
            by_thread: counter.by_thread,
            counted: 1,
            interrupted: counter.interrupted,
            lock_waits: counter.lock_waits,
        }
    }

    #[test]
    fn waits_for_locks_by_address() {
        let seen = seen(&[
            " vcpu1-9 [003] ..... 1.0: contention_begin: 000000003f5a1b20 (flags=RT)",
            " vcpu1-9 [003] ..... 1.0: <stack trace>",
            " => kvm_vcpu_ioctl",
            " vcpu1-9 [003] d.... 1.1: kvm_entry: PC: 0xffff800080010000",
            " vcpu1-9 [003] ..... 1.2: kvm_mmio: mmio write len 4 gpa 0xa001004 val 0x927c0",
            " worker-7 [000] ..... 1.3: contention_begin: 000000003f5a1b20 (flags=RT)",
            " worker-7 [000] ..... 1.3: <stack trace>",
            " => ep_send_events",
            " vcpu1-9 [003] ..... 1.4: contention_begin: 000000003f5a1b20 (flags=RT|READ)",
            " vcpu1-9 [003] ..... 1.4: <stack trace>",
            " => eventfd_signal_mask",
            " => kvm_io_bus_write",
            " => io_mem_abort",
            // The scheduler's, on the way back.
            " vcpu1-9 [003] ..... 1.5: contention_begin: 0000000063df90e3 (flags=SPIN)",
            " vcpu1-9 [003] ..... 1.5: <stack trace>",
            " => sugov_update_shared",
            " vcpu1-9 [003] d.... 1.6: kvm_entry: PC: 0xffff800080010000",
        ]);
        let at = |name, address| {
            let LockWaits { looked_at, waits } = seen.lock_waits(name, address);
            (looked_at, waits.join(","))
        };
        let led = "eventfd_signal_mask kvm_io_bus_write ";
        assert_eq!(at("vcpu1", 0xa00_1004), (1, led.to_owned()));
        assert_eq!(at("vcpu1", 0xa00_0004), (0, String::new()));
        assert_eq!(at("vcpu0", 0xa00_1004), (0, String::new()));
    }

    #[test]
    fn exits_by_address() {
        let seen = seen(&[
            "# tracer: nop",
            " vcpu0-9 [000] ..... 1.0: kvm_mmio: mmio write len 4 gpa 0xa000004 val 0x927c0",
            " vcpu1-8 [001] ..... 1.1: kvm_mmio: mmio unsatisfied-read len 1 gpa 0x9000005 val 0x0",
            " vcpu0-9 [000] ..... 1.2: kvm_mmio: mmio write len 4 gpa 0xa000004 val 0x1",
            " vcpu1-8 [001] ..... 1.3: kvm_userspace_exit: reason KVM_EXIT_MMIO (6)",
            " vcpu0-9 [000] ..... 1.4: kvm_userspace_exit: reason KVM_EXIT_INTR (10)",
        ]);
        assert_eq!(
            ["vcpu0", "vcpu1"].map(|name| seen.interrupted(name)),
            [1, 0]
        );
        let others = |name| seen.by_others_than(name, 0xa00_0004);
        assert_eq!((others("vcpu0"), others("vcpu1")), (0, 2));
        let accesses = |trapped, exited| TracedAccesses { trapped, exited };
        assert_eq!(seen.at(0xa00_0000..0xa01_0000), accesses(2, 0));
        assert_eq!(seen.all(), accesses(3, 1));
        assert!(seen.agrees() && !SeenExits { counted: 2, ..seen }.agrees());
    }
}
