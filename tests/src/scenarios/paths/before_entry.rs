// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Whether a write's clamp is in force before the guest's next instruction: the order, in the
//! host's trace, of the return of the kernel's function that sets the clamp and the vCPU's next
//! entry. An order, not a time. By the paths `ioeventfd` and `shm`, whose worker is another thread,
//! the entry comes first: the trace can show both orders. And how many system calls the vCPU's
//! thread makes for it.

use anyhow::Result;
use serde_json::{Value, json};

use super::measured::Measured;
use vcpufreq_bench::tracefs::{Instance, TraceLine, events};

use crate::harness::access_cost::NAP_MS;
use crate::harness::policy::Policy;
use crate::harness::trace::probe::Probe;

/// When the function returns, and what it was given.
const PROBE: &str = "cpu_uclamp_min_write text=+0($arg2):string written=$retval:s64";
const EVENTS: [&str; 4] = [
    "kvm/kvm_mmio",
    "kvm/kvm_entry",
    "lab/clamp",
    "raw_syscalls/sys_enter",
];
/// ioctl on arm64.
const IOCTL: &str = "NR 29 (";
/// By which the thread enters the guest again.
const KVM_RUN: &str = "ae80";
/// Each with a new clamp.
const WRITES: u64 = 100;

/// What came first after each write of a vCPU.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct EntryOrder {
    /// Writes of set_perf.
    writes: u64,
    /// Whose clamp came before the vCPU's next entry.
    before: u64,
    /// Whose clamp came after it.
    after: u64,
    /// Clamps that no write asked for, or that were refused.
    strange: u64,
    /// The clamp that the last write asks for, in hundredths of a percent, and
    /// whether the vCPU was entered since.
    pending: Option<(u32, bool)>,
    /// What else runs on the pCPU may be added to what the last write asked for, and taken away
    /// again later.
    adds_others: bool,
    /// What that asked for.
    last: u32,
    /// The vCPU has written, and was not entered since.
    writing: bool,
    /// System calls of the vCPU's thread from each write to its next entry, but for the one that
    /// enters.
    host_calls: Vec<u64>,
}

impl EntryOrder {
    /// Has the guest write, now and then another OPP.
    pub fn of(guest: &mut Measured, policy: &Policy) -> Result<Self> {
        let (vcpu, set_perf, trap) = (guest.vcpu, &guest.set_perf, guest.trap);
        let thread = format!("vcpu{vcpu}-{}", guest.vm.vcpu_tid(vcpu)?);
        let watch = TraceWatch::start()?;
        let opps = &guest.opps;
        let wrote = guest.vm.ask(format!(
            "store-naps {vcpu} {NAP_MS} {set_perf} {WRITES} {opps}"
        ));
        let trace = watch.stop()?;
        wrote?;
        let mut order = Self {
            adds_others: guest.path == "bpf",
            ..Self::default()
        };
        for line in events(&trace) {
            order.line(&line, &thread, trap, policy)?;
        }
        Ok(order)
    }

    /// Every write's clamp came before the guest went on.
    pub fn all_before(&self) -> bool {
        (self.writes, self.before, self.strange) == (WRITES, WRITES, 0)
    }

    /// Some write's clamp came after it.
    pub fn some_after(&self) -> bool {
        self.writes == WRITES && self.after > 0
    }

    /// So many system calls of the vCPU's thread for each write.
    pub fn calls_a_write(&self, calls: u64) -> bool {
        self.host_calls.iter().all(|of_write| *of_write == calls)
    }

    pub fn json(&self, path: &str) -> Value {
        json!({
            "path": path, "writes": self.writes, "clamp_before_entry": self.before,
            "clamp_after_entry": self.after, "strange_clamps": self.strange,
            "host_calls": self.host_calls.iter().sum::<u64>(),
            "most_host_calls": self.host_calls.iter().max(),
        })
    }

    /// Of the vCPU's thread `kvm_mmio: mmio write len 4 gpa 0xa001004 val 0x1b7740` and
    /// `kvm_entry: PC: 0x...`, and by any thread
    /// `clamp: (cgroup_file_write+0x8/0x1 <- cpu_uclamp_min_write) text="45.0" written=4`
    fn line(&mut self, line: &TraceLine, thread: &str, trap: u64, policy: &Policy) -> Result<()> {
        let own = line.thread == thread;
        let is_write = line.tail.starts_with("mmio write len 4 ");
        match line.event {
            "clamp" => {
                let text = line.tail.split('"').nth(1);
                let hundredths = line.known(text.and_then(hundredths))?;
                let set = !line.tail.contains("written=-");
                let more = self.adds_others && hundredths >= self.last;
                let asked = |(asked, _): &mut (u32, bool)| (*asked == hundredths || more) && set;
                match self.pending.take_if(asked) {
                    Some((_, false)) => self.before += 1,
                    Some((_, true)) => self.after += 1,
                    None if more && set => {}
                    None => self.strange += 1,
                }
            }
            "kvm_mmio" if own && is_write && line.hex("gpa")? == trap => {
                // In turn; a doorbell's value is another one.
                let turn = usize::try_from(self.writes)? % policy.opps.len();
                let util = policy.util(policy.opps[turn]);
                self.writes += 1;
                self.host_calls.push(0);
                self.writing = true;
                self.last = (util * 10_000 + 512) / 1024;
                self.pending = Some((self.last, false));
            }
            "sys_enter" if own && self.writing && !enters_guest(line.tail) => {
                if let Some(calls) = self.host_calls.last_mut() {
                    *calls += 1;
                }
            }
            "kvm_entry" if own => {
                self.writing = false;
                if let Some((_, entered)) = &mut self.pending {
                    *entered = true;
                }
            }
            _ => (),
        }
        Ok(())
    }
}

