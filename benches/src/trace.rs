// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's trace of frequencies, context switches, and guests' writes to the cpufreq registers.
//! It has a tracefs instance of its own, which leaves other tracing alone and is removed at the
//! end.

use std::path::Path;

use anyhow::Result;
use vcpufreq_device::{MAX_VCPUS, REG_SET_PERF, REGION_STRIDE, SET_PERF_KHZ};
use vcpufreq_host::{CpufreqPolicy, HostCpus, HostRoot};

use crate::recorded_instance::{RecordedInstance, has_event};
use crate::tracefs::{FrequencyEvent, INSTANCES, Mmio, Switch, TraceLine, events};

/// Of each CPU's buffer; a repeat of a second has some hundred switches.
const BUFFER_KIB: u32 = 2048;
const NEEDED: [&str; 2] = ["power/cpu_frequency", "sched/sched_switch"];
/// Requests as they arrive; a kernel without it shows none.
const WISHED: &str = "kvm/kvm_mmio";

/// Whether the host's trace can be used; why not, in one line.
pub fn usable() -> Result<(), String> {
    if !Path::new(INSTANCES).is_dir() {
        return Err(format!(
            "no {INSTANCES}; mount tracefs at /sys/kernel/tracing, and run as root"
        ));
    }
    let Some(event) = NEEDED.iter().find(|event| !has_event(event)) else {
        let cpus = HostCpus::read(&HostRoot::default());
        return without_events(&cpus.policies).map_or(Ok(()), Err);
    };
    Err(format!(
        "this kernel has no trace event {event}, or you may not read it; run as root"
    ))
}

/// The line of a host whose frequencies are in no trace.
fn without_events(policies: &[CpufreqPolicy]) -> Option<String> {
    let mut policies = policies.iter();
    let (driver, word) = policies.find_map(|one| Some((&one.driver, one.events_by()?)))?;
    Some(format!(
        "{driver} changes the frequency without the trace event power/cpu_frequency, by which this is \
         measured; boot with {word}, or use vcpufreq demo"
    ))
}

/// What was seen, in order of time.
#[derive(Debug, Default)]
pub struct RepeatEvents {
    /// Frequencies.
    pub changes: Vec<FrequencyEvent>,
    /// Context switches.
    pub switches: Vec<Switch>,
    /// Requests of guests: what they write to set_perf.
    pub requests: Vec<Mmio>,
    /// Where the first vCPU's registers are.
    pub base: u64,
}

/// The instance; dropping it removes it.
#[derive(Debug)]
pub struct RepeatTrace {
    own: RecordedInstance,
    base: u64,
}

impl RepeatTrace {
    /// Makes it, all events on: to switch an event on or off patches the
    /// kernel's code, which is work on every CPU. Guests have the cpufreq registers at `base`.
    pub fn create(base: u64) -> Result<Self> {
        let own = RecordedInstance::create(BUFFER_KIB)?;
        own.instance().enable(&NEEDED)?;
        if has_event(WISHED) {
            own.instance().enable(&[WISHED])?;
        }
        Ok(Self { own, base })
    }

    /// Starts with an empty buffer.
    pub fn start(&self) -> Result<()> {
        self.own.instance().start()
    }

    /// Stops; what was seen stays.
    pub fn stop(&self) -> Result<()> {
        self.own.instance().pause()
    }

    /// What was seen between the start and the end.
    pub fn seen(&self) -> Result<RepeatEvents> {
        RepeatEvents::read(&self.own.instance().text()?, self.base)
    }
}

impl RepeatEvents {
    /// Reads the text of a trace file.
    fn read(text: &str, base: u64) -> Result<Self> {
        let mut seen = Self {
            base,
            ..Self::default()
        };
        for line in events(text) {
            seen.add(&line, base)?;
        }
        Ok(seen)
    }

    /// The vCPU whose register a request is in.
    pub fn vcpu_of(&self, request: &Mmio) -> Option<usize> {
        let offset = request.address.checked_sub(self.base)?;
        usize::try_from(offset / REGION_STRIDE).ok()
    }

    /// The pCPU that last ran a thread at or before a moment in µs.
    pub fn ran_on(&self, thread: i32, us: u64) -> Option<u32> {
        let before = self.switches.iter().take_while(|one| one.time_us <= us);
        // A switch away is of the same pCPU.
        let of = |one: &&Switch| one.next.1 == thread || one.prev.1 == thread;
        before.filter(of).last().map(|one| one.cpu)
    }

