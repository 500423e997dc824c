// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Jobs of a fixed amount of work, in the shapes of the published ones: an
//! inference over weights, requests that wait for I/O, frames at a fixed rate.
//! Unlike the timed steps they take as long as the CPU lets them.

use std::hint::black_box;
use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use nix::sched::sched_getcpu;

use crate::device::BlockDevice;
use crate::load_log::LoadLog;
use crate::work::{now_ns, spin};

/// Multiplications of one inference, the same for all sizes of weights.
pub const MULTIPLICATIONS: u64 = 1 << 20;
/// Weights from one to the next that is used: a cache line of f32 and one, so
/// that all of them are used in turn.
const STRIDE: usize = 17;
/// Work of frames in turn, in eighths of the ordinary one: most are alike,
/// a few are heavier, one three times as heavy.
pub const FRAMES: &[u64] = &[8, 8, 9, 8, 12, 8, 8, 14, 8, 8, 10, 8, 24, 8, 9, 8];

/// Work of frames that vary and never overload a CPU that is fast enough for a quarter more than
/// their mean, in eighths of it.
pub const STEADY_FRAMES: &[u64] = &[7, 8, 8, 9, 8, 7, 10, 8, 8, 6, 9, 8, 7, 9, 8, 8];

/// How much of its work a load does, so that it takes as many cycles in a guest as on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkScale(u64);

impl WorkScale {
    /// All of its work.
    pub const ALL: Self = Self(10_000);

    /// So many ten-thousandths of it, at least 1.
    pub fn per_10_000(share: u64) -> Self {
        Self(share.max(1))
    }

    /// What is left of so much work.
    pub fn scaled(self, work: u64) -> u64 {
        work * self.0 / Self::ALL.0
    }
}

/// Weights of a made-up network.
pub fn weights(kib: usize) -> Vec<f32> {
    let count = (kib * 1024 / size_of::<f32>()).next_power_of_two();
    (0_u16..=u16::MAX)
        .cycle()
        .take(count)
        .map(|number| f32::from(number) / 65_536.0)
        .collect()
}

/// So many inferences, one after the other.
pub fn infer(log: &mut LoadLog, weights: &[f32], count: u64, scale: WorkScale) {
    let multiplications = scale.scaled(MULTIPLICATIONS);
    for _ in 0..count {
        let cpu = sched_getcpu().unwrap_or(0);
        forward_part(weights, multiplications);
        on_if_moved(log, cpu);
    }
    log.figure("done", count);
}

/// So many multiplications of an inference.
pub fn forward_part(weights: &[f32], multiplications: u64) {
    let mask = weights.len().saturating_sub(1);
    let (mut at, mut sum) = (0_usize, 0.0_f32);
    for _ in 0..multiplications {
        let weight = weights.get(at & mask).copied().unwrap_or_default();
        // Opaque, so that the loop is the same whatever the compiler can do.
        sum = black_box(sum.mul_add(0.5, weight));
        at += STRIDE;
    }
    black_box(sum);
}

/// So many times: a read from the device, then work.
pub fn requests(log: &mut LoadLog, turns: u64, count: u64) -> Result<()> {
    let mut device = BlockDevice::open()?;
    for _ in 0..count {
        device.read()?;
        let cpu = sched_getcpu().unwrap_or(0);
        spin(turns);
        on_if_moved(log, cpu);
    }
    log.figure("done", count);
    Ok(())
}

/// The same work in each.
pub const EVEN: &[u64] = &[8];

/// So many frames of this pattern, one each period; a frame that isn't finished when its
/// period ends is late, and the next one begins with a period.
pub fn frames(log: &mut LoadLog, [period_us, turns, count]: [u64; 3], pattern: &[u64]) {
    let period = period_us * 1000;
    let (mut begin, mut on_time) = (now_ns(), 0);
    for work in pattern
        .iter()
        .cycle()
        .take(usize::try_from(count).unwrap_or(usize::MAX))
    {
        sleep(Duration::from_nanos(begin.saturating_sub(now_ns())));
        let cpu = sched_getcpu().unwrap_or(0);
        spin(turns * work / 8);
        let end = now_ns();
        log.frame(begin, end);
        on_if_moved(log, cpu);
        on_time += u64::from(end <= begin + period);
        begin += period * (end.saturating_sub(begin) / period + 1);
    }
    // The last one's period is part of the job.
    sleep(Duration::from_nanos(begin.saturating_sub(now_ns())));
    log.figure("done", count);
    log.figure("on_time", on_time);
    log.figure("due_us", period_us);
}

fn on_if_moved(log: &mut LoadLog, from: usize) {
    if sched_getcpu().is_ok_and(|cpu| cpu != from) {
        log.mark("on");
    }
}

#[cfg(test)]
mod tests {
    //! Weights fill what was asked for, all of them are used, and a job logs
    //! what it did.

    use super::*;

    #[test]
    fn weights_fill_the_working_set() {
        assert_eq!(weights(32).len() * size_of::<f32>(), 32 * 1024);
        assert_eq!(weights(33).len(), 16 * 1024);
        // An odd stride over a power of two comes by every weight.
        assert_eq!(STRIDE % 2, 1);
    }

    #[test]
    fn a_scale_takes_its_share_of_the_work() {
        let scale = WorkScale::per_10_000(9_500);
        assert_eq!((scale.scaled(1_000), WorkScale::ALL.scaled(7)), (950, 7));
        assert_eq!(WorkScale::per_10_000(0).scaled(10_000), 1);
        assert_eq!(STEADY_FRAMES.iter().sum::<u64>(), 8 * 16);
    }

    #[test]
    fn jobs_log_what_they_did() {
        let mut log = LoadLog::default();
        infer(&mut log, &weights(1), 2, WorkScale::per_10_000(1));
        assert_eq!(log.figures, [("done".to_owned(), 2)].into());
        frames(&mut log, [10, 1, 3], FRAMES);
        assert_eq!((log.figures["done"], log.figures["due_us"]), (3, 10));
        let begins: Vec<_> = log.frames.iter().map(|frame| frame.begin_ns).collect();
        assert_eq!(begins.len(), 3);
        // Each begins at a multiple of the period behind the first, on which the log's time counts.
        let apart = |pair: &[u64]| pair[1] > pair[0] && (pair[1] - pair[0]) % 10_000 == 0;
        assert!(begins.windows(2).all(apart), "{begins:?}");
        assert!(log.figures.contains_key("on_time"));
    }
}
