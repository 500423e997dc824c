// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Events that more than one reader of the trace looks at. Times are in µs of the trace's clock.

use anyhow::Result;

use super::line::TraceLine;

/// A frequency change of a pCPU, from the tracepoint `power:cpu_frequency`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrequencyEvent {
    /// When.
    pub time_us: u64,
    /// The pCPU.
    pub cpu: u32,
    /// The new frequency in kHz.
    pub khz: u32,
}

/// A pCPU goes from one thread to the next, from `sched:sched_switch`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Switch {
    /// When.
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
    /// When.
    pub time_us: u64,
    /// The pCPU that the vCPU was on.
    pub cpu: u32,
    /// How many bytes it has.
    pub len: u32,
    /// Guest-physical address.
    pub address: u64,
    /// What the guest has read or written.
    pub value: u64,
}

impl FrequencyEvent {
    /// `state=1800000 cpu_id=0`
    pub fn read(line: &TraceLine) -> Result<Self> {
        Ok(Self {
            time_us: line.time_us,
            cpu: line.number("cpu_id")?,
            khz: line.number("state")?,
        })
    }
}

impl Switch {
    /// `prev_comm=a b prev_pid=1 prev_prio=120 prev_state=S ==> next_comm=c next_pid=2
    /// next_prio=120`, or of `trace-cmd report` `a b:1 [120] S ==> c:2 [120]`
    pub fn read(line: &TraceLine) -> Result<Self> {
        let [prev, next] = line.known(kernels(line.tail).or_else(|| trace_cmds(line.tail)))?;
        Ok(Self {
            time_us: line.time_us,
            cpu: line.cpu,
            prev,
            next,
        })
    }
}

/// Name and number of a thread.
type NamedThread = (String, i32);

// Only the words behind a thread's name can't be in one.
fn kernels(tail: &str) -> Option<[NamedThread; 2]> {
    let names = tail.strip_prefix("prev_comm=")?;
    let (prev, next) = names.split_once(" ==> next_comm=")?;
    let thread = |text: &str, which: &str| {
        let (name, rest) = text.rsplit_once(which)?;
        Some((name.to_owned(), rest.split(' ').next()?.parse().ok()?))
    };
    Some([thread(prev, " prev_pid=")?, thread(next, " next_pid=")?])
}

fn trace_cmds(tail: &str) -> Option<[NamedThread; 2]> {
    let (prev, next) = tail.split_once(" ==> ")?;
    let thread = |text: &str| {
        let (thread, _priority) = text.rsplit_once(" [")?;
        let (name, tid) = thread.rsplit_once(':')?;
        Some((name.to_owned(), tid.parse().ok()?))
    };
    Some([thread(prev)?, thread(next)?])
}

impl Mmio {
    /// `mmio read len 4 gpa 0xa000000 val 0x1b7740`
    pub fn read(line: &TraceLine) -> Result<Self> {
        Ok(Self {
            time_us: line.time_us,
            cpu: line.cpu,
            len: line.known(line.behind("len")?.parse().ok())?,
            address: line.hex("gpa")?,
            value: line.hex("val")?,
        })
    }
}

#[cfg(test)]
mod tests {
    //! Promise: an event is read as the kernel prints it, whatever threads are called.
    use super::*;

    #[test]
    fn a_frequency() {
        let text = "  vcpu0-99 [000] d.h2. 12.345678: cpu_frequency: state=1800000 cpu_id=3";
        let event = FrequencyEvent::read(&TraceLine::read(text).unwrap()).unwrap();
        assert_eq!(
            (event.time_us, event.cpu, event.khz),
            (12_345_678, 3, 1_800_000)
        );
    }

    #[test]
    fn a_switch() {
        let text = " <idle>-0 [002] d..2. 1.000002: sched_switch: prev_comm=swapper/2 prev_pid=0 \
                    prev_prio=120 prev_state=R ==> next_comm=a next_pid=7 b next_pid=99 next_prio=120";
        let switch = Switch::read(&TraceLine::read(text).unwrap()).unwrap();
        assert_eq!((switch.time_us, switch.cpu), (1_000_002, 2));
        assert_eq!(switch.prev, ("swapper/2".to_owned(), 0));
        assert_eq!(switch.next, ("a next_pid=7 b".to_owned(), 99));
    }

    #[test]
    fn a_switch_of_trace_cmd() {
        let text = " a:b-7 [002] 1.000002: sched_switch: a:b:7 [120] S ==> swapper/2:0 [120]";
        let switch = Switch::read(&TraceLine::read(text).unwrap()).unwrap();
        assert_eq!(switch.prev, ("a:b".to_owned(), 7));
        assert_eq!(switch.next, ("swapper/2".to_owned(), 0));
    }

    #[test]
    fn a_read() {
        let text =
            " vcpu0-99 [002] ....1 1.000002: kvm_mmio: mmio read len 4 gpa 0xa001000 val 0x1b7740";
        let read = Mmio {
            time_us: 1_000_002,
            cpu: 2,
            len: 4,
            address: 0xa00_1000,
            value: 1_800_000,
        };
        assert_eq!(Mmio::read(&TraceLine::read(text).unwrap()).unwrap(), read);
    }
}