/// Of `NR 29 (8, ae80, 0, 0, 0, 0)`.
fn enters_guest(tail: &str) -> bool {
    let arguments = tail.strip_prefix(IOCTL);
    arguments.is_some_and(|arguments| arguments.split(", ").nth(1) == Some(KVM_RUN))
}

/// Of `45`, `45.1`, `45.12` or `max`, as the kernel takes them.
fn hundredths(text: &str) -> Option<u32> {
    let text = text.trim_end_matches("\\n").trim();
    if text == "max" {
        return Some(10_000);
    }
    let (whole, digits) = text.split_once('.').unwrap_or((text, ""));
    let digits: u32 = format!("{digits:0<2}").parse().ok()?;
    Some(whole.parse::<u32>().ok()? * 100 + digits)
}

/// The trace and its probe, in the order in which they have to go.
struct TraceWatch {
    trace: Instance,
    _probe: Probe,
}

impl TraceWatch {
    fn start() -> Result<Self> {
        let probe = Probe::set('r', "clamp", PROBE)?;
        let trace = Instance::create("entries", 2048)?;
        trace.enable(&EVENTS)?;
        trace.start()?;
        Ok(Self {
            trace,
            _probe: probe,
        })
    }

    /// The trace, which has to be complete; nothing of it stays.
    fn stop(self) -> Result<String> {
        self.trace.stop()?;
        let text = self.trace.text()?;
        self.trace.remove()?;
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    //! A clamp after the entry is distinguished from one before it. A clamp without a request, or a
    //! refused one, is neither.
    use super::*;

    const WRITE: &str = " vcpu1-9 [2] . 1.0: kvm_mmio: mmio write len 4 gpa 0xa001004 val 0x12c";
    const ENTRY: &str = " vcpu1-9 [2] . 1.0: kvm_entry: PC: 0x8";
    const OTHER_ENTRY: &str = " vcpu0-8 [1] . 1.0: kvm_entry: PC: 0x8";
    const CLAMP: &str =
        " vcpu1-9 [2] . 1.0: clamp: (a+0x8/0x1 <- cpu_uclamp_min_write) text=\"50.0\" written=4";

    fn of(lines: &[&str]) -> EntryOrder {
        let policy = Policy {
            path: String::new(),
            cpus: vec![2],
            opps: vec![300, 600],
            capacity: 1024,
            reference: 600,
            limit: 600,
        };
        let mut order = EntryOrder::default();
        for line in lines {
            let line = TraceLine::read(line).unwrap();
            order.line(&line, "vcpu1-9", 0xa00_1004, &policy).unwrap();
        }
        order
    }

    #[test]
    fn what_came_first() {
        let counts = |lines: &[&str]| {
            let order = of(lines);
            [order.writes, order.before, order.after, order.strange]
        };
        assert_eq!(counts(&[WRITE, OTHER_ENTRY, CLAMP, ENTRY]), [1, 1, 0, 0]);
        assert_eq!(counts(&[ENTRY, WRITE, ENTRY, CLAMP]), [1, 0, 1, 0]);
        assert_eq!(counts(&[WRITE, ENTRY]), [1, 0, 0, 0]);
        assert_eq!(counts(&[CLAMP]), [0, 0, 0, 1]);
        let refused = CLAMP.replace("written=4", "written=-34");
        assert_eq!(counts(&[WRITE, &refused, ENTRY]), [1, 0, 0, 1]);
        let another = CLAMP.replace("50.0", "50.1");
        assert_eq!(counts(&[WRITE, &another, CLAMP]), [1, 1, 0, 1]);
    }

    #[test]
    fn calls_are_of_the_vcpu_and_of_a_write() {
        const CALL: &str = " vcpu1-9 [2] . 1.0: sys_enter: NR 68 (8, 1, 6, 0, 0, 0)";
        const RUN: &str = " vcpu1-9 [2] . 1.0: sys_enter: NR 29 (8, ae80, 0, 0, 0, 0)";
        const OTHER_CALL: &str = " vcpu0-8 [1] . 1.0: sys_enter: NR 68 (8, 1, 6, 0, 0, 0)";
        let lines = [CALL, WRITE, OTHER_CALL, CALL, CLAMP, RUN, ENTRY, CALL];
        let order = of(&lines);
        assert!(order.calls_a_write(1), "{order:?}");
        assert!(!order.calls_a_write(0), "{order:?}");
        // As many as writes, but not one each; and an ioctl that enters no guest.
        let uneven = of(&[WRITE, CALL, CALL, ENTRY, WRITE, ENTRY]);
        assert!(!uneven.calls_a_write(1), "{uneven:?}");
        let ioctl = RUN.replace("ae80", "4008ae61");
        assert!(of(&[WRITE, &ioctl, RUN, ENTRY]).calls_a_write(1));
    }

    #[test]
    fn percents_as_the_kernel_takes_them() {
        let texts = ["45", "45.1", "45.12", "0.05", "max", "max\\n", "x"];
        let read = texts.map(hundredths);
        assert_eq!(read[..6], [4500, 4510, 4512, 5, 10_000, 10_000].map(Some));
        assert_eq!(read[6], None);
    }
}
