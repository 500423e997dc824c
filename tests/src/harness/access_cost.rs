// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What an access costs whoever makes it: batches for those that take less than
//! a look at the clock, one at a time for the others. Answers are
//! `MEDIAN P99` in ns.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::harness::load;
use crate::harness::registers::register;
use crate::harness::sys::Hypercalls;

/// `call` and `call-changes` of a hypercall, `store-naps`, the others [`in_batches`].
pub fn carry_out(verb: &str, words: &[&str]) -> Result<String> {
    match (verb, words) {
        ("call-changes", [cpu, function, count, values @ ..]) if !values.is_empty() => {
            load::pin(cpu.parse()?)?;
            call_changes(number(function)?, count.parse()?, values)
        }
        ("call", [cpu, function, argument]) => {
            load::pin(cpu.parse()?)?;
            let call = Hypercalls::open()?.call(number(function)?, argument.parse()?, 1)?;
            Ok(call.0.cast_signed().to_string())
        }
        ("store-naps", [cpu, address, count, values @ ..]) if !values.is_empty() => {
            load::pin(cpu.parse()?)?;
            store_naps(address, count.parse()?, values)
        }
        _ => in_batches(verb, words),
    }
}

/// One store now and then, of these values in turn, asleep in between: so
/// long that a worker of the VMM's may run for each, within its bound of a twentieth.
fn store_naps(address: &str, count: usize, values: &[&str]) -> Result<String> {
    let (page, offset) = register(address)?;
    let values: Vec<u32> = values.iter().map(|v| v.parse()).collect::<Result<_, _>>()?;
    for value in values.iter().cycle().take(count) {
        std::thread::sleep(Duration::from_millis(20));
        page.write(offset, *value);
    }
    Ok(String::new())
}

/// `VERB CPU WHAT BATCHES TIMES`: so many batches of so many reads, of a
/// register, of memory, or by hypercall; ns for each read.
fn in_batches(verb: &str, words: &[&str]) -> Result<String> {
    let &[cpu, what, batches, times] = words else {
        bail!("{verb} CPU WHAT BATCHES TIMES");
    };
    load::pin(cpu.parse()?)?;
    let (batches, times): (usize, usize) = (batches.parse()?, times.parse()?);
    let ns = match verb {
        "load-times" => {
            let (page, offset) = register(what)?;
            each(batches, || {
                load::timed(times, |_| {
                    std::hint::black_box(page.read(offset));
                })
            })
        }
        "ram-times" => {
            let word = std::sync::atomic::AtomicU32::new(1);
            each(batches, || {
                load::timed(times, |_| {
                    let value = word.load(std::sync::atomic::Ordering::Relaxed);
                    std::hint::black_box(value);
                })
            })
        }
        _ => {
            let (calls, function) = (Hypercalls::open()?, number(what)?);
            let count = u64::try_from(times)?;
            let ns: Result<Vec<_>> = (0..batches)
                .map(|_| Ok(calls.call(function, 0, count)?.1))
                .collect();
            ns?
        }
    };
    Ok(median_and_p99(ns, times))
}

/// One call now and then, of these arguments in turn; ns for each call.
fn call_changes(function: u32, count: usize, values: &[&str]) -> Result<String> {
    let calls = Hypercalls::open()?;
    let values: Vec<u32> = values.iter().map(|v| v.parse()).collect::<Result<_, _>>()?;
    let mut failed = None;
    let text = load::apart(count, |turn| {
        match calls.call(function, values[turn % values.len()], 1) {
            Ok((_, ns)) => ns.into(),
            Err(error) => {
                failed = Some(error);
                0
            }
        }
    });
    failed.map_or(Ok(text), Err)
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

/// `0x...`
fn number(text: &str) -> Result<u32> {
    let digits = text.strip_prefix("0x").context("a number is 0x...")?;
    Ok(u32::from_str_radix(digits, 16)?)
}
