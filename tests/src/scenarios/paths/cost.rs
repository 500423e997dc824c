// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The cost of an access for the vCPU, by each path: a read of cur_perf in a loop, and a write of
//! set_perf that changes the clamp, each 2 ms on an otherwise idle host, after the guest has
//! settled; and of writes that follow each other at once. The same accesses are counted by where they end, in a run of their own, since the trace
//! takes time too; and whether the clamp was there before the guest went on.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vcpufreq_tests::LabVerdict;

use super::before_entry::EntryOrder;
use super::measured::{Measured, QEMU, QEMU_PMU};
use super::sandbox_share;
use crate::harness::plan::Plan;
use crate::harness::policy::Policy;
use crate::harness::trace::exits::Exits;

/// Writes that are timed.
const WRITES: u64 = 500;
/// Reads that are timed: batches, and reads of each.
const BATCHES: u64 = 200;
const READS: u64 = 50;
/// Accesses of each kind that are counted by where they end.
const COUNTED: u64 = 1_000;
/// How often that many are made at once.
const MEANS: usize = 5;
/// Memory that a guest of `vcpufreq run` shares.
const SHM: &str = "shm";
/// Registers that are memory, which a thread of the VMM reads.
const RAM: &str = "ram";
/// The paths of a guest of `vcpufreq run` whose writes trap.
const OF_RUN: [&str; 4] = ["exit", "ioeventfd", "bpf", SHM];
/// A write by it against one by `exit`, at most: it wakes the worker, whose order of writes
/// nothing records.
const SHM_OF_EXIT: f64 = 0.40;

/// The paths that a VMM takes.
pub fn run(plan: &Plan) -> Result<LabVerdict> {
    let policies = Policy::all()?;
    let (mut rows, mut orders) = (Vec::new(), Vec::new());
    let mut in_order = true;
    let (mut bare, mut guest_kernel) = (Value::Null, String::new());
    for path in OF_RUN {
        let mut guest = Measured::boot(plan, &policies, path)?;
        rows.extend(guest.by_registers()?);
        let order = EntryOrder::of(&mut guest, policies.last().context("no policy")?)?;
        in_order &= match path {
            // Its worker is another thread: this is to be seen by the trace too.
            "ioeventfd" | SHM => order.some_after(),
            "exit" => order.all_before() && order.calls_a_write(1),
            _ => order.all_before() && order.calls_a_write(0),
        };
        orders.push(order.json(path));
        if path == "exit" {
            bare = guest.bare()?;
            guest_kernel = guest.vm.ask("read /proc/sys/kernel/osrelease")?;
        }
        guest.vm.quit()?;
    }
    let with = |path: &str, op: &str| {
        let found = rows.iter().find(|row| (row.path, row.op) == (path, op));
        found.map(|row| row.median_ns)
    };
    let sandbox = sandbox_share::measure(plan, &policies, &OF_RUN, with)?;
    for path in [RAM, QEMU, QEMU_PMU] {
        let mut guest = Measured::boot(plan, &policies, path)?;
        rows.extend(guest.by_registers()?);
        guest.vm.quit()?;
    }
    let wrong = [
        out_of_bound(&rows, &bare),
        sandbox_share::out_of_bound(&sandbox),
    ]
    .concat();
    let hold = rows.iter().all(CostRow::holds);
    let rows: Vec<Value> = rows.iter().map(CostRow::json).collect();
    // out/paths.json is made of them.
    vcpufreq_figures::rows_of(&json!({ "rows": rows }))?;
    let figures = json!({
        "out_of_bound": wrong, "rows": rows, "bare": bare, "sandbox": sandbox,
        "before_next_instruction": orders, "guest_kernel": guest_kernel,
        "host_kernel": crate::harness::sysfs::text("/proc/sys/kernel/osrelease")?,
    });
    Ok(LabVerdict::with_figures(figures)
        .check("clamps before the next instruction", in_order, &orders)
        .check_none("no cost is out of bound", &wrong)
        .check("each row holds", hold, &rows))
}

