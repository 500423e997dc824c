// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The host's trace of frequencies, context switches, and guests' writes to the cpufreq registers.
//! It has a tracefs instance of its own, which leaves other tracing alone and is removed at the
//! end.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

const INSTANCES: &str = "/sys/kernel/tracing/instances";
const PREFIX: &str = "vcpufreq-bench-";
/// Of each CPU's buffer; a repeat of a second has some hundred switches.
const BUFFER_KIB: &str = "2048";
const NEEDED: [&str; 2] = [
    "events/power/cpu_frequency/enable",
    "events/sched/sched_switch/enable",
];
/// Requests as they arrive; a kernel without it shows none.
const WISHED: &str = "events/kvm/kvm_mmio/enable";
/// A vCPU's register set_perf is here in its page.
const SET_PERF: u64 = 4;
const PAGE: u64 = 0x1000;

/// Whether the host's trace can be used; why not, in one line.
pub fn usable() -> Result<(), String> {
    if !Path::new(INSTANCES).is_dir() {
        return Err(format!(
            "no {INSTANCES}; mount tracefs at /sys/kernel/tracing, and run as root"
        ));
    }
    let Some(event) = NEEDED
        .iter()
        .find(|event| !Path::new(INSTANCES).with_file_name(event).exists())
    else {
        return Ok(());
    };
    Err(format!(
        "this kernel has no trace event {event}, or you may not read it; run as root"
    ))
}

/// A frequency change: when in µs, which pCPU, to which kHz.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// CLOCK_MONOTONIC in µs, as all times here.
    pub us: u64,
    /// The pCPU.
    pub cpu: u32,
    /// Its new frequency.
    pub khz: u32,
}

/// A pCPU goes from one thread to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Switch {
    /// When.
    pub us: u64,
    /// The pCPU.
    pub cpu: u32,
    /// The thread that ran until now.
    pub prev: i32,
    /// The one that runs from now on.
    pub next: i32,
}

/// A guest asks for a frequency.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// When.
    pub us: u64,
    /// What it asks for, in the unit of its table.
    pub khz: u64,
}

/// What was seen, in order of time.
#[derive(Debug, Default)]
pub struct Seen {
    /// Frequencies.
    pub changes: Vec<Change>,
    /// Context switches.
    pub switches: Vec<Switch>,
    /// Requests of guests.
    pub requests: Vec<Request>,
}

/// The instance; dropping it removes it.
#[derive(Debug)]
pub struct Trace {
    dir: PathBuf,
    base: u64,
}

impl Trace {
    /// Makes it, all events on: to switch an event on or off patches the
    /// kernel's code, which is work on every CPU. Guests have the cpufreq registers at `base`.
    pub fn create(base: u64) -> Result<Self> {
        remove_stale();
        let dir = Path::new(INSTANCES).join(format!("{PREFIX}{}", std::process::id()));
        fs::create_dir(&dir).with_context(|| format!("making {}; run as root", dir.display()))?;
        let trace = Self { dir, base };
        trace.write("tracing_on", "0")?;
        trace.write("buffer_size_kb", BUFFER_KIB)?;
        trace.write("trace_clock", "mono")?;
        for event in NEEDED {
            trace.write(event, "1")?;
        }
        if trace.dir.join(WISHED).exists() {
            trace.write(WISHED, "1")?;
        }
        Ok(trace)
    }

    /// Starts with an empty buffer.
    pub fn start(&self) -> Result<()> {
        self.write("trace", "")?;
        self.write("tracing_on", "1")
    }

    /// Stops; what was seen stays.
    pub fn stop(&self) -> Result<()> {
        self.write("tracing_on", "0")
    }

    /// What was seen between the start and the end.
    pub fn seen(&self) -> Result<Seen> {
        let path = self.dir.join("trace");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        parse(&text, self.base)
    }

    fn write(&self, file: &str, value: &str) -> Result<()> {
        let path = self.dir.join(file);
        fs::write(&path, value).with_context(|| format!("writing '{value}' to {}", path.display()))
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // Fails only when someone else has one of its files open; the next
        // bench removes it then.
        let _ = fs::remove_dir(&self.dir);
    }
}

/// Removes the instances of benches that were killed.
fn remove_stale() {
    for entry in fs::read_dir(INSTANCES).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name
            .to_string_lossy()
            .strip_prefix(PREFIX)
            .map(str::to_owned);
        if pid.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            // If this fails, making the new one fails too, with the reason.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// Reads the text of a trace file.
fn parse(text: &str, base: u64) -> Result<Seen> {
    let mut seen = Seen::default();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        add(&mut seen, line, base).with_context(|| format!("trace line '{line}'"))?;
    }
    Ok(seen)
}

