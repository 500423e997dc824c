// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! 64 vCPUs with a table of 16 entries each: all that the path `kernel` makes
//! of them is there, and the last one's registers work.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::{Plan, Policy, cur_perf, let_ticks_pass, registers};
use crate::exits::Exits;
use crate::vm::{Setup, Vm};

const VCPUS: usize = 64;
const ENTRIES: u32 = 16;

pub fn run(plan: &Plan) -> Result<Value> {
    let policies = Policy::all()?;
    let big = policies.last().context("no policy")?;
    let step = big.max() / ENTRIES;
    let table: Vec<String> = (1..=ENTRIES).map(|n| (n * step).to_string()).collect();
    let last = VCPUS - 1;
    let setup = Setup {
        pins: vec![String::new(); VCPUS],
        silent: true,
        ..plan.by_path(Setup::default())
    };
    let table = format!("0-{last}={}", table.join(","));
    let capacity = format!("0-{last}={}", big.capacity);
    let setup = setup.with(&["--table", &table, "--capacity", &capacity]);
    let mut vm = Vm::boot(&setup)?;
    let online = vm.ask("read /sys/devices/system/cpu/online")?;
    let base = registers(&mut vm)?;
    let page = base + 0x1000 * u64::try_from(last)?;
    let exits = Exits::watch()?;
    vm.ask(format!("poke {last} {:#x} {}", page + 4, 5 * step))?;
    let_ticks_pass();
    let clamp = vm.clamp(last)?;
    let read = cur_perf(&mut vm, base, last)?;
    let seen = exits.stop()?.at(page..page + 0x1000);
    let kib = vm.resident_kib()?;
    let said = vm.quit()?;
    let util = big.util(5 * step);
    let held = online == format!("0-{last}")
        && clamp == (util, 1024)
        && read % step == 0
        && (seen.trapped, seen.exited) == (1, 0);
    Ok(json!({
        "held": held, "online": online, "clamp": clamp, "util": util, "guest_reads_khz": read,
        "trapped": seen.trapped, "exited": seen.exited, "vmm_kib": kib, "vmm_said": said,
    }))
}