/// What costs more than it may. A read from memory may cost 1.2 times a load, and a write to it 1.2
/// times a store. Relative to a write by `exit`, with its clamp, a write may cost 0.54 by `bpf`, with its
/// clamp; 0.48 by `ioeventfd`, whose worker sets the clamp; and 0.30 in a guest of QEMU, whose server has
/// to be woken. That guest has no PMU, as the others.
fn out_of_bound(rows: &[CostRow], bare: &Value) -> Vec<String> {
    let median = |path, op| {
        let found = rows.iter().find(|row| (row.path, row.op) == (path, op));
        found.map_or(f64::NAN, |row| row.median_ns)
    };
    let of_bare = |key: &str| bare[key].as_f64().unwrap_or(f64::NAN);
    let (load, store) = (of_bare("load_median_ns"), of_bare("store_mean_ns"));
    let bounds = [
        ("ioeventfd", "read", 1.2 * load),
        (SHM, "read", 1.2 * load),
        (RAM, "read", 1.2 * load),
        (SHM, "write", median("exit", "write") * SHM_OF_EXIT),
        ("bpf", "read", 1.2 * load),
        (QEMU, "read", 1.2 * load),
        ("bpf", "write", median("exit", "write") * 0.54),
        (QEMU, "write", median("exit", "write") * 0.30),
        ("ioeventfd", "write", median("exit", "write") * 0.48),
    ];
    let costs = bounds.map(|(path, op, bound)| (path, op, median(path, op), bound));
    // One at a time it is shorter than a look at the clock.
    let stores = rows.iter().find(|row| (row.path, row.op) == (RAM, "write"));
    let stores = stores.and_then(|row| row.at_once_ns).unwrap_or(f64::NAN);
    let costs = costs
        .into_iter()
        .chain([(RAM, "write", stores, 1.2 * store)]);
    let wrong = costs.filter_map(|(path, op, ns, bound)| {
        // One that wasn't measured isn't within it either.
        let within = ns <= bound;
        (!within).then(|| format!("a {op} by {path} takes {ns} ns, more than {bound}"))
    });
    wrong.collect()
}

#[derive(Clone)]
struct CostRow {
    path: &'static str,
    op: &'static str,
    n: u64,
    median_ns: f64,
    p99_ns: f64,
    /// The mean of writes that follow each other at once, the median of [`MEANS`].
    at_once_ns: Option<f64>,
    exits_user: u64,
    exits_kernel: u64,
    clamp_after_ns: Option<u64>,
    freq_after_ns: Option<u64>,
}

/// How many of `n` accesses trapped, and how many of these exited.
struct Ends {
    trapped: u64,
    exited: u64,
}

impl Measured {
    /// Reads: median and 99th percentile, ns.
    pub fn reads(&mut self) -> Result<(f64, f64)> {
        let (vcpu, page) = (self.vcpu, self.page);
        self.times(format!("load-times {vcpu} {page:#x} {BATCHES} {READS}"))
    }

    /// [`WRITES`] writes: median and 99th percentile, ns.
    pub fn timed_writes(&mut self) -> Result<(f64, f64)> {
        self.writes(WRITES)
    }

    /// So many writes: median and 99th percentile, ns.
    pub fn writes(&mut self, count: u64) -> Result<(f64, f64)> {
        let (vcpu, set_perf) = (self.vcpu, &self.set_perf);
        self.times(format!(
            "store-times {vcpu} {set_perf} {count} {}",
            self.opps
        ))
    }

    fn by_registers(&mut self) -> Result<Vec<CostRow>> {
        let (vcpu, page, trap) = (self.vcpu, self.page, self.trap);
        let set_perf = self.set_perf.clone();
        let opps = self.opps.clone();
        let read = self.reads()?;
        let write = self.timed_writes()?;
        let after = self.after()?;
        let at_once = self.writes_at_once(&set_perf)?;
        let exits = Exits::watch()?;
        self.vm
            .number(format!("loads {vcpu} {page:#x} {COUNTED}"))?;
        let reads = exits.stop()?.at(page..page + 4);
        let exits = Exits::watch()?;
        self.vm
            .number(format!("stores {vcpu} {set_perf} {COUNTED} {opps}"))?;
        let writes = exits.stop()?.at(trap..trap + 4);
        let ends = |seen: crate::harness::trace::exits::TracedAccesses| Ends {
            trapped: seen.trapped,
            exited: seen.exited,
        };
        Ok(vec![
            CostRow::new(self.path, "read", read, &ends(reads), (None, None)),
            CostRow {
                at_once_ns: Some(at_once),
                ..CostRow::new(self.path, "write", write, &ends(writes), after)
            },
        ])
    }

    /// The mean, in ns, of writes to `register` that follow each other at once: the median of several
    /// means, since a tick of the guest's takes as long as all stores to memory. A worker that the first
    /// write has woken carries out the next ones, too.
    fn writes_at_once(&mut self, register: &str) -> Result<f64> {
        let (vcpu, opps) = (self.vcpu, &self.opps);
        let all = format!("stores {vcpu} {register} {COUNTED} {opps}");
        let means = (0..MEANS).map(|_| self.vm.number(&all));
        let mut means: Vec<u64> = means.collect::<Result<_>>()?;
        means.sort_unstable();
        Ok(means[MEANS / 2] as f64 / COUNTED as f64)
    }

    /// A load from memory, and a store.
    fn bare(&mut self) -> Result<Value> {
        let vcpu = self.vcpu;
        let store_ns = self.writes_at_once("memory")?;
        let load = self.times(format!("ram-times {vcpu} 0 {BATCHES} {READS}"))?;
        Ok(json!({ "load_median_ns": load.0, "store_mean_ns": store_ns }))
    }

