// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A load as a row of steps, and the threads that go through them.
//!
//! Steps, separated by white space: `pin=CPUS`, `sleep=US`, `mark=NAME`,
//! `busy=US`, `light=BUSY_US/PERIOD_US/COUNT`, `calm=` the same, not logged, `io=BUSY_US/COUNT`, and `fresh`: what follows is done by a thread that is created then. Fixed work:
//! `weights=KIB` and then `infer=COUNT`, `requests=TURNS/COUNT`,
//! `frames=PERIOD_US/TURNS/COUNT`, `even=` the same without heavier ones, `steady=` with few that are,
//! `rt-app=RUN_US/PERIOD_US/COUNT` on the CPU that the thread is on. `scale=N`: of the fixed work that
//! follows, N ten-thousandths are done. What is logged: `load_log.rs`. `fifo` and
//! `deadline=RUN_US/PERIOD_US` change the thread's policy: a `fresh` one's, which ends.
//! `uclamp=MIN/MAX` is the thread's own clamp, until the next. Of several threads or processes:
//! `rt-app-file=NAME`; `build=TURNS/COUNT/AT_ONCE`, processes; `weights=KIB` and then
//! `team=THREADS/COUNT`, inferences; `disk=TURNS/COUNT/THREADS`, reads. `fio=JOB/COUNT`, requests
//! of fio, which it marks itself.

use std::collections::BTreeMap;
use std::num::ParseIntError;
use std::str::FromStr;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Builder, sleep};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use nix::sched::sched_getcpu;
use nix::unistd::gettid;
use vcpufreq_host::{CpuList, SchedAttr, Tid};

use crate::device::BlockDevice;
use crate::fio::FioJob;
use crate::jobs::{self, WorkScale};
use crate::load_log::LoadLog;
use crate::rt_app::RtApp;
use crate::rt_app_file::RtAppFile;
use crate::teams;
use crate::work::{now_ns, pin_to};

/// One step of a load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoadStep {
    /// Runs on these CPUs alone from now on.
    Pin(CpuList),
    /// Sleeps, in µs.
    Sleep(u64),
    /// Logs the time under a name.
    Mark(String),
    /// Busy without a break, in µs.
    Busy(u64),
    /// Busy for the first of each of the second, in µs, so many times.
    Light([u64; 3]),
    /// The same, not logged: before the load begins.
    Calm([u64; 3]),
    /// Reads from a device, then is busy for so many µs; so many times.
    Io([u64; 2]),
    /// Fills a working set of so many KiB.
    Weights(usize),
    /// So many inferences over it.
    Infer(u64),
    /// Reads from a device, then does so many turns; so many times.
    Requests([u64; 2]),
    /// A frame each so many µs, of about so many turns; so many.
    Frames([u64; 3]),
    /// The same, all alike.
    Even([u64; 3]),
    /// The same, some a little heavier.
    Steady([u64; 3]),
    /// So much of the fixed work that follows is done.
    Scale(WorkScale),
    /// A run of rt-app.
    RtApp(RtApp),
    /// A workload in a file of rt-app's.
    RtAppFile(RtAppFile),
    /// A build: processes of so many turns, so many, so many at once.
    Build([u64; 3]),
    /// By so many threads, so many inferences over the working set.
    Team([u64; 2]),
    /// Reads from a device, each before so many turns; so many by each of so many threads.
    Disk([u64; 3]),
    /// So many requests of a job of fio.
    Fio(FioJob, u64),
    /// The rest is done by a new thread.
    Fresh,
    /// In SCHED_FIFO from now on.
    Fifo,
    /// In SCHED_DEADLINE from now on, with so many µs of each so many.
    Deadline([u64; 2]),
    /// With uclamp.min and uclamp.max from now on.
    Uclamp([u32; 2]),
}

/// Reads a row of steps.
pub fn steps(words: &[&str]) -> Result<Vec<LoadStep>> {
    words.iter().map(|word| step(word)).collect()
}

