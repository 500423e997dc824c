// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A load as a row of steps, and the threads that go through them.
//!
//! Steps, separated by white space: `pin=CPUS`, `sleep=US`, `mark=NAME`,
//! `busy=US`, `light=BUSY_US/PERIOD_US/COUNT`, `io=BUSY_US/COUNT`, and
//! `fresh`: what follows is done by a thread that is created then. A mark is the time of the thread's
//! own clock and the CPU that it is on; a busy thread also marks, as `on`,
//! each CPU that it finds itself moved to.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, sleep};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use nix::fcntl::OFlag;
use nix::sched::sched_getcpu;
use nix::unistd::gettid;

use crate::work::{CHUNK, cpu_list, now_ns, pin_to, spin};

/// One step of a load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Runs on these CPUs alone from now on.
    Pin(Vec<u32>),
    /// Sleeps, in µs.
    Sleep(u64),
    /// Notes the time under a name.
    Mark(String),
    /// Busy without a break, in µs.
    Busy(u64),
    /// Busy for the first of each of the second, in µs, so many times.
    Light(u64, u64, u32),
    /// Reads from [`IO_DEVICE`], then is busy for so many µs; so many times.
    Io(u64, u32),
    /// The rest is done by a new thread.
    Fresh,
}

/// Reads a row of steps.
pub fn steps(words: &[&str]) -> Result<Vec<Step>> {
    words.iter().map(|word| step(word)).collect()
}

fn step(word: &str) -> Result<Step> {
    let (name, value) = word.split_once('=').unwrap_or((word, ""));
    let number = || value.parse().with_context(|| format!("step '{word}'"));
    Ok(match name {
        "pin" => Step::Pin(cpu_list(value)?),
        "sleep" => Step::Sleep(number()?),
        "mark" => Step::Mark(value.to_owned()),
        "busy" => Step::Busy(number()?),
        "light" => {
            let parts: Vec<&str> = value.split('/').collect();
            let [busy, period, count] = parts[..] else {
                bail!("step '{word}' is not light=BUSY_US/PERIOD_US/COUNT");
            };
            Step::Light(busy.parse()?, period.parse()?, count.parse()?)
        }
        "io" => {
            let parts = value.split_once('/');
            let (busy, count) =
                parts.with_context(|| format!("step '{word}' is not io=BUSY_US/COUNT"))?;
            Step::Io(busy.parse()?, count.parse()?)
        }
        "fresh" => Step::Fresh,
        _ => bail!("no such step: '{word}'"),
    })
}

/// What I/O is done on: the kernel's null_blk, with its completion by timer.
pub const IO_DEVICE: &str = "/dev/nullb0";
const BLOCK: usize = 4096;

/// A block device, read past the page cache: each read waits for the device,
/// which is what the scheduler takes for I/O.
struct Device {
    file: File,
    buffer: Vec<u8>,
}

impl Device {
    fn open() -> Result<Self> {
        let file = File::options()
            .read(true)
            .custom_flags(OFlag::O_DIRECT.bits())
            .open(IO_DEVICE)
            .with_context(|| format!("opening {IO_DEVICE}; load null_blk with irqmode=2"))?;
        Ok(Self {
            file,
            buffer: vec![0; 2 * BLOCK],
        })
    }

    fn read(&mut self) -> Result<()> {
        // Direct reads go to memory that is aligned as the device's blocks.
        let from = self.buffer.as_ptr().align_offset(BLOCK);
        let aligned = self
            .buffer
            .get_mut(from..from + BLOCK)
            .context("no aligned block")?;
        self.file.read_exact_at(aligned, 0).context(IO_DEVICE)
    }
}

/// What a thread notes on its way: `tid=T TURNS=N NAME=NS@CPU ...`.
#[derive(Debug, Default)]
struct Notes {
    text: String,
    turns: u64,
}

impl Notes {
    fn mark(&mut self, name: &str) {
        let cpu = sched_getcpu().unwrap_or(0);
        // Writing to a String can't fail.
        let _ = write!(self.text, " {name}={}@{cpu}", now_ns());
    }

    fn busy_until(&mut self, end_ns: u64) {
        let mut cpu = sched_getcpu();
        while now_ns() < end_ns {
            spin(CHUNK);
            self.turns += CHUNK;
            let now_on = sched_getcpu();
            if now_on != cpu {
                cpu = now_on;
                self.mark("on");
            }
        }
    }