    /// Median and 99th percentile.
    fn times(&mut self, line: String) -> Result<(f64, f64)> {
        let answer = self.vm.ask(line)?;
        let mut numbers = answer.split(' ').map(str::parse::<f64>);
        let (median, p99) = (numbers.next(), numbers.next());
        Ok((median.context("no median")??, p99.context("no p99")??))
    }

    /// Medians from a request to its clamp, and to the next frequency: upper
    /// bounds, which are powers of two.
    fn after(&self) -> Result<(Option<u64>, Option<u64>)> {
        let stats = crate::harness::stats::of(&self.vm)?;
        let of = &stats["vcpus"][self.vcpu];
        let p50 = |name: &str| of[name]["p50_below_ns"].as_u64();
        Ok((p50("clamp_after"), p50("freq_after")))
    }
}

impl CostRow {
    fn new(
        path: &'static str,
        op: &'static str,
        (median_ns, p99_ns): (f64, f64),
        ends: &Ends,
        (clamp_after_ns, freq_after_ns): (Option<u64>, Option<u64>),
    ) -> Self {
        let read = op == "read";
        // A read that exits is traced when it leaves and when it is answered.
        let told = if read { 2 } else { 1 };
        Self {
            path,
            op,
            n: if read { BATCHES * READS } else { WRITES },
            median_ns,
            p99_ns,
            at_once_ns: None,
            exits_user: ends.exited,
            exits_kernel: ends.trapped.saturating_sub(told * ends.exited),
            clamp_after_ns,
            freq_after_ns,
        }
    }

    /// All accesses ended where the path promises.
    fn holds(&self) -> bool {
        let (user, kernel) = match (self.path, self.op) {
            ("ioeventfd" | "bpf" | SHM | QEMU | QEMU_PMU, "read") | (RAM, _) => (0, 0),
            ("ioeventfd" | "bpf" | SHM | QEMU | QEMU_PMU, _) => (0, COUNTED),
            // The guest's tick reads too.
            (_, "read") => return self.exits_user >= COUNTED && self.exits_kernel == 0,
            _ => (COUNTED, 0),
        };
        (self.exits_user, self.exits_kernel) == (user, kernel)
    }

    fn json(&self) -> Value {
        json!({
            "path": self.path, "op": self.op, "n": self.n, "median_ns": self.median_ns,
            "p99_ns": self.p99_ns, "at_once_ns": self.at_once_ns, "exits_user": self.exits_user,
            "exits_kernel": self.exits_kernel, "exits_of": COUNTED,
            "clamp_after_ns": self.clamp_after_ns, "freq_after_ns": self.freq_after_ns,
        })
    }
}

#[cfg(test)]
mod tests {
    //! What costs too much is named, and what wasn't measured isn't within its bound.
    use super::*;

    fn row(path: &'static str, op: &'static str, median_ns: f64) -> CostRow {
        let ends = Ends {
            trapped: 0,
            exited: 0,
        };
        CostRow::new(path, op, (median_ns, median_ns), &ends, (None, None))
    }

    #[test]
    fn costs_have_bounds() {
        let bare = json!({ "load_median_ns": 10.0, "store_mean_ns": 10.0 });
        let stores = |ns| CostRow {
            at_once_ns: Some(ns),
            ..row(RAM, "write", 50.0)
        };
        let rows = |bpf_write, ioeventfd_write, qemu_write| {
            vec![
                row("exit", "write", 28_000.0),
                row("ioeventfd", "read", 12.0),
                row(SHM, "read", 12.0),
                row(SHM, "write", 11_200.0),
                row("ioeventfd", "write", ioeventfd_write),
                row("bpf", "read", 12.0),
                row("bpf", "write", bpf_write),
                row(QEMU, "read", 12.0),
                row(QEMU, "write", qemu_write),
                row(RAM, "read", 12.0),
                stores(12.0),
            ]
        };
        let within = rows(15_120.0, 13_440.0, 8_400.0);
        assert!(out_of_bound(&within, &bare).is_empty());
        for (path, rows) in [
            ("bpf", rows(15_121.0, 13_440.0, 8_400.0)),
            ("ioeventfd", rows(15_120.0, 13_441.0, 8_400.0)),
            (QEMU, rows(15_120.0, 13_440.0, 8_401.0)),
        ] {
            let wrong = out_of_bound(&rows, &bare);
            let named = format!("a write by {path}");
            assert!(
                matches!(&wrong[..], [one] if one.starts_with(&named)),
                "{wrong:?}"
            );
        }
        let slow = [vec![stores(12.1)], within.clone()].concat();
        assert_eq!(out_of_bound(&slow, &bare).len(), 1);
        assert_eq!(out_of_bound(&within, &Value::Null).len(), 6);
        assert_eq!(out_of_bound(&[], &bare).len(), 10);
    }
}