fn step(word: &str) -> Result<LoadStep> {
    let (name, value) = word.split_once('=').unwrap_or((word, ""));
    let number = || value.parse().with_context(|| format!("step '{word}'"));
    Ok(match name {
        "pin" => {
            let cpus: CpuList = value.parse()?;
            ensure!(!cpus.is_empty(), "step '{word}' names no CPU");
            LoadStep::Pin(cpus)
        }
        "sleep" => LoadStep::Sleep(number()?),
        "mark" => LoadStep::Mark(value.to_owned()),
        "busy" => LoadStep::Busy(number()?),
        "light" => LoadStep::Light(numbers(word, value)?),
        "calm" => LoadStep::Calm(numbers(word, value)?),
        "io" => LoadStep::Io(numbers(word, value)?),
        "weights" => LoadStep::Weights(usize::try_from(number()?)?),
        "infer" => LoadStep::Infer(number()?),
        "requests" => LoadStep::Requests(numbers(word, value)?),
        "frames" => LoadStep::Frames(numbers(word, value)?),
        "even" => LoadStep::Even(numbers(word, value)?),
        "steady" => LoadStep::Steady(numbers(word, value)?),
        "scale" => LoadStep::Scale(WorkScale::per_10_000(number()?)),
        "rt-app" => {
            let [run_us, period_us, count] = numbers(word, value)?;
            LoadStep::RtApp(RtApp {
                run_us,
                period_us,
                count: usize::try_from(count)?,
            })
        }
        "rt-app-file" => LoadStep::RtAppFile(RtAppFile::named(value)?),
        "build" => LoadStep::Build(numbers(word, value)?),
        "team" => LoadStep::Team(numbers(word, value)?),
        "disk" => LoadStep::Disk(numbers(word, value)?),
        "fio" => {
            let (job, count) = value.split_once('/').unwrap_or((value, ""));
            let count = count.parse().with_context(|| format!("step '{word}'"))?;
            LoadStep::Fio(FioJob::named(job)?, count)
        }
        "fresh" => LoadStep::Fresh,
        "fifo" => LoadStep::Fifo,
        "deadline" => LoadStep::Deadline(numbers(word, value)?),
        "uclamp" => LoadStep::Uclamp(numbers(word, value)?),
        _ => bail!("no such step: '{word}'"),
    })
}

/// Numbers between slashes, as many as the step has.
fn numbers<T, const N: usize>(word: &str, value: &str) -> Result<[T; N]>
where
    T: FromStr<Err = ParseIntError>,
{
    let parts: Vec<T> = value
        .split('/')
        .map(str::parse)
        .collect::<Result<_, _>>()
        .with_context(|| format!("step '{word}'"))?;
    let count = parts.len();
    parts
        .try_into()
        .map_err(|_| anyhow!("step '{word}' has {count} numbers, and needs {N}"))
}