    fn go_through(&mut self, steps: &[Step]) -> Result<()> {
        for (at, step) in steps.iter().enumerate() {
            match step {
                Step::Pin(cpus) => pin_to(cpus)?,
                Step::Sleep(us) => sleep(Duration::from_micros(*us)),
                Step::Mark(name) => self.mark(name),
                Step::Busy(us) => self.busy_until(now_ns() + us * 1000),
                Step::Light(busy, period, count) => {
                    let mut next = now_ns();
                    for _ in 0..*count {
                        next += period * 1000;
                        sleep(Duration::from_nanos(next.saturating_sub(now_ns())));
                        self.busy_until(now_ns() + busy * 1000);
                    }
                }
                Step::Io(busy, count) => {
                    let mut device = Device::open()?;
                    for _ in 0..*count {
                        device.read()?;
                        self.busy_until(now_ns() + busy * 1000);
                    }
                }
                Step::Fresh => {
                    let rest = steps[at + 1..].to_vec();
                    self.text.push_str(&by_new_thread(rest)?);
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// Goes through steps; the notes.
fn notes_of(steps: &[Step]) -> Result<String> {
    let mut notes = Notes::default();
    notes.go_through(steps)?;
    Ok(format!(
        "tid={} turns={}{}",
        gettid(),
        notes.turns,
        notes.text
    ))
}

/// The new thread's notes come last: its `tid` counts.
fn by_new_thread(steps: Vec<Step>) -> Result<String> {
    let thread = Builder::new()
        .name("load-new".to_owned())
        .spawn(move || notes_of(&steps))?;
    let notes = thread
        .join()
        .map_err(|_| anyhow!("the new thread panicked"))??;
    Ok(format!(" {notes}"))
}

/// A thread that waits for steps, goes through them, and waits again: its
/// history is the load's.
#[derive(Debug)]
struct Worker {
    steps: Sender<Vec<Step>>,
    notes: Receiver<Result<String>>,
}

impl Worker {
    fn start(name: &str) -> Result<Self> {
        let (steps, todo) = channel::<Vec<Step>>();
        let (done, notes) = channel();
        Builder::new().name(format!("load-{name}")).spawn(move || {
            for steps in todo {
                if done.send(notes_of(&steps)).is_err() {
                    break;
                }
            }
        })?;
        Ok(Self { steps, notes })
    }
}

/// The threads, by name; each stays when its steps are done.
#[derive(Debug, Default)]
pub struct Workers(BTreeMap<String, Worker>);

impl Workers {
    /// Gives a thread steps, which it starts with at once.
    pub fn start(&mut self, name: &str, steps: Vec<Step>) -> Result<()> {
        if !self.0.contains_key(name) {
            self.0.insert(name.to_owned(), Worker::start(name)?);
        }
        let worker = self.0.get(name).context("no such thread")?;
        worker.steps.send(steps).context("the thread has ended")
    }

    /// Waits until it has gone through them; its notes.
    pub fn join(&mut self, name: &str) -> Result<String> {
        let worker = self.0.get(name).context("no such thread")?;
        worker.notes.recv().context("the thread has ended")?
    }
}

#[cfg(test)]
mod tests {
    //! Steps are read as documented, and notes say what was done.

    use super::*;

    #[test]
    fn steps_are_read() {
        let read = steps(&[
            "pin=0,2-3",
            "sleep=5",
            "mark=start",
            "light=1/2/3",
            "io=4/5",
            "fresh",
        ])
        .unwrap();
        let expected = [
            Step::Pin(vec![0, 2, 3]),
            Step::Sleep(5),
            Step::Mark("start".to_owned()),
            Step::Light(1, 2, 3),
            Step::Io(4, 5),
            Step::Fresh,
        ];
        assert_eq!(read, expected);
        for wrong in ["busy", "busy=x", "light=1/2", "io=1", "sloop=1"] {
            assert!(steps(&[wrong]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_new_thread_notes_its_own_tid() {
        let mut workers = Workers::default();
        let load = steps(&["mark=before", "fresh", "mark=start", "busy=1"]).unwrap();
        workers.start("a", load).unwrap();
        let notes = workers.join("a").unwrap();
        let tids: Vec<&str> = notes.matches("tid=").collect();
        assert_eq!(tids.len(), 2, "{notes}");
        assert!(notes.contains(" before=") && notes.contains(" start="));
    }
}
