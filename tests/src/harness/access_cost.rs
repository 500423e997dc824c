// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The cost of an access: batches for those that take less than a read of the clock, one at a time
//! for the others. Answers are `MEDIAN P99` in ns; of stores that are timed from outside, nothing.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Result, bail};

use crate::harness::load;
use crate::harness::registers::{Requests, register};
use crate::harness::sys::Register;

/// How long a guest naps between stores each of which a worker of the VMM's is to carry out, within its
/// twentieth of the time.
pub const NAP_MS: u64 = 20;
/// Of `store-bursts`: the first store of two follows an idle time, the second one work.
const BETWEEN_BURSTS: Duration = Duration::from_millis(100);
const BURST: Duration = Duration::from_millis(20);

/// Stores now and then, or [`in_batches`].
pub fn carry_out(verb: &str, words: &[&str]) -> Result<String> {
    match (verb, words) {
        ("store-naps", [cpu, ms, address, count, values @ ..]) if !values.is_empty() => {
            load::pin(cpu.parse()?)?;
            let nap = Duration::from_millis(ms.parse()?);
            store(address, count.parse()?, values, |_| sleep(nap))
        }
        ("store-bursts", [cpu, address, count, values @ ..]) if !values.is_empty() => {
            load::pin(cpu.parse()?)?;
            store(address, count.parse()?, values, |turn| match turn % 2 {
                0 => sleep(BETWEEN_BURSTS),
                _ => load::busy_for(BURST),
            })
        }
        _ => in_batches(verb, words),
    }
}

/// Stores of these values in turn, with `before` before each.
fn store(address: &str, count: usize, values: &[&str], before: impl Fn(usize)) -> Result<String> {
    let register = Requests::at(address)?;
    let values: Vec<u32> = values.iter().map(|v| v.parse()).collect::<Result<_, _>>()?;
    for (turn, value) in values.iter().cycle().take(count).enumerate() {
        before(turn);
        register.write(*value);
    }
    Ok(String::new())
}

/// `VERB CPU WHAT BATCHES TIMES`: so many batches of so many reads, of a
/// register or of memory; ns for each read.
fn in_batches(verb: &str, words: &[&str]) -> Result<String> {
    let &[cpu, what, batches, times] = words else {
        bail!("{verb} CPU WHAT BATCHES TIMES");
    };
    load::pin(cpu.parse()?)?;
    let (batches, times): (usize, usize) = (batches.parse()?, times.parse()?);
    let ns = match verb {
        "load-times" => {
            let (page, offset) = register(what)?;
            let register = page.at(offset);
            each(batches, || reads(register, times))
        }
        _ => {
            let mut word = 1;
            let register = Register::from(&mut word);
            each(batches, || reads(register, times))
        }
    };
    Ok(median_and_p99(ns, times))
}

/// One loop of machine code for registers and for memory, whatever the compiler makes of it. The
/// register comes by value: its address is in a CPU register then.
#[inline(never)]
fn reads(register: Register<'_>, times: usize) -> u64 {
    load::timed(times, move |_| {
        std::hint::black_box(register.read());
    })
}

fn each(batches: usize, batch: impl FnMut() -> u64) -> Vec<u64> {
    std::iter::repeat_with(batch).take(batches).collect()
}

fn median_and_p99(mut ns: Vec<u64>, times: usize) -> String {
    ns.sort_unstable();
    let at = |percent: usize| {
        let ns = ns.get(ns.len() * percent / 100).copied().unwrap_or(0);
        ns as f64 / times as f64
    };
    format!("{:.1} {:.1}", at(50), at(99))
}