impl LoadLog {
    fn go_through(&mut self, steps: &[LoadStep]) -> Result<()> {
        let mut weights = Vec::new();
        let mut scale = WorkScale::ALL;
        for (at, step) in steps.iter().enumerate() {
            match step {
                LoadStep::Pin(cpus) => pin_to(cpus.as_slice())?,
                LoadStep::Sleep(us) => sleep(Duration::from_micros(*us)),
                LoadStep::Mark(name) => self.mark(name),
                LoadStep::Busy(us) => self.busy_until(now_ns() + us * 1000),
                LoadStep::Light(times) => self.light(*times),
                LoadStep::Calm(times) => Self::default().light(*times),
                LoadStep::Io(times) => self.io(*times)?,
                LoadStep::Weights(kib) => weights = jobs::weights(*kib),
                LoadStep::Infer(count) => jobs::infer(self, &weights, *count, scale),
                LoadStep::Requests([turns, count]) => {
                    jobs::requests(self, scale.scaled(*turns), *count)?;
                }
                LoadStep::Frames(times) => jobs::frames(self, scaled(*times, scale), jobs::FRAMES),
                LoadStep::Even(times) => jobs::frames(self, scaled(*times, scale), jobs::EVEN),
                LoadStep::Steady(times) => {
                    jobs::frames(self, scaled(*times, scale), jobs::STEADY_FRAMES);
                }
                LoadStep::Scale(share) => scale = *share,
                LoadStep::Fifo => set_policy(&SchedAttr {
                    policy: SchedAttr::FIFO,
                    priority: 1,
                    ..SchedAttr::default()
                })?,
                LoadStep::Deadline([run, period]) => {
                    set_policy(&SchedAttr::deadline(run * 1000, period * 1000))?;
                }
                LoadStep::Uclamp([min, max]) => set_policy(&SchedAttr::clamp(*min, *max))?,
                LoadStep::RtApp(run) => run.carry_out(self, sched_getcpu()?)?,
                LoadStep::RtAppFile(file) => file.carry_out(self, scale)?,
                LoadStep::Build([turns, count, at_once]) => {
                    teams::build(self, [scale.scaled(*turns), *count, *at_once])?;
                }
                LoadStep::Team(times) => teams::team(self, &weights, *times, scale)?,
                LoadStep::Disk([turns, count, threads]) => {
                    teams::disk(self, [scale.scaled(*turns), *count, *threads])?;
                }
                LoadStep::Fio(job, count) => job.carry_out(self, *count)?,
                LoadStep::Fresh => {
                    let rest = steps[at + 1..].to_vec();
                    self.go_on_as(by_new_thread(rest)?);
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    fn light(&mut self, [busy_us, period_us, count]: [u64; 3]) {
        let mut next = now_ns();
        for _ in 0..count {
            next += period_us * 1000;
            sleep(Duration::from_nanos(next.saturating_sub(now_ns())));
            self.busy_until(now_ns() + busy_us * 1000);
        }
    }

    fn io(&mut self, [busy_us, count]: [u64; 2]) -> Result<()> {
        let mut device = BlockDevice::open()?;
        for _ in 0..count {
            device.read()?;
            self.busy_until(now_ns() + busy_us * 1000);
        }
        Ok(())
    }
}

/// Period, turns and count of frames of which so much work is done.
fn scaled([period_us, turns, count]: [u64; 3], scale: WorkScale) -> [u64; 3] {
    [period_us, scale.scaled(turns), count]
}

fn set_policy(attr: &SchedAttr) -> Result<()> {
    let set = attr.set(Tid::current());
    set.with_context(|| format!("making the thread {attr:?}"))
}

/// Goes through steps; the log.
fn log_of(steps: &[LoadStep]) -> Result<LoadLog> {
    let mut log = LoadLog {
        tid: gettid().as_raw(),
        ..LoadLog::default()
    };
    log.go_through(steps)?;
    Ok(log)
}

fn by_new_thread(steps: Vec<LoadStep>) -> Result<LoadLog> {
    let thread = Builder::new()
        .name("load-new".to_owned())
        .spawn(move || log_of(&steps))?;
    thread
        .join()
        .map_err(|_| anyhow!("the new thread panicked"))?
}

/// A thread that waits for steps, goes through them, and waits again: its
/// history is the load's.
#[derive(Debug)]
struct LoadThread {
    steps: Sender<Vec<LoadStep>>,
    logs: Receiver<Result<LoadLog>>,
    /// A log that was waited for and not asked for yet.
    done: Option<Result<LoadLog>>,
}

impl LoadThread {
    fn start(name: &str) -> Result<Self> {
        let (steps, todo) = channel::<Vec<LoadStep>>();
        let (done, logs) = channel();
        Builder::new().name(format!("load-{name}")).spawn(move || {
            for steps in todo {
                if done.send(log_of(&steps)).is_err() {
                    break;
                }
            }
        })?;
        Ok(Self {
            steps,
            logs,
            done: None,
        })
    }
}

/// The threads, by name; each stays when its steps are done.
#[derive(Debug, Default)]
pub struct Workers(BTreeMap<String, LoadThread>);

impl Workers {
    /// Gives a thread steps, which it starts with at once.
    pub fn start(&mut self, name: &str, steps: Vec<LoadStep>) -> Result<()> {
        if !self.0.contains_key(name) {
            self.0.insert(name.to_owned(), LoadThread::start(name)?);
        }
        let worker = self.0.get(name).context("no such thread")?;
        worker.steps.send(steps).context("the thread has ended")
    }

    /// Waits until it has gone through them. Its log stays: to tell it takes a
    /// guest's console a while, in which the load would still be measured.
    pub fn wait(&mut self, name: &str) -> Result<()> {
        let worker = self.0.get_mut(name).context("no such thread")?;
        if worker.done.is_none() {
            worker.done = Some(worker.logs.recv().context("the thread has ended")?);
        }
        Ok(())
    }

    /// The same; its log.
    pub fn join(&mut self, name: &str) -> Result<LoadLog> {
        self.wait(name)?;
        let worker = self.0.get_mut(name).context("no such thread")?;
        worker.done.take().context("the thread has ended")?
    }
}

#[cfg(test)]
mod tests {
    //! Steps are read as documented, and logs record what was done.

    use super::*;

    #[test]
    fn steps_are_read() {
        let read = steps(&[
            "pin=0,2-3",
            "sleep=5",
            "mark=start",
            "light=1/2/3",
            "calm=4/5/6",
            "io=4/5",
            "frames=6/7/8",
            "even=6/7/8",
            "steady=6/7/8",
            "scale=9500",
            "rt-app=9/10/11",
            "rt-app-file=bursts",
            "build=1/2/3",
            "team=4/5",
            "disk=6/7/8",
            "fio=rand_read/9",
            "fresh",
            "fifo",
            "deadline=12/13",
            "uclamp=14/15",
        ])
        .unwrap();
        let expected = [
            LoadStep::Pin(CpuList::from_iter([0, 2, 3])),
            LoadStep::Sleep(5),
            LoadStep::Mark("start".to_owned()),
            LoadStep::Light([1, 2, 3]),
            LoadStep::Calm([4, 5, 6]),
            LoadStep::Io([4, 5]),
            LoadStep::Frames([6, 7, 8]),
            LoadStep::Even([6, 7, 8]),
            LoadStep::Steady([6, 7, 8]),
            LoadStep::Scale(WorkScale::per_10_000(9500)),
            LoadStep::RtApp(RtApp {
                run_us: 9,
                period_us: 10,
                count: 11,
            }),
            LoadStep::RtAppFile(RtAppFile::named("bursts").unwrap()),
            LoadStep::Build([1, 2, 3]),
            LoadStep::Team([4, 5]),
            LoadStep::Disk([6, 7, 8]),
            LoadStep::Fio(FioJob::named("rand_read").unwrap(), 9),
            LoadStep::Fresh,
            LoadStep::Fifo,
            LoadStep::Deadline([12, 13]),
            LoadStep::Uclamp([14, 15]),
        ];
        assert_eq!(read, expected);
        for wrong in [
            "busy",
            "busy=x",
            "light=1/2",
            "io=1",
            "frames=1/2",
            "uclamp=1",
            "team=1/2/3",
            "rt-app-file=none",
            "fio=rand_read",
            "fio=none/1",
            "sloop=1",
        ] {
            assert!(steps(&[wrong]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn calm_is_not_logged() {
        let mut log = LoadLog::default();
        log.go_through(&steps(&["calm=1/1/3"]).unwrap()).unwrap();
        assert_eq!(log, LoadLog::default());
        log.go_through(&steps(&["light=1/1/3"]).unwrap()).unwrap();
        assert!(log.turns > 0);
    }

    #[test]
    fn what_follows_a_scale_is_scaled() {
        assert_eq!(
            scaled([1, 20_000, 3], WorkScale::per_10_000(9_000)),
            [1, 18_000, 3]
        );
        let mut log = LoadLog::default();
        let of = |words: &[&str]| steps(words).unwrap();
        log.go_through(&of(&["scale=1", "steady=1/20000/2"]))
            .unwrap();
        assert_eq!(log.frames.len(), 2);
    }

    #[test]
    fn a_log_stays_until_it_is_asked_for() {
        let mut workers = Workers::default();
        for mark in ["one", "two"] {
            let load = steps(&[&format!("mark={mark}")]).unwrap();
            workers.start("a", load).unwrap();
            workers.wait("a").unwrap();
            workers.wait("a").unwrap();
            assert_eq!(workers.join("a").unwrap().marks[0].name, mark);
        }
        assert!(workers.wait("b").is_err());
    }

    #[test]
    fn a_new_thread_logs_its_own_tid() {
        let mut workers = Workers::default();
        let load = steps(&["mark=before", "fresh", "mark=start", "busy=1"]).unwrap();
        workers.start("a", load).unwrap();
        let log = workers.join("a").unwrap();
        workers.start("a", steps(&["sleep=1"]).unwrap()).unwrap();
        assert_ne!(log.tid, workers.join("a").unwrap().tid, "the worker's own");
        let marks: Vec<_> = log.marks.iter().map(|mark| mark.name.as_str()).collect();
        assert_eq!(marks, ["before", "start"]);
    }
}
