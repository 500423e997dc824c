// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Jobs of several threads or processes, which rt-app can't do: a build, an inference by a team, and
//! reads of a disk. They start on the CPUs of the thread that starts them, and go where the scheduler
//! moves them.

use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, ExitCode};
use std::sync::Barrier;
use std::thread::{ScopedJoinHandle, scope};

use anyhow::{Context, Result, anyhow, ensure};

use crate::NAME;
use crate::device::BlockDevice;
use crate::jobs::{MULTIPLICATIONS, WorkScale, forward_part};
use crate::load_log::LoadLog;
use crate::work::spin;

/// The word behind the program's name for a process that does some turns, and ends.
pub const TURNS: &str = "turns";
/// Layers of an inference, after each of which its threads wait for each other.
const LAYERS: u64 = 8;

/// What a process of a build does: so many turns.
pub fn turns(count: &str) -> ExitCode {
    match count.parse() {
        Ok(count) => {
            spin(count);
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{NAME}: {TURNS} {count}: {error}; give a number");
            ExitCode::from(2)
        }
    }
}

/// A build: so many processes of so many turns, so many at once.
pub fn build(log: &mut LoadLog, [turns, count, at_once]: [u64; 3]) -> Result<()> {
    let at_once = usize::try_from(at_once.max(1))?;
    let mut running: Vec<Child> = Vec::new();
    for _ in 0..count {
        if running.len() == at_once {
            end(running.remove(0))?;
        }
        let mut process = Command::new("/proc/self/exe");
        process.arg0(NAME).args([TURNS, &turns.to_string()]);
        running.push(process.spawn().context("starting a process of the build")?);
    }
    running.into_iter().try_for_each(end)?;
    log.figure("done", count);
    Ok(())
}

fn end(mut process: Child) -> Result<()> {
    let status = process.wait()?;
    ensure!(
        status.success(),
        "a process of the build ended with {status}"
    );
    Ok(())
}

/// So many inferences, each by so many threads.
pub fn team(
    log: &mut LoadLog,
    weights: &[f32],
    [threads, count]: [u64; 2],
    scale: WorkScale,
) -> Result<()> {
    let part = scale.scaled(MULTIPLICATIONS) / (threads.max(1) * LAYERS);
    let layer = Barrier::new(usize::try_from(threads)?);
    let work = || {
        for _ in 0..count * LAYERS {
            forward_part(weights, part);
            layer.wait();
        }
        Ok(())
    };
    all_of(threads, &work)?;
    log.figure("done", count);
    Ok(())
}

/// Reads of a disk by so many threads, each before so many turns; so many of each.
pub fn disk(log: &mut LoadLog, [turns, count, threads]: [u64; 3]) -> Result<()> {
    let work = || {
        let mut device = BlockDevice::open()?;
        for _ in 0..count {
            device.read()?;
            spin(turns);
        }
        Ok(())
    };
    all_of(threads, &work)?;
    log.figure("done", count * threads);
    Ok(())
}

/// Does the same in so many threads.
fn all_of(threads: u64, work: &(impl Fn() -> Result<()> + Sync)) -> Result<()> {
    let join = |thread: ScopedJoinHandle<Result<()>>| {
        thread
            .join()
            .map_err(|_| anyhow!("a thread of the job panicked"))?
    };
    scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        all.into_iter().try_for_each(join)
    })
}

#[cfg(test)]
mod tests {
    //! Each job logs what it did; what fails in a thread of it, fails it.

    use super::*;

    #[test]
    fn a_team_does_its_inferences() {
        let mut log = LoadLog::default();
        team(&mut log, &[0.5], [3, 2], WorkScale::per_10_000(1)).unwrap();
        assert_eq!(log.figures["done"], 2);
    }

    #[test]
    fn a_thread_that_fails_fails_the_job() {
        let error = all_of(2, &|| Err(anyhow!("no disk"))).unwrap_err();
        assert_eq!(error.to_string(), "no disk");
    }

    #[test]
    fn a_process_of_a_build_needs_a_number() {
        assert_eq!(turns("5"), ExitCode::SUCCESS);
        assert_eq!(turns("x"), ExitCode::from(2));
    }
}