/// `  vcpu0-99  [000] d..2.  12.345678: EVENT: NAME=VALUE ...`
fn add(seen: &mut Seen, line: &str, base: u64) -> Result<()> {
    if let Some((head, tail)) = line.split_once(": cpu_frequency: ") {
        let (us, _) = time_and_cpu(head)?;
        seen.changes.push(Change {
            us,
            cpu: value(tail, "cpu_id=")?.parse()?,
            khz: value(tail, "state=")?.parse()?,
        });
    } else if let Some((head, tail)) = line.split_once(": sched_switch: ") {
        let (us, cpu) = time_and_cpu(head)?;
        // Names can hold anything, the words behind them can't.
        let (prev, next) = tail.split_once(" ==> ").context("no '==>'")?;
        let prev = value(last(prev, " prev_pid=")?, "prev_pid=")?.parse()?;
        let next = value(last(next, " next_pid=")?, "next_pid=")?.parse()?;
        seen.switches.push(Switch {
            us,
            cpu,
            prev,
            next,
        });
    } else if let Some((head, tail)) = line.split_once(": kvm_mmio: mmio write ") {
        let (us, _) = time_and_cpu(head)?;
        seen.requests.extend(request(us, tail, base)?);
    }
    Ok(())
}

/// `len 4 gpa 0xa000004 val 0x1b7740`, if it is a register set_perf.
fn request(us: u64, tail: &str, base: u64) -> Result<Option<Request>> {
    let mut words = tail.split_whitespace();
    let mut number = |name: &str| -> Result<u64> {
        words
            .find(|word| *word == name)
            .with_context(|| format!("no {name}"))?;
        let digits = words.next().and_then(|word| word.strip_prefix("0x"));
        Ok(u64::from_str_radix(digits.context("not 0x...")?, 16)?)
    };
    let (address, khz) = (number("gpa")?, number("val")?);
    let offset = address.checked_sub(base);
    Ok(offset
        .filter(|offset| offset % PAGE == SET_PERF && offset / PAGE < 512)
        .map(|_| Request { us, khz }))
}

fn last<'a>(text: &'a str, name: &str) -> Result<&'a str> {
    let at = text.rfind(name).with_context(|| format!("no{name}"))?;
    Ok(&text[at..])
}

fn value<'a>(text: &'a str, name: &str) -> Result<&'a str> {
    let mut words = text.split_whitespace();
    words
        .find_map(|word| word.strip_prefix(name))
        .with_context(|| format!("no {name}"))
}

/// Of `  vcpu0-99  [000] d..2.  12.345678`.
fn time_and_cpu(head: &str) -> Result<(u64, u32)> {
    let cpu = head
        .rsplit_once('[')
        .and_then(|(_, rest)| rest.split(']').next());
    let time = head.split_whitespace().next_back().context("no time")?;
    let (s, us) = time.split_once('.').context("no decimal point")?;
    let us = s.parse::<u64>()? * 1_000_000 + us.parse::<u64>()?;
    Ok((us, cpu.context("no CPU")?.parse()?))
}

#[cfg(test)]
mod tests {
    //! Lines as the kernel prints them, odd names included.

    use super::*;

    const TEXT: &str = "# tracer: nop\n\
        \x20         <idle>-0       [002] d..2.    12.000100: sched_switch: prev_comm=swapper/2 prev_pid=0 prev_prio=120 prev_state=R ==> next_comm=a pid=7 b next_pid=99 next_prio=120\n\
        \x20         vcpu2-99      [002] d.h2.    12.004000: cpu_frequency: state=1700000 cpu_id=2\n\
        \x20         vcpu2-99      [002] .....    12.004100: kvm_mmio: mmio write len 4 gpa 0xa002004 val 0x2ab980\n\
        \x20         vcpu2-99      [002] .....    12.004200: kvm_mmio: mmio write len 1 gpa 0x9000000 val 0x40\n";
    #[test]
    fn events_are_read() {
        let seen = parse(TEXT, 0x0a00_0000).unwrap();
        let switch = Switch {
            us: 12_000_100,
            cpu: 2,
            prev: 0,
            next: 99,
        };
        assert_eq!(seen.switches, [switch]);
        assert_eq!(
            seen.changes,
            [Change {
                us: 12_004_000,
                cpu: 2,
                khz: 1_700_000
            }]
        );
        assert_eq!(
            seen.requests,
            [Request {
                us: 12_004_100,
                khz: 2_800_000
            }]
        );
    }

    #[test]
    fn a_line_that_makes_no_sense_is_an_error() {
        let error = parse("x-1 [000] d 1.0: cpu_frequency: state=? cpu_id=0", 0).unwrap_err();
        assert!(format!("{error:#}").contains("trace line"), "{error:#}");
    }
}