    fn add(&mut self, line: &TraceLine, base: u64) -> Result<()> {
        match line.event {
            "cpu_frequency" => self.changes.push(FrequencyEvent::read(line)?),
            "sched_switch" => self.switches.push(Switch::read(line)?),
            "kvm_mmio" if line.tail.starts_with("mmio write ") => {
                let mut write = Mmio::read(line)?;
                // A ceiling or not, it requests a frequency.
                write.value &= u64::from(SET_PERF_KHZ);
                if requesting_vcpu(&write, base).is_some() {
                    self.requests.push(write);
                }
            }
            _ => (),
        }
        Ok(())
    }
}

/// The vCPU whose set_perf a write is to, of a VM with the cpufreq registers at `base`. One of another
/// width is none to a register.
#[must_use]
pub fn requesting_vcpu(write: &Mmio, base: u64) -> Option<u16> {
    let offset = write.address.checked_sub(base)?;
    let vcpu = u16::try_from(offset / REGION_STRIDE).ok()?;
    let is_set_perf = offset % REGION_STRIDE == REG_SET_PERF && write.len == 4;
    (is_set_perf && usize::from(vcpu) < MAX_VCPUS).then_some(vcpu)
}

#[cfg(test)]
mod tests {
    //! Promises: of guests' writes, those to set_perf alone are requests; a host that traces no
    //! frequencies has one line with the kernel's parameter.

    use super::*;
    use vcpufreq_host::fakes::FakeHost;

    const TEXT: &str = "# tracer: nop\n\
        \x20 vcpu2-99 [002] d.h2. 12.004000: cpu_frequency: state=1700000 cpu_id=2\n\
        \x20 vcpu2-99 [002] ..... 12.004100: kvm_mmio: mmio write len 4 gpa 0xa002004 val 0x2ab980\n\
        \x20 vcpu2-99 [002] ..... 12.004150: kvm_mmio: mmio write len 1 gpa 0xa002004 val 0x40\n\
        \x20 vcpu2-99 [002] ..... 12.004200: kvm_mmio: mmio write len 1 gpa 0x9000000 val 0x40\n";

    #[test]
    fn requests_are_told_from_other_writes() {
        let seen = RepeatEvents::read(TEXT, 0x0a00_0000).unwrap();
        let requests: Vec<_> = seen.requests.iter().map(|one| one.value).collect();
        assert_eq!((seen.changes.len(), requests), (1, vec![2_800_000]));
    }

    #[test]
    fn a_driver_without_events_is_one_line() {
        let host = FakeHost::two_plus_two();
        let line = || without_events(&HostCpus::read(&host.root()).policies);
        assert_eq!(line(), None);
        let policy = "sys/devices/system/cpu/cpufreq/policy2";
        host.write(&format!("{policy}/scaling_driver"), "intel_cpufreq");
        host.write(&format!("{policy}/energy_performance_preference"), "");
        let line = line().unwrap();
        assert!(line.starts_with("intel_cpufreq changes"), "{line}");
        assert!(line.contains("; boot with intel_pstate=no_hwp"), "{line}");
    }

    #[test]
    fn a_thread_is_where_it_last_ran() {
        let text = "x-0 [001] d 1.000000: sched_switch: prev_comm=a prev_pid=0 prev_prio=120 prev_state=R ==> next_comm=v next_pid=7 next_prio=120\n\
            x-0 [003] d 2.000000: sched_switch: prev_comm=a prev_pid=0 prev_prio=120 prev_state=R ==> next_comm=v next_pid=7 next_prio=120\n";
        let seen = RepeatEvents::read(text, 0).unwrap();
        let at = [999_999, 1_000_000, 1_999_999, 2_000_000].map(|us| seen.ran_on(7, us));
        assert_eq!(at, [None, Some(1), Some(1), Some(3)]);
        assert_eq!(seen.ran_on(8, 3_000_000), None);
    }

    #[test]
    fn an_event_that_makes_no_sense_is_an_error() {
        let text = "x-1 [000] d 1.0: cpu_frequency: state=? cpu_id=0";
        let error = RepeatEvents::read(text, 0).unwrap_err();
        assert!(format!("{error:#}").contains("trace line"), "{error:#}");
    }
}
