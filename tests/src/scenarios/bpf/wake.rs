// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What it adds to a vCPU's write that it wakes a thread, by how that thread
//! waits and is scheduled, and that the write is recorded: with a VM of a few
//! instructions, against an eventfd that nobody waits for. By hand, for docs/paths.md.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use serde_json::{Value, json};
use vmm_sys_util::eventfd::EventFd;

use super::tiny_vm::{Deed, TinyVm};
use super::{BASE, Policy};
use crate::harness::load;
use crate::harness::sys::set_fifo_priority;
use crate::harness::trace::instance::Instance;

const SET_PERF: u64 = BASE + 4;
const WRITES: usize = 200;
/// The waiting thread sleeps again by then, and its CPU too.
const BETWEEN: Duration = Duration::from_millis(3);

/// How the thread waits.
#[derive(Clone, Copy)]
enum Waits {
    No,
    Read,
    Epoll,
    EpollOfEpoll,
}

/// A way of taking notice of a write.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    waits: Waits,
    fifo: bool,
    pinned: bool,
    traced: Option<&'static str>,
}

const NOBODY: Way = Way {
    name: "nobody waits",
    waits: Waits::No,
    fifo: false,
    pinned: false,
    traced: None,
};
const READS: Way = Way {
    name: "read",
    waits: Waits::Read,
    ..NOBODY
};

fn ways() -> Vec<Way> {
    let pinned = |way: Way, name| Way {
        name,
        pinned: true,
        ..way
    };
    let fifo = |way: Way, name| Way {
        name,
        fifo: true,
        ..way
    };
    let traced = |way: Way, name, filter| Way {
        name,
        traced: Some(filter),
        ..way
    };
    vec![
        NOBODY,
        READS,
        pinned(READS, "read, one CPU"),
        fifo(READS, "read, FIFO"),
        pinned(fifo(READS, ""), "read, FIFO, one CPU"),
        Way {
            name: "epoll",
            waits: Waits::Epoll,
            ..NOBODY
        },
        Way {
            name: "epoll of epoll",
            waits: Waits::EpollOfEpoll,
            ..NOBODY
        },
        traced(NOBODY, "nobody waits, traced", "0"),
        traced(
            NOBODY,
            "nobody waits, traced with a filter",
            "gpa == 0xa000004",
        ),
        traced(fifo(READS, ""), "read, FIFO, traced", "0"),
    ]
}

pub fn run() -> Result<Value> {
    let policies = Policy::all()?;
    let cpu = policies.last().context("no policy")?.cpu();
    let (mut rows, mut held) = (Vec::new(), true);
    for way in ways() {
        let measured = std::thread::spawn(move || measure(way, cpu));
        let (median, p90, woken) = measured.join().map_err(|_| anyhow!("panicked"))??;
        // Else it wasn't asleep when the write came.
        let waits = !matches!(way.waits, Waits::No);
        held &= !waits || woken >= WRITES as u64;
        rows.push(json!({
            "way": way.name, "median_ns": median, "p90_ns": p90, "woken": woken,
        }));
    }
    Ok(json!({ "held": held, "writes": WRITES, "rows": rows }))
}

/// Median and 90th percentile of a run of one write, entry and leaving included.
fn measure(way: Way, cpu: u32) -> Result<(u64, u64, u64)> {
    load::pin(cpu)?;
    let mut vm = TinyVm::new(None)?;
    let event = vm.swallow(SET_PERF)?;
    let done = Arc::new(AtomicBool::new(false));
    let waiter = waiter(way, event.try_clone()?, cpu, &done);
    let traced = way.traced.map(trace).transpose()?;
    let deed = Deed {
        times: 1,
        address: SET_PERF,
        value: 1,
        ..Deed::default()
    };
    let mut times = Vec::new();
    for _ in 0..WRITES {
        sleep(BETWEEN);
        let began = Instant::now();
        vm.run(deed, |_, _| ())?;
        times.push(u64::try_from(began.elapsed().as_nanos())?);
    }
    traced.map(Instance::remove).transpose()?;
    done.store(true, Ordering::Release);
    event.write(1)?;
    let woken = waiter
        .join()
        .map_err(|_| anyhow!("the waiter panicked"))??;
    times.sort_unstable();
    Ok((times[WRITES / 2], times[WRITES * 9 / 10], woken))
}

/// Records every access of guests in a ring of its own, which wakes nobody.
fn trace(filter: &str) -> Result<Instance> {
    let trace = Instance::create("wake", 1024)?;
    trace.set("events/kvm/kvm_mmio/filter", filter)?;
    trace.enable(&["kvm/kvm_mmio"])?;
    trace.start()?;
    Ok(trace)
}

fn waiter(
    way: Way,
    event: EventFd,
    cpu: u32,
    done: &Arc<AtomicBool>,
) -> std::thread::JoinHandle<Result<u64>> {
    let done = Arc::clone(done);
    std::thread::spawn(move || {
        if way.pinned {
            load::pin(cpu - 1)?;
        } else {
            // Not where the guest runs.
            load::pin_to(&[cpu - 1, cpu + 1])?;
        }
        if way.fifo {
            set_fifo_priority(1)?;
        }
        let depth = match way.waits {
            Waits::No => return Ok(0),
            Waits::Read => 0,
            Waits::Epoll => 1,
            Waits::EpollOfEpoll => 2,
        };
        // SAFETY: the descriptor is open as long as `event` is there.
        let fd = unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
        let mut sets: Vec<Epoll> = Vec::new();
        for _ in 0..depth {
            let set = Epoll::new(EpollCreateFlags::empty())?;
            set.add(
                sets.last().map_or(fd, |inner| inner.0.as_fd()),
                EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, 0),
            )?;
            sets.push(set);
        }
        if sets.is_empty() {
            // It waits in read(2).
            fcntl(fd, FcntlArg::F_SETFL(OFlag::empty()))?;
        }
        let mut woken = 0;
        while !done.load(Ordering::Acquire) {
            let mut events = [EpollEvent::empty(); 4];
            for set in sets.iter().rev() {
                set.wait(&mut events, EpollTimeout::NONE)?;
            }
            woken += u64::from(event.read().is_ok());
        }
        Ok(woken)
    })
}
